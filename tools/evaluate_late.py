"""Compare the token vectors (ColBERT) and term weights (SPLADE) of optimized models with those of the originals.

python -m tools.evaluate_late --pairs sts-dev.csv [--texts FILE] [--queries 200] [--formats bf16 int8 default …]

MaxSim: all-minilm-l6-v2 gives a vector for each token, and mask tokens fill queries up to 32 tokens. Queries are the
first sentences of pairs, documents the second ones. Each query is scored with its pair's document and with its ten best
documents by the original. The table has the relative differences of these scores, and the share of queries whose best
document is the original's.

Top terms: splade-tiny weights the terms of texts, by default the queries. The table has the share of texts whose 64
largest weights have the original's terms, the mean overlap of these terms, and the share of weight on terms that only
one of both models has.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import ortolan
from ortolan import SparseVectors, TextEncoder, TokenVectors
from ortolan.embedding import read_sts
from ortolan.graph_passes.names import WEIGHTS
from ortolan.models.catalog import SPLADE, get_model
from tools.compare_cpus import read_lines

Scores = NDArray[np.float64]
Figures = dict[str, float]
_T = TypeVar("_T")

LATE_MODEL = "all-minilm-l6-v2"
LATE_SETTINGS = {"model_type": "ColBERT", "query_prefix": "", "document_prefix": ""}  # other settings: PyLate's
BEST, TERMS = 10, 64
DEFAULT = "default"  # the format that optimize_onnx chooses itself
FORMATS = (DEFAULT, *WEIGHTS)


def max_sim_scores(queries: TokenVectors, documents: TokenVectors) -> Scores:
    """Return the MaxSim scores [queries, documents]. Every document needs a token."""
    starts = np.cumsum(documents.lengths) - documents.lengths
    similar = (query @ documents.vectors.T for query in queries)
    return np.array([np.maximum.reduceat(one, starts, axis=1).sum(axis=0, dtype=np.float64) for one in similar])


def compare_scores(found: Scores, original: Scores, own: Sequence[int]) -> Figures:
    """Return the figures of MaxSim.

    Args:
        found: The scores of an optimized model, [queries, documents].
        original: The original's.
        own: The document of each query's pair.
    """
    best = np.argsort(-original, axis=1, kind="stable")[:, :BEST]
    chosen = np.concatenate([best, np.asarray(own)[:, None]], axis=1)
    given, expected = (np.take_along_axis(scores, chosen, axis=1) for scores in (found, original))
    differences = np.abs(given / expected - 1)
    return {
        "largest difference": float(differences.max()),
        "mean difference": float(differences.mean()),
        "same best document": float(np.mean(found.argmax(axis=1) == best[:, 0])),
    }


def compare_terms(found: SparseVectors, original: SparseVectors) -> Figures:
    """Return the figures of top terms, which are those of the arguments."""
    overlaps, others = [], []
    for (terms, weights), (expected, by_original) in zip(found, original, strict=True):
        shared, here, there = np.intersect1d(terms, expected, assume_unique=True, return_indices=True)
        overlaps.append(len(shared) / max(len(terms), len(expected), 1))
        others.append(1 - (weights[here].sum() + by_original[there].sum()) / (weights.sum() + by_original.sum()))
    return {
        "same terms": float(np.mean(np.equal(overlaps, 1))),
        "mean overlap": float(np.mean(overlaps)),
        "weight of other terms": float(np.mean(others)),
    }


def write_folder(name: str, folder: Path, settings: dict[str, Any] | None = None) -> Path:
    """Write a model of the catalog to a folder. settings: those of a late-interaction model."""
    files = get_model(name)
    assert files.tokenizer is not None
    folder.mkdir()
    shutil.copy(files.onnx, folder / "model.onnx")
    for file in ("tokenizer.json", "config.json"):
        shutil.copy(files.tokenizer.with_name(file), folder)
    if settings is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def measure(
    folder: Path, formats: Sequence[str], embed: Callable[[TextEncoder], _T], compare: Callable[[_T, _T], Figures]
) -> dict[str, Figures]:
    """Return the figures of each format of the model in a folder.

    Args:
        folder: The model.
        formats: Names in FORMATS.
        embed: Embeds the texts.
        compare: Compares an optimized model's result of `embed` with the original's.
    """
    original = embed(TextEncoder(folder))
    figures = {}
    for name in formats:
        with tempfile.TemporaryDirectory() as work:
            weights = None if name == DEFAULT else name
            ortolan.optimize_onnx(folder, Path(work) / "fast", weights=weights)
            figures[name] = compare(embed(TextEncoder(Path(work) / "fast")), original)
    return figures


def measure_max_sim(folder: Path, formats: Sequence[str], pairs: Sequence[tuple[str, str]], queries: int) -> Any:
    """Return the figures of MaxSim for each format. queries: the number of pairs whose first sentences are queries."""
    documents = list(dict.fromkeys(second for _, second in pairs))
    own = [documents.index(second) for _, second in pairs[:queries]]

    def scores(encoder: TextEncoder) -> Scores:
        asked = ortolan.embed_tokens([first for first, _ in pairs[:queries]], encoder, query=True)
        return max_sim_scores(asked, ortolan.embed_tokens(documents, encoder))

    return measure(folder, formats, scores, lambda found, original: compare_scores(found, original, own))


def measure_terms(folder: Path, formats: Sequence[str], texts: Sequence[str]) -> dict[str, Figures]:
    """Return the figures of top terms for each format."""
    return measure(folder, formats, lambda one: ortolan.embed_sparse(texts, one, top_k=TERMS), compare_terms)


def show(title: str, figures: dict[str, Figures]) -> None:
    """Print a table with a row for each format."""
    table = Table("format", title=title, title_justify="left")
    for name in next(iter(figures.values())):
        table.add_column(name, justify="right")
    for name, found in figures.items():
        table.add_row(name, *(f"{100 * one:.3f} %" for one in found.values()))
    Console(width=100).print(table)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="sentence pairs in the format of STS-B")
    parser.add_argument("--texts", type=Path, help="texts whose terms are weighted, UTF-8, one a line")
    parser.add_argument("--queries", type=int, default=200, help="number of queries, and of texts")
    parser.add_argument("--formats", nargs="+", default=("bf16", "int8", DEFAULT), choices=FORMATS)
    arguments = parser.parse_args()
    for name in ("pairs", "texts"):
        path = getattr(arguments, name)
        if path is not None and not path.is_file():
            parser.error(f"--{name}: file {str(path)!r} does not exist")
    pairs = [(first, second) for _, first, second in read_sts(arguments.pairs)]
    if not 0 < arguments.queries <= len(pairs):
        parser.error(f"--queries: expected 1 to {len(pairs)}, the number of pairs, found {arguments.queries}")
    texts = [first for first, _ in pairs] if arguments.texts is None else read_lines(arguments.texts)
    texts = texts[: arguments.queries]
    with tempfile.TemporaryDirectory() as work:
        late = write_folder(LATE_MODEL, Path(work) / "late", LATE_SETTINGS)
        show(
            f"MaxSim, {LATE_MODEL}, {arguments.queries} queries",
            measure_max_sim(late, arguments.formats, pairs, arguments.queries),
        )
        terms = write_folder(SPLADE, Path(work) / "terms")
        show(f"Top {TERMS} terms, {SPLADE}, {len(texts)} texts", measure_terms(terms, arguments.formats, texts))


if __name__ == "__main__":
    main()

"""Texts of mixed lengths through an encoder: texts a second with padding and without, beside ONNX Runtime.

python -m ortolan.benchmarks.embeddings [--model all-minilm-l6-v2] [--weights int8] [--lengths 8:256] [--batch 32]
    [--texts 64] [--sts sts-dev.csv] [--threads 1]

Texts are random words, or with --sts the sentences of that file as its tokenizer cuts them; batches are padded to their
longest text. Once the texts are divided into batches as they come, once sorted by length. With --sts a column tells
Spearman on all of the file. "alone": whether some texts get the same numbers, bit by bit, alone and in a batch.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnxruntime.quantization import quantize_dynamic
from rich.console import Console
from rich.table import Table

from ortolan.graph_passes.measure.feeds import Feeds
from ortolan.graph_passes.measure.timing import interleave, pinned
from ortolan.graph_passes.recipe import Recipe

from ..embedding import spearman_on_sts, token_feeds
from ..optimize import optimize_onnx
from ..session import create_session
from ..text_encoder import TextEncoder
from .encoder import (
    FP32,
    INT8,
    MOST_TOKENS,
    PUBLISHED,
    SENTENCES,
    Encoder,
    calibration_feeds,
    open_model,
    silent_root_logger,
    word_feeds,
)
from .result import versions_line
from .variants import file_megabytes, session_options

_COMPARED = 8  # texts that are run alone


def read_lengths(text: str) -> tuple[int, int]:
    """LEAST:MOST, in tokens."""
    least, colon, most = text.partition(":")
    if not (colon and least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most) <= MOST_TOKENS):
        raise argparse.ArgumentTypeError(f"expected LEAST:MOST, 1 to {MOST_TOKENS} tokens, found {text!r}")
    return int(least), int(most)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PUBLISHED[0], choices=PUBLISHED)
    parser.add_argument("--weights", default="int8", choices=("bf16", "int8", "int4"))
    parser.add_argument(
        "--lengths", type=read_lengths, default=(8, 256), help="of texts of random words; default: 8:256"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--sts", type=Path, help="sts-dev.csv: tab-separated, columns 6 and 7 two sentences")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each order of texts")
    arguments = parser.parse_args()
    for name in ("batch", "texts", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: expected 1 or more, found {getattr(arguments, name)}")
    if arguments.sts and not arguments.sts.is_file():
        parser.error(f"--sts: file {str(arguments.sts)!r} does not exist")
    return arguments


def make_texts(encoder: Encoder, arguments: argparse.Namespace) -> list[Feeds]:
    """One text a feed, without padding."""
    if arguments.sts:
        lines = [line.split("\t") for line in arguments.sts.read_text(encoding="utf-8").split("\n") if line.strip()]
        sentences = [columns[place] for columns in lines[: arguments.texts] for place in (5, 6)]
        assert encoder.tokenizer is not None
        return [{name: one[name] for name in encoder.inputs} for one in token_feeds(encoder.tokenizer, sentences)]
    least, most = arguments.lengths
    lengths = np.random.default_rng(0).integers(least, most + 1, arguments.texts)
    return [word_feeds(encoder.inputs, 1, int(tokens), seed) for seed, tokens in enumerate(lengths)]


def batches_of(texts: Sequence[Feeds], batch: int, in_order: bool) -> list[Feeds]:
    """Padded behind the texts, with zeros."""
    if in_order:
        texts = sorted(texts, key=lambda one: one["input_ids"].shape[1])
    return [_padded(texts[start : start + batch]) for start in range(0, len(texts), batch)]


def _padded(texts: Sequence[Feeds]) -> Feeds:
    longest = max(one["input_ids"].shape[1] for one in texts)
    return {
        name: np.concatenate([np.pad(one[name], ((0, 0), (0, longest - one[name].shape[1]))) for one in texts])
        for name in texts[0]
    }


def run_all(session: ort.InferenceSession, batches: Sequence[Feeds]) -> None:
    for feeds in batches:
        session.run(None, feeds)


def same_alone(session: ort.InferenceSession, texts: Sequence[Feeds]) -> bool:
    """Whether the numbers of all tokens are the same, bit by bit, alone and in a batch."""
    (together,) = session.run(None, _padded(texts))[:1]
    alone = [session.run(None, one)[0][0] for one in texts]
    return all(np.array_equal(one, rows[: len(one)]) for one, rows in zip(alone, together, strict=True))


def make_variants(encoder: Encoder, weights: str, folder: Path) -> dict[str, Path]:
    """Name -> ONNX file, made in `folder`."""
    paths = {FP32: encoder.onnx, INT8: folder / "ort_int8.onnx"}
    with silent_root_logger():
        quantize_dynamic(encoder.onnx, paths[INT8])
    padded = Recipe.of(weights=weights).without_pass("unpad")
    for kind, recipe in (("padded", padded), ("unpad", padded.with_pass("unpad"))):
        paths[f"{weights}, {kind}"] = folder / f"{kind}.onnx"
        calibration = calibration_feeds(encoder, SENTENCES)
        optimize_onnx(encoder.onnx, folder / f"{kind}.onnx", recipe=recipe, calibration=calibration)
    return paths


def main() -> None:
    arguments = read_arguments()
    with tempfile.TemporaryDirectory() as temporary, pinned(arguments.threads):
        folder = Path(temporary)
        encoder = open_model(arguments.model, folder)
        paths = make_variants(encoder, arguments.weights, folder)
        sessions = {name: create_session(path, session_options(arguments.threads)) for name, path in paths.items()}
        texts = make_texts(encoder, arguments)
        times = []
        for in_order in (False, True):
            batches = batches_of(texts, arguments.batch, in_order)
            calls = {name: partial(run_all, session, batches) for name, session in sessions.items()}
            times.append(interleave(calls, seconds=arguments.seconds))
        title = (
            f"{versions_line()} · {arguments.model} · {len(texts)} texts in batches of {arguments.batch}"
            f" · threads {arguments.threads}"
        )
        caption = "texts a second, by the shortest time; how many times as fast as ORT int8 in the same order"
        table = Table(title=title, title_justify="left", caption=caption)
        for column in ("", "MB", "Spearman", "alone", "as they come", "sorted by length"):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        for name, session in sessions.items():
            spearman = ""
            if arguments.sts and encoder.tokenizer is not None:
                spearman = f"{spearman_on_sts(TextEncoder(session, encoder.tokenizer), arguments.sts):.4f}"
            milliseconds = [(one[name].min_ms, one[INT8].min_ms) for one in times]
            rates = [f"{len(texts) / own * 1e3:.0f}  {peer / own:.2f}x" for own, peer in milliseconds]
            alone = "same" if same_alone(session, texts[:_COMPARED]) else "differs"
            table.add_row(name, f"{file_megabytes(paths[name]):.1f}", spearman, alone, *rates)
    Console(width=180).print(table)


if __name__ == "__main__":
    main()

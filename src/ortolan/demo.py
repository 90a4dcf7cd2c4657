"""`ortolan demo`: a real sentence encoder before and after, side by side: answers, sizes, latencies."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ortolan.graph_passes.measure.timing import interleave
from ortolan.graph_passes.report.figures import Timing

from .errors import OrtolanError
from .progress import Progress, Stage, no_progress

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime as ort
    from rich.console import RenderableType

    from .models import ModelFiles

MODEL = "all-minilm-l6-v2"

# What the two sentences of a pair have to do with each other, and the sentences.
PAIRS = (
    ("same meaning", "A cat is sleeping on the sofa.", "A kitten naps on the couch."),
    ("same meaning", "How do I reset my password?", "I forgot my login, how can I get a new one?"),
    ("same topic", "The train to Berlin leaves at nine.", "The next bus to Hamburg is late today."),
    ("unrelated", "She plays the violin in an orchestra.", "Mix the flour with two eggs and some milk."),
    ("unrelated", "Share prices fell sharply on Monday.", "The old bridge over the river is closed."),
)
TOKEN_COUNTS = (16, 128)

_SECONDS_A_LENGTH = 3.0


@dataclass(frozen=True)
class PairSimilarity:
    """Cosine similarity of two sentences by the original and by the optimized model."""

    relation: str
    first: str
    second: str
    original: float
    optimized: float


@dataclass(frozen=True)
class Agreement:
    """How near the optimized model stays: cosine of each sentence's two embeddings, and the rank correlation (Spearman)
    of the similarities of all pairs of sentences."""

    cosine_mean: float
    cosine_min: float
    spearman: float


@dataclass(frozen=True)
class LatencyRow:
    """Time of one run of a 1 x tokens input."""

    tokens: int
    original: Timing
    optimized: Timing

    @property
    def speedup(self) -> float:
        """Of the minima: above 1 where the optimized model is faster."""
        return self.original.min_ms / self.optimized.min_ms


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured. Prints as tables with rich."""

    model: str
    model_path: str
    recipe: str
    sparsity: float
    threads: int
    cpu: str
    isa: str
    onnxruntime: str
    layers_replaced: int
    optimize_seconds: float
    original_bytes: int
    optimized_bytes: int
    original_layer_bytes: int
    optimized_layer_bytes: int
    pairs: tuple[PairSimilarity, ...]
    agreement: Agreement
    latencies: tuple[LatencyRow, ...]

    def to_json(self) -> str:
        """All fields under their names; each latency also with its speedup."""
        latencies = [asdict(row) | {"speedup": row.speedup} for row in self.latencies]
        return json.dumps(asdict(self) | {"latencies": latencies}, indent=2)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        similarities = Table(title="Cosine similarity", title_justify="left")
        similarities.add_column("relation")
        similarities.add_column("sentences", overflow="fold")
        for column in ("original", "optimized", "change"):
            similarities.add_column(column, justify="right", no_wrap=True)
        for pair in self.pairs:
            change = pair.optimized - pair.original
            cells = (f"{pair.original:.3f}", f"{pair.optimized:.3f}", f"{change:+.3f}")
            similarities.add_row(pair.relation, Text(f"{pair.first}\n{pair.second}"), *cells)

        threads = f"{self.threads} thread" + ("s" if self.threads > 1 else "")
        figures = Table(title=f"Size, and latency on {threads}", title_justify="left")
        figures.add_column("")
        for column in ("original", "optimized", "gain"):
            figures.add_column(column, justify="right", no_wrap=True)
        for name, before, after in (
            ("file size", self.original_bytes, self.optimized_bytes),
            ("weights of these layers", self.original_layer_bytes, self.optimized_layer_bytes),
        ):
            figures.add_row(name, f"{before / 1e6:.2f} MB", f"{after / 1e6:.2f} MB", f"{before / after:.2f}x")
        for row in self.latencies:
            for name, before_ms, after_ms in (
                ("minimum", row.original.min_ms, row.optimized.min_ms),
                ("median", row.original.median_ms, row.optimized.median_ms),
            ):
                label = f"1x{row.tokens} tokens, {name}"
                figures.add_row(label, f"{before_ms:.2f} ms", f"{after_ms:.2f} ms", f"{before_ms / after_ms:.2f}x")

        agree = self.agreement
        head = (
            f"{self.model}, recipe {self.recipe}: {self.layers_replaced} layers at {self.sparsity:.0%} sparsity, "
            f"optimized in {self.optimize_seconds:.1f} s\n{self.cpu} ({self.isa}), onnxruntime {self.onnxruntime}"
        )
        agreement = (
            f"Agreement: the embeddings of a sentence by both models have cosine {agree.cosine_mean:.4f} on average, "
            f"{agree.cosine_min:.4f} at worst;\nthe rank correlation of the similarities of all pairs of sentences is "
            f"{agree.spearman:.4f}."
        )
        return Group(Text(head), similarities, Text(agreement), figures, Text(self._advice()))

    def _advice(self) -> str:
        """What to make of the figures."""
        if self.sparsity == 0:
            text = "Nothing was pruned here: the differences come from rounding to bf16 alone."
        else:
            text = (
                f"{self.sparsity:.0%} of the weights were dropped by magnitude in one shot, without any retraining: "
                "that costs accuracy.\nTry --sparsity 0 (bf16 rounding alone), 0.2 or 0.5 and compare the agreement; "
                "measure on your own task before you ship."
            )
        if any(row.speedup < 1 for row in self.latencies):
            text += "\nWhere the gain is below 1x, this CPU runs the original faster."
        return text


def run_demo(
    sparsity: float = 0.3,
    threads: int = 1,
    *,
    model: ModelFiles | None = None,
    progress: Progress = no_progress,
    say: Callable[[str], None] | None = None,
) -> DemoResult:
    """Optimizes all-MiniLM-L6-v2 and compares it with the original in plain ONNX Runtime.

    sparsity: the share of weights to drop in each layer.
    threads: of ONNX Runtime, for both models.
    model: another sentence encoder with a tokenizer, to use instead of the published one.
    progress: called as progress(stage, done, total).
    say: called with a line of text at each step of the download.

    The download stays in the model cache; the optimized model is deleted at the end.

    Raises OrtolanError when the packages of the extra `demo` are missing or the model cannot be fetched.
    """
    if threads < 1:
        raise OrtolanError(f"threads is {threads}, expected 1 or more")
    _require_extras()
    import onnxruntime as ort

    from . import cpu_info, create_session, optimize_onnx
    from .embed import SentenceEncoder
    from .models import get_model

    if model is None:
        model = get_model(MODEL, progress=say)
    if model.tokenizer is None:
        raise OrtolanError(f"model {model.name} has no tokenizer; the demo needs one")
    with tempfile.TemporaryDirectory(prefix="ortolan-demo-") as folder:
        optimized_path = Path(folder) / "optimized.onnx"
        started = time.perf_counter()
        # No time for verify's own latencies: both models are timed below.
        report = optimize_onnx(
            model.onnx,
            optimized_path,
            weights="bf16",
            sparsity=sparsity or None,
            options={"verify.seconds": 0},
            progress=progress,
        )
        optimize_seconds = time.perf_counter() - started
        options = _session_options(threads)
        original = ort.InferenceSession(os.fspath(model.onnx), options, providers=["CPUExecutionProvider"])
        optimized = create_session(optimized_path, _session_options(threads))
        sentences = [sentence for pair in PAIRS for sentence in pair[1:]]
        vectors = []
        for done, session in enumerate((original, optimized)):
            progress(Stage.EMBED, done, 2)
            vectors.append(SentenceEncoder(session, model.tokenizer).encode(sentences))
        latencies = measure_latencies(original, optimized, model.tokenizer, progress)
        del optimized  # it maps the files that are deleted now
    info = cpu_info()
    return DemoResult(
        model=model.name,
        model_path=os.fspath(model.onnx),
        recipe=report.recipe["name"],
        sparsity=sparsity,
        threads=threads,
        cpu=str(info["name"]),
        isa=str(info["isa"]),
        onnxruntime=str(ort.__version__),
        layers_replaced=len(report.replaced),
        optimize_seconds=optimize_seconds,
        original_bytes=report.file_size_before or 0,
        optimized_bytes=report.file_size_after or 0,
        original_layer_bytes=sum(layer.bytes_before or 0 for layer in report.replaced),
        optimized_layer_bytes=sum(layer.bytes_after or 0 for layer in report.replaced),
        pairs=compare_pairs(*vectors),
        agreement=compare_embeddings(*vectors),
        latencies=latencies,
    )


def compare_pairs(original: np.ndarray, optimized: np.ndarray) -> tuple[PairSimilarity, ...]:
    """The similarity within each of PAIRS, from the unit vectors of their sentences in order."""
    return tuple(
        PairSimilarity(*pair, *(float(vectors[2 * i] @ vectors[2 * i + 1]) for vectors in (original, optimized)))
        for i, pair in enumerate(PAIRS)
    )


def compare_embeddings(original: np.ndarray, optimized: np.ndarray) -> Agreement:
    """Agreement of two sets of unit vectors [sentences, hidden] for the same sentences."""
    import numpy as np

    from .embed import spearman

    cosines = (original * optimized).sum(axis=1)
    pairs = np.triu_indices(len(original), k=1)
    correlation = spearman((original @ original.T)[pairs], (optimized @ optimized.T)[pairs])
    return Agreement(float(cosines.mean()), float(cosines.min()), correlation)


def measure_latencies(
    original: ort.InferenceSession,
    optimized: ort.InferenceSession,
    tokenizer_path: str | os.PathLike[str],
    progress: Progress = no_progress,
) -> tuple[LatencyRow, ...]:
    """Times both sessions in turns, so that a noisy neighbour slows both."""
    rows = []
    for done, tokens in enumerate(TOKEN_COUNTS):
        progress(Stage.TIME_BOTH, done, len(TOKEN_COUNTS))
        feeds = _feeds(original, tokenizer_path, tokens)
        calls = {
            "original": partial(original.run, None, feeds),
            "optimized": partial(optimized.run, None, feeds),
        }
        rows.append(LatencyRow(tokens, **interleave(calls, seconds=_SECONDS_A_LENGTH)))
    return tuple(rows)


def _feeds(session: ort.InferenceSession, tokenizer_path: str | os.PathLike[str], tokens: int) -> dict[str, np.ndarray]:
    """One input of so many tokens of real text."""
    import numpy as np
    from tokenizers import Tokenizer

    text = " ".join(sentence for pair in PAIRS for sentence in pair[1:])
    tokenizer = Tokenizer.from_file(os.fspath(tokenizer_path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = np.resize(np.array(tokenizer.encode(text).ids, np.int64), (1, tokens))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    return {value.name: feeds[value.name] for value in session.get_inputs()}


def _session_options(threads: int) -> ort.SessionOptions:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Or the threads of the session that has just run would still spin while the other one is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _require_extras() -> None:
    missing = []
    for name in ("safetensors", "tokenizers"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise OrtolanError(
            f"the demo needs the package{'s' if len(missing) > 1 else ''} {' and '.join(missing)}; "
            'install what is missing with: pip install "ortolan[demo]"'
        )

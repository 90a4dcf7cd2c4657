"""`ortolan demo`: compares a sentence encoder with ONNX Runtime's dynamic int8 version and with Ortolan's version."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ortolan.graph_passes.measure.timing import interleave
from ortolan.graph_passes.report.figures import Timing

from .errors import ArgumentError, OrtolanError
from .progress import Progress, Stage, no_progress
from .text_encoder import TextEncoder

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime as ort
    from rich.console import RenderableType
    from rich.table import Table

    from .models import ModelFiles

MODEL = "all-minilm-l6-v2"

# (relation of the two sentences, first sentence, second sentence)
PAIRS = (
    ("same meaning", "A cat is sleeping on the sofa.", "A kitten naps on the couch."),
    ("same meaning", "How do I reset my password?", "I forgot my login, how can I get a new one?"),
    ("same topic", "The train to Berlin leaves at nine.", "The next bus to Hamburg is late today."),
    ("unrelated", "She plays the violin in an orchestra.", "Mix the flour with two eggs and some milk."),
    ("unrelated", "Share prices fell sharply on Monday.", "The old bridge over the river is closed."),
)
TOKEN_COUNTS = (16, 128)

ORIGINAL, DYNAMIC_INT8, OURS = "original", "ORT dynamic int8", "Ortolan"

_SECONDS_A_LENGTH = 4.0
_EXPLANATION = (
    "Each layer has the format that is fastest on this CPU within the budget above. No weight was pruned.\nDynamic "
    "int8 has one scale for all inputs of a layer, so a sentence's vector depends on the other sentences of its batch."
)


@dataclass(frozen=True)
class Agreement:
    """The agreement between the vectors of two models.

    Attributes:
        cosine_mean: The cosine similarity of a sentence's vectors by the two models, averaged over the sentences.
        cosine_min: The smallest of these cosine similarities.
        spearman: Spearman's rank correlation of the similarities of all pairs of sentences.
    """

    cosine_mean: float
    cosine_min: float
    spearman: float


@dataclass(frozen=True)
class Variant:
    """One of the compared models.

    Attributes:
        times: The time of one run with [1, tokens], for each of TOKEN_COUNTS.
        agreement: The agreement with the original's vectors.
        batch_difference: The largest difference of token vectors between a sentence alone and in a batch.
    """

    name: str
    bytes: int
    times: tuple[Timing, ...]
    agreement: Agreement
    batch_difference: float


@dataclass(frozen=True)
class DemoResult:
    """The measurements of the demo, which rich prints as tables.

    Attributes:
        threads: Threads of all models; None: ONNX Runtime's choice.
        isa: The best feature set that kernels use.
        similarities: The similarity of each of PAIRS by each variant.
        variants: The models: the original first, Ortolan's last.
    """

    model: str
    model_path: str
    outcome: str
    threads: int | None
    cpu: str
    isa: str
    onnxruntime: str
    layers_replaced: int
    optimize_seconds: float
    similarities: tuple[tuple[float, ...], ...]
    variants: tuple[Variant, ...]

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self), indent=2)

    def __rich__(self) -> RenderableType:
        """Return the tables."""
        from rich.console import Group
        from rich.text import Text

        head = (
            f"{self.model}: {self.layers_replaced} layers replaced, optimized in {self.optimize_seconds:.1f} s\n"
            f"{self.cpu} ({self.isa}), onnxruntime {self.onnxruntime}\n{self.outcome}"
        )
        return Group(Text(head), self._similarity_table(), self._figures(), Text(_EXPLANATION))

    def _similarity_table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Cosine similarity of two sentences", title_justify="left")
        table.add_column("relation")
        table.add_column("sentences", overflow="fold")
        for variant in self.variants:
            table.add_column(variant.name, justify="right")
        for (relation, first, second), found in zip(PAIRS, self.similarities, strict=True):
            table.add_row(relation, Text(f"{first}\n{second}"), *(f"{similarity:.3f}" for similarity in found))
        return table

    def _figures(self) -> Table:
        from rich.table import Table

        threads = "ONNX Runtime's default threads" if self.threads is None else f"{self.threads} thread(s)"
        table = Table(title=f"Compared with the original, on {threads}", title_justify="left")
        table.add_column("")
        for variant in self.variants:
            table.add_column(variant.name, justify="right")
        original = self.variants[0]
        table.add_row("file size", *(f"{variant.bytes / 1e6:.1f} MB" for variant in self.variants))
        for index, tokens in enumerate(TOKEN_COUNTS):
            for kind in ("min_ms", "median_ms"):
                base = getattr(original.times[index], kind)
                times = [getattr(variant.times[index], kind) for variant in self.variants]
                label = f"1 x {tokens} tokens, {'minimum' if kind == 'min_ms' else 'median'}"
                table.add_row(label, *(f"{time:.2f} ms ({base / time:.2f}x)" for time in times))
        table.add_row(
            "accuracy: smallest cosine", *(f"{variant.agreement.cosine_min:.4f}" for variant in self.variants)
        )
        table.add_row(
            "accuracy: order of similarities", *(f"{variant.agreement.spearman:.4f}" for variant in self.variants)
        )
        table.add_row(
            "difference alone / in a batch", *(f"{variant.batch_difference:.2g}" for variant in self.variants)
        )
        return table


def run_demo(
    threads: int | None = None,
    *,
    model: ModelFiles | None = None,
    progress: Progress = no_progress,
    say: Callable[[str], None] | None = None,
) -> DemoResult:
    """Optimize all-MiniLM-L6-v2 with the defaults, and compare it with the original and with dynamic int8.

    The downloaded model stays in the cache folder; the other models are deleted.

    Args:
        threads: Threads of all models; None: ONNX Runtime's choice.
        model: Another sentence encoder with a tokenizer.
        progress: Called as progress(stage, done, total).
        say: Called with a line of text when the download, optimizing and comparing begin.

    Raises:
        ArgumentError: `threads` is not positive.
        OrtolanError: Packages of the extra `demo` are missing, or the model cannot be downloaded.
    """
    if threads is not None and threads < 1:
        raise ArgumentError(f"threads is {threads}, expected 1 or more")
    _require_extras()
    from .models import get_model

    if model is None:
        model = get_model(MODEL, progress=say)
    if model.tokenizer is None:
        raise OrtolanError(f"model {model.name} has no tokenizer; the demo needs one")
    with tempfile.TemporaryDirectory(prefix="ortolan-demo-") as folder:
        return _compare(model, Path(folder), threads, progress, say or (lambda line: None))


def _compare(
    model: ModelFiles, folder: Path, threads: int | None, progress: Progress, say: Callable[[str], None]
) -> DemoResult:
    import onnxruntime as ort

    from . import cpu_info, create_session, optimize_onnx

    assert model.tokenizer is not None
    say(f"{model.name}: optimizing; formats of its layers are timed on this CPU, for up to a minute")
    started = time.perf_counter()
    # With verify.seconds 0, pass verify does not time the model: all models are timed below.
    report = optimize_onnx(model.onnx, folder / "optimized.onnx", options={"verify.seconds": 0}, progress=progress)
    optimize_seconds = time.perf_counter() - started
    say(f"{model.name}: comparing with the original and with ONNX Runtime's dynamic int8")
    quantize_dynamic(model.onnx, folder / "int8.onnx")
    paths = {ORIGINAL: model.onnx, DYNAMIC_INT8: folder / "int8.onnx", OURS: folder / "optimized.onnx"}
    sessions = {name: create_session(path, _session_options(threads)) for name, path in paths.items()}
    sentences = [sentence for pair in PAIRS for sentence in pair[1:]]
    vectors = {}
    for done, (name, session) in enumerate(sessions.items()):
        progress(Stage.EMBED, done, len(sessions))
        vectors[name] = TextEncoder(session, model.tokenizer).encode(sentences)
    times = measure_times(sessions, model.tokenizer, progress)
    differences = {
        name: difference_in_a_batch(session, model.tokenizer, sentences) for name, session in sessions.items()
    }
    del sessions, session  # sessions map files that are deleted now
    variants = [
        Variant(
            name,
            sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*")),
            times[name],
            compare_embeddings(vectors[ORIGINAL], vectors[name]),
            differences[name],
        )
        for name, path in paths.items()
    ]
    info = cpu_info()
    return DemoResult(
        model=model.name,
        model_path=os.fspath(model.onnx),
        outcome="" if report.auto is None else report.auto.outcome,
        threads=threads,
        cpu=str(info["name"]),
        isa=str(info["isa"]),
        onnxruntime=str(ort.__version__),
        layers_replaced=len(report.replaced),
        optimize_seconds=optimize_seconds,
        similarities=tuple(zip(*(pair_similarities(found) for found in vectors.values()), strict=True)),
        variants=tuple(variants),
    )


def quantize_dynamic(model: Path, output: Path) -> None:
    """Write ONNX Runtime's dynamic int8 model with default settings."""
    from onnxruntime.quantization import quantize_dynamic

    # Silence the quantizer's advice to run ONNX Runtime's preprocessing, which has no effect here.
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        quantize_dynamic(model, output)
    finally:
        root.setLevel(level)


def pair_similarities(vectors: np.ndarray) -> list[float]:
    """Return the similarity of each of PAIRS from the unit vectors of their sentences."""
    return [float(vectors[2 * pair] @ vectors[2 * pair + 1]) for pair in range(len(PAIRS))]


def difference_in_a_batch(
    session: ort.InferenceSession, tokenizer: str | os.PathLike[str], sentences: Sequence[str]
) -> float:
    """Return the largest difference of token vectors between a sentence alone and in a batch."""
    import numpy as np

    encoder = TextEncoder(session, tokenizer)
    together = encoder.token_vectors(list(sentences))
    alone = [encoder.token_vectors([sentence])[0] for sentence in sentences]
    return max(float(np.abs(one - other).max()) for one, other in zip(alone, together, strict=True))


def compare_embeddings(original: np.ndarray, optimized: np.ndarray) -> Agreement:
    """Return the agreement of two sets of unit vectors [sentences, hidden]."""
    import numpy as np

    from .embedding import spearman

    cosines = (original * optimized).sum(axis=1)
    pairs = np.triu_indices(len(original), k=1)
    correlation = spearman((original @ original.T)[pairs], (optimized @ optimized.T)[pairs])
    return Agreement(float(cosines.mean()), float(cosines.min()), correlation)


def measure_times(
    sessions: Mapping[str, ort.InferenceSession],
    tokenizer_path: str | os.PathLike[str],
    progress: Progress = no_progress,
) -> dict[str, tuple[Timing, ...]]:
    """Return times by name for each of TOKEN_COUNTS. Sessions run in turn, so that a busy machine slows all of them."""
    rows = []
    for done, tokens in enumerate(TOKEN_COUNTS):
        progress(Stage.TIME, done, len(TOKEN_COUNTS))
        feeds = _feeds(next(iter(sessions.values())), tokenizer_path, tokens)
        calls = {name: partial(session.run, None, feeds) for name, session in sessions.items()}
        rows.append(interleave(calls, seconds=_SECONDS_A_LENGTH))
    return {name: tuple(row[name] for row in rows) for name in sessions}


def _feeds(session: ort.InferenceSession, tokenizer_path: str | os.PathLike[str], tokens: int) -> dict[str, np.ndarray]:
    """Return one input with `tokens` tokens of real text."""
    import numpy as np

    from ortolan.graph_passes.text.tokenizer_file import load_tokenizer

    text = " ".join(sentence for pair in PAIRS for sentence in pair[1:])
    tokenizer = load_tokenizer(tokenizer_path)
    ids = np.resize(np.array(tokenizer.encode(text).ids, np.int64), (1, tokens))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    return {value.name: feeds[value.name] for value in session.get_inputs()}


def _session_options(threads: int | None) -> ort.SessionOptions:
    import onnxruntime as ort

    options = ort.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Without this entry, threads of the previous session would spin while the next session is timed.
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
            f"install with: pip install {' '.join(missing)}"
        )

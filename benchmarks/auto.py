"""Recipe "auto" on whole models, compared with the original and ONNX Runtime's dynamic int8 and MatMulNBits in one run.

Encoders run 1 x 128 and 1 x 16 tokens, decoders one token after 128 in the cache. Errors are measured on texts that
were not used for calibration: sentences for encoders, texts sampled from the original for decoders. `auto` chooses for
both shapes at once, with the measured number of threads, under its default budget; for decoders, under a perplexity
budget.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from ortolan.errors import one_line
from ortolan.graph_passes.auto.budget import DEFAULT_COSINE, perplexity
from ortolan.graph_passes.measure.compare import measure_errors
from ortolan.graph_passes.measure.feeds import Feeds, Sizes, read_calibration, synthetic_feeds
from ortolan.graph_passes.measure.timing import interleave, pinned
from ortolan.graph_passes.report.figures import Timing
from ortolan.session import create_session

from ..embedding import token_feeds
from ..errors import OrtolanError
from ..models import get_model
from ..models.perplexity import sample_texts
from ..models.tokenizer import load_tokenizer
from ..optimize import optimize_onnx, search
from ..progress import Progress, no_progress
from .encoder import SENTENCES, silent_root_logger
from .matmul_nbits import make_matmul_nbits
from .result import BenchOptions, BenchResult, versions_line
from .variants import file_megabytes, session_options

if TYPE_CHECKING:
    from rich.console import Group

ENCODERS = ("all-minilm-l6-v2", "all-mpnet-base-v2")
DECODERS = ("stories15m", "smollm2-135m-instruct")
QUICK = (ENCODERS[0], DECODERS[0])
ENCODER_SHAPES, DECODER_SHAPES = ((1, 128), (1, 16)), ((1, 1),)
ORIGINAL, INT8, NBITS, AUTO = "original", "ORT dynamic int8", "ORT MatMulNBits", "auto"
PERPLEXITY = 0.02  # budget of decoders: largest relative increase of perplexity
_PAST = 128
_BLOCK, _ACCURACY = 32, 4  # block size of MatMulNBits, and its fastest accuracy_level
_SCORED = 4  # index of the scored sentence in every five; the other four calibrate
_WINDOW = 128  # tokens of a text sampled from a decoder
_SECONDS, _QUICK_SECONDS = 8.0, 2.0  # per shape


@dataclass(frozen=True)
class Variant:
    """One variant of a model, with its errors against the original."""

    model: str
    threads: int
    name: str
    megabytes: float
    times: dict[str, Timing]  # maps "batch x tokens" to times
    speedups: dict[str, float]  # speedup over the original, by the fastest runs
    cosine: float  # similarity to the original: of a decoder's logits, or of an encoder's worst output
    perplexity: float | None  # relative increase of perplexity; None for encoders

    def to_dict(self) -> dict[str, Any]:
        """Return the variant as plain values."""
        return asdict(self)


@dataclass
class AutoBenchResult(BenchResult):
    """The variants of all models."""

    variants: list[Variant] = field(default_factory=list)

    def to_json(self) -> str:
        """Return {"cpu", "versions", "notes", "interrupted", "variants": Variant.to_dict} as JSON."""
        document = {
            "cpu": self.cpu,
            "versions": self.versions,
            "notes": self.notes,
            "interrupted": self.interrupted,
            "variants": [variant.to_dict() for variant in self.variants],
        }
        return json.dumps(document, indent=2)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table

        table = Table(title=versions_line(self.versions), title_justify="left")
        for column in ("model", "threads", "variant"):
            table.add_column(column)
        for column in ("MB", "batch x tokens", "ms (min / median)", "speed-up", "cosine", "perplexity"):
            table.add_column(column, justify="right")
        last = None
        for variant in self.variants:
            group = variant.model, variant.threads
            if last is not None and group != last:
                table.add_section()
            for number, (shape, timing) in enumerate(variant.times.items()):
                first = number == 0
                table.add_row(
                    variant.model if first and group != last else "",
                    str(variant.threads) if first and group != last else "",
                    variant.name if first else "",
                    f"{variant.megabytes:.1f}" if first else "",
                    shape,
                    str(timing),
                    f"{variant.speedups[shape]:.2f}x",
                    f"{variant.cosine:.5f}" if first else "",
                    f"{100 * variant.perplexity:+.2f} %" if first and variant.perplexity is not None else "",
                )
            last = group
        return Group(table, *self.notes)


def run(options: BenchOptions, progress: Progress = no_progress) -> AutoBenchResult:
    """Measure every model. An interrupt returns the results so far."""
    for name in ("cases", "sparsity", "layers", "batch", "group_size"):
        if getattr(options, name) is not None:
            raise OrtolanError(f"auto is measured on whole models: leave out --{name.replace('_', '-')}")
    models = options.kinds or (QUICK if options.quick else (*ENCODERS, *DECODERS))
    unknown = [name for name in models if name not in (*ENCODERS, *DECODERS)]
    if unknown:
        raise OrtolanError(
            f"auto is not measured on {unknown[0]!r}, expected one of {', '.join((*ENCODERS, *DECODERS))}"
        )
    result = AutoBenchResult()
    cases = [(model, threads) for model in models for threads in options.threads]
    try:
        for number, (model, threads) in enumerate(cases):
            progress(f"{model}, {threads} threads", number, len(cases))
            with tempfile.TemporaryDirectory(prefix="ortolan-", ignore_cleanup_errors=True) as folder, pinned(threads):
                measured = measure(open_model(model, options.quick), Path(folder), threads, options.quick, result.notes)
                result.variants += measured
        progress("done", len(cases), len(cases))
    except KeyboardInterrupt:
        result.interrupted = True
    return result


@dataclass(frozen=True)
class Model:
    """A model, its texts and its shapes."""

    name: str
    onnx: Path
    calibration: list[Feeds]
    scored: list[Feeds]
    shapes: tuple[tuple[int, int], ...]
    decoder: bool


def open_model(name: str, quick: bool = False) -> Model:
    """Fetch a model, and get the texts for it."""
    files = get_model(name)
    assert files.tokenizer is not None
    graph = ir.load(files.onnx)
    if name in DECODERS:
        tokens = (8 if quick else 24) * _WINDOW
        start = load_tokenizer(files.tokenizer).start
        texts = sample_texts(create_session(files.onnx), start, tokens, _WINDOW)
        given = [{"input_ids": np.array([ids], np.int64)} for ids in texts]
    else:
        inputs = {value.name for value in graph.graph.inputs}
        found = token_feeds(files.tokenizer, SENTENCES)
        given = [{key: array for key, array in one.items() if key in inputs} for one in found]
    feeds = read_calibration(given, graph)
    scored = feeds[_SCORED :: _SCORED + 1] if name in ENCODERS else feeds[3::4]
    calibration = [one for one in feeds if not any(one is other for other in scored)]
    shapes = DECODER_SHAPES if name in DECODERS else ENCODER_SHAPES
    return Model(name, files.onnx, calibration, scored, shapes, name in DECODERS)


def measure(model: Model, folder: Path, threads: int, quick: bool, notes: list[str]) -> list[Variant]:
    """Time all variants of a model in the same rounds. notes: receives the search's result, and failed variants."""
    paths = {ORIGINAL: model.onnx}
    for name, write in _writers(model, threads, notes):
        path = folder / name.replace(" ", "-") / "model.onnx"
        path.parent.mkdir()
        try:
            write(path)
            create_session(path, session_options(threads))
        except Exception as error:  # ONNX Runtime and its quantizers raise various exceptions
            notes.append(f"{model.name}: {name} is left out: {one_line(error)}")
        else:
            paths[name] = path
    sessions = {name: create_session(path, session_options(threads)) for name, path in paths.items()}
    errors = {name: _errors(model, sessions[ORIGINAL], session) for name, session in sessions.items()}
    graph = ir.load(model.onnx)
    times: dict[str, dict[str, Timing]] = {name: {} for name in sessions}
    for batch, tokens in model.shapes:
        feeds = synthetic_feeds(graph, Sizes(batch, tokens, _PAST))
        calls = {name: partial(session.run, None, feeds) for name, session in sessions.items()}
        found = interleave(calls, seconds=_QUICK_SECONDS if quick else _SECONDS)
        for name, timing in found.items():
            times[name][f"{batch} x {tokens}"] = timing
    return [
        Variant(
            model.name, threads, name, file_megabytes(paths[name]), times[name],
            {shape: times[ORIGINAL][shape].min_ms / timing.min_ms for shape, timing in times[name].items()},
            *errors[name],
        )
        for name in sessions
    ]  # fmt: skip


def _writers(model: Model, threads: int, notes: list[str]) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield each variant's name, and a function that writes it to a path."""

    def write_int8(path: Path) -> None:
        from onnxruntime.quantization import quantize_dynamic

        with silent_root_logger():
            quantize_dynamic(model.onnx, path)

    def write_auto(path: Path) -> None:
        budget: Any = {"max_perplexity_increase": PERPLEXITY} if model.decoder else {"budget": DEFAULT_COSINE}
        found = search(model.onnx, **budget, shapes=model.shapes, calibration=model.calibration)
        optimize_onnx(model.onnx, path, recipe=found, calibration=model.calibration)
        assert found.search is not None
        notes.append(f"{model.name}, threads {threads}: {found.search.outcome}")

    yield INT8, write_int8
    yield NBITS, lambda path: make_matmul_nbits(model.onnx, path, _BLOCK, _ACCURACY)
    yield AUTO, write_auto


def _errors(model: Model, original: ort.InferenceSession, session: ort.InferenceSession) -> tuple[float, float | None]:
    """Return the cosine to the original's answers, and the relative increase of perplexity."""
    names = [value.name for value in original.get_outputs() if not model.decoder or value.name == "logits"]
    runs = [[one.run(names, feeds) for feeds in model.scored] for one in (original, session)]
    cosine = min((error.cosine for error in measure_errors(names, *runs)), default=math.nan)
    if not model.decoder:
        return cosine, None
    values = [perplexity(_answers(one), model.scored) for one in (original, session)]
    return cosine, values[1] / values[0] - 1


def _answers(session: ort.InferenceSession) -> Callable[[Feeds], dict[str, np.ndarray]]:
    return lambda feeds: {"logits": session.run(["logits"], feeds)[0]}

"""Speed against quality of a sentence encoder and a decoder, in forms of ONNX Runtime and of Ortolan, as one picture.

python -m ortolan.benchmarks.picture --sts sts-dev.csv --text FILE --output FILE.svg [--threads 1] [--note TEXT]
python -m ortolan.benchmarks.picture --from FILE.json --output FILE.svg

What was measured lies beside the picture in a JSON file of its name, from which --from draws it again. Drawn twice, a
picture has the same bytes. --text is scored from its beginning; sentences of its second half are calibrated on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortolan.errors import OrtolanError, one_line
from ortolan.graph_passes.measure.timing import interleave, pinned

from ..embedding import spearman_on_sts
from ..models import ModelFiles, get_model
from ..models.evaluate import score_tokens
from ..models.tokenizer import load_tokenizer
from ..optimize import optimize_onnx
from ..session import create_session, package_versions
from ..text_encoder import TextEncoder
from . import decode
from .encoder import SENTENCES, silent_root_logger, word_feeds
from .matmul_nbits import make_matmul_nbits
from .result import cpu_name
from .scatter import Mark, draw_marks, name_marks, save_svg
from .variants import file_megabytes, session_options

ENCODER, DECODER = "all-minilm-l6-v2", "smollm2-135m-instruct"
TITLES = {ENCODER: "all-MiniLM-L6-v2", DECODER: "SmolLM2-135M-Instruct"}
FP32, INT8, NBITS = "fp32", "dynamic int8", "MatMulNBits 4 bit"
PEERS = (FP32, INT8, NBITS)  # ONNX Runtime's own
DEFAULT, PRUNED = "default", "sparse"  # the second one is calibrated
# What optimize_onnx is asked for.
FORMS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    ENCODER: {
        DEFAULT: {},
        "int8": {"weights": "int8"},
        "int4": {"weights": "int4", "group_size": 32},
        PRUNED: {"recipe": "sparse-encoder"},
    },
    DECODER: {
        DEFAULT: {},
        "int8": {"weights": "int8"},
        "int4": {"weights": "int4", "group_size": 32},
        PRUNED: {"weights": "int8", "sparsity": 0.5, "method": "wanda"},
    },
}
_BLOCK, _ACCURACY = 32, 4  # of MatMulNBits: the fastest level
_TOKENS = 128  # of a sentence, and in front of what is decoded
_SECONDS, _ROUNDS, _DECODED = 20.0, 5, 32  # spent on timing
_SCORED, _WINDOW = 4081, 256  # tokens
_CALIBRATED = 256  # sentences
_LEAST_SENTENCE = 60  # characters


@dataclass(frozen=True)
class Point:
    """A form of a model. speedup: times as fast as ONNX Runtime's fp32; quality: as the model's axis says."""

    form: str
    ours: bool
    call: dict[str, Any]
    megabytes: float
    speed: float
    speedup: float
    quality: float
    cosine: float | None  # encoders: the mean over sentences, to the original's vectors


@dataclass
class ModelPoints:
    """What was measured of one model. speed: what the numbers are; higher_is_better: of its quality."""

    name: str
    title: str
    speed: str
    quality: str
    higher_is_better: bool
    points: list[Point] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass
class Picture:
    """All that the picture shows, and what it was measured on."""

    command: str
    threads: int
    note: str
    cpu: str = field(default_factory=cpu_name)
    versions: dict[str, str] = field(default_factory=package_versions)
    models: list[ModelPoints] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Picture:
        """The inverse of to_json. Raises OrtolanError for any other text."""
        try:
            table = json.loads(text)
            models = [
                ModelPoints(**{**model, "points": [Point(**point) for point in model["points"]]})
                for model in table["models"]
            ]
            return cls(**{**table, "models": models})
        except (ValueError, TypeError, KeyError) as error:
            raise OrtolanError(f"not the data of a picture: {error!r}; expected what a run has written") from error


Say = Callable[[str], None]


def make_forms(
    files: ModelFiles, texts: Sequence[str], threads: int, folder: Path, found: ModelPoints, say: Say
) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """(form, the arguments of optimize_onnx, its file), made one after the other. What fails is left out, and said."""

    def write_int8(path: Path) -> None:
        from onnxruntime.quantization import quantize_dynamic

        with silent_root_logger():
            # Of what shape inference does not know, such as what GroupQueryAttention gives.
            quantize_dynamic(files.onnx, path, extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT})

    yield FP32, {}, files.onnx
    writers: dict[str, tuple[dict[str, Any], Callable[[Path], object]]] = {
        INT8: ({}, write_int8),
        NBITS: (
            {"block_size": _BLOCK, "accuracy_level": _ACCURACY},
            lambda path: make_matmul_nbits(files.onnx, path, _BLOCK, _ACCURACY),
        ),
    }
    for form, call in FORMS[found.name].items():
        data = {"calibration": list(texts), "tokenizer": files.tokenizer} if form == PRUNED else {}
        writers[form] = (dict(call), partial(_optimize, files.onnx, {**call, **data}))
    for form, (call, write) in writers.items():
        path = folder / f"{found.name} {form}".replace(" ", "-") / "model.onnx"
        path.parent.mkdir()
        began = time.perf_counter()
        try:
            # The default measures: as it is measured itself.
            with pinned(threads) if form == DEFAULT else nullcontext():
                write(path)
            create_session(path)
        except Exception as error:  # peers, and ONNX Runtime, raise whatever they trip over
            found.left_out.append(f"{form}: {one_line(error)}")
            say(f"{found.name}: {form} is left out: {one_line(error)}")
            continue
        say(f"{found.name}: {form} made in {time.perf_counter() - began:.0f} s")
        yield form, call, path


def _optimize(model: Path, call: Mapping[str, Any], path: Path) -> None:
    optimize_onnx(model, path, **call)


def measure_encoder(sts: Path, texts: Sequence[str], threads: int, folder: Path, say: Say) -> ModelPoints:
    files = get_model(ENCODER, progress=say)
    assert files.tokenizer is not None
    found = ModelPoints(
        ENCODER, TITLES[ENCODER], f"milliseconds for 1 x {_TOKENS} tokens", "Spearman's correlation, STS-B dev", True
    )
    forms = {form: (call, path) for form, call, path in make_forms(files, texts, threads, folder, found, say)}
    sessions = {form: create_session(path, session_options(threads)) for form, (_, path) in forms.items()}
    inputs = [value.name or "" for value in ir.load(files.onnx).graph.inputs]
    calls = {form: partial(session.run, None, word_feeds(inputs, 1, _TOKENS)) for form, session in sessions.items()}
    with pinned(threads):
        times = interleave(calls, seconds=_SECONDS)
    encoders = {form: TextEncoder(session, files.tokenizer) for form, session in sessions.items()}
    original = encoders[FP32].encode(SENTENCES)
    for form, (call, path) in forms.items():
        say(f"{ENCODER}: scoring {form}")
        found.points.append(
            Point(
                form, form not in PEERS, call, file_megabytes(path), times[form].min_ms,
                times[FP32].min_ms / times[form].min_ms, spearman_on_sts(encoders[form], sts),
                float((encoders[form].encode(SENTENCES) * original).sum(axis=1).mean()),
            )
        )  # fmt: skip
    return found


def measure_decoder(text: Path, texts: Sequence[str], threads: int, folder: Path, say: Say) -> ModelPoints:
    files = get_model(DECODER, progress=say, attention="gqa")
    assert files.tokenizer is not None
    ids = load_tokenizer(files.tokenizer).encode(text.read_text(encoding="utf-8")[: 16 * _SCORED])[:_SCORED]
    if len(ids) < _SCORED:
        raise OrtolanError(f"{text} holds {len(ids)} tokens, expected at least {_SCORED}; give a longer text")
    found = ModelPoints(
        DECODER, TITLES[DECODER], f"tokens decoded a second, behind {_TOKENS}", f"perplexity, {text.stem}", False
    )
    forms = {form: (call, path) for form, call, path in make_forms(files, texts, threads, folder, found, say)}
    decoders = {
        form: decode.open_decoder(path, session_options(threads), _TOKENS + _DECODED)
        for form, (_, path) in forms.items()
    }
    prompt = np.random.default_rng(0).integers(0, decoders[FP32].vocabulary, _TOKENS).tolist()
    rates = {form: speed.decode_rates[0] for form, speed in decode.measure(decoders, prompt, _DECODED, _ROUNDS).items()}
    for form, (call, path) in forms.items():
        say(f"{DECODER}: scoring {form}")
        score = score_tokens(decoders[form].session, ids, _WINDOW, _WINDOW - 1)
        found.points.append(
            Point(
                form, form not in PEERS, call, file_megabytes(path), rates[form], rates[form] / rates[FP32],
                score.perplexity, None,
            )
        )  # fmt: skip
    return found


def calibration_sentences(text: Path) -> list[str]:
    """Of the second half, from lines that are no headings."""
    lines = [line.strip() for line in text.read_text(encoding="utf-8").splitlines()]
    found = [
        sentence.strip()
        for line in lines[len(lines) // 2 :]
        if not line.startswith("=")
        for sentence in line.split(" . ")
        if len(sentence) >= _LEAST_SENTENCE
    ]
    if not found:
        raise OrtolanError(
            f"{text} has no sentence of {_LEAST_SENTENCE} characters in its second half; give a longer text"
        )
    return found[:_CALIBRATED]


def draw(picture: Picture, path: Path) -> None:
    """Writes an SVG: a plot a model, times as fast as fp32 to the right, quality upwards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots(1, len(picture.models), squeeze=False)[0]
    for plot, model in zip(axes, picture.models, strict=True):
        _draw_model(plot, model)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    threads = f"{picture.threads} thread" + ("s" if picture.threads > 1 else "")
    caption = f"{picture.cpu}, {threads}, onnxruntime {picture.versions.get('onnxruntime', '')}"
    figure.suptitle(caption + (f" ({picture.note})" if picture.note else ""), fontsize=9, color="0.35")
    save_svg(figure, path)


def _draw_model(plot: Any, model: ModelPoints) -> None:
    marks = [Mark(point.form, point.ours, point.speedup, point.quality) for point in model.points]
    draw_marks(plot, marks, "ONNX Runtime", "Ortolan, in ONNX Runtime")
    plot.set_title(model.title)
    plot.set_xlabel("times as fast as ONNX Runtime in fp32")
    plot.set_ylabel(model.quality)
    if not model.higher_is_better:
        plot.set_yscale("log")
        plot.invert_yaxis()
        ticks = _round_ticks([point.quality for point in model.points])
        plot.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        plot.minorticks_off()
    name_marks(plot, marks)


def _round_ticks(values: Sequence[float]) -> list[float]:
    """Round numbers in steps of about a quarter that hold all of the values, for a logarithmic axis."""
    steps = [base * 10.0**power for power in range(-2, 6) for base in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)]
    return [tick for tick in steps if 0.9 * min(values) <= tick <= 1.1 * max(values)]


def measure(sts: Path, text: Path, threads: int, note: str, say: Say) -> Picture:
    """Everything, in some ten minutes."""
    # Names of files, not where they lie on one machine.
    options = {"--sts": sts.name, "--text": text.name, "--threads": str(threads), "--output": "speed-and-quality.svg"}
    command = ["python", "-m", "ortolan.benchmarks.picture", *(word for pair in options.items() for word in pair)]
    picture = Picture(shlex.join(command), threads, note)
    texts = calibration_sentences(text)
    with tempfile.TemporaryDirectory(prefix="ortolan-", ignore_cleanup_errors=True) as folder:
        picture.models.append(measure_encoder(sts, texts, threads, Path(folder), say))
        picture.models.append(measure_decoder(text, texts, threads, Path(folder), say))
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.svg")
    parser.add_argument("--sts", type=Path, help="sts-dev.csv: tab-separated, columns 5 to 7 score and two sentences")
    parser.add_argument("--text", type=Path, help="the text whose perplexity is measured, UTF-8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--note", default="", help="on how it was measured, for the picture")
    parser.add_argument("--from", dest="data", type=Path, metavar="FILE.json", help="draws this, and measures nothing")
    arguments = parser.parse_args()
    if arguments.output.suffix != ".svg":
        parser.error(f"--output: expected a name that ends in .svg, found {str(arguments.output)!r}")
    if not os.access(arguments.output.parent, os.W_OK):  # asked before measuring, which takes long
        parser.error(f"--output: expected a folder to write to, found {str(arguments.output.parent)!r}")
    for option in ("from",) if arguments.data else ("sts", "text"):
        path = arguments.data if option == "from" else getattr(arguments, option)
        if path is None or not path.is_file():
            parser.error(f"--{option}: expected a file, found {None if path is None else str(path)!r}")
    try:
        if arguments.data:
            picture = Picture.from_json(arguments.data.read_text(encoding="utf-8"))
        else:
            say = partial(print, file=sys.stderr, flush=True)
            picture = measure(arguments.sts, arguments.text, arguments.threads, arguments.note, say)
            arguments.output.with_suffix(".json").write_text(picture.to_json(), encoding="utf-8")
        draw(picture, arguments.output)
    except OrtolanError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

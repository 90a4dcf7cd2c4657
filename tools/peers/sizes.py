"""Compare decoders of 0.5 to 8 billion weights: one GGUF file in Ortolan's engine, llama.cpp, its fork and OpenVINO.

ONNX Runtime GenAI runs the smaller ones, quantized from float32.

The weights are random (tools.random_gguf): speed, memory and sizes do not depend on their values. The perplexity of
random tokens only shows that the runtimes compute the same function. The largest model is also optimized from a
float32 ONNX file of 32 GB, to measure the memory for it. The temporary folder needs 15 GB, for this file 50 GB.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ortolan.benchmarks.stream_reader import StreamReader
from ortolan.errors import OrtolanError

from ..random_gguf import write_shape
from ..workers.process import WorkerError
from . import decoders
from .comparison import Found, Job, LeaveOut, Work, compare, open_all
from .configuration import Configuration, Runner, speed_of
from .decoder_source import write_onnx
from .result import Measure, PeersResult, Row
from .serving import FIRST, MEMORY, UNIT, Serving, ik_llama_cpp
from .serving import SCRIPT as SCRIPT
from .serving_times import Run
from .verdict import SIZES as SECTION

FORM = "Q4_K_M"
MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-4b", "llama-3-8b")
LARGEST = MODELS[-1]
GENAI_MODELS = MODELS[:2]  # ONNX Runtime's quantizer holds the whole float32 model in memory
ONNX_MODEL = f"{LARGEST}, ONNX file"
SHARE = "share of a plain read"
DECODE = "decode"
_TOKEN_IDS = (3, 1000)  # the range of the prompts' tokens
_OPENING = 32  # tokens that are scored when a model is opened
_ROUNDS, _READS = 2, 10
_GIGA, _KILO = 1e9, 1e3


@dataclass(frozen=True)
class Requests:
    """Requests that come at once: their number, and the tokens of each prompt and each answer."""

    count: int
    prompt: int
    answer: int

    @property
    def name(self) -> str:
        """The name of the work."""
        return f"prompt {self.prompt}" if self.count == 1 else f"{self.count} requests"

    def given(self) -> dict[str, Any]:
        """Return the work for tools/workers/serving.py."""
        draw = np.random.default_rng((self.count, self.prompt))
        prompts = draw.integers(*_TOKEN_IDS, (self.count, self.prompt)).tolist()
        # Greedy answers of random weights repeat, so every draft would be right.
        return {"kind": "serve", "prompts": prompts, "answer": self.answer, "lookup": False}


FIRST_PROMPT, LONG_PROMPT, TOGETHER = WORKS = (Requests(1, 128, 32), Requests(1, 512, 1), Requests(16, 32, 32))


def measure(job: Job, result: PeersResult) -> None:
    """Add the rows of every model. The files of a model are deleted before the next one."""
    for name in MODELS:
        if job.takes_model(SECTION, name):
            with tempfile.TemporaryDirectory(dir=job.folder) as folder:
                _compare(replace(job, folder=Path(folder)), name, result)
    if job.takes_model(SECTION, ONNX_MODEL) and (SECTION, ONNX_MODEL) not in job.done:
        with tempfile.TemporaryDirectory(dir=job.folder) as folder:
            _optimize(replace(job, folder=Path(folder)), result)


def _write(job: Job, name: str) -> Path:
    path = job.folder / f"{name}-{FORM}.gguf"
    write_shape(name, path, FORM)
    job.say(f"{SECTION}, {name}: {path.name} of {path.stat().st_size / _GIGA:.2f} GB written")
    return path


def _compare(job: Job, name: str, result: PeersResult) -> None:
    """Add the rows of one model."""
    gguf = _write(job, name)
    window = np.random.default_rng(0).integers(*_TOKEN_IDS, _OPENING).tolist()
    opening = {"kind": "score", "windows": [window]}

    def judge(runner: Runner) -> Mapping[str, float]:
        return {"perplexity": decoders.perplexity_of(runner, opening)}

    def time_all(job: Job, found: Found, works: Sequence[Work], threads: int, leave_out: LeaveOut) -> None:
        opened = open_all(found, threads, works[0], leave_out)
        served = Serving(job, window, found, opened, threads, leave_out)
        for work in WORKS:
            if job.takes_work(work.name):
                _time(served, work, gguf)
        for runner in opened.values():
            runner.close()

    configurations = list(configurations_for(job, gguf))
    try:
        configurations += _genai(job, name, gguf)
    except OrtolanError as error:
        result.left_out.append(f"{SECTION}, {name}: ORT GenAI: {error}")
    works = [Work("opening", opening, 1, UNIT)]
    compare(job, SECTION, name, SCRIPT, configurations, works, judge, result, time_all=time_all)


def configurations_for(job: Job, gguf: Path) -> Iterator[Configuration]:
    """Yield Ortolan's engine, then the runtimes that read GGUF files."""
    yield Configuration("Ortolan, engine", "ortolan", gguf, {"cache_type": "bfloat16"}, ours=True)
    if (python := job.pythons.get("llama.cpp")) is not None:
        yield Configuration("llama.cpp, as it is", "llama.cpp", gguf, {"unified": True}, python)
    yield from ik_llama_cpp(job, gguf)
    yield from decoders.openvino_genai_as_it_is(job, gguf)


def _genai(job: Job, name: str, gguf: Path) -> Iterator[Configuration]:
    """Yield ONNX Runtime GenAI, if it takes part and the model is small enough.

    Raises:
        OrtolanError: The file cannot be converted.
    """
    if "onnxruntime-genai" in job.pythons and name in GENAI_MODELS:
        onnx = job.folder / "onnx" / "model.onnx"
        onnx.parent.mkdir()
        write_onnx(gguf, onnx)
        yield from decoders.genai_configurations(job, onnx, gguf)


def _time(served: Serving, work: Requests, gguf: Path) -> None:
    """Serve the requests by all configurations in turns, and add speeds and measures to their rows.

    The share of a plain read is known for configurations of the GGUF file only.
    """
    threads, runs = served.threads, {name: list[Run]() for name in served.opened}
    rates = [plain_read(threads)]
    for _ in range(_ROUNDS):
        for name, found in runs.items():
            served.try_one(
                name, work.name, lambda name=name, found=found: found.append(served.serve(name, work.given()))
            )
        rates.append(plain_read(threads))
    for name, found in runs.items():
        if len(found) == _ROUNDS:
            note(served.row(name), work, threads, found)
            if served.found[name][0].configuration.model == gguf:
                add_share(served.row(name), threads, bytes_of_a_token(gguf), max(rates))


def note(row: Row, work: Requests, threads: int, runs: Sequence[Run]) -> None:
    """Add the speeds and measures of runs to a row."""

    def add_speed(name: str, speeds: Sequence[float | None]) -> None:
        row.speeds.append(speed_of(name, threads, 1, UNIT, [1 / speed for speed in speeds if speed]))

    if work.count > 1:
        add_speed(work.name, [run.whole_speed() for run in runs])
    else:
        add_speed(work.name, [run.prompt_speed() for run in runs])
        seconds = min(run.to_first_token()[0] for run in runs)
        row.measures.append(Measure(work.name, threads, FIRST, "ms", _KILO * seconds))
    if work == FIRST_PROMPT:
        add_speed(DECODE, [run.decode_speed() for run in runs])
    if peaks := [run.peak_megabytes for run in runs if run.peak_megabytes is not None]:
        row.measures.append(Measure(work.name, threads, MEMORY, "MB", max(peaks)))


def add_share(row: Row, threads: int, bytes_read: int, rate: float) -> None:
    """Add the speed of decoding relative to a plain read of the file's weights.

    bytes_read: Bytes of weights that a token needs. rate: Bytes per second of a plain read; 0 if it is unknown.
    """
    decode = row.speed(DECODE, threads)
    if decode is not None and rate and row.measure(DECODE, threads, SHARE) is None:
        row.measures.append(Measure(DECODE, threads, SHARE, "%", 100 * decode.best * bytes_read / rate))


def bytes_of_a_token(gguf: Path) -> int:
    """Return the bytes of a GGUF file's weights that each token reads: all, except for a table that is not the head."""
    from gguf import GGUFReader

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(gguf).tensors}
    return sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)


def plain_read(threads: int) -> float:
    """Return the bytes per second of a plain read from memory; 0 without the kernel of builds with ORTOLAN_TESTING."""
    reader = StreamReader(threads)
    try:
        candidates = reader.candidates().values()
    except ImportError:
        return 0.0
    seconds = []
    for run in [*candidates] * _READS:
        began = perf_counter()
        run()
        seconds.append(perf_counter() - began)
    return reader.buffer.size / min(seconds)


def _optimize(job: Job, result: PeersResult) -> None:
    """Add a row for the optimization of the largest model's ONNX file: its time, memory and size."""
    result.drop(SECTION, ONNX_MODEL)
    gguf, onnx = _write(job, LARGEST), job.folder / "onnx" / "model.onnx"
    onnx.parent.mkdir()
    write_onnx(gguf, onnx)
    one = Configuration("Ortolan int4", "ortolan", onnx, {"weights": "int4"}, ours=True)
    with Runner(one, decoders.SCRIPT, job.folder / "made") as runner:
        try:
            result.add(runner.make(SECTION, ONNX_MODEL, max(job.threads)))
        except WorkerError as error:
            result.left_out.append(f"{SECTION}, {ONNX_MODEL}: {one.name}: {error}")
    job.keep()


def columns() -> list[str]:
    """Return the names of the columns."""
    return [
        *("", "threads", "MB", "perplexity", "conversion, s", "its memory, GB", "load, s"),
        *(f"first token after {work.prompt}, s" for work in (FIRST_PROMPT, LONG_PROMPT)),
        *("decode, tokens/s", "of a plain read, %", f"{TOGETHER.name}, tokens/s", "peak memory, GB"),
    ]


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """Return the cells of each line: a row with a number of threads. Rows that were not timed have one line."""
    threads: list[int | None] = [*sorted({speed.threads for row in rows for speed in row.speeds})]
    return [_cells(row, count) for count in threads or [None] for row in rows]


def _cells(row: Row, threads: int | None) -> list[str]:
    def measured(work: str, name: str, unit: float = 1.0) -> float | None:
        found = None if threads is None else row.measure(work, threads, name)
        return None if found is None else found.value / unit

    def speed(work: str) -> float | None:
        found = None if threads is None else row.speed(work, threads)
        return None if found is None else found.best

    peaks = [peak for work in WORKS if (peak := measured(work.name, MEMORY, _KILO))]
    values = [
        row.megabytes,
        row.quality.get("perplexity"),
        row.make_seconds,
        None if row.make_megabytes is None else row.make_megabytes / _KILO,
        row.load_seconds,
        *(measured(work.name, FIRST, _KILO) for work in (FIRST_PROMPT, LONG_PROMPT)),
        speed(DECODE),
        measured(DECODE, SHARE),
        speed(TOGETHER.name),
        max(peaks, default=None),
    ]
    return [
        row.name,
        "-" if threads is None else str(threads),
        *("-" if one is None else _figure(one) for one in values),
    ]


def _figure(value: float) -> str:
    """Return a value with three digits, or as an integer."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"

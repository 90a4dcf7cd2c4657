"""Texts through encoders: texts a second with padding and without, and their quality, beside ONNX Runtime and others.

python -m ortolan.benchmarks.embeddings [--model all-minilm-l6-v2 …] [--work mixed|sts|wide|long|pairs|all …]
    [--sts sts-dev.csv] [--peer openvino=PYTHON …] [--weights int8] [--lengths 8:256] [--batch 32] [--texts 64]
    [--threads 1] [--json FILE] [--picture FILE.svg]
python -m ortolan.benchmarks.embeddings --from FILE.json [--picture FILE.svg]

Token ids go in, a unit vector of each text comes out, in batches padded to their longest text: once divided as the
texts come, once sorted by length. What the works are is told in embedding_texts.py, which packages a peer's environment
needs in encoder_peers.py. Rows of Ortolan run by TextEncoder: a batch a call, and the last one as users have it, in
calls of so many tokens. Each row is a process of its own, pinned to the same CPUs; they are told to run in turns.
A peer that computes in fp32 must give ONNX Runtime's vectors before it is timed. "alone": whether some texts get the
same vectors, bit by bit, alone and in a batch. With --sts a column tells Spearman on all of that file.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np
from onnxruntime.quantization import quantize_dynamic
from rich.console import Console

from ortolan.errors import OrtolanError
from ortolan.graph_passes.measure.feeds import Feeds
from ortolan.graph_passes.recipe import Recipe

from ..embedding import spearman_on_sts, token_feeds
from ..models import get_model
from ..optimize import optimize_onnx
from ..text_encoder import BATCH_TOKENS
from .embedding_result import ORDERS, EmbeddingsResult, ModelRows, Row, Speed, draw
from .embedding_texts import RANGES, STS, WORKS, batches_of, make_texts, padded
from .encoder import (
    FP32,
    INT8,
    MOST_TOKENS,
    PUBLISHED,
    RANDOM,
    SENTENCES,
    Encoder,
    calibration_feeds,
    open_model,
    silent_root_logger,
)
from .encoder_peers import PEERS, peer_specs, read_peer
from .encoder_process import EncoderProcess, EncoderSpec
from .workers.process import WorkerError

_COMPARED = 8  # texts that are run alone
_SAME = 0.9999  # the least cosine of a peer's vectors that computes in fp32
_LEAST_ROUNDS = 3
_WARM_UP_SECONDS = 0.3  # of each turn; longer than the threads of OpenMP spin that had the last one
_INTERRUPTED = 130


def read_lengths(text: str) -> tuple[int, int]:
    """LEAST:MOST, in tokens."""
    least, colon, most = text.partition(":")
    if not (colon and least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most) <= MOST_TOKENS):
        raise argparse.ArgumentTypeError(f"expected LEAST:MOST, 1 to {MOST_TOKENS} tokens, found {text!r}")
    return int(least), int(most)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=[PUBLISHED[0]], choices=[*PUBLISHED, RANDOM])
    parser.add_argument("--work", nargs="+", choices=[*WORKS, "all"], help="default: sts with --sts, else mixed")
    parser.add_argument("--weights", default="int8", choices=("bf16", "int8", "int4"))
    parser.add_argument(
        "--lengths", type=read_lengths, default=RANGES["mixed"], help="of the work mixed, in tokens; default: 8:256"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--texts", type=int, default=64, help="of each work")
    parser.add_argument("--sts", type=Path, help="sts-dev.csv: tab-separated, columns 5 to 7 score and two sentences")
    parser.add_argument(
        "--peer", nargs="+", type=read_peer, default=[], metavar="NAME=PYTHON", help=f"names: {', '.join(PEERS)}"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="for each order of a work's texts; at least 3 turns"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the result there")
    parser.add_argument("--from", dest="data", type=Path, metavar="FILE.json", help="shows this, and measures nothing")
    arguments = parser.parse_args()
    for name in ("batch", "texts", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: expected 1 or more, found {getattr(arguments, name)}")
    for name, path in (("sts", arguments.sts), ("from", arguments.data)):
        if path and not path.is_file():
            parser.error(f"--{name}: file {str(path)!r} does not exist")
    for name in ("json", "picture"):  # asked before measuring, which takes long
        path = getattr(arguments, name)
        if path and not os.access(path.parent, os.W_OK):
            parser.error(f"--{name}: expected a folder to write to, found {str(path.parent)!r}")
    if arguments.picture and arguments.picture.suffix != ".svg":
        parser.error(f"--picture: expected a name that ends in .svg, found {str(arguments.picture)!r}")
    works = arguments.work or [STS if arguments.sts else "mixed"]
    arguments.work = list(dict.fromkeys(WORKS if "all" in works else works))
    if STS in arguments.work and not arguments.sts:
        parser.error("--work: sts needs the file, --sts sts-dev.csv")
    if arguments.sts and RANDOM in arguments.model:
        parser.error(f"--sts: {RANDOM} has random weights and no tokenizer; run it by itself, without --sts")
    return arguments


class EncodesBatches(Protocol):
    def vectors(self, batches: Sequence[Feeds]) -> np.ndarray: ...


class StsEncoder:
    """What spearman_on_sts asks for, of a process. Remembers the vectors."""

    def __init__(self, process: EncodesBatches, encoder: Encoder, batch: int) -> None:
        self._process, self._encoder, self._batch = process, encoder, batch
        self.found = np.empty((0, 0), np.float32)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        assert self._encoder.tokenizer is not None
        feeds = token_feeds(self._encoder.tokenizer, texts)
        order = sorted(range(len(feeds)), key=lambda index: feeds[index]["input_ids"].shape[1])
        in_order = [{name: feeds[index][name] for name in self._encoder.inputs} for index in order]
        vectors = self._process.vectors(batches_of(in_order, self._batch, in_order=False))
        self.found = np.empty_like(vectors)
        self.found[order] = vectors
        return self.found


def mean_cosine(found: np.ndarray, expected: np.ndarray) -> float:
    """Of unit vectors."""
    if found.shape != expected.shape:
        raise WorkerError(f"it gave vectors of shape {found.shape}, expected {expected.shape}")
    return float((found * expected).sum(axis=1).mean())


def same_alone(process: EncodesBatches, texts: Sequence[Feeds]) -> bool:
    """Whether the vectors are the same, bit by bit, alone and in a batch."""
    return np.array_equal(process.vectors([padded(texts)]), process.vectors(texts))


def make_variants(encoder: Encoder, weights: str, folder: Path) -> dict[str, EncoderSpec]:
    """By what the table calls them; files are made in `folder`."""
    specs = {FP32: EncoderSpec("onnxruntime", encoder.onnx, exact=True)}
    with silent_root_logger():
        quantize_dynamic(encoder.onnx, folder / "ort_int8.onnx")
    specs[INT8] = EncoderSpec("onnxruntime", folder / "ort_int8.onnx")
    without = Recipe.of(weights=weights).without_pass("unpad")
    calibration = calibration_feeds(encoder, SENTENCES)
    # Of random weights any will do: the ids are given, and only the token to pad with is read.
    tokenizer = str(encoder.tokenizer or get_model(PUBLISHED[0]).tokenizer)
    for kind, recipe in (("padded", without), ("unpad", without.with_pass("unpad"))):
        path = folder / f"{kind}.onnx"
        optimize_onnx(encoder.onnx, path, recipe=recipe, calibration=calibration)
        specs[f"{weights}, {kind}"] = EncoderSpec("ortolan", path, {"tokenizer": tokenizer})
    options = {"tokenizer": tokenizer, "batch_tokens": BATCH_TOKENS}
    specs[f"{weights}, unpad, {BATCH_TOKENS} tokens a call"] = EncoderSpec("ortolan", path, options)
    return specs


class Comparison:
    """The rows of one model. Those that fail are left out, and the result says why."""

    def __init__(self, arguments: argparse.Namespace, name: str, stack: ExitStack) -> None:
        self._arguments, self._stack = arguments, stack
        self.found = ModelRows(name)
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        self._encoder = open_model(name, self._folder)
        self._sentences = calibration_feeds(self._encoder, SENTENCES)
        self._processes: dict[str, EncoderProcess] = {}
        self._texts = {
            work: make_texts(work, self._encoder, arguments.texts, arguments.sts, arguments.lengths)
            for work in arguments.work
        }
        self.found.texts = {work: len(texts) for work, texts in self._texts.items()}
        self.found.tokens = {
            work: sum(one["input_ids"].shape[1] for one in texts) for work, texts in self._texts.items()
        }

    def run(self) -> None:
        arguments = self._arguments
        specs = make_variants(self._encoder, arguments.weights, self._folder)
        specs |= peer_specs(
            dict(arguments.peer), self.found.model, self._encoder, self._sentences, self._folder, self._leave_out
        )
        expected: np.ndarray | None = None
        for name, spec in specs.items():
            try:
                vectors = self._open(name, spec, expected)
            except WorkerError as error:
                self._leave_out(name, str(error))
                continue
            # The first one is ONNX Runtime's fp32.
            expected = vectors if expected is None else expected
        for work, texts in self._texts.items():
            for order in ORDERS:
                self._time(work, order, batches_of(texts, arguments.batch, order == ORDERS[1]))

    def _open(self, name: str, spec: EncoderSpec, expected: np.ndarray | None) -> np.ndarray:
        """Its vectors: of STS-B, or else of our own sentences. Raises WorkerError."""
        began = perf_counter()
        folder = self._folder / f"row{len(self._processes) + len(self.found.left_out)}"
        process = self._stack.enter_context(EncoderProcess(spec, self._arguments.threads, folder))
        try:
            process.load()
            row = Row(name, spec.engine == "ortolan", process.versions, process.call, process.megabytes)
            if self._arguments.sts:
                encoder = StsEncoder(process, self._encoder, self._arguments.batch)
                row.spearman = spearman_on_sts(encoder, self._arguments.sts)
                vectors = encoder.found
            else:
                vectors = process.vectors(batches_of(self._sentences, self._arguments.batch, in_order=False))
            row.cosine = mean_cosine(vectors, vectors if expected is None else expected)
            if spec.exact and row.cosine < _SAME:
                raise WorkerError(f"its vectors are not ONNX Runtime's: cosine {row.cosine:.4f}, expected {_SAME}")
            row.alone = same_alone(process, self._sentences[:_COMPARED])
        except WorkerError:
            process.restart()  # it would take memory, and has no turn
            raise
        self._processes[name] = process
        self.found.rows.append(row)
        say(f"{self.found.model}: {name} is ready, {perf_counter() - began:.0f} s")
        return vectors

    def _time(self, work: str, order: str, batches: Sequence[Feeds]) -> None:
        processes = dict(self._processes)
        for name, process in self._processes.items():
            try:
                process.give(batches)
            except WorkerError as error:
                del processes[name]
                self._leave_out(f"{name}, {work} {order}", str(error))
        times = interleave(processes, self._arguments.seconds)
        for row in self.found.rows:
            if isinstance(seconds := times.get(row.name), WorkerError):
                self._leave_out(f"{row.name}, {work} {order}", str(seconds))
            elif seconds:
                row.speeds.append(Speed(work, order, min(seconds), statistics.median(seconds)))
        say(f"{self.found.model}: {work}, {order}: timed")

    def _leave_out(self, name: str, reason: str) -> None:
        self.found.left_out.append(f"{name}: {reason}")
        say(f"{self.found.model}: {self.found.left_out[-1]}")


def interleave(processes: Mapping[str, EncoderProcess], seconds: float) -> dict[str, list[float] | WorkerError]:
    """Seconds of the passes of each over what it was given, A B C A B C …, or why there are none."""
    times: dict[str, list[float]] = {name: [] for name in processes}
    failed: dict[str, WorkerError] = {}
    end, rounds = perf_counter() + seconds, 0
    while perf_counter() < end or rounds < _LEAST_ROUNDS:
        for name in [one for one in processes if one not in failed]:
            try:
                times[name] += processes[name].time(1, _WARM_UP_SECONDS)
            except WorkerError as error:
                failed[name] = error
        rounds += 1
    return {**times, **failed}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure(arguments: argparse.Namespace) -> EmbeddingsResult:
    command = shlex.join(["python", "-m", "ortolan.benchmarks.embeddings", *sys.argv[1:]])
    result = EmbeddingsResult(command, arguments.threads, arguments.batch)
    for name in arguments.model:
        with ExitStack() as stack:
            comparison = Comparison(arguments, name, stack)
            comparison.run()
            result.models.append(comparison.found)
    return result


def main() -> None:
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers must not stay
    try:
        if arguments.data:
            result = EmbeddingsResult.from_json(arguments.data.read_text(encoding="utf-8"))
        else:
            result = measure(arguments)
        if arguments.json:
            arguments.json.write_text(result.to_json(), encoding="utf-8")
        if arguments.picture:
            draw(result, arguments.picture)
    except OrtolanError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    console = Console(width=180, highlight=False)
    for part in result.tables():
        console.print(part, markup=False)


if __name__ == "__main__":
    main()

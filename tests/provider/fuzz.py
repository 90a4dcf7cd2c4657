"""Run damaged models in sessions with the provider: the result must be an error or answers near ONNX Runtime's.

    python -m tests.provider.fuzz --models 20000 --seed 1

A crash or a hang is a failure. Each model has its own seed, counted from --seed: resume a stopped run with the last
seed that it printed. Models run in separate processes. If a model ends its process, its seed is printed and the model
is saved. `ortolan` must be importable.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import selectors
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, helper, numpy_helper

from ortolan.graph_passes.measure.sessions import sums_are_exact

from ..passes.int8_layers import adopt
from ..passes.small_models import run as run_model
from .fuzz_damage import damaged, graphs, odd_feeds
from .fuzz_models import Feeds, Rng, model_of
from .sessions import claimed, exact_session, plain_session, provider_session

MODELS_PER_PROCESS = 400  # because sanitizers do not return memory
MOST_MEMORY = 8 << 30
MOST_NUMBERS = 1 << 20  # the largest number of elements of a generated input
SANE = 1e4  # outputs are compared only if all inputs and stored values are at most this, as larger ones may overflow
TOLERANCE = 0.1  # relative error (norm): ONNX Runtime and the provider round to int8, per tensor or per group
ALL = {"ep__ortolanexecutionprovider__claims": "all"}
# The provider's error may be up to five times the error that this much input noise causes in ONNX Runtime. The noise is
# relative to the norm of the inputs.
NOISE = 0.02
TYPES = {"float": np.float32, "double": np.float64, "float16": np.float16, "uint8": np.uint8, "int8": np.int8}
TYPES |= {"int32": np.int32, "int64": np.int64, "bool": np.bool_}
# Outcomes that count as failures, besides crashes and hangs.
WRONG = ("other answers", "refused by the provider alone", "other answers after an error", "wrong when compiled")


@dataclass
class Report:
    """Counts of outcomes, and a line for each failure."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def model_of_seed(seed: int) -> tuple[ModelProto, Feeds, list[str], Rng]:
    rng = np.random.default_rng(seed)
    model, feeds = model_of(rng)
    return model, feeds, damaged(rng, model), rng


# --- one model --------------------------------------------------------------------------------------------------------


def feeds_for(session: onnxruntime.InferenceSession, known: Feeds) -> Feeds:
    """Return inputs for the session: those of `known` that it has, and random ones for the rest."""
    feeds = {}
    for value in session.get_inputs():
        if value.name in known:
            feeds[value.name] = known[value.name]
            continue
        shape = [size if isinstance(size, int) and size >= 0 else 3 for size in value.shape]
        dtype = TYPES.get(value.type.removeprefix("tensor(").removesuffix(")"), np.float32)
        if np.prod(shape, dtype=float) <= MOST_NUMBERS:
            feeds[value.name] = np.ones(shape, dtype)
    return feeds


def is_sane(model: ModelProto, feeds: Feeds) -> bool:
    def floats() -> Iterator[np.ndarray]:
        yield from (array for array in feeds.values() if array.dtype.kind == "f")
        for tensor in model.graph.initializer:
            array = numpy_helper.to_array(tensor)
            if array.dtype.kind == "f":
                yield array

    try:
        return all(bool((np.abs(array) < SANE).all()) for array in floats())
    except Exception:  # a damaged model raises many kinds of errors
        return False


def differences(expected: list[Any], found: list[Any]) -> list[float]:
    """Return the relative error of each float output with finite expected values; inf if types or shapes differ."""
    errors = []
    for plain, ours in zip(expected, found, strict=True):
        if not isinstance(plain, np.ndarray) or plain.dtype.kind not in "fiu":
            errors.append(0.0)
        elif plain.dtype != ours.dtype or plain.shape != ours.shape:
            errors.append(np.inf)
        elif plain.dtype.kind != "f" or not np.isfinite(plain).all():
            errors.append(0.0)
        else:
            error = float(np.linalg.norm(np.float64(plain) - ours)) / max(
                float(np.linalg.norm(np.float64(plain))), 1e-6
            )
            errors.append(error if error >= 0 else np.inf)
    return errors


def has_padding(model: ModelProto, feeds: Feeds) -> bool:
    """Return True if the queries or caches of a GroupQueryAttention node have padding, whose results are arbitrary."""
    model = ModelProto.FromString(model.SerializeToString())
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    read = [name for node in nodes for name in (node.input[0], node.input[3], node.input[5])]
    del model.graph.output[:]
    # Add Identity nodes, because an input cannot be an output.
    for place, name in enumerate(read):
        model.graph.node.append(helper.make_node("Identity", [name], [f"read {place}"]))
        model.graph.output.append(helper.make_empty_tensor_value_info(f"read {place}"))
    found = plain_session(model, fuses=False).run(None, feeds) if read else []
    return any(
        bool((lengths + 1 != query.shape[1] + past.shape[2]).any())
        for query, past, lengths in zip(found[::3], found[1::3], found[2::3], strict=True)
    )


def with_noise(feeds: Feeds) -> Feeds:
    rng, noisy = np.random.default_rng(0), dict(feeds)
    for name, array in feeds.items():
        if array.dtype == np.float32 and array.size:
            step = NOISE * float(np.sqrt(np.mean(array**2)))
            noisy[name] = np.asarray(array + step * rng.standard_normal(array.shape), np.float32)
    return noisy


def wrong_when_compiled(model: ModelProto, feeds: Feeds, answers: list[Any], threads: int) -> str:
    """Return how the compiled model differs from the session that gave `answers`.

    The text is empty if it does not differ, or if ONNX Runtime cannot write the model.
    """
    if {one.name for one in model.graph.input} & {one.name for one in model.graph.initializer}:
        return ""  # ONNX Runtime would turn these inputs into constants
    with tempfile.TemporaryDirectory() as folder:
        source, path = Path(folder) / "model.onnx", Path(folder) / "model_ctx.onnx"
        source.write_bytes(model.SerializeToString())
        embeds = str(len(feeds) % 2)
        try:
            provider_session(str(source), threads, **ALL, ep__context_enable="1", ep__context_embed_mode=embeds)
        except Exception as error:  # ONNX Runtime cannot write all models that it runs
            return f"not written: {error}" if "Ortolan" in str(error) else ""
        if not path.exists():
            return ""
        try:
            found = provider_session(str(path), threads, **ALL).run(None, feeds)
        except Exception as error:
            return f"not read: {error}" if "Ortolan" in str(error) else ""
        return "" if same_bits(answers, found) else f"answers differ by {differences(answers, found)} of their norms"


def outcome(model: ModelProto, known: Feeds, odd: Feeds, threads: int = 1) -> str:
    """Return the outcome for a model; a failure is one of WRONG, a colon and a reason."""
    plain_error = our_error = ""
    try:
        plain = plain_session(model)
    except Exception as error:  # ONNX Runtime's exceptions only share the base class Exception
        plain, plain_error = None, str(error)
    try:
        ours = provider_session(model, threads, **ALL)
    except Exception as error:
        ours, our_error = None, str(error)
    if ours is None:
        return "no session" if plain is None else f"{WRONG[1]}: {our_error}"
    taken = "taken" if claimed(ours) else "left"
    feeds = feeds_for(ours, known)
    answers: list[list[Any] | None] = []
    for fed in (feeds, with_odd(feeds, odd), feeds):
        try:
            answers.append(ours.run(None, fed))
        except Exception as error:
            answers.append(None)
            our_error = our_error or str(error)
    if plain is None:
        return f"{taken}, where ONNX Runtime makes no session ({plain_error[:80]!r})"
    first, again = answers[0], answers[2]
    if (first is None) != (again is None) or (first and again and not same_bits(first, again)):
        return f"{WRONG[2]}: {our_error}"
    wrong = wrong_when_compiled(model, feeds, first, threads) if first and taken == "taken" else ""
    if wrong:
        return f"{WRONG[3]}: {wrong}"
    try:
        expected = plain.run(None, feeds)
    except Exception:
        return f"{taken}, {'both refuse the feeds' if first is None else 'ONNX Runtime alone refuses the feeds'}"
    if first is None:
        return f"{WRONG[1]}: {our_error}"
    if not is_sane(model, feeds):
        return f"{taken}, numbers beyond bounds"
    errors = differences(expected, first)
    if max(errors, default=0.0) > TOLERANCE and has_padding(model, feeds):
        return f"{taken}, padding that differs"
    if max(errors, default=0.0) > TOLERANCE:
        plain = exact_session(model)
        if not sums_are_exact(plain):
            return f"{taken}, sums that saturate"
        expected = plain.run(None, feeds)
        errors, own = differences(expected, first), differences(expected, plain.run(None, with_noise(feeds)))
        if has_fixed_ranges(model) and max(errors) > TOLERANCE:
            # The provider skips activation quantization (fixed ranges) that the optimized file skips too.
            expected = answers_of_file(model, feeds)
            if expected is None:
                return f"{taken}, ranges that no file is made of"
            errors = [min(pair) for pair in zip(errors, differences(expected, first), strict=True)]
        if any(error > max(TOLERANCE, 5 * noise) for error, noise in zip(errors, own, strict=True)):
            return f"{WRONG[0]}: outputs differ by {errors} of their norms"
    return f"{taken}, answered"


def has_fixed_ranges(model: ModelProto) -> bool:
    return any(node.op_type == "QuantizeLinear" for graph in graphs(model.graph) for node in graph.node)


def answers_of_file(model: ModelProto, feeds: Feeds) -> list[Any] | None:
    """Return the outputs of the optimized file, or None if the model cannot be optimized."""
    try:
        return run_model(adopt(model).model, feeds, library=True)
    except Exception:
        return None


def run_plain(model: ModelProto, known: Feeds, odd: Feeds) -> None:
    try:
        session = plain_session(model)
    except Exception:
        return
    feeds = feeds_for(session, known)
    for fed in (feeds, with_odd(feeds, odd)):
        with contextlib.suppress(Exception):
            session.run(None, fed)


def with_odd(feeds: Feeds, odd: Feeds) -> Feeds:
    return feeds | {name: odd[name] for name in odd if name in feeds}


def same_bits(one: list[Any], other: list[Any]) -> bool:
    return all(
        not isinstance(a, np.ndarray) or (a.shape == b.shape and a.tobytes() == b.tobytes())
        for a, b in zip(one, other, strict=True)
    )


def work(first: int, end: int, plain_only: bool) -> None:
    """Run the models of these seeds in this process, and print a line before and after each."""
    if "asan" not in os.environ.get("LD_PRELOAD", ""):  # the sanitizer reserves the whole address space
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for seed in range(first, end):
        print(f"begin {seed}", flush=True)
        model, feeds, damage, rng = model_of_seed(seed)
        odd = odd_feeds(rng, feeds)
        if plain_only:
            run_plain(model, feeds, odd)
            print(f"end\t{seed}", flush=True)
            continue
        text = outcome(model, feeds, odd, threads=1 + (seed % 16 == 0))
        print("end", seed, ", ".join(damage) or "no damage", " ".join(text.split()), sep="\t", flush=True)


# --- many -------------------------------------------------------------------------------------------------------------


def start(first: int, end: int, errors: Any, *more: str) -> subprocess.Popen[bytes]:
    paths = [str(Path(__file__).parents[2]), *(os.path.abspath(path) for path in sys.path if path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    # Very large allocations must fail with an error instead of a sanitizer report.
    environment["ASAN_OPTIONS"] = environment.get("ASAN_OPTIONS", "") + ":allocator_may_return_null=1"
    command = [
        sys.executable,
        "-m",
        "tests.provider.fuzz",
        "--work",
        f"--seed={first}",
        f"--models={end - first}",
        *more,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)


def lines_in_time(process: subprocess.Popen[bytes], seconds: float) -> Iterator[str]:
    """Yield the lines that a process prints, until it ends or prints nothing for `seconds`."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(seconds):
            read = os.read(process.stdout.fileno(), 1 << 16)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)


def crashes_without_the_provider(seed: int, seconds: float) -> bool:
    with start(seed, seed + 1, subprocess.DEVNULL, "--plain-only") as process:
        lines = list(lines_in_time(process, seconds))
        process.kill()
    return f"end\t{seed}" not in lines


def run(seed: int, models: int, folder: Path, seconds: float = 120.0, show: bool = False) -> Report:
    """Run the models of these seeds, each for at most `seconds`; save models that fail to the folder."""
    report = Report()

    def tell(kind: str, at: int, text: str) -> None:
        model, _, damage, _ = model_of_seed(at)
        path = folder / f"{at}.onnx"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(model.SerializeToString())
        report.wrong.append(f"{kind}: seed {at} ({', '.join(damage)}), {path}: {text}")
        if show:
            print(report.wrong[-1], flush=True)

    at, end = seed, seed + models
    while at < end:
        until = min(at + MODELS_PER_PROCESS, end)
        ended, errors = follow(at, until, seconds, report, tell)
        if ended < until:
            if crashes_without_the_provider(ended, seconds):
                report.counts["crash of ONNX Runtime's own"] += 1
            else:
                report.counts["crash or hang"] += 1
                tell("crash or hang", ended, " ".join(errors.split())[-1000:])
            ended += 1
        at = ended
        if show:
            print(f"up to seed {at - 1}: {dict(sorted(report.counts.items()))}", flush=True)
    return report


def follow(first: int, end: int, seconds: float, report: Report, tell: Any) -> tuple[int, str]:
    """Read the output of one process into the report.

    Returns the seed of the model that ended the process (or `end`), and the process's messages.
    """
    with tempfile.TemporaryFile() as errors:
        process = start(first, end, errors)
        assert process.stdout is not None
        done = first
        try:
            for line in lines_in_time(process, seconds):
                if not line.startswith("end\t"):
                    continue
                _, number, _, text = line.split("\t", 3)
                kind = text.split(": ")[0].split(" (")[0]
                report.counts[kind] += 1
                if kind in WRONG:
                    tell(kind, int(number), text)
                done = int(number) + 1
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        errors.seek(0)
        return done, errors.read().decode(errors="replace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first model")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="folder for models with failures")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of one model")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain-only", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work:
        work(chosen.seed, chosen.seed + chosen.models, chosen.plain_only)
        return 0
    report = run(chosen.seed, chosen.models, chosen.folder, chosen.seconds, show=True)
    print(f"{len(report.wrong)} wrong of {chosen.models}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

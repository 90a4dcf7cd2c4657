"""One graph of the fuzz test, from its seed to its outcome.

A graph is a base model with several mutations, optimized in a separate folder. Its outcome must be one in GOOD: answers
like the original's on feeds that the optimizer did not use, or a refusal with a reason from Ortolan.
"""

from __future__ import annotations

import os
import re
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import ortolan
from ortolan import OptimizationReport, OrtolanError
from ortolan.errors import CalibrationError, VerificationError
from ortolan.session import register

from . import names_and_shapes, values_and_graphs
from .bases import draw_base
from .case import Case, Feeds

Mutation = Callable[[Case, np.random.Generator], str | None]

MUTATIONS: Sequence[Mutation] = (
    names_and_shapes.rename_values,
    names_and_shapes.rename_nodes,
    names_and_shapes.reorder,
    names_and_shapes.dead_nodes,
    names_and_shapes.dead_initializers,
    names_and_shapes.dead_input,
    names_and_shapes.drop_shapes,
    names_and_shapes.add_value_info,
    names_and_shapes.odd_symbols,
    names_and_shapes.versions,
    names_and_shapes.as_inputs,
    names_and_shapes.as_constants,
    names_and_shapes.external,
    names_and_shapes.weight_as_output,
    names_and_shapes.more_outputs,
    values_and_graphs.share_weights,
    values_and_graphs.odd_weights,
    values_and_graphs.element_type,
    values_and_graphs.half_layer,
    values_and_graphs.input_types,
    values_and_graphs.noise,
    values_and_graphs.into_if,
    values_and_graphs.into_loop,
    values_and_graphs.into_function,
)

# Call -> (frequency in percent, options).
CALLS: dict[str, tuple[int, dict[str, Any]]] = {
    "int8": (45, {"weights": "int8"}),
    "bf16": (20, {"weights": "bf16"}),
    "int4": (15, {"weights": "int4"}),
    "4x1": (5, {"sparsity": 0.5, "pattern": "4x1"}),
    "float cache": (5, {"cache": "float32"}),
    "default": (10, {}),
}

# "invalid": ONNX Runtime cannot run the original. "no feeds": the original fails on synthetic or given feeds.
GOOD = ("equal", "unchanged", "refused", "no feeds", "invalid")
# Raw messages of ONNX Runtime or Python. An error may quote them only if the original itself does not run.
RAW = re.compile(
    r"ONNXRuntimeError|Traceback|could not be optimized|object has no attribute|\b[A-Z][a-z]+Error\b|is not in list|"
    r"please report this|not subscriptable|out of bounds for axis|unsupported operand"
)
_SLOW_TO_SEARCH = ("bert", "mpnet", "modernbert", "llama", "attention")
_SHAPES = ((2, 9), (1, 5), (3, 14))


@dataclass
class Outcome:
    """The outcome of one graph."""

    seed: int
    kind: str
    detail: str = ""
    base: str = ""
    call: str = ""
    done: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.kind in GOOD


@dataclass
class Graph:
    """A mutated model, the call that optimizes it, and the random generator of its feeds."""

    base: str
    case: Case
    call: str
    by_path: bool
    calibrated: bool
    portable: bool


def build(seed: int, without: Sequence[int] = ()) -> Graph:
    """Build the graph of a seed, without the mutations at the positions in `without`."""
    rng = np.random.default_rng([seed, 0])
    base, case = draw_base(rng)
    weights = np.array([weight for weight, _ in CALLS.values()], np.float64)
    call = str(rng.choice(list(CALLS), p=weights / weights.sum()))
    if call == "default" and base in _SLOW_TO_SEARCH:
        call = "int8"
    by_path, calibrated, portable = bool(rng.integers(2)), bool(rng.integers(3) == 0), bool(rng.integers(4))
    chosen = rng.choice(len(MUTATIONS), int(rng.integers(1, 7)))
    for place, index in enumerate(chosen):
        if place in without:
            continue
        done = MUTATIONS[index](case, np.random.default_rng([seed, 1 + place]))
        if done:
            case.done.append(f"{place}: {done}")
    return Graph(base, case, call, by_path or case.external, calibrated, portable)


def try_graph(seed: int, without: Sequence[int] = ()) -> Outcome:
    """Build and optimize the graph of a seed, and return the outcome."""
    graph = build(seed, without)
    with tempfile.TemporaryDirectory(prefix="ortolan-fuzz-") as folder:
        old, tempfile.tempdir = tempfile.tempdir, folder
        try:
            kind, detail = _judge(graph, seed, Path(folder))
        finally:
            tempfile.tempdir = old
    return Outcome(seed, kind, " ".join(detail.split()), graph.base, graph.call, graph.case.done)


def _judge(graph: Graph, seed: int, folder: Path) -> tuple[str, str]:
    case = graph.case
    rng = np.random.default_rng([seed, 99])
    unseen = [case.feeds(rng, *shape) for shape in _SHAPES]
    source = folder / "in" / "model.onnx"
    source.parent.mkdir()
    if case.external:
        copy = onnx.ModelProto.FromString(case.model.SerializeToString())
        onnx.save(copy, source, save_as_external_data=True, location="weights.bin", size_threshold=64)
    elif graph.by_path:
        onnx.save(case.model, source)
    given: Any = source if graph.by_path else case.model
    expected = _answers(given, [feeds for feeds, _ in unseen])
    arguments: dict[str, Any] = dict(CALLS[graph.call][1])
    arguments["options"] = {"verify.seconds": 0.0}
    if graph.call not in ("default", "float cache"):
        arguments["options"]["may_grow"] = True
    if graph.calibrated and expected is not None:
        arguments["calibration"] = [case.feeds(np.random.default_rng([seed, 7]), 2, 8)[0]]
    output = folder / "out.onnx" if graph.by_path else None
    before = case.model.SerializeToString(deterministic=True)
    try:
        report = ortolan.optimize_onnx(given, output, portable=graph.portable, **arguments)
    except OrtolanError as error:
        left = _left_over(folder, source.parent)
        if left:
            return "files left", f"{left}; after {error}"
        return _judge_refusal(error, expected)
    except Exception as error:  # every other exception is a defect
        place = traceback.extract_tb(error.__traceback__)[-1]
        return "foreign exception", f"{type(error).__name__}: {error} at {Path(place.filename).name}:{place.lineno}"
    if case.model.SerializeToString(deterministic=True) != before:
        return "input changed", "the given ModelProto was changed"
    if left := _left_over(folder, source.parent, output):
        return "files left", left
    if expected is None:
        return "invalid", "the original does not run, but was optimized"
    return _compare(given, output or report.model, report, unseen, expected)


def _left_over(folder: Path, source: Path, output: Path | None = None) -> str:
    """Return the files in the folder that belong neither to the input nor to the output."""
    wanted = {source} if output is None else {source, output, output.with_name(output.name + ".data")}
    return ", ".join(sorted(path.name for path in folder.iterdir() if path not in wanted))


def _judge_refusal(error: OrtolanError, expected: list[list[Any]] | None) -> tuple[str, str]:
    text = str(error)
    if isinstance(error, VerificationError):
        return "verification failed", text
    if expected is None:
        return ("invalid", text) if "could not be optimized" not in text else ("raw message", text)
    if isinstance(error, CalibrationError) and "does not run on" in text:
        return "no feeds", text
    return ("raw message" if RAW.search(text) else "refused"), f"{type(error).__name__}: {text}"


def _open(model: Any, library: bool = False, plain: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if plain:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library:
        register(options)
    content = model.SerializeToString() if isinstance(model, onnx.ModelProto) else os.fspath(model)
    return ort.InferenceSession(content, options, ["CPUExecutionProvider"])


def _answers(model: Any, feeds: Sequence[Feeds]) -> list[list[Any]] | None:
    """Return the original's answers without ONNX Runtime's optimizations.

    Returns None if the original fails with or without them.
    """
    try:
        session = _open(model)
        found = [session.run(None, dict(one)) for one in feeds]
        usual = _open(model, plain=False)
        for one in feeds:
            usual.run(None, dict(one))
    except Exception:  # Exception is the only common base of ONNX Runtime's errors
        return None
    return found


def _compare(
    given: Any,
    output: Any,
    report: OptimizationReport,
    unseen: Sequence[tuple[Feeds, np.ndarray | None]],
    expected: list[list[Any]],
) -> tuple[str, str]:
    before = _open(given)
    try:
        after = _open(output, library=True, plain=False)
    except Exception as error:  # see _answers
        return "does not load", str(error)
    signatures = [
        [(one.name, one.type) for values in (session.get_inputs(), session.get_outputs()) for one in values]
        for session in (before, after)
    ]
    if signatures[0] != signatures[1]:
        return "signature changed", f"{sorted(set(signatures[0]) ^ set(signatures[1]))}"
    stated = {error.name: error.relative_l2 for error in report.output_error}
    names = [one.name for one in before.get_outputs()]
    try:
        found = [after.run(None, dict(feeds)) for feeds, _ in unseen]
    except Exception as error:  # see _answers
        return "does not run", str(error)
    masks = [visible for _, visible in unseen]
    for index, name in enumerate(names):
        problem = _unlike([(e[index], f[index], m) for e, f, m in zip(expected, found, masks, strict=True)])
        if isinstance(problem, str):
            return "wrong answer", f"{name!r}: {problem}"
        # A few rows of a random model may have errors several times as large as the reported one.
        limit = 3 * stated.get(name, 0.0) + 0.02
        if expected[0][index].dtype.itemsize == 1:  # one step of an 8-bit value
            limit += 0.1
        if problem > limit:
            return "wrong answer", f"{name!r}: relative error {problem:.3g}, {stated.get(name)} stated"
    return ("equal" if report.recipe.get("pass") else "unchanged"), ""


def _unlike(pairs: Sequence[tuple[Any, Any, np.ndarray | None]]) -> float | str:
    """Return the relative error over all positions with a token, or a message if shapes or types differ."""
    difference = norm = 0.0
    for expected, found, visible in pairs:
        if not isinstance(expected, np.ndarray):
            continue
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return f"{found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}"
        if expected.dtype.kind not in "fiub" and expected.dtype.name != "bfloat16":
            continue
        x, y = (_visible(array, visible).astype(np.float64) for array in (expected, found))
        finite = np.isfinite(x)
        if not np.isfinite(y[finite]).all():
            return "not finite where the original is"
        difference += float(((x - y)[finite] ** 2).sum())
        norm += float((x[finite] ** 2).sum())
    if difference == 0:
        return 0.0
    return float(np.sqrt(difference / norm)) if norm else float(np.inf)


def _visible(array: np.ndarray, visible: np.ndarray | None) -> np.ndarray:
    """Return the part of an output that belongs to tokens."""
    if visible is None or visible.all():
        return array
    batch, tokens = visible.shape
    if array.shape[:2] == (batch, tokens):
        return array[visible]
    if array.ndim >= 2 and array.shape[0] == batch * tokens:
        return array[visible.reshape(-1)]
    if array.ndim == 4 and array.shape[0] == batch and array.shape[2] == tokens:
        kept = array.transpose(0, 2, 1, 3)[visible]
        if array.shape[3] == tokens:  # attention scores: the last axis is keys
            keys = np.broadcast_to(visible[:, None, None, :], (batch, tokens, *array.shape[1::2]))[visible]
            return kept[keys]
        return kept
    if array.ndim == 4 and array.shape[0] == batch and array.shape[3] == tokens:  # keys, transposed
        return array.transpose(0, 3, 1, 2)[visible]
    return array

"""Runs the original model on feeds and records what goes into its linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, one_line
from ortolan.progress import Stage

from ..files.model_file import ModelFile, data_path, to_bytes, write_model
from ..find.linear import Linear, layer_key
from ..measure.feeds import SIZES_TO_TRY, Feeds, Sizes, hold_out, synthetic_feeds
from ..measure.sessions import open_quietly, open_to_time
from ..options import PassOptions, takes
from .context import PassContext, RecipePass

OnRun = Callable[[int, int], None]  # on_run(done, total)

_CAPTURE_BYTES = 256 * 1024**2  # of recorded inputs that one run may return
_HESSIAN_ROWS = 8192  # that are multiplied at once


@dataclass(frozen=True)
class CalibrateOptions(PassOptions):
    max_rows: int = field(default=64, metadata=takes("int", low=1))  # inputs (tokens) kept for each layer
    # Every so-manieth of the feeds is kept from what fits weights to inputs, and errors of layers and of the whole
    # model are measured on these. 0, or more than there are feeds: none.
    held_out: int = field(default=0, metadata=takes("int", low=0))


class CalibratePass(RecipePass):
    """Records inputs of the linear layers; changes nothing."""

    options_type = CalibrateOptions
    options: CalibrateOptions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        context = self.context
        linears = context.survey(model)
        if not context.dry_run and linears:
            feeds = feeds_for(context)
            if not context.held_out:
                context.feeds, context.held_out = hold_out(feeds, self.options.held_out)
            recorded = capture_inputs(
                model,
                linears,
                context.held_out or feeds,
                self.options.max_rows,
                context.source,
                lambda done, total: context.progress(Stage.CALIBRATE, done, total),
            )
            context.captured.update(recorded)
            context.release()
        return ir.passes.PassResult(model, modified=False)


def open_original(context: PassContext, timed: bool = False) -> Any:
    """A session for the model as it was given: one to judge by, or to time."""
    source = context.source
    model: Path | bytes | None = source.path
    if model is None:
        assert source.proto is not None
        model = to_bytes(source.proto)
    return open_to_time(model) if timed else open_quietly(model, source)


def feeds_for(context: PassContext, session: Any = None) -> list[Feeds]:
    """The user's feeds without those that are held out, or made-up ones on which the original runs. Found once a
    run."""
    if context.feeds is None:
        session = session or open_original(context)
        context.feeds, context.report.feeds = make_up_feeds(context.source.model, session)
        context.feeds_made_up = True
    return context.feeds


def feeds_to_verify(context: PassContext, count: int, session: Any = None) -> list[Feeds]:
    """Those that are held out come first."""
    feeds = feeds_for(context, session)
    return [*context.held_out, *feeds][:count]


def make_up_feeds(model: ir.Model, session: Any) -> tuple[list[Feeds], str]:
    """Synthetic feeds that this session accepts, and a description of them."""
    problem = ""
    for sizes in SIZES_TO_TRY:
        feeds = synthetic_feeds(model, sizes)
        try:
            session.run(None, feeds)
        except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
            problem = problem or one_line(error)
            continue
        found = [feeds]
        # A second length finds shapes that a pass froze by mistake. Some exports allow one length only.
        others = [synthetic_feeds(model, Sizes(1, max(1, sizes.sequence // 2 - 1), sizes.past), seed=1)]
        # A flag chooses between branches of the model: both must run.
        flags = [name for name, array in feeds.items() if array.dtype == bool and array.size == 1]
        others += [feeds | {name: np.zeros_like(feeds[name])} for name in flags]
        for other in others:
            with suppress(Exception):  # see above
                session.run(None, other)
                found.append(other)
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in list(feeds.items())[:3])
        return found, f"{len(found)} synthetic feed(s): {shapes}{', …' if len(feeds) > 3 else ''}"
    raise CalibrationError(
        f"the original model does not run on made-up inputs: {problem}; give calibration=… with inputs "
        "for this model (an .npz file, a dict of arrays, or a list of such dicts)"
    )


def capture_inputs(
    model: ir.Model,
    linears: Sequence[Linear],
    feeds: Sequence[Feeds],
    max_rows: int,
    source: ModelFile,
    on_run: OnRun = lambda done, total: None,
) -> dict[ir.Value, np.ndarray]:
    """Up to max_rows inputs of each layer as float32 [rows, k], by layer_key; layers in subgraphs are left out."""
    recorder = InputRecorder(
        model,
        linears,
        feeds,
        lambda: open_quietly(to_bytes(model), source, data_folder=source.external_root),
    )
    kept = recorder.some_rows(recorder.names, max_rows, on_run)
    return {layer_key(linear): kept[linear.x.name] for linear in linears if linear.x.name in kept}


class Recorded(Protocol):
    """What is to be recorded: a value of the model, such as a layer's input."""

    @property
    def x(self) -> ir.Value: ...
    @property
    def k(self) -> int: ...  # its last dimension
    @property
    def dtype(self) -> ir.DataType: ...


def open_as_it_is(path: Path, context: PassContext) -> Any:
    """A copy of the model in the midst of its passes. Operators of ours that are in it are the functions in the file;
    a model that is to have none needs our library."""
    return open_quietly(path, context.source, library=not context.portable)


@contextmanager
def recording(model: ir.Model, context: PassContext, values: Sequence[Recorded]) -> Iterator[InputRecorder]:
    """Runs a copy of the model as it is now, on the feeds."""
    path = context.candidate.with_name("calibrate.onnx")

    def open_copy() -> Any:
        write_model(model, path, lambda done, total: None)
        context.release()
        return open_as_it_is(path, context)

    try:
        yield InputRecorder(model, values, feeds_for(context), open_copy)
    finally:
        for file in (path, data_path(path)):
            file.unlink(missing_ok=True)


class InputRecorder:
    """Runs a model, as it was when this was made, and hands out what goes into its layers.

    Layers in subgraphs are left out: their values cannot be made outputs. Memory is bounded by recording a few layers a
    run.
    """

    def __init__(
        self, model: ir.Model, linears: Sequence[Recorded], feeds: Sequence[Feeds], open_model: Callable[[], Any]
    ) -> None:
        """open_model makes the session; it is called while the wanted values are outputs of the model."""
        self._wanted = {linear.x.name or "": linear for linear in linears if _belongs_to(linear.x, model.graph)}
        self._computed = {name: linear for name, linear in self._wanted.items() if not linear.x.is_graph_input()}
        self._feeds = feeds
        with _as_outputs(model, self._computed):
            self._session = open_model()

    @property
    def names(self) -> list[str]:
        """Of the values that can be recorded."""
        return list(self._wanted)

    def record(self, names: Sequence[str], take: Callable[[str, np.ndarray], None], on_run: OnRun) -> None:
        """Calls take(name, inputs [rows, k]) for each of the values and each of the feeds. Keep no inputs."""
        groups = _group({name: self._computed[name] for name in names if name in self._computed}, self._feeds)
        total = len(self._feeds) * len(groups)
        for number, one in enumerate(self._feeds):
            for name in names:
                if name not in self._computed and name in one:
                    take(name, one[name].reshape(-1, self._wanted[name].k))
            for index, group in enumerate(groups):
                on_run(number * len(groups) + index, total)
                try:
                    arrays = self._session.run(group, one)
                except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
                    raise CalibrationError(
                        f"the original model does not run on calibration feeds {number + 1}: {one_line(error)}; "
                        "check their shapes and types"
                    ) from error
                for name, array in zip(group, arrays, strict=True):
                    take(name, array.reshape(-1, self._wanted[name].k))
        on_run(total, total)

    def some_rows(self, names: Sequence[str], max_rows: int, on_run: OnRun) -> dict[str, np.ndarray]:
        """Up to max_rows inputs for each value as float32 [rows, k], about as many of each of the feeds."""
        rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
        quota = -(-max_rows // len(self._feeds))
        self.record(names, lambda name, inputs: rows[name].append(_some_rows(inputs, quota)), on_run)
        return {name: np.concatenate(parts)[:max_rows] for name, parts in rows.items() if parts}

    def numbers(self, names: Sequence[str], most: int, on_run: OnRun) -> dict[str, np.ndarray]:
        """Up to `most` numbers of each value as float32 [count], drawn at random, about as many of each of the feeds;
        the value's smallest and largest number are among them."""
        drawn: dict[str, list[np.ndarray]] = {name: [] for name in names}
        quota = -(-most // len(self._feeds))
        rng = np.random.default_rng(0)

        def draw(name: str, inputs: np.ndarray) -> None:
            flat = inputs.reshape(-1)
            if flat.size == 0:
                return
            some = flat if flat.size <= quota else flat[rng.integers(0, flat.size, max(quota - 2, 0))]
            drawn[name].append(np.concatenate([some, [flat.min(), flat.max()]]).astype(np.float32))

        self.record(names, draw, on_run)
        found = {}
        for name, parts in drawn.items():
            if parts:
                numbers = np.concatenate(parts)
                extremes = [numbers.min(), numbers.max()]
                found[name] = np.append(numbers[: most - 2], np.asarray(extremes, np.float32))
        return found

    def hessians(self, names: Sequence[str], on_run: OnRun) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """X^T X over all inputs X of each value, float32 [2, k, k] (see HessianSums), and how many those are."""
        found: dict[str, HessianSums] = {}

        def add(name: str, inputs: np.ndarray) -> None:
            found.setdefault(name, HessianSums(inputs.shape[1], len(self._feeds))).add(inputs)

        self.record(names, add, on_run)
        return {name: sums.halves() for name, sums in found.items()}, {name: sums.rows for name, sums in found.items()}


class HessianSums:
    """X^T X over inputs X of one value, float32 [2, k, k]: of every other one of the feeds, and of the rest; of a
    single one, of its first half and its second. Of the inputs it keeps half as many bytes as of the sums."""

    def __init__(self, k: int, feeds: int) -> None:
        self.rows = 0
        self._sums = np.zeros((2, k, k), np.float32)
        self._waiting: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        self._at_once = min(k // 2 + 1, _HESSIAN_ROWS)
        self._split = 2 if feeds == 1 else 1
        self._taken = 0

    @staticmethod
    def bytes_for(k: int) -> int:
        """About."""
        return 12 * k * k

    def add(self, inputs: np.ndarray) -> None:
        """inputs: [rows, k] of one of the feeds."""
        for part in np.array_split(inputs, self._split):
            waiting = self._waiting[self._taken % 2]
            for start in range(0, len(part), _HESSIAN_ROWS):
                waiting.append(part[start : start + _HESSIAN_ROWS].astype(np.float32))
                # Many rows at once: of a few, reading and writing the sum would take longer than the products.
                if sum(map(len, waiting)) >= self._at_once:
                    self._multiply(self._taken % 2)
            self._taken += 1
        self.rows += len(inputs)

    def halves(self) -> np.ndarray:
        self._multiply(0)
        self._multiply(1)
        return self._sums

    def _multiply(self, half: int) -> None:
        if self._waiting[half]:
            rows = np.concatenate(self._waiting[half])
            self._waiting[half].clear()
            self._sums[half] += rows.T @ rows


def _belongs_to(value: ir.Value, graph: ir.Graph) -> bool:
    node = value.producer()
    return (node.graph if node is not None else value.graph) is graph


@contextmanager
def _as_outputs(model: ir.Model, wanted: dict[str, Recorded]) -> Iterator[None]:
    """Inside, the named values are outputs of the model."""
    outputs = model.graph.outputs
    count = len(outputs)
    present = {value.name for value in outputs}
    for name, linear in wanted.items():
        if name not in present:
            if linear.x.type is None:
                linear.x.type = ir.TensorType(linear.dtype)
            outputs.append(linear.x)
    try:
        yield
    finally:
        while len(outputs) > count:  # a slice deleted at once would leave the values marked as outputs
            outputs.pop()


def _group(computed: dict[str, Recorded], feeds: Sequence[Feeds]) -> list[list[str]]:
    """Splits the values so that what one run returns stays below _CAPTURE_BYTES."""
    tokens = max((int(np.prod(array.shape[:2])) for one in feeds for array in one.values()), default=1)
    groups: list[list[str]] = []
    size = 0
    for name, linear in computed.items():
        needed = 4 * tokens * linear.k
        if not groups or size + needed > _CAPTURE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += needed
    return groups


def _some_rows(inputs: np.ndarray, count: int) -> np.ndarray:
    """Up to `count` of the rows, evenly spread, so that all sequences and positions take part."""
    if len(inputs) > count:
        inputs = inputs[np.linspace(0, len(inputs) - 1, count).astype(int)]
    return inputs.astype(np.float32)

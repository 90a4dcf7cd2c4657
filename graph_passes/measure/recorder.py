"""Records inputs of linear layers while a model runs on feeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, one_line

from .feeds import Feeds

OnRun = Callable[[int, int], None]  # called as on_run(done, total) after each run


_CAPTURE_BYTES = 256 * 1024**2  # limit for the recorded inputs that one run returns, in bytes


_HESSIAN_ROWS = 8192  # number of rows that are multiplied at once


class Recorded(Protocol):
    """A value of the model to record, such as a layer's input."""

    @property
    def x(self) -> ir.Value:
        """The value."""

    @property
    def k(self) -> int:
        """Its last dimension."""

    @property
    def dtype(self) -> ir.DataType:
        """Its type."""


class InputRecorder:
    """Runs a model and calls a function with the inputs of its linear layers, a few layers per run.

    Layers in subgraphs are left out, because their values cannot become outputs of the model.
    """

    def __init__(
        self, model: ir.Model, linears: Sequence[Recorded], feeds: Sequence[Feeds], open_model: Callable[[], Any]
    ) -> None:
        """Prepare a recorder. open_model: opens a session; called while the values to record are model outputs."""
        self._wanted = {linear.x.name or "": linear for linear in linears if _belongs_to(linear.x, model.graph)}
        self._computed = {name: linear for name, linear in self._wanted.items() if not linear.x.is_graph_input()}
        self._feeds = feeds
        with _as_outputs(model, self._computed):
            self._session = open_model()

    @property
    def names(self) -> list[str]:
        """The names of the values that can be recorded."""
        return list(self._wanted)

    def record(self, names: Sequence[str], take: Callable[[str, np.ndarray], None], on_run: OnRun) -> None:
        """Call take(name, inputs [rows, k]) for each value and each feed. `take` must not keep the inputs."""
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
                except Exception as error:  # ONNX Runtime's exceptions share no base class
                    raise CalibrationError(
                        f"the original model does not run on calibration feeds {number + 1}: {one_line(error)}; "
                        "check their shapes and types"
                    ) from error
                for name, array in zip(group, arrays, strict=True):
                    take(name, array.reshape(-1, self._wanted[name].k))
        on_run(total, total)

    def some_rows(self, names: Sequence[str], max_rows: int, on_run: OnRun) -> dict[str, np.ndarray]:
        """Return up to max_rows inputs of each value, float32 [rows, k], sampled evenly over the feeds."""
        rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
        quota = -(-max_rows // len(self._feeds))
        self.record(names, lambda name, inputs: rows[name].append(_some_rows(inputs, quota)), on_run)
        return {name: np.concatenate(parts)[:max_rows] for name, parts in rows.items() if parts}

    def samples(self, names: Sequence[str], limit: int, on_run: OnRun) -> dict[str, np.ndarray]:
        """Return up to `limit` random elements of each value, float32 [count], and its minimum and maximum."""
        drawn: dict[str, list[np.ndarray]] = {name: [] for name in names}
        quota = -(-limit // len(self._feeds))
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
                values = np.concatenate(parts)
                extremes = [values.min(), values.max()]
                found[name] = np.append(values[: limit - 2], np.asarray(extremes, np.float32))
        return found

    def hessians(self, names: Sequence[str], on_run: OnRun) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Return X^T X over all rows X of each value, float32 [2, k, k] (see HessianSums), and the number of rows."""
        found: dict[str, HessianSums] = {}

        def add(name: str, inputs: np.ndarray) -> None:
            found.setdefault(name, HessianSums(inputs.shape[1], len(self._feeds))).add(inputs)

        self.record(names, add, on_run)
        return {name: sums.halves() for name, sums in found.items()}, {name: sums.rows for name, sums in found.items()}

    def energies(self, names: Sequence[str], on_run: OnRun) -> dict[str, np.ndarray]:
        """Return the sum of x^2 over all inputs of each value, float32 [k]: the diagonal of X^T X."""
        found: dict[str, np.ndarray] = {}

        def add(name: str, inputs: np.ndarray) -> None:
            wide = inputs.astype(np.float32, copy=False)
            found[name] = found.get(name, np.float32(0)) + np.einsum("rk,rk->k", wide, wide)

        self.record(names, add, on_run)
        return found


class HessianSums:
    """Sums of X^T X over the inputs X of one value, float32 [2, k, k], for two halves of the inputs.

    The halves are alternate feeds, or the two halves of a single feed. Rows are buffered, up to half the size of the
    sums.
    """

    def __init__(self, k: int, feeds: int) -> None:
        self.rows = 0
        self._sums = np.zeros((2, k, k), np.float32)
        self._waiting: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        self._at_once = min(k // 2 + 1, _HESSIAN_ROWS)
        self._split = 2 if feeds == 1 else 1
        self._taken = 0

    @staticmethod
    def bytes_for(k: int) -> int:
        """Return the approximate memory of one instance."""
        return 12 * k * k

    def add(self, inputs: np.ndarray) -> None:
        """Add inputs [rows, k] of one feed."""
        for part in np.array_split(inputs, self._split):
            waiting = self._waiting[self._taken % 2]
            for start in range(0, len(part), _HESSIAN_ROWS):
                waiting.append(part[start : start + _HESSIAN_ROWS].astype(np.float32))
                # Multiply many rows at once. With few rows, reading and writing the sum would dominate.
                if sum(map(len, waiting)) >= self._at_once:
                    self._multiply(self._taken % 2)
            self._taken += 1
        self.rows += len(inputs)

    def halves(self) -> np.ndarray:
        """Return the sums, float32 [2, k, k]."""
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
    """Inside the with statement, the named values are outputs of the model."""
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
        while len(outputs) > count:  # pop, because deleting a slice would leave values marked as outputs
            outputs.pop()


def _group(computed: dict[str, Recorded], feeds: Sequence[Feeds]) -> list[list[str]]:
    """Split the values so that one run returns at most _CAPTURE_BYTES."""
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
    """Return up to `count` rows, evenly spread, so that all sequences and positions are represented."""
    if len(inputs) > count:
        inputs = inputs[np.linspace(0, len(inputs) - 1, count).astype(int)]
    return inputs.astype(np.float32)

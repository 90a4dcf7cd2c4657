"""X^T X over the inputs X of linear layers, for passes that fit weights to inputs: prune and quantize.

Either all inputs are recorded from the model in its present state, as many layers per run as memory allows; or layers
are recorded in graph order, so that each layer's inputs reflect the changes to earlier layers (segments.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError

from ..find.linear import Linear
from .evidence import Evidence
from .recorder import HessianSums, OnRun
from .segments import Segments
from .sessions import open_quietly

_HESSIAN_BYTES = 512 * 1024**2  # limit for the Hessians that one run collects, in bytes

G = TypeVar("G", bound="Group")


@dataclass(frozen=True)
class LayerInputs:
    """X^T X of a layer. halves: float32 [2, k, k], for two halves of the inputs. rows: number of input rows."""

    halves: np.ndarray
    rows: int

    @property
    def hessian(self) -> np.ndarray:
        """The sum of both halves: X^T X over all inputs, float32 [k, k]."""
        total: np.ndarray = self.halves.sum(axis=0)
        return total

    def __add__(self, other: LayerInputs) -> LayerInputs:
        return LayerInputs(self.halves + other.halves, self.rows + other.rows)


class Group(Protocol):
    """Layers that share one weight."""

    linears: list[Linear]


GroupInputs = Iterator[tuple[G, LayerInputs | None]]  # None: the inputs cannot be recorded


def inputs_as_it_is(model: ir.Model, evidence: Evidence, groups: Sequence[G], on_run: OnRun) -> GroupInputs[G]:
    """Yield the groups in order, with the inputs that their layers have before any group is changed."""
    with evidence.recording(model, [linear for group in groups for linear in group.linears]) as recorder:
        for batch in _batches(groups):
            names = list(dict.fromkeys(linear.x.name or "" for group in batch for linear in group.linears))
            hessians, counts = recorder.hessians([name for name in names if name in recorder.names], on_run)
            found = {name: LayerInputs(halves, counts[name]) for name, halves in hessians.items()}
            del hessians
            for group in batch:
                seen = sorted({linear.x.name or "" for linear in group.linears} & found.keys())
                yield _checked(group, [found[name] for name in seen])


def energies_as_it_is(
    model: ir.Model, evidence: Evidence, groups: Sequence[G], on_run: OnRun
) -> Iterator[tuple[G, np.ndarray | None]]:
    """Yield the groups in order, with the sum of x^2 for each input feature, float32 [k]; None if not recorded."""
    with evidence.recording(model, [linear for group in groups for linear in group.linears]) as recorder:
        found = recorder.energies(recorder.names, on_run)
    for group in groups:
        seen = sorted({linear.x.name or "" for linear in group.linears} & found.keys())
        total = np.sum([found[name] for name in seen], axis=0) if seen else None
        if total is not None:
            _check_finite(group, total)
        yield group, total


def inputs_in_turn(model: ir.Model, evidence: Evidence, groups: Sequence[G]) -> GroupInputs[G]:
    """Yield the groups in graph order; changes that the caller makes to one group affect the inputs of later ones.

    A group of several layers is yielded at its last layer.
    """
    feeds = evidence.feeds()
    linears = [linear for group in groups for linear in group.linears]
    folder = evidence.folder / "segments"
    open_piece = partial(open_quietly, library=not evidence.portable)
    with Segments(model, linears, feeds, folder, open_piece) as segments:
        recorded = set(segments.values)
        left = {id(group): {linear.x for linear in group.linears} & recorded for group in groups}
        found: dict[int, list[LayerInputs]] = {id(group): [] for group in groups}
        widths = {linear.x: linear.k for linear in linears}
        sums: dict[ir.Value, HessianSums] = {}

        def take(value: ir.Value, inputs: np.ndarray) -> None:
            k = widths[value]
            sums.setdefault(value, HessianSums(k, len(feeds))).add(inputs.reshape(-1, k))

        for group in groups:
            if not left[id(group)]:
                yield group, None
        for value in segments.run(take):
            total = sums.pop(value)
            inputs = LayerInputs(total.halves(), total.rows)
            del total
            for group in groups:
                if value in left[id(group)]:
                    left[id(group)].remove(value)
                    found[id(group)].append(inputs)
                    if not left[id(group)]:
                        yield _checked(group, found.pop(id(group)))
            del inputs


def _checked(group: G, inputs: Sequence[LayerInputs]) -> tuple[G, LayerInputs | None]:
    if not inputs:
        return group, None
    total = inputs[0]
    for other in inputs[1:]:
        total = total + other
    _check_finite(group, total.halves.diagonal(axis1=1, axis2=2))
    return group, total


def _check_finite(group: Group, energies: np.ndarray) -> None:
    if not np.isfinite(energies).all():
        raise CalibrationError(
            f"the inputs of layer {group.linears[0].name!r} hold NaN, infinity or values whose squares overflow, on "
            "the calibration feeds; give other feeds, or exclude this layer"
        )


def _batches(groups: Sequence[G]) -> Iterator[list[G]]:
    """Split the groups, in order, into batches whose Hessians fit into _HESSIAN_BYTES; a larger group is a batch."""
    batch: list[G] = []
    names: set[str] = set()
    size = 0
    for group in groups:
        needed = HessianSums.bytes_for(group.linears[0].k)
        more = {linear.x.name or "" for linear in group.linears} - names
        if batch and size + needed * len(more) > _HESSIAN_BYTES:
            yield batch
            batch, names, size = [], set(), 0
            more = {linear.x.name or "" for linear in group.linears}
        batch.append(group)
        names |= more
        size += needed * len(more)
    yield batch

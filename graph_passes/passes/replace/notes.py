"""Notes of pass replace, in addition to the report's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import onnx_ir as ir

from ...find.constants import stored_bytes
from ...find.linear import Linear
from ...operators.sparse_amx_matmul_storage import BITMAP, bitmaps_are_fast
from ...report.figures import human_bytes
from ..context import PassContext


def note_adopted(context: PassContext, adopted: Sequence[Linear], rounding: Set[Linear]) -> None:
    """Note the layers that keep their stored integers. rounding: layers whose inputs the original rounds too."""
    for bits in (4, 8):
        of_bits = [linear for linear in adopted if context.layer(linear).weight_bits == bits]
        if of_bits:
            _note_adopted(context, of_bits, bits, sum(linear in rounding for linear in of_bits))


def _note_adopted(context: PassContext, adopted: Sequence[Linear], bits: int, rounding: int) -> None:
    layers = f"{len(adopted)} layers keep" if len(adopted) > 1 else f"layer {adopted[0].name!r} keeps"
    text = f"{layers} the model's stored {bits}-bit weights exactly"
    if rounding:
        text += (
            f"; the original rounds the inputs of {rounding} to int8 in a similar way (accuracy_level 4), so errors "
            "against it do not show the full cost of this rounding"
        )
    context.note(text)


def note_slow_bitmaps(context: PassContext) -> None:
    """Note bitmaps that are not faster than dense weights on this CPU."""
    slow = [
        layer
        for layer in context.report.layers
        if layer.storage == BITMAP and layer.weight_bits is not None and not bitmaps_are_fast(layer.weight_bits)
    ]
    if slow:
        layers = f"{len(slow)} layers are bitmaps" if len(slow) > 1 else f"layer {slow[0].name!r} is a bitmap"
        context.note(
            f"{layers} of int{slow[0].weight_bits} weights: smaller, but no faster than dense weights on this CPU, "
            "which has no AVX-512 VBMI; pattern='2:4' is fast here"
        )


def note_apart(context: PassContext, reasons: Mapping[Linear, str]) -> None:
    """Note why layers with an activation after them are not joined with the next layer."""
    by_reason: dict[str, list[str]] = {}
    for linear, reason in reasons.items():
        by_reason.setdefault(reason, []).append(linear.name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        context.note(f"layer {names[0]!r}{more} and the next one stay two operators: {reason}")


def note_copies(context: PassContext, copies: int) -> None:
    """Note weights that are stored again for another graph."""
    if copies:
        context.note(
            f"{copies} packed weights are stored again for another branch of the model: many versions of ONNX "
            "Runtime (such as 1.24) give an operator only the constants of its own branch"
        )


def note_stored_twice(context: PassContext, weights: Sequence[ir.Value]) -> None:
    """Note weights that other nodes also use, such as an embedding that is also the head."""
    used = {value for value in weights if value.uses() or value.is_graph_output()}
    size = sum(stored_bytes(value) for value in used)
    if used:
        names = sorted(value.name or "" for value in used)
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        context.note(
            f"{human_bytes(size)} of weights are stored twice: nodes that are not replaced, such as an embedding, "
            f"also use {names[0]!r}{others}"
        )


def why_nothing(context: PassContext) -> str:
    """Return the error text for a run that replaced no layer."""
    layers = context.report.layers
    name = context.source.name
    if not layers:
        return f"{name} holds no MatMul or Gemm, so no layer can be replaced"
    reasons = list(dict.fromkeys(f"{layer.name}: {layer.reason}" for layer in layers if layer.reason))
    more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    return f"none of the {len(layers)} matrix products of {name} can be replaced: {'; '.join(reasons[:5])}{more}"

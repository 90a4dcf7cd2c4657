"""What pass replace tells the user besides the report's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import onnx_ir as ir

from ...find.constants import stored_bytes
from ...find.linear import Linear
from ...operators.sparse_amx_matmul_storage import BITMAP, bitmaps_are_fast
from ...report.figures import human_bytes
from ..context import PassContext


def note_adopted(context: PassContext, adopted: Sequence[Linear], rounding: Set[Linear]) -> None:
    """adopted: layers whose stored numbers are taken over. rounding: those whose inputs the original rounds, too."""
    for bits in (4, 8):
        of_bits = [linear for linear in adopted if context.layer(linear).weight_bits == bits]
        if of_bits:
            _note_adopted(context, of_bits, bits, sum(linear in rounding for linear in of_bits))


def _note_adopted(context: PassContext, adopted: Sequence[Linear], bits: int, rounding: int) -> None:
    layers = f"{len(adopted)} layers keep" if len(adopted) > 1 else f"layer {adopted[0].name!r} keeps"
    text = f"{layers} the {bits}-bit weights that the model stores, number by number"
    if rounding:
        text += (
            f"; the original rounds inputs of {rounding} to int8 in much the same way (accuracy_level 4), so the "
            "errors against it are smaller than what this rounding costs"
        )
    context.note(text)


def note_slow_bitmaps(context: PassContext) -> None:
    """Tells of bitmaps that this CPU is slower with than with dense weights."""
    slow = [
        layer
        for layer in context.report.layers
        if layer.storage == BITMAP and layer.weight_bits is not None and not bitmaps_are_fast(layer.weight_bits)
    ]
    if slow:
        layers = f"{len(slow)} layers are bitmaps" if len(slow) > 1 else f"layer {slow[0].name!r} is a bitmap"
        context.note(
            f"{layers} of int{slow[0].weight_bits} weights, which are small, but no faster than dense ones on this CPU "
            "(it has no AVX-512 VBMI); what is pruned with pattern='2:4' is fast here"
        )


def note_apart(context: PassContext, reasons: Mapping[Linear, str]) -> None:
    """Tells why layers with an activation behind them are not one operator with the next layer."""
    by_reason: dict[str, list[str]] = {}
    for linear, reason in reasons.items():
        by_reason.setdefault(reason, []).append(linear.name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        context.note(f"layer {names[0]!r}{more} and the next one stay two operators: {reason}")


def note_copies(context: PassContext, copies: int) -> None:
    if copies:
        context.note(
            f"{copies} packed weights are stored again for another branch of the model: many versions of ONNX "
            "Runtime (1.24, for one) give an operator only the constants of its own branch"
        )


def note_stored_twice(context: PassContext, weights: Sequence[ir.Value]) -> None:
    """Tells of weights that other nodes use as well, such as an embedding that is also the head."""
    used = {value for value in weights if value.uses() or value.is_graph_output()}
    size = sum(stored_bytes(value) for value in used)
    if used:
        names = sorted(value.name or "" for value in used)
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        context.note(
            f"{names[0]!r}{others} also serve nodes that stay, such as an embedding, so {human_bytes(size)} of "
            "weights are now stored twice"
        )


def why_nothing(context: PassContext) -> str:
    """For the error, where no layer was replaced."""
    layers = context.report.layers
    name = context.source.name
    if not layers:
        return f"{name} holds no MatMul or Gemm, so there is nothing to replace"
    reasons = list(dict.fromkeys(f"{layer.name}: {layer.reason}" for layer in layers if layer.reason))
    more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    return f"none of the {len(layers)} matrix products of {name} can be replaced: {'; '.join(reasons[:5])}{more}"

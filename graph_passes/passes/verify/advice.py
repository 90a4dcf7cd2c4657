"""Advice for answers that differ too much from the original's, based on what the run changed."""

from __future__ import annotations

from ..context import PassContext


def advice(context: PassContext) -> str:
    """Return advice that fits the recipe: about pruning only if it prunes, about bits only if it quantizes."""
    plan, layers = context.plan, context.report.layers
    bits = {layer.weight_bits for layer in layers if layer.weight_bits} if plan.quantizes else set()
    parts = ["try less sparsity"] if plan.prunes else []
    if bits:
        parts.append(f"try more bits (weights={'int8' if 4 in bits else 'bf16'!r})")
    if context.evidence.made_up:
        parts.append("give typical inputs (calibration=…)")
    changed = [layer for layer in layers if layer.output_error and layer.status != "kept"]
    if changed:
        worst = max(changed, key=lambda layer: layer.output_error or 0.0).name
        has_ignore = plan.prunes or bits
        option = f"ignore=['heads', {worst!r}]" if has_ignore else f"options={{'replace.exclude': [{worst!r}]}}"
        parts.append(f"leave out the layer with the largest error ({option})")
    return ", ".join(parts or ["compare on inputs of your own (calibration=…)"])

"""Run a recipe: plan, transform, write, verify."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ortolan.errors import ModelError, NothingToReplaceError, OrtolanError
from ortolan.progress import Stage
from ortolan.session import package_versions

from .files.model_file import write_model
from .find.linear import node_name
from .names import EVERYWHERE, OPTIONS_KEY, ORTOLAN_DOMAIN, RECIPE_KEY, VERSION_KEY
from .operators.declared_shapes import declare_shapes
from .options import WORDS, Globs, any_matches
from .passes.context import PassContext, RecipePass
from .passes.plan.plan import Plan
from .passes.verify.verify import VerifyPass
from .passes.weight_groups import count_layers
from .recipe import Recipe
from .registry import PASSES
from .report.figures import human_bytes
from .report.lines import first_of

# Optional passes: one that fails is skipped, unless the user's own recipe names it.
OPTIONAL = frozenset(
    ("embeddings", "fuse_attention", "fuse_cached_attention", "fuse_lut", "fuse_norm", "linear_attention", "unpad")
)


@dataclass(frozen=True)
class Steps:
    """The passes of a recipe for one run: transforms, then verification (None if the recipe has no pass verify)."""

    recipe: Recipe
    transforms: list[RecipePass]
    verification: VerifyPass | None


def run_recipe(recipe: Recipe, context: PassContext) -> None:
    """Run a recipe on context.source.model. A dry run stops before it writes anything."""
    steps = plan(recipe, context)
    transform(steps, context)
    if not context.dry_run:
        write(steps, context)
        verify(steps, context)


def plan(recipe: Recipe, context: PassContext) -> Steps:
    """Create the passes, and the plan, which tells each pass what all others do to a layer."""
    context.plan = Plan(recipe.passes)
    passes = [PASSES[step.name](step.options, context) for step in recipe.passes]
    last = passes[-1] if passes else None
    if isinstance(last, VerifyPass):
        return Steps(recipe, passes[:-1], last)
    return Steps(recipe, passes, None)


def transform(steps: Steps, context: PassContext) -> None:
    """Run the passes in order.

    Raises:
        OrtolanError: A pass failed; errors are unwrapped from those of the onnx-ir pass manager.
    """
    for one in steps.transforms:
        name = next(name for name, kind in PASSES.items() if isinstance(one, kind))
        before = _wiring(context.source.model) if name in OPTIONAL and context.optional_may_fail else None
        try:
            _run_pass(one, context)
        except NothingToReplaceError:
            raise
        except OrtolanError as error:
            if before is None or _wiring(context.source.model) != before:
                raise
            context.note(f"pass {name!r} was left out: {error}")
    _note_unmatched(steps.recipe, context)
    _note_gainless(context)
    _note_irreproducible(steps.recipe, context)


def _run_pass(one: RecipePass, context: PassContext) -> None:
    try:
        ir.passes.PassManager([one], steps=1)(context.source.model)
    except (ir.passes.PassError, ir.passes.InvariantError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OrtolanError):
            last, cause = cause, cause.__cause__
        if cause is not None:
            raise cause from cause.__cause__
        if isinstance(last, MemoryError):
            raise last from None
        raise ModelError(f"{context.source.name} could not be optimized: {type(last).__name__}: {last}") from error


def _wiring(model: ir.Model) -> list[Any]:
    """Return all nodes with their inputs, and the outputs, to detect whether a pass changed the graph."""
    return [*((node, *node.inputs) for node in model.graph.all_nodes()), tuple(model.graph.outputs)]


def write(steps: Steps, context: PassContext, embed_limit: int | None = None) -> None:
    """Write the model with its provenance to context.candidate. embed_limit: as for write_model."""
    model = context.source.model
    model.metadata_props.update(_provenance(steps.recipe))
    declare_shapes(model, lambda wanted: context.new_name(model, wanted))
    write_model(model, context.candidate, context.telling(Stage.WRITE), embed_limit)
    context.release()


def verify(steps: Steps, context: PassContext) -> None:
    """Compare the written model with the original, if the recipe has a pass verify.

    Raises:
        VerificationError: The outputs differ too much.
    """
    if steps.verification is not None:
        steps.verification(context.source.model)


def _provenance(recipe: Recipe) -> dict[str, str]:
    return {
        RECIPE_KEY: recipe.name,
        VERSION_KEY: package_versions().get("ortolan", "unknown"),
        OPTIONS_KEY: json.dumps(recipe.to_dict()["pass"]),
    }


def _note_gainless(context: PassContext) -> None:
    """Add notes on layers whose weights changed without any gain."""
    layers = context.layers.reports.values()
    grown = [layer for layer in layers if layer.status in ("pruned", "quantized") and layer.growth > 0]
    if grown:
        context.note(
            f"{count_layers([layer.name for layer in grown])} {' or '.join(sorted({layer.status for layer in grown}))} "
            f"but stored dense, {human_bytes(sum(layer.growth for layer in grown))} larger than in the original; "
            "exclude such layers (prune.exclude, quantize.exclude)"
        )
    rounded = [layer for layer in layers if layer.status == "quantized"]
    if rounded:
        context.note(
            f"{count_layers([layer.name for layer in rounded])} quantized but not replaced: rounded weights are "
            "stored as floats, neither smaller nor faster; add pass 'replace'"
        )


def _note_irreproducible(recipe: Recipe, context: PassContext) -> None:
    """Add notes on layers and attention whose bits depend on the CPU, if the same bits are asked for everywhere."""
    if not (context.reproducible or any(getattr(step.options, "reproducible", None) for step in recipe.passes)):
        return
    reports = context.layers.reports.values()
    bf16 = [layer.name for layer in reports if layer.weights.endswith("bf16")]
    if bf16:
        context.note(
            f"{count_layers(bf16)} in bf16: the bytes depend on the CPU, although reproducible is {EVERYWHERE!r}; give "
            "ignore=() and int8 or int4 weights"
        )
    # Attention in a few MatMuls is reported as layers.
    kept = [layer.name for layer in reports if layer.new_op is None]
    attention = [] if context.dry_run else _attention_left(context.source.model)
    left = list(dict.fromkeys((*kept, *attention)))
    if left:
        context.note(
            f"layers or attention left to ONNX Runtime: {first_of(left)}; the bytes depend on the CPU, although "
            f"reproducible is {EVERYWHERE!r}"
        )


def _attention_left(model: ir.Model) -> list[str]:
    """Return the names of attention operators that are not Ortolan's."""
    nodes = model.graph.all_nodes()
    return [node_name(node) for node in nodes if node.op_type.endswith("Attention") and node.domain != ORTOLAN_DOMAIN]


def _note_unmatched(recipe: Recipe, context: PassContext) -> None:
    """Add notes on patterns, except words such as "heads", that match no layer."""
    for option, glob in _patterns(recipe):
        used = glob in WORDS or any_matches(context.layers.names, (glob,))
        if context.layers.reports and not used:
            context.note(f"pattern {glob!r} of {option} matches no layer; `ortolan inspect` lists their names")


def _patterns(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for step in recipe.passes:
        for option in ("select", "exclude"):
            globs: Globs = getattr(step.options, option, ())
            yield from ((f"{step.name}.{option}", glob) for glob in globs)

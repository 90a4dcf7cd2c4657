"""Random weights to quantize, and helpers that run recipes which quantize them."""

from __future__ import annotations

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import numpy_helper

from ortolan import OptimizationReport, Recipe
from ortolan.graph_passes.files.model_file import load_model
from ortolan.graph_passes.files.spill import TensorSpill
from ortolan.graph_passes.find.linear import Linear, linears_in
from ortolan.graph_passes.measure.evidence import Evidence
from ortolan.graph_passes.passes.context import PassContext
from ortolan.graph_passes.run import plan, transform
from ortolan.graph_passes.weights.quantizers.grid import Quantization

INT8 = Quantization(8, None)

INT4 = [Quantization(4, size) for size in (32, 64, 128)]


def recipe_of(*steps: dict) -> Recipe:
    return Recipe.from_dict({"name": "r", "pass": [{"name": "normalize"}, *steps]})


def weights_of(report: OptimizationReport) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in report.model.graph.initializer}


def spread(scales: np.ndarray, quantization: Quantization, k: int) -> np.ndarray:
    """Return the scale of each weight, float64 [k, n]."""
    return np.repeat(scales.astype(np.float64), quantization.group_size or k, axis=0)[:k]


@st.composite
def weights(draw) -> np.ndarray:
    """Columns of very different magnitudes, with random zeros, zero columns and zero groups."""
    k, n = draw(st.integers(1, 150)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    low, high = sorted(draw(st.tuples(*[st.floats(-45, 38.5)] * 2)))
    values = rng.standard_normal((k, n)) * 10 ** (low + (high - low) * rng.random(n))
    if draw(st.booleans()):  # vary the magnitudes within a column as well
        values *= 10.0 ** rng.uniform(-8, 0, (k, n))
    values[rng.random((k, n)) < draw(st.sampled_from([0.0, 0.5, 0.97, 1.0]))] = 0
    largest = np.finfo(np.float32).max
    return np.clip(values, -largest, largest).astype(np.float32)


def quantize_in(
    model: onnx.ModelProto, folder, *steps: dict, dry_run: bool = False
) -> tuple[PassContext, dict[str, Linear]]:
    """Run a recipe of these passes; return its context and the linear layers of the resulting model."""
    source = load_model(model)
    recipe = recipe_of(*steps)
    with TensorSpill(folder) as spill:
        context = PassContext(
            Evidence(source, folder),
            source,
            OptimizationReport(recipe.to_dict()),
            folder / "model.onnx",
            spill,
            dry_run=dry_run,
        )
        transform(plan(recipe, context), context)
    return context, {linear.name: linear for linear in linears_in(source.model)}

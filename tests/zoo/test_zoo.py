"""Each architecture of the zoo with random weights, exported by Optimum.

Skipped without ortolan[optimum].
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

pytest.importorskip("optimum.onnxruntime", reason="needs optimum-onnx[onnxruntime]")

from ortolan.benchmarks.zoo import parts, provided, study
from ortolan.graph_passes.measure.feeds import Sizes, has_past, synthetic_feeds
from ortolan.models.zoo import ARCHITECTURES, SMALL, Architecture, export
from ortolan.session import create_session

from ..match.front_ends import differences

NOT_FUSED = {"longformer"}  # its Softmax reads concatenated chunks, not one MatMul of queries and keys
LEAST_COSINE = 0.9999
# These outputs are dot products of unit vectors, times e^2.6592 (CLIP's logit_scale). With random weights the vectors
# are nearly orthogonal and the products near 0, so the limit is absolute: the angles that both vectors may turn.
PAIR_SCORES = ("logits_per_image", "logits_per_text")
MOST_SCORE_CHANGE = math.exp(2.6592) * 2 * math.acos(LEAST_COSINE)
NOT_LINEAR = {"squeezebert"}  # all its linear layers are grouped convolutions
# Where the provider does not give the bits of the optimized file, or claims fewer attentions, and why.
NOT_ALIKE = {
    "deberta": "the last bits differ, the cause is not known",
    "mpnet": "the last bits differ, the cause is not known",
    "siglip_vision_model": "its head has layers that the provider does not find: their weights are views of a constant",
}


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    a, b = (np.asarray(x, np.float64).ravel() for x in (one, other))
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))) if a.any() or b.any() else 1.0


def convolutions(model: ir.Model) -> int:
    return sum(node.op_type == "Conv" for node in model.graph.all_nodes())


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.name)
def test_is_replaced_and_answers_alike(architecture: Architecture, tmp_path: Path) -> None:
    folder = export(architecture, SMALL, tmp_path / "exported")
    assert parts(folder)
    for source in parts(folder):
        output = tmp_path / source.name
        # In branches, ONNX Runtime does not tell the names of dimensions, so merged decoders differ.
        assert differences(str(source)) == []
        found = study(architecture, SMALL, source, output, "bf16")
        assert found.linear_replaced == found.linear, found.reasons
        assert found.linear or architecture.name in NOT_LINEAR
        if architecture.name in NOT_FUSED:
            assert found.fused == 0
        else:
            assert found.fused == found.attentions > 0, found.reasons
        assert found.cosine >= LEAST_COSINE
        model = ir.load(source)
        sessions = ort.InferenceSession(str(source), providers=["CPUExecutionProvider"]), create_session(output)
        # Use other lengths than verification did.
        feeds = synthetic_feeds(
            model,
            Sizes(2, 3 if has_past(model) else 21 if architecture.tokens == 128 else architecture.tokens, 7),
            seed=5,
        )
        if architecture.name not in NOT_ALIKE:
            in_provider = provided(source, output, feeds)
            assert in_provider.attentions == found.fused
            # Convolutions that are linear layers in the file stay convolutions in the provider.
            if convolutions(model) == convolutions(ir.load(output)):
                assert not in_provider.unequal
        for name, expected, answer in zip(
            (one.name for one in sessions[0].get_outputs()), *(one.run(None, feeds) for one in sessions), strict=True
        ):
            if np.issubdtype(np.asarray(expected).dtype, np.floating):
                assert np.shape(expected) == np.shape(answer), name
                if name in PAIR_SCORES:
                    assert np.abs(expected - answer).max() <= MOST_SCORE_CHANGE, name
                else:
                    assert cosine(expected, answer) >= LEAST_COSINE, name

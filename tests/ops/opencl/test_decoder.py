"""A decoder whose W4A8MatMul nodes run on OpenCL must give the tokens and logits of the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

import ortolan
from ortolan.engine import RowState, SamplingOptions
from ortolan.engine.sampling import NativeSampler
from ortolan.generate import Decoder
from ortolan.models import tiny

from .devices import asked, assert_equal_bits, needs_opencl


def decode(path: Path, prompt: np.ndarray, steps: int) -> tuple[list[int], list[np.ndarray]]:
    """Return the tokens sampled after the prompt, and the logits from which each was sampled."""
    sampler, row = NativeSampler(), RowState(SamplingOptions(), (), [], 0, seed=1)
    decoder = Decoder(ortolan.create_session(path))
    logits = []
    fed: np.ndarray | list[int] = prompt
    for _ in range(steps):
        logits.append(decoder.step(fed))
        row.answer.append(sampler.sample(logits[-1][-1:], [row])[0].token)
        fed = row.answer[-1:]
    return row.answer, logits


@needs_opencl
def test_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    model, path = ir.to_proto(tiny.tiny_llama(hidden_size=64, vocab_size=128)), tmp_path / "fast.onnx"
    ortolan.optimize_onnx(model, path, weights="int4", options={"verify.seconds": 0})
    assert sum(node.op_type == "W4A8MatMul" for node in onnx.load(path).graph.node) >= 8
    prompt = np.random.default_rng(0).integers(0, 128, 20)
    with asked("0"):
        tokens, logits = decode(path, prompt, 12)
    with asked("force"):
        on_device, device_logits = decode(path, prompt, 12)
    assert on_device == tokens and len(set(tokens)) > 1
    for y, expected in zip(device_logits, logits, strict=True):
        assert_equal_bits(y, expected)

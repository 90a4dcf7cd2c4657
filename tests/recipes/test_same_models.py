"""The packed weights that a choice gave at commit d0add09, when each was a recipe of its own: they stay the same.

Those of int4, and of SparseGPT with rounding, are of the commit that searches grids.

What needs no inputs is compared byte by byte, by its SHA-256. What is fitted to inputs
hangs, in its last bits, on the CPU's way of adding up products, so its numbers are stored, and nearly
all must be equal.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import ortolan
from ortolan import Recipe
from ortolan.models import tiny

STORED = Path(__file__).with_name("same_models.json")
# Of all numbers of a model that are fitted to inputs.
LEAST_EQUAL = 0.999

Feeds = list[dict[str, np.ndarray]]


def wide_llama() -> ir.Model:
    return tiny.tiny_llama(head_dim=16)  # which a cache of codes takes


def llama_feeds(tokens: int = 40, head_dim: int = 12) -> Feeds:
    rng = np.random.default_rng(0)
    past = np.zeros((1, 2, 0, head_dim), np.float32)
    return [
        {
            "input_ids": rng.integers(0, 97, (1, tokens)),
            "attention_mask": np.ones((1, tokens), np.int64),
            "position_ids": np.arange(tokens)[None],
            **{f"past_key_values.{layer}.{part}": past for layer in range(2) for part in ("key", "value")},
        }
        for _ in range(4)
    ]


def bert_feeds() -> Feeds:
    ids = np.random.default_rng(0).integers(0, 101, (4, 30))
    return [{"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}]


def mlp() -> ir.Model:
    return tiny.mlp(widths=(136, 48, 24), forms="matmul_add")


def mlp_feeds() -> Feeds:
    rng = np.random.default_rng(1)
    mixing = np.eye(136) + np.eye(136, k=1) / 2  # correlated inputs
    return [{"x": (rng.standard_normal((120, 136)) @ mixing).astype(np.float32)} for _ in range(4)]


MODELS: dict[str, tuple[Callable[[], ir.Model], Callable[[], Feeds]]] = {
    "llama": (tiny.tiny_llama, llama_feeds),
    "wide llama": (wide_llama, partial(llama_feeds, head_dim=16)),
    "bert": (tiny.tiny_bert, bert_feeds),
    "mlp": (mlp, mlp_feeds),
}


@dataclass(frozen=True)
class Case:
    """model: of MODELS. call: what chooses the form. exact: whether all bytes are the same on every CPU."""

    model: str
    call: dict[str, Any]
    exact: bool = True
    replaces: bool = True  # whether a pass replace is in it


STATIC = Recipe.of(weights="int8", sparsity=0.8, pattern="4x1").with_pass("ranges")
ALL_INT4 = {"weights": "int4", "ignore": ()}

CASES = {
    "sparse-bf16": Case("llama", {"weights": "bf16", "sparsity": 0.5}),
    "sparse-int8": Case("llama", {"weights": "int8", "sparsity": 0.5}),
    "sparse-int4": Case("llama", {"weights": "int4", "sparsity": 0.5}),
    "sparse-int8-4x1": Case("bert", {"weights": "int8", "sparsity": 0.8, "pattern": "4x1"}),
    "sparse-int8-4x1-static": Case("bert", {"recipe": STATIC}, exact=False),
    "sparsegpt-bf16": Case("mlp", {"weights": "bf16", "sparsity": 0.5, "method": "sparsegpt"}, exact=False),
    "sparsegpt-int8": Case("mlp", {"weights": "int8", "sparsity": 0.5, "method": "sparsegpt"}, exact=False),
    "sparsegpt-int4": Case("mlp", {"weights": "int4", "sparsity": 0.5, "method": "sparsegpt"}, exact=False),
    "sparsegpt-int8-4x1": Case("mlp", {"recipe": "sparse-encoder"}, exact=False),
    "int4": Case("llama", ALL_INT4, exact=False),
    "int4-gptq": Case("mlp", ALL_INT4 | {"method": "gptq"}, exact=False),
    "int4-awq": Case("mlp", ALL_INT4 | {"method": "awq"}, exact=False),
    "int4-hqq": Case("mlp", ALL_INT4 | {"method": "hqq"}, exact=False),
    "activation-sparse": Case("mlp", {"recipe": "activation-sparse"}, exact=False),
    "activation-sparse-int8": Case("mlp", {"recipe": "activation-sparse", "weights": "int8"}, exact=False),
    "long-context": Case("wide llama", {"cache": "codes"}, exact=False, replaces=False),
}


def optimized(case: Case) -> onnx.ModelProto:
    make, feeds = MODELS[case.model]
    options = {"verify.seconds": 0.0} | ({"may_grow": True} if case.replaces else {})
    if case.model == "bert":
        options["unpad.drop_hidden"] = True
    report = ortolan.optimize_onnx(ir.to_proto(make()), calibration=feeds(), options=options, **case.call)
    assert report.model is not None
    return report.model


def packed(model: onnx.ModelProto) -> list[tuple[str, list[np.ndarray]]]:
    """Of each node of ours, in the order of nodes, its operator and the constants that it reads. Attention with a cache
    of floats has none but empty ones, for what it is not given. Norms by themselves pack nothing."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = [
        (node.op_type, [constants[name] for name in node.input if name in constants])
        for node in model.graph.node
        if node.domain == "ai.ortolan" and node.op_type != "AddLayerNorm"
    ]
    return [(op, read) for op, read in found if op != "NoMADAttention" or any(one.size for one in read)]


def describe(model: onnx.ModelProto) -> list[Any]:
    """Operators, and what type and shape their constants have."""
    return [[op, [[str(one.dtype), list(one.shape)] for one in constants]] for op, constants in packed(model)]


def digest(model: onnx.ModelProto) -> str:
    found = hashlib.sha256()
    for op, constants in packed(model):
        found.update(op.encode())
        for one in constants:
            found.update(np.ascontiguousarray(one).tobytes())
    return found.hexdigest()


def numbers(model: onnx.ModelProto) -> bytes:
    return b"".join(np.ascontiguousarray(one).tobytes() for _, constants in packed(model) for one in constants)


def share_equal(model: onnx.ModelProto, stored: bytes) -> float:
    """Of numbers; floats are equal that differ by a rounding, or by two of the largest: each CPU sums in its order."""
    equal = total = at = 0
    for _, constants in packed(model):
        for one in constants:
            other = np.frombuffer(stored, one.dtype, one.size, at).reshape(one.shape)
            if one.dtype.kind == "f":
                same = np.isclose(one, other, rtol=1e-6, atol=2**-22 * np.abs(other).max(initial=0))
            else:
                same = one == other
            equal, total, at = equal + int(np.count_nonzero(same)), total + one.size, at + one.nbytes
    return equal / total


def store() -> None:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        model = optimized(case)
        found[name] = {"nodes": describe(model)}
        if case.exact:
            found[name]["sha256"] = digest(model)
        else:
            found[name]["numbers"] = base64.b64encode(zlib.compress(numbers(model), 9)).decode()
    STORED.write_text(json.dumps(found) + "\n")


@pytest.mark.parametrize("name", CASES)
def test_the_same_model(name: str) -> None:
    stored = json.loads(STORED.read_text())[name]
    model = optimized(CASES[name])
    assert describe(model) == stored["nodes"]
    if CASES[name].exact:
        assert digest(model) == stored["sha256"]
    else:
        assert share_equal(model, zlib.decompress(base64.b64decode(stored["numbers"]))) >= LEAST_EQUAL


if __name__ == "__main__":
    store()

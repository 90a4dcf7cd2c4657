"""Check that models optimized on x86 give nearly the same answers on an emulated Arm CPU as on x86 (answers.py).

`make test-aarch64` names this file; the suite does not collect it.

`.ci/aarch64 max aarch64/check_models.py -k real -rP` prints the answers of the real models in the cache, and kernels.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import onnx
import pytest

import ortolan
from ortolan import doctor

try:
    from ortolan import _testing
except ImportError:  # packages for users do not name their kernels
    _testing = None

FOLDER = Path(os.environ["ORTOLAN_ANSWERS"])
# Emulated CPU, by qemu's name -> its best feature set.
BEST = {"cortex-a53": "neon", "cortex-a72": "neon", "neoverse-n1": "dotprod", "max": "i8mm"}
NAMES = sorted(path.stem for path in FOLDER.glob("*.onnx"))
# Limits on the relative difference of answers, by norm. Encoders of int8, 4x1 blocks and int4 have equal bits. In
# decoders, ONNX Runtime's operators add floats in another order than on x86; so do caches and bf16 layers. bf16 layers
# round their inputs to bf16. The sums of i8mm differ most, so that some inputs after the first layer round differently.
# With i8mm, the nodes of that model are therefore compared one by one, each with x86's inputs.
# In real decoders, ONNX Runtime also computes the float32 layers. If a sum is near the middle between two int8 values,
# inputs of all later layers may round differently. Such a decoder must be closer to x86's answer than half of the error
# of its format.
LAYERS = ("layer sparse-int8", "layer sparse-int4", "layer sparse-int8-4x1", "layer int4")
ENCODERS = ("model sparse-int8", "model sparse-int8-4x1", "model int4", "model sparse-encoder")
REAL_ENCODER = "real all-minilm-l6-v2 "
# The limit for the bytes of a cache, such as key codes, is the fraction that differs.
BOUND, REAL_BOUND, REAL_BYTES = 1e-6, 1e-5, 1e-3
BY_NODES_WITH_I8MM = "model sparse-bf16"
# Kernel table of each operator; SparseAMXMatMul has one for each weight type.
TABLES = {
    "W4A8MatMul": "w4a8_matmul",
    "W8A8MatMul": "w8a8_matmul",
    "VNNISpMM": "vnni_spmm",
    "PackedNoMADAttention": "nomad_attention",
    "NoMADAttention": "decode_attention",
}
BY_BITS = {16: "sparse_amx_matmul", 8: "sparse_amx_matmul_int8"}


def kernels_of(model: onnx.ModelProto) -> dict[str, str]:
    """Return the kernel that this CPU runs for each operator with a table in TABLES or BY_BITS."""
    found = {}
    for node in model.graph.node:
        bits = next((attribute.i for attribute in node.attribute if attribute.name == "weight_bits"), 0)
        table = BY_BITS.get(bits) if node.op_type == "SparseAMXMatMul" else TABLES.get(node.op_type)
        if table is not None and _testing is not None:
            rows = getattr(_testing, f"{table}_kernels")()
            found[node.op_type] = next(row["name"] for row in rows if row["runs_here"])
    return found


def test_this_is_the_cpu_and_the_doctor_says_what_it_has() -> None:
    assert platform.machine() == "aarch64"
    best = BEST[os.environ["CPU"]]
    assert ortolan.cpu_info()["isa"] == best
    check = doctor.check_cpu()
    assert check.status == "ok" and check.detail.endswith(best)
    doctor.run_tiny_model(ortolan.get_library_path())
    assert {*LAYERS, *ENCODERS} < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_gives_the_answers_of_x86(name: str) -> None:
    if name == BY_NODES_WITH_I8MM and BEST[os.environ["CPU"]] == "i8mm":
        assert sum(other.startswith(f"{name}, node ") for other in NAMES) >= 4
        pytest.skip("its nodes are compared one by one")
    model = onnx.load(FOLDER / f"{name}.onnx")
    assert any(node.domain == "ai.ortolan" for node in model.graph.node)
    session = ortolan.create_session(FOLDER / f"{name}.onnx")
    with np.load(FOLDER / f"{name}.npz") as arrays:
        feeds = {key.removeprefix("in."): arrays[key] for key in arrays.files if key.startswith("in.")}
        real = max(REAL_BOUND, 0.5 * float(arrays["lost"]))
        exact = name in (*LAYERS, *ENCODERS) or name.startswith(REAL_ENCODER)
        bound = 0.0 if exact else real if name.startswith("real ") else BOUND
        expected = {key.removeprefix("out."): arrays[key] for key in arrays.files if key.startswith("out.")}
    found = dict(zip((output.name for output in session.get_outputs()), session.run(None, feeds), strict=True))
    assert found.keys() == expected.keys()
    kernels = kernels_of(model)
    print(f"{name} on {os.environ['CPU']}: {kernels}")
    assert "scalar" not in kernels.values()
    for output, there in expected.items():
        here = found[output]
        assert here.shape == there.shape and here.dtype == there.dtype
        limit = bound
        if here.dtype != np.float32:
            apart = np.mean(here != there)
            limit = REAL_BYTES if name.startswith("real ") else bound
        else:
            apart = np.linalg.norm(here - there) / np.linalg.norm(there)
        print(f"{output}: {apart:.1e} apart")
        assert apart <= limit, f"{output} of {name}: {apart:.2e} apart, at most {limit:.2e}"

"""Check that models optimized on x86 give nearly the same outputs on an emulated Arm CPU as on x86 (answers.py).

`make test-aarch64` names this file explicitly; pytest does not collect it otherwise.

`.ci/aarch64 max aarch64/check_models.py -k real -rP` prints the differences of the real models in the cache and the
kernels that ran.
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
except ImportError:  # packages for users do not include _testing
    _testing = None

FOLDER = Path(os.environ["ORTOLAN_ANSWERS"])
# Maps the qemu name of an emulated CPU to its best feature set.
BEST = {"cortex-a53": "neon", "cortex-a72": "neon", "neoverse-n1": "dotprod", "max": "i8mm"}
NAMES = sorted(path.stem for path in FOLDER.glob("*.onnx"))
# BOUND and REAL_BOUND limit the relative difference between outputs on Arm and on x86, in the Euclidean norm.
#
# The models in LAYERS, ENCODERS and REAL_ENCODER must have equal bits. Decoders, caches and bf16 layers may differ,
# because floats are added in another order than on x86. A different sum in a bf16 layer can change how the input of a
# later layer is rounded; most bf16 sums differ on Arm with i8mm and on x86 with AMX. The nodes of the bf16 model
# (BF16_NODE) are therefore compared one by one, each with the inputs from x86.
#
# In real decoders, ONNX Runtime also computes the float32 layers. If a sum is near the middle between two int8 values,
# the inputs of all later layers may round differently. The difference of such a decoder must be less than half of the
# error that its format causes.
LAYERS = ("layer sparse-int8", "layer sparse-int4", "layer sparse-int8-4x1", "layer int4")
ENCODERS = ("model sparse-int8", "model sparse-int8-4x1", "model int4", "model sparse-encoder")
REAL_ENCODER = "real all-minilm-l6-v2 "
# Largest fraction of different bytes in the quantized caches of real models (REAL_BYTES).
BOUND, REAL_BOUND, REAL_BYTES = 1e-6, 1e-5, 1e-3
BF16_NODE = "model sparse-bf16, node "
# Maps an operator to its kernel table. SparseAMXMatMul has one table per weight type: BY_BITS.
TABLES = {
    "W4A8MatMul": "w4a8_matmul",
    "W8A8MatMul": "w8a8_matmul",
    "VNNISpMM": "vnni_spmm",
    "PackedNoMADAttention": "nomad_attention",
    "NoMADAttention": "decode_attention",
}
BY_BITS = {16: "sparse_amx_matmul", 8: "sparse_amx_matmul_int8"}


def kernels_of(model: onnx.ModelProto) -> dict[str, str]:
    """Return the kernel that this CPU runs for each operator of the model that has a kernel table."""
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
    assert sum(name.startswith(BF16_NODE) for name in NAMES) >= 4


@pytest.mark.parametrize("name", NAMES)
def test_a_model_gives_the_answers_of_x86(name: str) -> None:
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

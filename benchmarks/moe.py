"""MoE in ORT sessions on the layer of Qwen3-30B-A3B, compared with ONNX Runtime's QMoE on the same weights.

Each call routes its rows to other experts than the calls before, so the weights of all 128 experts, which exceed all
caches, are cold. Peers, kinds int4 and int8:

    ort_qmoe            QMoE in blocks of 32, x in float32 (int8: rounded to int8)
    ort_qmoe_level_4    QMoE with accuracy_level 4: x rounded to int8 as in MoE
    ortolan_1_thread    MoE on one thread
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from ortolan.graph_passes.measure.timing import interleave, pinned
from ortolan.graph_passes.recipe import Recipe
from ortolan.graph_passes.report.figures import Timing

from ..errors import OrtolanError
from ..optimize import optimize_onnx
from ..progress import Progress, no_progress
from ..session import register
from .result import BenchOptions, BenchResult, BenchRow
from .side_by_side import QUICK_ROUNDS, QUICK_SECONDS, ROUNDS, SECONDS, chosen_kinds

OP = "MoE"
KINDS = ("int4", "int8")
BITS = {"int4": 4, "int8": 8}
EXPERTS, SELECTED, HIDDEN, INNER = 128, 8, 2048, 768
BLOCK = 32
BATCH = (1, 128)
ROUTES = 16  # one row per call visits all experts in this number of calls


def run(options: BenchOptions, progress: Progress = no_progress) -> BenchResult:
    """Measure every kind of weights, number of threads and batch."""
    if options.cases or options.layers:
        raise OrtolanError("--shape: MoE is measured on the layer of Qwen3-30B-A3B only; leave it out")
    result = BenchResult(
        notes=[f"{EXPERTS} experts of {HIDDEN} x {INNER}, {SELECTED} per row, with cold weights and equal integers."],
        summary_title="Speedup over QMoE",
    )
    seconds, rounds = (QUICK_SECONDS, QUICK_ROUNDS) if options.quick else (SECONDS, ROUNDS)
    batches = options.batch or BATCH
    kinds = chosen_kinds(options, KINDS[:1] if options.quick else KINDS)
    total = len(kinds) * len(options.threads) * len(batches)
    for index, kind in enumerate(kinds):
        progress(f"{OP} {kind}: making weights", index * total // len(kinds), total)
        models = make_models(BITS[kind])
        alone: dict[int, Timing] = {}
        for threads in options.threads:
            with pinned(threads):
                sessions = {name: open_session(model, threads) for name, model in models.items()}
                for m in batches:
                    progress(f"{OP} {kind}, {m} rows, threads {threads}", len(result.rows), total)
                    timings = interleave(calls(sessions, m), seconds=seconds, min_rounds=rounds)
                    ours = timings.pop("ortolan")
                    if threads == 1:
                        alone[m] = ours
                    elif m in alone:
                        timings["ortolan_1_thread"] = alone[m]
                    case = {"kind": kind, "m": m, "k": HIDDEN, "n": INNER}
                    result.rows += [BenchRow(OP, case, threads, ours, peer, time) for peer, time in timings.items()]
                del sessions
    progress("done", total, total)
    return result


def make_models(bits: int) -> dict[str, onnx.ModelProto]:
    """Return QMoE models, and the optimized one, by the candidate's name."""
    rng = np.random.default_rng(bits)
    tensors: dict[str, np.ndarray] = {}
    for name, n, k in (("fc1", 2 * INNER, HIDDEN), ("fc2", HIDDEN, INNER)):
        tensors[name] = rng.integers(0, 256, (EXPERTS, n, k * bits // 8), dtype=np.uint8)
        scales = rng.random((EXPERTS, n, k // BLOCK), dtype=np.float32) * np.float32(0.3 / 2**bits)
        tensors[f"{name}_scales"] = scales.astype(np.float16).astype(np.float32)
    models = {"ort_qmoe": _qmoe(tensors, bits)}
    steps = [{"name": "normalize"}, {"name": "experts"}]
    recipe = Recipe.from_dict({"name": "experts", "pass": steps})
    optimized = optimize_onnx(models["ort_qmoe"], recipe=recipe, portable=False).model
    assert optimized is not None
    if bits == 4:
        models["ort_qmoe_level_4"] = _qmoe(tensors, bits, accuracy_level=4)
    return {"ortolan": optimized, **models}


def _qmoe(tensors: dict[str, np.ndarray], bits: int, **attributes: int) -> onnx.ModelProto:
    inputs = ["x", "logits", "fc1", "fc1_scales", "", "fc2", "fc2_scales"]
    node = helper.make_node("QMoE", inputs, ["y"], "moe", domain="com.microsoft", activation_type="swiglu")
    attributes |= {"k": SELECTED, "swiglu_fusion": 1, "normalize_routing_weights": 1, "expert_weight_bits": bits}
    for name, value in (attributes | {"block_size": BLOCK}).items():
        node.attribute.append(helper.make_attribute(name, value))
    shapes = {"x": HIDDEN, "logits": EXPERTS}
    graph = helper.make_graph(
        [node],
        "layer",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", n]) for name, n in shapes.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["tokens", HIDDEN])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=9, opset_imports=opsets)


def open_session(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    """Return a session of the model."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def calls(sessions: dict[str, ort.InferenceSession], m: int) -> dict[str, Callable[[], object]]:
    """Return a call of each session, which routes its m rows to other experts each time."""
    rng = np.random.default_rng(m)
    feeds = []
    for route in range(ROUTES):
        x = rng.standard_normal((m, HIDDEN), dtype=np.float32)
        logits = rng.standard_normal((m, EXPERTS), dtype=np.float32)
        if m == 1:  # all routes together select each expert once
            logits[0, route * SELECTED : (route + 1) * SELECTED] += 20
        feeds.append({"x": x, "logits": logits})

    def call_of(session: ort.InferenceSession) -> Callable[[], object]:
        count = 0

        def call() -> object:
            nonlocal count
            count += 1
            return session.run(None, feeds[count % ROUTES])

        return call

    return {name: call_of(session) for name, session in sessions.items()}

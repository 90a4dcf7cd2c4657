"""Claims of the provider with `claims="faster"`: by the kept times of layers, else by the limits of the CPU."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import ortolan
from ortolan.graph_passes.auto import layer_times
from ortolan.graph_passes.auto.candidates import ORIGINAL, candidates_for
from ortolan.times_file import MOST_BYTES, KeptTimes, machine, read_times, times_path, today, write_times

from ..passes.int8_layers import Int8Layer
from .int8_models import dense_integers
from .nbits_models import NBits
from .sessions import claimed, needs_provider, provider_session

pytestmark = needs_provider
K, N = 128, 128
SLOW, FAST = {"original": 1.0, "bf16": 2.0, "int8": 3.0}, {"original": 1.0, "bf16": 0.5, "int8": 0.4}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))


def float_layer(k: int = K, n: int = N, dtype: type = np.float32) -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.ones((k, n), dtype), "W")
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x, y = (helper.make_tensor_value_info(name, kind, [None, size]) for name, size in (("x", k), ("y", n)))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "W"], ["y"], name="layer")], "g", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def case(rows: int = 8, k: int = K, n: int = N, dtype: str = "FLOAT", blocks: float = 0.0, cpu: str = "") -> str:
    return f"{cpu or machine()}\t2\t{rows}x{k}x{n}\t{dtype}\t0.00\t{blocks:.2f}\tbias, 4 copies: int8"


def keep(*entries: tuple[str, dict[str, float]], days: int = 0) -> None:
    date = (today() - timedelta(days)).isoformat()
    write_times(times_path(), {name: KeptTimes(date, ms) for name, ms in entries})


def reason(model: onnx.ModelProto | None = None, precision: str = "bf16") -> str:
    """Return why the layer is left, or "claimed"."""
    found = ortolan.inspect_provider(float_layer() if model is None else model, precision=precision)  # type: ignore[arg-type]
    return "claimed" if found.nodes[0].taken else found.nodes[0].reason


def test_a_layer_that_was_slower_is_left() -> None:
    assert reason() == "claimed"
    keep((case(), SLOW))
    assert reason() == "ONNX Runtime was 2.00 times as fast for layers of 128 x 128 on this machine (ortolan times)"
    assert reason(precision="int8").startswith("ONNX Runtime was 3.00 times as fast")
    assert reason(float_layer(K, 256)) == "claimed"
    assert claimed(provider_session(float_layer(), ep__ortolanexecutionprovider__precision="bf16")) == ["layer"]
    keep((case(), FAST))
    assert reason() == "claimed"


@pytest.mark.parametrize("block, name", [(32, "int4/32"), (128, "int4")])
def test_stored_4_bits_are_compared_with_onnx_runtimes_operator(block: int, name: str) -> None:
    model = NBits(K, N, block).model()
    keep((case(), {"original": 9.0, name: 2.0, f"ort {name}": 1.0}))
    assert reason(model).startswith("ONNX Runtime was 2.00 times as fast")
    keep((case(), {"original": 1.0, name: 2.0, f"ort {name}": 3.0}))
    assert reason(model) == "claimed"


@pytest.mark.parametrize("form, is_timed", [("chain", True), ("qdq", False)])
def test_stored_int8_is_compared_if_the_search_times_it(form: str, is_timed: bool) -> None:
    if "avx512vnni" not in ortolan.cpu_info()["features"]:
        pytest.skip("without VNNI no dense int8 layer is claimed")
    model = Int8Layer(form, q=dense_integers(K, N)).model()
    assert claimed(provider_session(model, claims="faster"))
    keep((case(), {"int8": 2.0, "ort int8": 1.0}))
    assert bool(claimed(provider_session(model, claims="faster"))) != is_timed
    assert claimed(provider_session(model))


def test_the_mean_of_all_rows_decides() -> None:
    keep((case(1), {"original": 1.0, "bf16": 3.0}), (case(128), {"original": 1.0, "bf16": 0.25}))
    assert reason() == "claimed"
    keep((case(1), {"original": 1.0, "bf16": 8.0}), (case(128), {"original": 1.0, "bf16": 0.5}))
    assert reason().startswith("ONNX Runtime was 2.00 times")


@pytest.mark.parametrize("days, is_used", [(0, True), (90, True), (91, False), (-1, False)])
def test_times_expire(days: int, is_used: bool) -> None:
    keep((case(), SLOW), days=days)
    assert (reason() != "claimed") == is_used
    assert bool(read_times(times_path())) == is_used


@pytest.mark.parametrize("part", ["AMD", "; Zen", "onnxruntime 1", "ortolan 0"])
def test_times_of_another_machine_or_version_are_not_used(part: str) -> None:
    other = machine().replace(part, "x" + part, 1) if part in machine() else "x" + machine()
    keep((case(cpu=other), SLOW))
    assert reason() == "claimed"


def test_types_and_zero_blocks_are_told_apart() -> None:
    half = float_layer(dtype=np.float16)
    keep((case(), SLOW), (case(4, blocks=0.75), FAST))
    assert (reason() == "claimed", reason(half)) == (False, "claimed")
    keep((case(dtype="FLOAT16"), SLOW))
    assert (reason(), reason(half) == "claimed") == ("claimed", False)


def test_a_small_float_layer_is_left_on_cpus_where_that_was_measured() -> None:
    is_known = ortolan.cpu_info()["microarchitecture"] == "Zen 4"
    found = reason(float_layer(64, 64))
    assert found == ("ONNX Runtime is faster for float layers with fewer than 9216 weights" if is_known else "claimed")
    keep((case(k=64, n=64), FAST))
    assert reason(float_layer(64, 64)) == "claimed"


def test_a_missing_or_damaged_file_has_no_times(tmp_path: Path) -> None:
    keep((case(), SLOW))
    good = times_path().read_bytes()
    for content in (b"", b"\0" * 100, b"other" + good, good[:-30], good + b"x" * MOST_BYTES):
        times_path().write_bytes(content)
        assert reason() == "claimed"
        read_times(times_path())
    times_path().write_bytes(good.replace(b"\n", b"\n\xff\t\t\n=\n", 1) + b"2026-")  # wrong lines beside a right one
    assert reason() != "claimed"
    times_path().unlink()
    times_path().mkdir()
    assert reason() == "claimed"


def test_no_content_ends_the_session() -> None:
    rng = random.Random(5)
    keep((case(), SLOW), (case(1), FAST))
    good, model = times_path().read_bytes(), float_layer()
    for _ in range(300):
        content = bytearray(good)
        for _ in range(rng.randint(1, 8)):
            place = rng.randrange(len(content))
            kind = rng.randrange(3)
            if kind == 0:
                content[place] = rng.choice(b"\t\n=x-.0 9e\0\xff")
            elif kind == 1:
                del content[place : place + rng.randint(1, 40)]
                content += b"\t"
            else:
                content[place:place] = rng.choice(
                    [b"99999999999999999999", b"nan", b"inf", b"-1", b"1e-999", b"\t", b"="]
                )
        times_path().write_bytes(content)
        read_times(times_path())
        provider_session(model, claims="faster", ep__ortolanexecutionprovider__precision="bf16")


def test_the_search_times_onnx_runtimes_own_operators() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((K, N)).astype(np.float32)
    layer = layer_times.LayerCase(K, N, 3, "FLOAT", True, 0.0, 0.0, 2)
    times = layer_times.LayerTimes().of(layer, lambda: matrix, candidates_for(calibrated=False, sparsity=None))
    assert {ORIGINAL, "ort int8", "int8", "ort int4/32", "int4/32", "ort int4", "int4"} <= set(times)
    ((line, kept),) = read_times(times_path()).items()
    assert line.startswith(f"{machine()}\t") and kept.ms == pytest.approx(times, rel=1e-5)
    # The provider finds the times, whatever they are.
    slower = {name: 9.0 if name.startswith(("int", "bf16")) else 1.0 for name in times}
    write_times(times_path(), {line: KeptTimes(today().isoformat(), slower)})
    assert reason().startswith("ONNX Runtime was 9.00 times as fast")

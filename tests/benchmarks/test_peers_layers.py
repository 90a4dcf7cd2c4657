"""Comparison of linear layers: small layers in ONNX Runtime and Ortolan."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest

from ortolan.benchmarks.cold_layers import cold_copies
from tools.peers import layers
from tools.peers.comparison import Job
from tools.peers.configuration import Configuration, Runner, interleave
from tools.peers.result import PeersResult
from tools.workers.process import WorkerError

K, N, COPIES = 256, 96, 5


def configuration(engine, model, **options):
    return Configuration(engine, engine, model, {"copies": COPIES, **options}, copies=COPIES)


@pytest.fixture
def files(tmp_path):
    """Return the paths of a weight and of 3 rows of inputs, and the weight."""
    w = layers.make_weights(layers.Layer("small", K, N))
    np.save(tmp_path / "w.npy", w)
    return tmp_path / "w.npy", layers.write_inputs(tmp_path, K, 3), w


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zeros", "theirs", "ours"),
    [(0.0, layers.ONNX_RUNTIME, layers.DENSE), (0.5, layers.ONNX_RUNTIME[:1], layers.SPARSE)],
)
def test_every_form_has_an_error_a_size_and_speeds(tmp_path, monkeypatch, zeros, theirs, ours):
    """ONNX Runtime's variants are measured only once, because zeros do not change their speed."""
    monkeypatch.setattr(layers, "ONNX_RUNTIME", theirs)
    monkeypatch.setattr(layers, "MODELS", (layers.Layer("small", K, N, zeros), layers.Layer("other", K, N)))
    monkeypatch.setattr(layers, "copies_to_stay_cold", lambda size: COPIES)
    monkeypatch.setattr("tools.peers.configuration._WARM_UP_SECONDS", 0.0)
    works = ("1 row", "8 rows")
    job = Job((1,), 0.0, {}, tmp_path, lambda line: None, models=("small",), works=works)
    result = PeersResult("command", "2026-11-25")
    layers.measure(job, result)
    assert result.left_out == [] and not list(tmp_path.iterdir())
    assert [row.name for row in result.rows] == [form.name for form in (*theirs, *ours)]
    bits = {form.name: form.bits for form in (*theirs, *ours)}
    for row in result.rows:
        assert [(one.work, one.unit, one.threads) for one in row.speeds] == [(work, "layers/s", 1) for work in works]
        assert (row.section, row.model, row.load_seconds, row.peak_megabytes) == ("layers", "small", None, None)
        assert K * N * bits[row.name] / 8e6 * 0.8 < row.megabytes < K * N * bits[row.name] / 8e6 + 0.05
        assert row.ours == row.name.startswith("Ortolan")
    errors = {row.name: row.quality["error"] for row in result.rows}
    assert errors["ONNX Runtime fp32"] < 1e-5
    for name, error in errors.items():
        least, most = (0.03, 0.2) if "int4" in name or "4 bits" in name else (0.003, 0.03)
        assert name == "ONNX Runtime fp32" or (1e-4 if "bf16" in name else least) < error < most, name


@pytest.mark.slow
def test_speeds_with_more_threads_come_to_the_rows_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "ONNX_RUNTIME", layers.ONNX_RUNTIME[:1])
    monkeypatch.setattr(layers, "DENSE", layers.DENSE[1:2])
    monkeypatch.setattr(layers, "MODELS", (layers.Layer("small", K, N),))
    monkeypatch.setattr(layers, "copies_to_stay_cold", lambda size: COPIES)
    monkeypatch.setattr("tools.peers.configuration._WARM_UP_SECONDS", 0.0)
    result = PeersResult("command", "2026-11-25")
    for threads in ((1,), (1, 2), (1, 2)):
        job = Job(threads, 0.0, {}, tmp_path, lambda line: None, works=("1 row",), done=result.timed())
        layers.measure(job, result)
    for row in result.rows:
        assert [one.threads for one in row.speeds] == [1, 2]
    result.rows[1].megabytes *= 1.1  # as if this run had written a different model file
    job = Job((3,), 0.0, {}, tmp_path, lambda line: None, works=("1 row",), done=result.timed())
    layers.measure(job, result)
    assert len(result.left_out) == 1 and "its size in MB is" in result.left_out[0]
    assert result.rows[1].speed("1 row", 3) is None and result.rows[0].speed("1 row", 3) is not None
    del result.rows[0].speeds[-1]
    assert len(result.rows) == 2 and result.timed() == {("layers", "small"): frozenset({1, 2})}


def test_a_speed_counts_every_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, "time", lambda self, passes, warm_up: [0.5] * passes)
    with Runner(configuration("onnxruntime", tmp_path), layers.SCRIPT, tmp_path / "runner") as runner:
        speed = interleave({"one": runner}, "work", 1, 1, "layers/s", 0.0)["one"]
    assert (speed.best, speed.median) == (COPIES / 0.5, COPIES / 0.5)


def test_the_last_copy_has_the_weights_that_were_made_and_the_others_differ():
    given = np.arange(12, dtype=np.float32).reshape(3, 4)
    copies = [arrays[0] for arrays in cold_copies([given], COPIES, distinct=True)]
    np.testing.assert_array_equal(copies[-1], given)
    assert len({copy.tobytes() for copy in copies}) == COPIES
    for copy in copies:
        np.testing.assert_allclose(copy, given, atol=1e-6)


def test_weights_are_always_the_same_and_half_of_them_is_zero():
    dense, pruned = (layers.make_weights(layers.Layer("small", K, N, zeros)) for zeros in (0.0, 0.5))
    np.testing.assert_array_equal(dense, layers.make_weights(layers.Layer("another", K, N)))
    assert np.count_nonzero(dense) == dense.size and np.count_nonzero(pruned) == dense.size / 2
    kept = pruned != 0
    np.testing.assert_array_equal(pruned[kept], dense[kept])
    assert np.abs(dense[~kept]).max() < np.abs(dense[kept]).min()


def test_copies_outgrow_the_caches_within_the_memory(monkeypatch):
    monkeypatch.setattr(layers, "copies_to_stay_cold", lambda size: 40)
    monkeypatch.setattr(layers, "cold_budget", lambda: 10**11)
    assert layers.cold_copies(10**7, 10) == 40
    assert layers.cold_copies(2 * 10**7, 20) == 15  # in 6 GB
    assert layers.cold_copies(10**9, 20) == 4
    monkeypatch.setattr(layers, "cold_budget", lambda: 3 * 10**9)
    assert layers.cold_copies(2 * 10**7, 20) == 7


def test_peers_take_part_where_they_are_asked_for(tmp_path):
    layer = layers.Layer("small", K, N)
    job = Job((1,), 0.0, {form.engine: "python" for form in layers.OTHERS}, tmp_path, print)
    found = list(layers.configurations_of(job, layer, tmp_path / "w.npy"))
    assert [one.name for one in found] == [form.name for form in (*layers.ONNX_RUNTIME, *layers.DENSE, *layers.OTHERS)]
    for one in found:
        own = one.engine in ("onnxruntime", "ortolan")
        assert one.python == (sys.executable if own else "python")
        assert one.options["copies"] == one.copies


def test_wrong_answers_are_refused(tmp_path, files):
    weights, inputs, w = files
    with Runner(configuration("onnxruntime", weights, form="fp32"), layers.SCRIPT, tmp_path / "runner") as runner:
        runner.make("layers", "small", 1)
        runner.open(1, {"inputs": str(inputs)})
        assert layers.Judge(w, inputs)(runner)["error"] < 1e-6
        with pytest.raises(WorkerError, match=r"a relative error of 2, expected at most 0\.5"):
            layers.Judge(-w, inputs)(runner)
        with pytest.raises(WorkerError, match=r"answer has shape \[3, 96\], expected \[3, 95\]"):
            layers.Judge(w[:, :-1], inputs)(runner)


@pytest.mark.parametrize("engine", sorted({form.engine for form in layers.OTHERS}))
def test_a_missing_package_is_told(tmp_path, files, engine):
    if find_spec(engine.replace("llama.cpp", "llama_cpp")):
        pytest.skip(f"{engine} is installed")
    form = next(form for form in layers.OTHERS if form.engine == engine)
    with (
        Runner(configuration(engine, files[0], **form.options), layers.SCRIPT, tmp_path / "runner") as runner,
        pytest.raises(WorkerError, match="No module named"),
    ):
        runner.make("layers", "small", 1)


def test_an_unknown_form_is_refused(tmp_path, files):
    with (
        Runner(configuration("onnxruntime", files[0], form="fp8"), layers.SCRIPT, tmp_path / "runner") as runner,
        pytest.raises(WorkerError, match="unknown form 'fp8'; expected fp32, nbits or int8"),
    ):
        runner.make("layers", "small", 1)

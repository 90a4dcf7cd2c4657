"""Sessions, and errors of ONNX Runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import ortolan
from ortolan import ArgumentTypeError, LibraryError, SessionError
from ortolan.engines import serving_options
from ortolan.models import tiny

from ..recipes.forms import NAMED


@pytest.fixture
def fast(tmp_path) -> Path:
    model = ir.to_proto(tiny.mlp())
    ortolan.optimize_onnx(
        model, tmp_path / "fast.onnx", recipe=NAMED["sparse-bf16"], options={"seconds": 0}, portable=False
    )
    return tmp_path / "fast.onnx"


X = {"x": np.ones((3, 24), np.float32)}


def test_create_session(fast):
    session = ortolan.create_session(fast)
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert session.run(None, X)[0].shape == (3, 16)


def test_registering_twice_is_harmless(fast):
    options = onnxruntime.SessionOptions()
    ortolan.register(options)
    ortolan.register(options)
    first, second = (ortolan.create_session(str(fast), options, ["CPUExecutionProvider"]) for _ in range(2))
    np.testing.assert_array_equal(first.run(None, X)[0], second.run(None, X)[0])


def test_the_users_options_rule(fast):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_profiling = True
    options.profile_file_prefix = str(fast.parent / "profile")
    session = ortolan.create_session(fast, options)
    assert Path(session.end_profiling()).parent == fast.parent


def test_library_path_is_a_library_that_any_host_can_load(fast):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(ortolan.get_library_path())
    onnxruntime.InferenceSession(str(fast), options, providers=["CPUExecutionProvider"])


def test_missing_library(monkeypatch):
    monkeypatch.setattr("ortolan.library.LIBRARY_NAME", "libnone.so")
    with pytest.raises(LibraryError, match=r"libnone.so is not in .*reinstall Ortolan"):
        ortolan.get_library_path()


def test_a_library_that_does_not_load(monkeypatch, tmp_path):
    (tmp_path / "lib.so").write_bytes(b"no library")
    monkeypatch.setattr("ortolan.session.get_library_path", lambda: str(tmp_path / "lib.so"))
    with pytest.raises(LibraryError, match=r"ONNX Runtime cannot load .*lib\.so.*ortolan doctor"):
        ortolan.register(onnxruntime.SessionOptions())


def test_unregistered_library_becomes_advice(fast, monkeypatch):
    monkeypatch.setattr("ortolan.session.register", lambda options: None)
    with pytest.raises(SessionError, match=r"fast\.onnx.*open it with ortolan.create_session") as caught:
        ortolan.create_session(fast)
    assert caught.value.__cause__ is not None and "\n" not in str(caught.value)


def test_data_that_is_gone(tmp_path):
    ir.save(tiny.mlp(), tmp_path / "m.onnx", external_data="m.data", size_threshold_bytes=0)
    (tmp_path / "m.data").unlink()
    with pytest.raises(SessionError, match="external data file is missing"):
        ortolan.create_session(tmp_path / "m.onnx")


def test_cpu_info():
    info = ortolan.cpu_info()
    assert info["name"] and info["microarchitecture"]
    assert 2**14 <= info["l1_bytes"] < info["l2_bytes"] <= 2**26
    assert info["features"][0] == "scalar" and info["features"][-1] == info["isa"]
    assert set(info["features"]) <= set(info["detected_features"])
    assert info["isa_problem"] == ""


def test_every_public_name_exists():
    assert ortolan.__all__ == sorted(ortolan.__all__)
    for name in ortolan.__all__:
        assert getattr(ortolan, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'optimise_onnx'"):
        ortolan.optimise_onnx  # noqa: B018


def test_import_loads_nothing_heavy():
    heavy = ("onnx", "onnxruntime", "numpy", "onnx_ir")
    code = f"import sys, ortolan; print([name for name in {heavy} if name in sys.modules])"
    flags = ["-S"] if sys.flags.no_site else []
    result = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_library_that_the_user_has_registered_already(fast):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(ortolan.get_library_path())
    with pytest.raises(SessionError, match="have the library twice: remove your register_custom_ops_library"):
        ortolan.create_session(fast, options)


def test_a_model_proto(fast):
    assert ortolan.create_session(onnx.load(fast)).run(None, X)[0].shape == (3, 16)


@pytest.mark.filterwarnings("error")  # ONNX Runtime would warn of unknown providers
def test_one_provider_as_a_text(fast):
    assert ortolan.create_session(fast, providers="CPUExecutionProvider").get_providers() == ["CPUExecutionProvider"]


def test_session_options_of_the_wrong_type(fast):
    with pytest.raises(ArgumentTypeError, match="session_options is a str, expected"):
        ortolan.register("fast")
    with pytest.raises(ArgumentTypeError, match="session_options is a dict"):
        ortolan.create_session(fast, {"intra_op_num_threads": 1})


def test_register_returns_the_options(fast):
    options = onnxruntime.SessionOptions()
    assert ortolan.register(options) is options and ortolan.register(options) is options
    for known in (options, ortolan.register()):
        assert onnxruntime.InferenceSession(fast, known).run(None, X)[0].shape == (3, 16)


def test_timing_and_versions_need_no_native_module():
    code = (
        "import sys; sys.modules['ortolan._native'] = None; "
        "import ortolan.graph_passes.measure.timing, ortolan.benchmarks; "
        "from ortolan.session import package_versions; print(sorted(package_versions()))"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(["numpy", "onnx", "onnx-ir", "onnxruntime", "ortolan", "python"])


def test_sessions_of_ours_plan_no_memory_patterns(tmp_path: Path) -> None:
    """Memory patterns are disabled, except in options that the user passes."""
    onnx.save(ir.to_proto(tiny.mlp()), tmp_path / "model.onnx")
    given = onnxruntime.SessionOptions()
    for options, expected in ((None, False), (serving_options(1), False), (given, True)):
        session = ortolan.create_session(tmp_path / "model.onnx", options)
        assert session.get_session_options().enable_mem_pattern is expected

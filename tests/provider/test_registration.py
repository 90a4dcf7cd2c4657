"""Test registration of the provider, its options, and sessions on models of all kinds."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan import provider
from ortolan.provider import PROVIDER

from ..ops.group_node import node_model
from ..ops.groups import GroupLayer
from ..ops.single_node import assert_same_bits
from ..passes.int8_layers import Int8Layer
from .int8_models import all_claims, dense_integers
from .nbits_models import NBits, whole
from .sessions import claimed, needs_provider, plain_session, provider_session


def run_python(text: str) -> str:
    """Run code in a process with the same import paths and `tests`, and return its output; it must exit with 0."""
    paths = [str(Path(__file__).parents[2]), *(os.path.abspath(path) for path in sys.path if path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def devices() -> list[str]:
    return [device.ep_name for device in ort.get_ep_devices() if device.ep_name == PROVIDER]


@needs_provider
def test_registers_once() -> None:
    for _ in range(3):
        ortolan.register_provider()
        assert devices() == [PROVIDER]


@needs_provider
def test_what_is_said_of_the_device() -> None:
    ortolan.register_provider()
    (device,) = (device for device in ort.get_ep_devices() if device.ep_name == PROVIDER)
    assert device.ep_vendor == "Ortolan"
    assert device.device.type == ort.OrtHardwareDeviceType.CPU


@needs_provider
def test_plain_onnxruntime_registers_it_too() -> None:
    """Ortolan's functions also work after the provider was registered by onnxruntime, as in docs/provider.md."""
    text = f"""
        import onnxruntime, ortolan
        onnxruntime.register_execution_provider_library("any name", ortolan.get_library_path())
        found = [one for one in onnxruntime.get_ep_devices() if one.ep_name == "{PROVIDER}"]
        options = onnxruntime.SessionOptions()
        options.add_provider_for_devices(found, {{}})
        ortolan.register_provider()
        ortolan.session_options()
        print(len(found), sum(one.ep_name == "{PROVIDER}" for one in onnxruntime.get_ep_devices()))
    """
    assert run_python(text).split() == ["1", "1"]


def test_an_old_onnxruntime_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "__version__", "1.22.1")
    with pytest.raises(
        ortolan.LibraryError, match=r"onnxruntime 1\.22\.1 cannot load execution providers.* 1\.23 or later"
    ):
        ortolan.register_provider()


@needs_provider
@pytest.mark.parametrize("version", ["1.17.0", "1.22.1", "no version"])
def test_an_old_host_gets_a_status(version: str) -> None:
    """A host in C or C# gets the error from the library, because no Python code checks the version first."""
    told: list[bytes] = []
    create_status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(
        lambda code, text: told.append(text) or 1
    )
    api = (ctypes.c_void_p * 300)(ctypes.cast(create_status, ctypes.c_void_p))
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(lambda asked: ctypes.addressof(api))
    text = ctypes.create_string_buffer(version.encode())
    get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(text))
    base = (ctypes.c_void_p * 2)(*(ctypes.cast(one, ctypes.c_void_p) for one in (get_api, get_version)))
    create = ctypes.CDLL(ortolan.get_library_path()).CreateEpFactories
    create.restype = ctypes.c_void_p
    create.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3, ctypes.c_size_t, ctypes.c_void_p]
    factories, count = (ctypes.c_void_p * 4)(), ctypes.c_size_t(0)
    assert create(b"ortolan", base, None, factories, 4, ctypes.byref(count)) == 1
    assert count.value == 0
    expected = f"this ONNX Runtime is version {version}, Ortolan's execution provider needs 1.23 or later"
    assert told[0].decode().startswith(expected)


@needs_provider
def test_a_library_that_cannot_be_registered_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "libortolan_ops.so"
    library.write_bytes(b"CreateEpFactories\0")
    monkeypatch.setattr(provider, "get_library_path", lambda: str(library))
    monkeypatch.setattr(provider, "_devices", lambda onnxruntime: [])
    with pytest.raises(ortolan.LibraryError, match="cannot register the execution provider"):
        ortolan.register_provider()


@needs_provider
def test_an_instruction_set_that_the_cpu_lacks_is_told_of() -> None:
    text = """
        import os
        os.environ["ORTOLAN_ISA"] = "no such set"
        import ortolan
        try:
            ortolan.register_provider()
        except ortolan.LibraryError as error:
            print(error)
    """
    assert "no such set" in run_python(text)


def float_model() -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    weight = helper.make_tensor("w", TensorProto.FLOAT, [8, 4], np.arange(32, dtype=np.float32))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"], name="linear"), helper.make_node("Relu", ["p"], ["y"])]
    inputs, outputs = [value("x", TensorProto.FLOAT, ["batch", 8])], [value("y", TensorProto.FLOAT, ["batch", 4])]
    return whole(helper.make_graph(nodes, "floats", inputs, outputs, [weight]))


@needs_provider
def test_models_with_nothing_to_claim_run_unchanged() -> None:
    model, x = float_model(), np.random.default_rng(0).standard_normal((3, 8), dtype=np.float32)
    session = provider_session(model)
    assert claimed(session) == []
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], plain_session(model).run(None, {"x": x})[0])


@needs_provider
def test_one_registration_serves_optimized_models_too() -> None:
    """Optimized models run in a session with the provider, but ORT's CPU provider runs their operators."""
    rng = np.random.default_rng(0)
    layer = GroupLayer.random(rng, 64, 20, 32)
    model = node_model(layer)
    del model.functions[:]  # without the function, only the library's kernel can run the node
    session = provider_session(model)
    assert claimed(session) == []
    x = rng.standard_normal((3, 64), dtype=np.float32)
    layer.check(session.run(None, {"x": x})[0], x)


@needs_provider
def test_create_session_takes_the_options() -> None:
    layer = NBits(64, 20, 32)
    session = ortolan.create_session(layer.model(), ortolan.session_options())
    assert session.get_providers() == [PROVIDER, "CPUExecutionProvider"]
    x = layer.x(3)
    layer.oracle(32).check(session.run(None, {"x": x})[0], x)


@needs_provider
def test_options_made_by_hand_are_told_of() -> None:
    ortolan.register_provider()
    options = ort.SessionOptions()
    options.add_provider_for_devices([one for one in ort.get_ep_devices() if one.ep_name == PROVIDER], {})
    with pytest.raises(ortolan.SessionError, match=r"execution provider, use ortolan\.session_options\(\) instead"):
        ortolan.create_session(NBits(64, 20, 32).model(), options)


@needs_provider
def test_create_session_without_the_options_has_no_provider() -> None:
    ortolan.register_provider()
    assert ortolan.create_session(NBits(64, 20, 32).model()).get_providers() == ["CPUExecutionProvider"]


@needs_provider
def test_named_providers_win_over_the_options() -> None:
    with pytest.warns(UserWarning, match="already been configured with providers"):
        session = ortolan.create_session(
            NBits(64, 20, 32).model(), ortolan.session_options(), providers=["CPUExecutionProvider"]
        )
    assert session.get_providers() == ["CPUExecutionProvider"]


@needs_provider
def test_sessions_are_made_run_and_dropped_in_ten_threads_at_once() -> None:
    models = [NBits(128, 33, block, bits).model() for block in (32, 64) for bits in (4, 8)]
    models += [Int8Layer(form, q=dense_integers(128, 33), bias=True).model() for form in ("chain", "dynamic")]
    shared = [all_claims(model, threads=2) for model in models]
    feeds = [{"x": NBits(128, 33, 32).x(rows)} for rows in range(1, 7)]
    expected = [[session.run(None, fed)[0] for fed in feeds] for session in shared]
    assert all(claimed(session) for session in shared)
    begin, failed = threading.Barrier(10), []

    def work(number: int) -> None:
        try:
            begin.wait()
            for turn, fed in enumerate(feeds):
                at = (number + turn) % len(models)
                own = all_claims(models[at], threads=1 + turn % 2)
                for session in (own, shared[at]):
                    assert_same_bits(session.run(None, fed)[0], expected[at][turn])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]


@needs_provider
def test_memory_of_sessions_comes_back() -> None:
    """Sessions release their memory.

    Packed weights have 0.6 MB or 1 MB, so a leak in one of ten sessions would be found.
    """
    text = """
        import gc, os
        from tests.passes.int8_layers import Int8Layer
        from tests.provider.int8_models import all_claims, dense_integers
        from tests.provider.nbits_models import NBits
        from tests.provider.sessions import claimed
        layer = NBits(1024, 1024, 32)
        models = [layer.model(), Int8Layer("chain", q=dense_integers(1024, 1024)).model()]

        def resident(sessions):
            for i in range(sessions):
                session = all_claims(models[i % 2], threads=1 + i // 2 % 2)
                assert claimed(session)
                session.run(None, {"x": layer.x(4)})
                del session
            gc.collect()
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        before = resident(40)
        print(resident(200) - before)
    """
    assert int(run_python(text)) < 16 << 20


@needs_provider
def test_unregisters_when_sessions_are_gone_and_registers_again() -> None:
    text = f"""
        import gc
        import numpy, onnxruntime, ortolan
        from tests.provider.nbits_models import NBits
        from tests.provider.sessions import provider_session
        layer = NBits(64, 20, 32)
        for _ in range(3):
            session = provider_session(layer.model(), threads=2)
            (y,) = session.run(None, {{"x": layer.x(3)}})
            layer.oracle(32).check(y, layer.x(3))
            del session
            gc.collect()
            onnxruntime.unregister_execution_provider_library("ortolan")
            print(sum(one.ep_name == "{PROVIDER}" for one in onnxruntime.get_ep_devices()))
    """
    assert run_python(text).split() == ["0"] * 3


@needs_provider
def test_sessions_outlive_their_registration() -> None:
    """Sessions keep working after the provider was unregistered.

    ONNX Runtime forbids this but does not check it, so the library must stay loaded.
    """
    text = """
        import onnxruntime
        from tests.provider.nbits_models import NBits
        from tests.provider.sessions import provider_session
        layer = NBits(64, 20, 32)
        session = provider_session(layer.model(), threads=2)
        onnxruntime.unregister_execution_provider_library("ortolan")
        layer.oracle(32).check(session.run(None, {"x": layer.x(3)})[0], layer.x(3))
        other = provider_session(layer.model())
        del session
        layer.oracle(32).check(other.run(None, {"x": layer.x(3)})[0], layer.x(3))
        print("well")
    """
    assert run_python(text).strip() == "well"


@needs_provider
def test_sessions_run_while_it_is_unregistered_and_registered() -> None:
    text = """
        import threading
        import numpy, onnxruntime, ortolan
        from tests.passes.int8_layers import Int8Layer
        from tests.provider.int8_models import all_claims
        from tests.provider.nbits_models import NBits
        from tests.provider.sessions import claimed
        layers = [NBits(64, 20, 32), Int8Layer("chain", 64, 24, bias=True)]
        sessions, x = [all_claims(layer.model(), threads=2) for layer in layers], layers[0].x(3)
        expected = [session.run(None, {"x": x})[0] for session in sessions]
        ends, right = threading.Event(), [[], []]

        def run(at):
            while not ends.is_set() or not right[at]:
                right[at].append(numpy.array_equal(sessions[at].run(None, {"x": x})[0], expected[at]))

        threads = [threading.Thread(target=run, args=(at,)) for at in (0, 1)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            onnxruntime.unregister_execution_provider_library("ortolan")
            ortolan.register_provider()
            assert claimed(all_claims(layers[0].model()))
        ends.set()
        for thread in threads:
            thread.join()
        print("well" if all(right[0]) and all(right[1]) else "not well")
    """
    assert run_python(text).strip() == "well"


@needs_provider
def test_the_process_ends_well_with_sessions_alive() -> None:
    text = """
        from tests.provider.nbits_models import NBits
        from tests.provider.sessions import provider_session
        sessions = [provider_session(NBits(64, 20, 32).model(), threads=2) for _ in range(3)]
        print(sessions[2].run(None, {"x": NBits(64, 20, 32).x(3)})[0].shape)
    """
    assert run_python(text).strip() == "(3, 20)"

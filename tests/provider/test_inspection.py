"""Test inspect_provider, `ortolan inspect --provider`, and the option claims_file that both use."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from typer.testing import CliRunner

import ortolan
from ortolan import provider_inspection
from ortolan.cli import app
from ortolan.provider import PROVIDER, options_with
from ortolan.provider_inspection import ProviderNode

from .nbits_models import NBits, whole
from .sessions import claimed, needs_provider, provider_session
from .test_registration import float_model

TAKEN = ProviderNode("first", "MatMulNBits", True, "64 x 32, 4 bits in blocks of 32", "")
LEFT = ProviderNode("second", "MatMulNBits", False, "", "its block_size is 16, expected a multiple of 32")


def two_layers(first: str = "first", second: str = "second") -> onnx.ModelProto:
    """Return a model with a layer that is claimed and one that is not, with these names."""
    value = helper.make_tensor_value_info
    layers = NBits(64, 32, 32), NBits(32, 20, 16)
    graph = helper.make_graph(
        [layers[0].node("x", "h", first, "1."), layers[1].node("h", "y", second, "2.")],
        "two layers",
        [value("x", onnx.TensorProto.FLOAT, ["batch", 64])],
        [value("y", onnx.TensorProto.FLOAT, None)],
        [*layers[0].initializers("1."), *layers[1].initializers("2.")],
    )
    return whole(graph)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(two_layers(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@needs_provider
def test_what_is_taken_and_what_is_left(path: Path) -> None:
    found = ortolan.inspect_provider(path)
    assert found.nodes == [TAKEN, LEFT]
    assert found.model == str(path)
    assert claimed(provider_session(str(path))) == [node.node for node in found.nodes if node.taken]
    assert ortolan.inspect_provider(path.parent).nodes == found.nodes
    assert ortolan.inspect_provider(two_layers()).nodes == found.nodes


@needs_provider
def test_it_says_what_the_log_says(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ortolan.session_options()
    options.log_severity_level = 1
    ort.InferenceSession(path, options)
    log = capfd.readouterr().err
    for node in ortolan.inspect_provider(path).nodes:
        assert f"{'takes' if node.taken else 'leaves'} {node.op} node '{node.node}': {node.what}{node.reason}" in log
    assert log.count("Ortolan takes") == log.count("Ortolan leaves") == 1


@needs_provider
def test_nothing_to_take() -> None:
    found = ortolan.inspect_provider(float_model())
    assert found.nodes == []
    nothing = "no supported nodes; --precision bf16 or int8 also claims float layers"
    assert str(found) == f"the given ModelProto: {nothing}"


@needs_provider
def test_the_command(path: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", "--provider", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "the provider claims 1 of 2 supported nodes" in shown.stdout
    rows = {line.split()[1]: line for line in shown.stdout.splitlines() if "MatMulNBits" in line}
    assert "claimed" in rows["first"] and TAKEN.what in rows["first"]
    assert "left" in rows["second"] and LEFT.reason in rows["second"]
    parsed = json.loads(CliRunner().invoke(app, ["inspect", "--provider", str(path), "--json"]).stdout)
    assert [ProviderNode(**node) for node in parsed["nodes"]] == [TAKEN, LEFT]


@needs_provider
def test_a_bad_file_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ortolan.SessionError, match=r"text\.onnx.*the file is not an ONNX model or is truncated"):
        ortolan.inspect_provider(tmp_path / "text.onnx")
    shown = CliRunner().invoke(app, ["inspect", "--provider", str(tmp_path / "none.onnx")])
    assert shown.exit_code == 1 and shown.stdout == ""
    assert shown.stderr.startswith("ortolan: ") and "none.onnx' does not exist" in shown.stderr


def test_an_old_onnxruntime_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "__version__", "1.22.1")
    with pytest.raises(
        ortolan.LibraryError, match=r"onnxruntime 1\.22\.1 cannot load execution providers.* 1\.23 or later"
    ):
        ortolan.inspect_provider(two_layers())


@needs_provider
@pytest.mark.parametrize("name", ['a "b" \\c/', "line\nbreak\ttab\x01\x7f", "größer ☃", "\u2028", ""])
def test_names_of_all_kinds(name: str) -> None:
    found = ortolan.inspect_provider(two_layers(name))
    assert [node.node for node in found.nodes] == [name, "second"]
    str(found)


@needs_provider
def test_names_that_are_no_utf8(path: Path) -> None:
    content = path.read_bytes().replace(b"first", b"f\xff\xfest")
    path.write_bytes(content)
    assert [node.node for node in ortolan.inspect_provider(path).nodes] == ["f\ufffd\ufffdst", "second"]


@needs_provider
def test_lines_are_added_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "claims.jsonl"
    file.write_text("what was there\n")
    for _ in range(2):
        ort.InferenceSession(two_layers().SerializeToString(), options_with({"claims_file": str(file)}))
    lines = file.read_text().splitlines()
    assert lines[0] == "what was there"
    assert [ProviderNode(**json.loads(line)) for line in lines[1:]] == [TAKEN, LEFT] * 2


@needs_provider
def test_a_session_entry_names_the_file_too(tmp_path: Path) -> None:
    provider_session(two_layers(), **{f"ep__{PROVIDER.lower()}__claims_file": str(tmp_path / "claims.jsonl")})
    assert len((tmp_path / "claims.jsonl").read_text().splitlines()) == 2


@needs_provider
def test_a_file_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    for file, problem in ((tmp_path / "none" / "file", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(Exception, match=f"claims_file is '{file}', which cannot be written: {problem}"):
            options = options_with({"claims_file": str(file)})
            ort.InferenceSession(two_layers().SerializeToString(), options, enable_fallback=False)


@needs_provider
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_leaves_all_to_onnx_runtime(capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime logs this error, like any error while a provider claims nodes, and runs the model."""
    session = provider_session(two_layers(), log=3, **{f"ep__{PROVIDER.lower()}__claims_file": "/dev/full"})
    assert claimed(session) == []
    assert "cannot be written: No space left on device" in capfd.readouterr().err


@needs_provider
def test_claims_that_onnx_runtime_does_not_know_of_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_provider(model: onnx.ModelProto, options: ort.SessionOptions) -> ort.InferenceSession:
        ortolan.create_session(model, options)
        return provider_session(float_model())

    monkeypatch.setattr(provider_inspection, "create_session", without_provider)
    with pytest.raises(ortolan.SessionError, match=r"provider claims 1 node of .*, but ONNX Runtime assigns 0"):
        ortolan.inspect_provider(two_layers())


def test_a_model_that_only_imports_our_operators_is_not_optimized() -> None:
    """A model compiled by ONNX Runtime imports Ortolan's operators, but is not an optimized model."""
    model = float_model()
    model.opset_import.add(domain="ai.ortolan", version=1)
    assert ortolan.inspect_onnx(model).optimized is None

"""Test hosts in other languages: examples/c/host.c, and the package onnxruntime-ep-ortolan."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import ortolan
from ortolan.provider import PROVIDER

from ..docs.pages import ROOT, blocks
from .nbits_models import NBits
from .ort_headers import headers
from .sessions import needs_provider
from .test_context import FORMAT, compile_model
from .test_inspection import TAKEN, two_layers
from .test_registration import run_python

EXAMPLE = ROOT / "examples" / "c"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("make", "cc"):
        if shutil.which(tool) is None:
            pytest.skip(f"the C example needs {tool}")
    include = headers()
    if include is None:
        pytest.skip("the C example needs ONNX Runtime's C headers: set ORT_INCLUDE_DIR")
    library = next(Path(ort.__file__).parent.glob("capi/libonnxruntime.so.*"), None)
    if library is None:
        pytest.skip("onnxruntime's package holds no libonnxruntime.so")
    folder = tmp_path_factory.mktemp("c") / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("host", "libonnxruntime*"))
    flags = "CFLAGS=-O2 -Wall -Wextra -Wpedantic -Werror"
    done = run("make", "-C", folder, f"ORT_INCLUDE={include}", f"ORT_LIBRARY={library}", flags)
    assert done.returncode == 0, done.stderr
    return folder / "host"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


@needs_provider
def test_the_c_example_runs_on_the_provider(host: Path, tmp_path: Path) -> None:
    layer = NBits(64, 20, 32)
    model, claims = tmp_path / "model.onnx", tmp_path / "claims.jsonl"
    onnx.save(layer.model(), model)
    done = run(host, ortolan.get_library_path(), model, claims)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    shape, numbers = done.stdout.splitlines()
    assert shape.split() == ["2", "20"]
    x = (np.arange(128, dtype=np.float32) % 7 / 4 - 0.75).reshape(2, 64)
    layer.oracle(32).check(np.array(numbers.split(), np.float32).reshape(2, 20), x)
    (line,) = claims.read_text().splitlines()
    assert json.loads(line)["taken"]


@needs_provider
def test_the_c_example_and_python_agree(host: Path, tmp_path: Path) -> None:
    onnx.save(two_layers(), tmp_path / "model.onnx")
    done = run(host, ortolan.get_library_path(), tmp_path / "model.onnx", tmp_path / "claims.jsonl")
    assert done.returncode == 0, done.stderr
    x = (np.arange(128, dtype=np.float32) % 7 / 4 - 0.75).reshape(2, 64)
    expected = ortolan.create_session(tmp_path / "model.onnx", ortolan.session_options()).run(None, {"x": x})[0]
    np.testing.assert_allclose(np.array(done.stdout.splitlines()[1].split(), np.float32), expected.ravel(), rtol=1e-6)
    found = [json.loads(line) for line in (tmp_path / "claims.jsonl").read_text().splitlines()]
    assert [node["node"] for node in found if node["taken"]] == [TAKEN.node]


@needs_provider
def test_the_c_example_says_what_is_wrong(host: Path, tmp_path: Path) -> None:
    library, model = ortolan.get_library_path(), tmp_path / "model.onnx"
    onnx.save(two_layers(), model)
    for arguments, code, message in (
        ((), 2, "usage: host LIBRARY MODEL"),
        ((tmp_path / "none.so", model), 1, "none.so"),
        ((library, tmp_path / "none.onnx"), 1, "none.onnx"),
        ((library, model, tmp_path), 1, "Is a directory"),
    ):
        done = run(host, *arguments)
        assert done.returncode == code and message in done.stderr and done.stdout == ""


@needs_provider
def test_hosts_in_c_refuse_compiled_models_of_another_format(host: Path, tmp_path: Path) -> None:
    """ONNX Runtime passes the format in the model's metadata to the provider, which rejects other formats."""
    compile_model(NBits(64, 20, 32).model(), tmp_path)
    path = tmp_path / "model_ctx.onnx"
    done = run(host, ortolan.get_library_path(), path)
    assert done.returncode == 0, done.stderr
    model = onnx.load(path)
    (info,) = (one for one in model.metadata_props if one.key == f"ep_compatibility_info.{PROVIDER}")
    info.value = info.value.replace(f"format {FORMAT} ", f"format {FORMAT + 1} ")
    model.ir_version = 11  # onnx writes a newer version, which some ONNX Runtimes cannot read
    onnx.save(model, path)
    done = run(host, ortolan.get_library_path(), path)
    assert done.returncode == 1 and done.stdout == ""
    assert f"Compiled model is not supported by execution provider: {PROVIDER}" in done.stderr


def test_the_page_shows_the_example() -> None:
    ((_, code),) = [block for block in blocks("provider.md") if block[0] == "c"]
    assert code in (EXAMPLE / "host.c").read_text(encoding="utf-8") and PROVIDER in code


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the contents of the wheel of packages/onnxruntime_ep_ortolan."""
    pytest.importorskip("scikit_build_core", reason="the package is built with scikit-build-core")
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "packages" / "onnxruntime_ep_ortolan", folder / "source")
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check")
    done = run(sys.executable, "-m", "pip", "wheel", *options, "-w", folder, folder / "source")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.name == f"onnxruntime_ep_ortolan-{version(ROOT)}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def version(folder: Path) -> str:
    return str(tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"])


@needs_provider
def test_the_package_registers(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))
    code = """
        import onnxruntime
        import onnxruntime_ep_ortolan as ep
        onnxruntime.register_execution_provider_library(ep.get_ep_name(), ep.get_library_path())
        print([device.ep_name for device in onnxruntime.get_ep_devices() if device.ep_name in ep.get_ep_names()])
        print(ep.__file__)
    """
    names, file = run_python(code).splitlines()
    assert names == f"['{PROVIDER}']" and Path(file).is_relative_to(installed)


def test_the_package_wants_the_library_of_its_version(installed: Path) -> None:
    metadata = (installed / f"onnxruntime_ep_ortolan-{version(ROOT)}.dist-info" / "METADATA").read_text()
    assert re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE) == [f"ortolan=={version(ROOT)}"]

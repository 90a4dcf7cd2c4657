"""`ortolan doctor`: checks that Ortolan works on this machine, and prints what to do if a check fails.

Each check is a function that returns a Check and never raises.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ortolan.graph_passes.report.lines import WIDTH, lay_out, wrap

from .errors import OrtolanError, one_line
from .opencl import VARIABLE
from .session import cpu_info
from .times_file import kept_times

Status = Literal["ok", "note", "failed"]

_REINSTALL = "reinstall Ortolan for this Python (in a source tree: pip install .)"
_PROVIDER = "execution provider"
_UNSET = "unset ORTOLAN_ISA, or set it to one of the listed names"
_SELF_TEST_SECONDS = 120
_MARKS = {"ok": "ok", "note": "note", "failed": "FAILED"}
_LABEL_WIDTH = 28  # width of the mark and name of a check


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
        status: "ok", "note" (not required, but worth knowing) or "failed" (required).
    """

    name: str
    status: Status
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class FeatureSet:
    """A set of CPU features for which kernels exist.

    Attributes:
        cpus: CPUs that have the features.
        brings: What kernels gain from the features.
        state: "in use" if kernels use the features, "available" if only the CPU has them, else "".
    """

    name: str
    cpus: str
    brings: str
    state: Literal["in use", "available", ""]


@dataclass(frozen=True)
class DoctorReport:
    """The results of all checks. `print` it, or call `to_json()`."""

    checks: tuple[Check, ...]
    feature_sets: tuple[FeatureSet, ...]

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return all(check.status != "failed" for check in self.checks)

    def to_json(self) -> str:
        """Return JSON: passed, checks [name, status, detail, advice], feature_sets [name, cpus, brings, state]."""
        return json.dumps({"passed": self.passed, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        return self.summary()

    def summary(self, width: int = WIDTH) -> str:
        """Return one line for each check with advice below it, then the CPU feature sets of this architecture."""
        checks = []
        for check in self.checks:
            checks.append(lay_out([(f"{_MARKS[check.status]:8}{check.name}", check.detail)], width, _LABEL_WIDTH))
            if check.advice:
                checks.append(wrap(f"-> {check.advice}", width, " " * 8, " " * 11))
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        sets = [
            (f"{one.state or '-':11}{one.name}", f"{one.brings} ({one.cpus})")
            for one in self.feature_sets
            if one.state or (one.name not in _ARM_SETS) == x86
        ]
        return "\n\n".join(("\n".join(checks), lay_out(sets, width, _LABEL_WIDTH), self._verdict()))

    def _verdict(self) -> str:
        """Return the verdict, the last line of the summary."""
        failed = sum(check.status == "failed" for check in self.checks)
        if failed:
            return f"{failed} {'check' if failed == 1 else 'checks'} failed; see the advice above."
        if any(check.name == _PROVIDER and check.status != "ok" for check in self.checks):
            return "Optimized models run. The execution provider is missing; see the advice above."
        return "Everything that Ortolan needs works."


def run_doctor() -> DoctorReport:
    """Run all checks, which takes a few seconds. Never raises."""
    checks: list[Check] = [_guarded("Ortolan", check_ortolan), _guarded("Python", check_python)]
    checks += [_guarded(name, partial(check_package, name)) for name in _PACKAGES]
    checks += [
        _guarded("native module", check_native_module),
        _guarded("CPU", check_cpu),
        _guarded("ORTOLAN_ISA", check_isa_override),
        _guarded("operator library", check_library),
        _guarded(_PROVIDER, check_provider),
        _guarded("layer times", check_times),
        _guarded("OpenCL", check_opencl),
    ]
    checks += [_guarded(name, partial(check_extra, name)) for name in _EXTRAS]
    return DoctorReport(tuple(checks), describe_feature_sets())


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        return Check(name, "failed", f"the check itself failed: {one_line(error)}", _REINSTALL)


# --- versions ---------------------------------------------------------------------------------------------------------

# Maps packages to their modules. Other packages also provide the module onnxruntime, so its __version__ is checked.
_PACKAGES = {
    "onnxruntime": "onnxruntime",
    "onnx": "onnx",
    "onnx-ir": "onnx_ir",
    "numpy": "numpy",
}
_EXTRAS = {"tokenizers": "sentence embeddings, the demo", "safetensors": "building all-MiniLM-L6-v2, the demo"}


def check_ortolan() -> Check:
    """Check Ortolan's version and folder."""
    return Check("Ortolan", "ok", f"{importlib.metadata.version('ortolan')} in {Path(__file__).parent}")


def check_python() -> Check:
    """Check the interpreter."""
    return Check("Python", "ok", f"{platform.python_version()} ({platform.system()} {platform.machine()})")


def check_package(name: str) -> Check:
    """Check that a required package can be imported and is new enough."""
    wanted = _required_versions().get(name, "")
    install = f'pip install --upgrade "{name}{">=" + wanted if wanted else ""}"'
    try:
        module = importlib.import_module(_PACKAGES[name])
    except Exception as error:  # importing a broken binary can raise any error
        return Check(name, "failed", f"cannot be imported: {one_line(error)}", install)
    version = str(getattr(module, "__version__", "") or importlib.metadata.version(name))
    if _parts(version) < _parts(wanted):
        return Check(name, "failed", f"{version} is too old, Ortolan needs {wanted} or later", install)
    return Check(name, "ok", version)


def check_extra(name: str) -> Check:
    """Check an optional package."""
    if importlib.util.find_spec(name) is None:
        detail = f"not installed (optional: {_EXTRAS[name]})"
        return Check(name, "note", detail, f"to use it: pip install {name}")
    return Check(name, "ok", f"{importlib.metadata.version(name)} (optional: {_EXTRAS[name]})")


def _required_versions() -> dict[str, str]:
    """Return the lowest version of each dependency of the installed package."""
    found = (re.match(r"([\w.-]+?)\s*>=\s*([\d.]+)", line) for line in importlib.metadata.requires("ortolan") or [])
    return {match[1]: match[2] for match in found if match}


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


# --- CPU --------------------------------------------------------------------------------------------------------------


def check_native_module() -> Check:
    """Check the compiled module that packs weights."""
    try:
        from . import _native
    except Exception as error:
        return Check("native module", "failed", f"ortolan._native cannot be imported: {one_line(error)}", _REINSTALL)
    return Check("native module", "ok", str(_native.__file__))


def check_cpu() -> Check:
    """Check the CPU's features."""
    info = cpu_info()
    detail = f"{info['name']}, tuned as {info['microarchitecture']}: uses {', '.join(info['features'])}"
    if unused := [name for name in info["detected_features"] if name not in info["features"]]:
        detail += f"; also has {', '.join(unused)}"
    if info["isa"] == "scalar":
        return Check("CPU", "note", detail, "results are correct, but slower than plain ONNX Runtime")
    return Check("CPU", "ok", detail)


def check_isa_override() -> Check:
    """Check the environment variable ORTOLAN_ISA."""
    value = os.environ.get("ORTOLAN_ISA")
    if not value:
        return Check("ORTOLAN_ISA", "ok", "not set: all features of the CPU are used")
    info = cpu_info()
    if info["isa_problem"]:
        return Check("ORTOLAN_ISA", "failed", str(info["isa_problem"]), _UNSET)
    return Check("ORTOLAN_ISA", "note", f"'{value}': kernels use no other features", "unset it for full speed")


# (name, CPUs, gain) of each feature set, in the order of ops/isa/feature_sets.inc.
_FEATURE_SETS = (
    ("scalar", "any", "portable code: correct, slow"),
    ("avx2", "Haswell 2013, Zen 1 and later", "8 multiply-adds at a time in fp32"),
    ("avxvnni", "Alder Lake, Sapphire Rapids, Zen 5 and later", "the same, with int8 products in fours (vpdpbusd)"),
    ("avx512bw", "Skylake-SP and later Xeons", "16 multiply-adds at a time in fp32"),
    ("avx512vnni", "Cascade Lake and later Xeons", "the same, with int8 products in fours (vpdpbusd)"),
    ("avx512", "Ice Lake, Zen 4 and later", "the same; sparse weights expand in registers (vpexpandw)"),
    ("avx512bf16", "Zen 4, Sapphire Rapids and later", "the same, with bf16 products in pairs (vdpbf16ps)"),
    ("amx", "Sapphire Rapids and later Xeons", "the same, with the tile unit for wide inputs"),
    ("neon", "any 64-bit Arm", "4 multiply-adds at a time in fp32"),
    ("dotprod", "Neoverse N1, Apple M1 and later", "the same, with int8 products in fours (sdot)"),
    ("i8mm", "Neoverse V1, Apple M2 and later", "the same, with int8 and bf16 products of small matrices"),
)
_ARM_SETS = ("neon", "dotprod", "i8mm")


def describe_feature_sets() -> tuple[FeatureSet, ...]:
    """Return all feature sets; without the native module, without their states."""
    try:
        info = cpu_info()
        used, detected = info["features"], info["detected_features"]
    except Exception:
        used = detected = []
    return tuple(
        FeatureSet(name, cpus, brings, "in use" if name in used else "available" if name in detected else "")
        for name, cpus, brings in _FEATURE_SETS
    )


# --- the operator library ---------------------------------------------------------------------------------------------


def check_library(library: str | os.PathLike[str] | None = None) -> Check:
    """Check that libortolan_ops.so loads in the installed ONNX Runtime and computes the same as NumPy.

    The check runs in its own process, because a library for another system may crash it.

    Args:
        library: The library's file. None: the file that Ortolan registers.
    """
    name = "operator library"
    if library is None:
        from . import get_library_path

        try:
            library = get_library_path()
        except OrtolanError as error:
            return Check(name, "failed", one_line(error), _REINSTALL)
    if not Path(library).is_file():
        return Check(name, "failed", f"{library} does not exist", _REINSTALL)
    code = "import sys; from ortolan.doctor import run_tiny_model; run_tiny_model(sys.argv[1])"
    try:
        result = _run_python(code, os.fspath(library))
    except subprocess.TimeoutExpired:
        detail = f"{library}: a tiny model did not finish within {_SELF_TEST_SECONDS} s"
        return Check(name, "failed", detail, "try again when the machine is less busy; if it fails again, report it")
    if result.returncode == 0:
        return Check(name, "ok", f"{library} loads and computes correctly")
    problem = _problem(result.returncode, result.stderr)
    return Check(name, "failed", f"{library}: {problem}", _library_advice(problem))


def check_provider() -> Check:
    """Check that the execution provider, which runs unchanged models, registers.

    The check runs in its own process, so that this one does not register it. Optimized models do not need it.
    """
    name = _PROVIDER
    try:
        result = _run_python("from ortolan.provider import session_options; session_options()")
    except subprocess.TimeoutExpired:
        return Check(name, "note", f"did not register within {_SELF_TEST_SECONDS} s")
    if result.returncode == 0:
        return Check(name, "ok", "registers: unchanged models with MatMulNBits run on it (ortolan.session_options)")
    problem = _problem(result.returncode, result.stderr)
    return Check(name, "note", f"{problem.removeprefix('ortolan.errors.LibraryError: ')}")


def check_times() -> Check:
    """Tell how many times of layers searches keep; the execution provider uses them too."""
    found = kept_times()
    advice = "to measure again: ortolan times --clear" if found.oldest is not None else ""
    return Check("layer times", "ok", str(found), advice)


def check_opencl() -> Check:
    """Check OpenCL devices, and whether ORTOLAN_OPENCL enables them. Another process loads the drivers."""
    name = "OpenCL"
    value = os.environ.get(VARIABLE) or "0"
    if value not in ("0", "1", "force"):
        return Check(name, "failed", f"{VARIABLE} is '{value}', expected 0, 1 or force", f"unset {VARIABLE}")
    try:
        result = _run_python(r"from ortolan.opencl import opencl_devices; print(*opencl_devices(), sep='\n')")
    except subprocess.TimeoutExpired:
        return Check(name, "note", f"the drivers did not list devices within {_SELF_TEST_SECONDS} s")
    unused = f"not used: {VARIABLE} is {os.environ.get(VARIABLE) or 'not set'}"
    if result.returncode == 0:
        devices = "; then ".join(result.stdout.strip().splitlines())
        return Check(name, "ok", f"{unused}; {devices}" if value == "0" else devices)
    if value == "0":
        return Check(name, "ok", unused)
    problem = _problem(result.returncode, result.stderr).removeprefix("ortolan.errors.LibraryError: ")
    return Check(name, "note", f"all operators run on the CPU: {problem}")


def _run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in another process.

    Raises:
        subprocess.TimeoutExpired: It did not end in time.
    """
    # With -P, files of the current folder are not imported instead of installed packages.
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_SELF_TEST_SECONDS, check=False
    )


def run_tiny_model(library: str) -> None:
    """Run one SparseAMXMatMul of a library in ONNX Runtime.

    Raises:
        OrtolanError: The result differs from NumPy's.
    """
    import numpy as np
    import onnxruntime as ort
    from onnx import TensorProto, helper

    from . import _native

    m, k, n = 3, 70, 21  # sizes that are not multiples of a tile
    rng = np.random.default_rng(0)
    # Small integers are exact in bf16, and their float32 sums are exact in any order.
    x = rng.integers(-4, 5, (m, k)).astype(np.float32)
    w = rng.integers(-4, 5, (k, n)) * rng.integers(0, 2, (k, n))
    masks, values, offsets = _native.pack_bitmap(w.astype(np.float32))
    initializers = [
        helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True)
        for name, kind, array in (
            ("masks", TensorProto.UINT8, masks),
            ("values", TensorProto.BFLOAT16, values),
            ("offsets", TensorProto.INT64, offsets),
        )
    ]
    node = helper.make_node(
        "SparseAMXMatMul", ["x", "masks", "values", "offsets"], ["y"], domain="ai.ortolan", k=k, n=n, format_version=1
    )
    graph = helper.make_graph(
        [node],
        "doctor",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [m, k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [m, n])],
        initializers,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.ortolan", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.register_custom_ops_library(library)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    error = float(np.abs(y - x @ w).max())
    if error != 0:
        raise OrtolanError(f"SparseAMXMatMul differs from numpy by up to {error:g}, expected 0")


def _problem(returncode: int, stderr: str) -> str:
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = str(-returncode)
        return f"the process that loaded it was killed by signal {name}"
    lines = stderr.strip().splitlines()
    if not lines:
        return f"the process that loaded it ended with exit code {returncode}"
    # Return the last line of the traceback, without the class and status of ONNX Runtime's errors.
    return re.sub(r"^onnxruntime\.[\w.]+: (\[ONNXRuntimeError\] : \d+ : \w+ : )?", "", lines[-1].strip())


def _library_advice(problem: str) -> str:
    if "ORTOLAN_ISA" in problem:
        return _UNSET
    if "No module named" in problem or "ImportError" in problem:
        return "fix the packages above first"
    if "Upgrade onnxruntime" in problem or "register_custom_ops_library" in problem:
        return "pip install --upgrade onnxruntime"
    if "signal SIGILL" in problem or "differs from numpy" in problem:
        return "try ORTOLAN_ISA=scalar, and report the CPU's name: a kernel is wrong on it"
    damage = ("GLIBC", "ELF", "cannot open shared object", "undefined symbol", "too short", "SIGBUS", "SIGSEGV")
    if any(text in problem for text in damage):
        return f"the file is damaged or built for another system; {_REINSTALL}"
    return _REINSTALL

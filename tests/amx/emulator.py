"""AMX and AVX-VNNI for tests: the CPU's own, or the emulator of amx_emulator.cc.

    with amx() as emulator:         # emulator is None if the CPU has AMX
        …                           # tile instructions run in this process, in every thread

Kernels are chosen by CPU features, which a process detects once, so `ORTOLAN_ASSUME_AMX=1` must be in the environment
before ortolan._native is first used. run_python starts a process with this variable and with AMX. AMX kernels also use
AVX-512, for which there is no emulator. run_avxvnni does the same for AVX-VNNI.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ortolan import _native

from .. import instructions

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "amx-tests"

INSTRUCTIONS = (
    "ldtilecfg",
    "sttilecfg",
    "tilerelease",
    "tilezero",
    "tileloadd",
    "tileloaddt1",
    "tilestored",
    "tdpbf16ps",
    "tdpbssd",
    "tdpbsud",
    "tdpbusd",
    "tdpbuud",
    "vpdpbusd",
)


@functools.cache
def cpu_has_amx() -> bool:
    """Return True if the CPU has AMX and this process may use it; requests the permission from the operating system."""
    cpuinfo = Path("/proc/cpuinfo")
    return (
        cpuinfo.exists()
        and {"amx_tile", "amx_bf16", "amx_int8"} <= set(cpuinfo.read_text().split())
        and "amx" in detected_features()
    )


def detected_features() -> list[str]:
    return list(_native.cpu_info()["detected_features"])


def mode() -> str:
    """Return "native" or "emulated", depending on how tile instructions run here."""
    return "native" if cpu_has_amx() else "emulated"


def why_unavailable() -> str | None:
    """Return the reason why tile instructions cannot run here, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "AMX and its emulator need x86-64 Linux"
    if shutil.which(compiler()[0]) is None:
        return f"no C++ compiler ({compiler()[0]}; $CXX names another)"
    return None


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def build(source: Path, *options: str, headers: Sequence[Path] = (ROOT / "ops" / "simd" / "amx_tiles.h",)) -> Path:
    """Return the shared library built from a source file here, building it once per state of sources and command.

    headers: All headers that it includes.
    """
    command = [*compiler(), "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"]
    command += [*options, "-I", str(ROOT / "ops"), str(source)]
    state = hashlib.sha256("\0".join(command).encode())
    for path in (source, *sorted(headers)):
        state.update(path.read_bytes())
    library = BUILD / f"{source.stem}-{state.hexdigest()[:16]}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            unfinished = Path(folder) / library.name
            result = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
            if result.returncode != 0:
                raise RuntimeError(f"{shlex.join(command)}\n{result.stderr}")
            unfinished.replace(library)  # Atomic, because other test processes may build the same library.
    return library


class Emulator:
    """The emulator in this process. Counts are those of the whole process."""

    def __init__(self, library: Path) -> None:
        self.path = library
        self.users = 0  # of amx()
        self._c = ctypes.CDLL(str(library))
        self._c.amx_emulator_count.argtypes = [ctypes.c_char_p]
        self._c.amx_emulator_count.restype = ctypes.c_int64

    def install(self) -> None:
        """Install the SIGILL handler. Call it again after another handler was installed (faulthandler.enable)."""
        self._check(self._c.amx_emulator_install())

    def uninstall(self) -> None:
        self._check(self._c.amx_emulator_uninstall())

    def reset_counts(self) -> None:
        self._c.amx_emulator_reset_counts()

    def count(self, *instructions: str) -> int:
        """Return how often these instructions ran since the last reset."""
        counts = [int(self._c.amx_emulator_count(name.encode())) for name in instructions]
        if -1 in counts:
            unknown = instructions[counts.index(-1)]
            raise ValueError(f"unknown instruction {unknown}, expected one of {', '.join(INSTRUCTIONS)}")
        return sum(counts)

    def counts(self) -> dict[str, int]:
        """Return the number of times that each instruction ran since the last reset, without zeros."""
        return {name: count for name in INSTRUCTIONS if (count := self.count(name))}

    def live_threads_with_config(self) -> int:
        """Return the number of threads with configured tiles that are not released: 0 if no kernel is running."""
        return int(self._c.amx_emulator_live_threads_with_config())

    @staticmethod
    def _check(error: int) -> None:
        if error:
            raise OSError(error, os.strerror(error))


@functools.cache
def load_emulator() -> Emulator:
    # -z now: the dynamic linker must not run inside a signal handler.
    options = ("-O3", "-mavx2", "-mfma", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-Wl,-z,now")
    return Emulator(build(HERE / "amx_emulator.cc", *options))


def build_shim() -> Path:
    return build(HERE / "instruction_shim.cc", "-O2")


@functools.cache
def load_shim() -> ctypes.CDLL:
    """Load instruction_shim.cc, which wraps each instruction in a C function. Arrays are passed as addresses."""
    shim = ctypes.CDLL(str(build_shim()))
    address, stride, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for name in ("configure", "configure_rip", "configure_fs", "configure_indexed", "store_config"):
        getattr(shim, f"shim_{name}").argtypes = [address]
    for name in ("store_config_indexed", "load_from_stack", "load_without_index", "load_without_base"):
        getattr(shim, f"shim_{name}").argtypes = [address]
    for name in ("load", "load_stream", "store", "load_by_form"):
        getattr(shim, f"shim_{name}").argtypes = [number, address, stride]
    shim.shim_load_without_base.restype = ctypes.c_bool
    shim.shim_dot_quads.argtypes = [number, address, address, address]
    shim.shim_dot_quads.restype = ctypes.c_bool
    shim.shim_multiply_local.argtypes = [address, address]
    shim.shim_multiply_under_mxcsr.argtypes = [number, ctypes.c_uint]
    shim.shim_multiply_under_mxcsr.restype = ctypes.c_uint
    return shim


def config_bytes(tiles: dict[int, tuple[int, int]], palette: int = 1) -> bytearray:
    """Return the 64-byte operand of LDTILECFG for tiles of (rows, colsb)."""
    config = bytearray(64)
    config[0] = palette
    for tile, (rows, colsb) in tiles.items():
        config[16 + 2 * tile : 18 + 2 * tile] = colsb.to_bytes(2, "little")
        config[48 + tile] = rows
    return config


@contextmanager
def amx() -> Iterator[Emulator | None]:
    """Make tile instructions run in this process.

    Yields the emulator, or None if the CPU has AMX. Contexts may be nested; the outermost exit uninstalls the emulator.
    """
    if cpu_has_amx():
        yield None
        return
    emulator = load_emulator()
    emulator.install()
    emulator.users += 1
    try:
        yield emulator
    finally:
        emulator.users -= 1
        if emulator.users == 0:
            emulator.uninstall()


def run_python(code: str, timeout: float = 1200, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that has AMX, with a variable `emulator` as `amx()` yields it.

    Skips the test if the CPU lacks the other instructions that AMX kernels use.
    """
    instructions.require(instructions.AMX_KERNELS, "an AMX kernel, besides emulated tiles,")
    return _run_assuming("ORTOLAN_ASSUME_AMX", code, timeout, environment)


def run_avxvnni(code: str, timeout: float = 1200) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process with AVX-VNNI and no better features: ORTOLAN_ISA=avxvnni.

    If the CPU lacks AVX-VNNI, the emulator runs these instructions. Skips the test if it cannot.
    """
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    instructions.require(instructions.AMX_EMULATOR, "the emulator of AVX-VNNI")
    return _run_assuming("ORTOLAN_ASSUME_AVXVNNI", code, timeout, {"ORTOLAN_ISA": "avxvnni"})


def _run_assuming(
    assume: str, code: str, timeout: float, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Return code with a prelude that installs the emulator, unless the CPU has AMX (and then AVX-VNNI too)."""
    prelude = "from tests.amx import emulator as _amx\n_context = _amx.amx()\nemulator = _context.__enter__()\n"
    inherited = {name: value for name, value in os.environ.items() if name != "ORTOLAN_ISA"}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", prelude + code],
        env=inherited | {assume: "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )

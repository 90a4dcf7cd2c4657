"""Test faults that end the process, other users of SIGILL, and the detection of CPU features for dispatch."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys

import pytest

from . import emulator
from .emulator import Emulator, config_bytes

CHILD = """
import ctypes, faulthandler, json, os, signal, sys
emulator, shim, steps = sys.argv[1], ctypes.CDLL(sys.argv[2]), json.loads(sys.argv[3])
if emulator:
    if steps[0] == "faulthandler":
        faulthandler.enable()
    if steps[0] == "signal":
        signal.signal(signal.SIGILL, lambda *_: print("handled", flush=True))
    emulator = ctypes.CDLL(emulator)
    assert emulator.amx_emulator_install() == 0
else:
    for fault in (signal.SIGILL, signal.SIGSEGV):  # which AddressSanitizer would answer with an exit
        signal.signal(fault, signal.SIG_DFL)
    assert ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0
buffer = ctypes.create_string_buffer(1024)
for name, *arguments in (step for step in steps if isinstance(step, list)):
    if name == "uninstall":
        assert emulator.amx_emulator_uninstall() == 0
    elif name == "kill":
        os.kill(os.getpid(), signal.SIGILL)
    elif name == "configure":
        shim.shim_configure(bytes.fromhex(arguments[0]))
    elif name in ("load", "load_stream", "store"):
        shim["shim_" + name](arguments[0], buffer, ctypes.c_int64(64))
    else:
        shim["shim_" + name](*arguments)
print("alive", flush=True)
"""


def run_child(emulator_path: str, *steps: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, emulator_path, str(emulator.build_shim()), json.dumps(steps)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def configure(tiles: dict[int, tuple[int, int]], palette: int = 1, poke: tuple[int, int] | None = None) -> list[str]:
    config = config_bytes(tiles, palette)
    if poke is not None:
        config[poke[0]] = poke[1]
    return ["configure", config.hex()]


FULL = configure(dict.fromkeys(range(8), (16, 64)))


@pytest.mark.parametrize(
    ("instruction", "reason", "steps"),
    [
        ("ldtilecfg", "palette is 2", [configure({0: (16, 64)}, palette=2)]),
        ("ldtilecfg", "tmm0 has 17 rows of 64 bytes", [configure({0: (17, 64)})]),
        ("ldtilecfg", "tmm7 has 16 rows of 68 bytes", [configure({7: (16, 68)})]),
        ("ldtilecfg", "tmm7 has 16 rows of 320 bytes", [configure({7: (16, 320)})]),
        ("ldtilecfg", "tmm3 has 16 rows of 0 bytes", [configure({3: (16, 0)})]),
        ("ldtilecfg", "tmm3 has 0 rows of 64 bytes", [configure({3: (0, 64)})]),
        *(
            ("ldtilecfg", "a reserved byte is not 0", [configure({0: (16, 64)}, poke=(byte, 1))])
            for byte in (2, 15, 32, 47, 56, 63)
        ),
        ("tilezero", "no tiles are configured", [["zero", 0]]),
        ("tileloadd", "no tiles are configured", [["load", 0]]),
        ("tilestored", "no tiles are configured", [FULL, ["load", 0], ["release"], ["store", 0]]),
        ("tdpbf16ps", "no tiles are configured", [FULL, configure({}, palette=0), ["multiply", 0, 0]]),
        ("tilezero", "tmm1 is not configured", [configure({0: (16, 64)}), ["zero", 1]]),
        ("tileloaddt1", "tmm1 is not configured", [configure({0: (16, 64)}), ["load_stream", 1]]),
        ("tilestored", "tmm0 has rows of 6 bytes, not a multiple of 4", [configure({0: (16, 6)}), ["store", 0]]),
        ("tdpbssd", "tmm2 is not configured", [configure({0: (16, 64), 1: (16, 64)}), ["multiply", 1, 0]]),
        (
            "tdpbf16ps",
            "tmm0.colsb is 64, tmm2.colsb is 60",
            [configure({0: (16, 64), 1: (16, 64), 2: (16, 60)}), ["multiply", 0, 0]],
        ),
        (
            "tdpbsud",
            "tmm7.rows is 15, tmm0.rows is 16",
            [configure({7: (15, 64), 0: (16, 64), 1: (16, 64)}), ["multiply", 2, 7]],
        ),
        (
            "tdpbuud",
            "tmm1.colsb / 4 is 16, tmm2.rows is 8",
            [configure({0: (16, 64), 1: (16, 64), 2: (8, 64)}), ["multiply", 4, 0]],
        ),
        ("tdpbf16ps", "two operands are the same tile: tmm0, tmm1, tmm1", [FULL, ["multiply_same_a_b"]]),
        ("tdpbssd", "two operands are the same tile: tmm0, tmm0, tmm2", [FULL, ["multiply_same_c_a"]]),
        ("tdpbusd", "two operands are the same tile: tmm0, tmm1, tmm0", [FULL, ["multiply_same_c_b"]]),
    ],
)
def test_faults_end_the_process(amx: Emulator | None, instruction: str, reason: str, steps: list[object]) -> None:
    result = run_child(str(amx.path) if amx else "", *steps)
    assert result.stdout == ""
    if amx is None:
        assert result.returncode in (-signal.SIGILL, -signal.SIGSEGV)
        return
    assert result.returncode == -signal.SIGABRT
    line, *others = result.stderr.splitlines()
    assert not others
    assert line.startswith(f"amx emulator: {instruction} at 0x")
    assert line.endswith(f": {reason}")


def test_other_signals_go_to_the_handler_before(emulated: Emulator) -> None:
    path = str(emulated.path)
    result = run_child(path, "none", FULL, ["undefined_instruction"])
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGILL, "", "")
    result = run_child(path, "none", ["kill"])
    assert (result.returncode, result.stdout) == (-signal.SIGILL, "")
    result = run_child(path, "faulthandler", FULL, ["undefined_instruction"])
    assert (result.returncode, result.stdout) == (-signal.SIGILL, "")
    assert "Fatal Python error: Illegal instruction" in result.stderr
    result = run_child(path, "signal", FULL, ["kill"], ["release"])
    assert (result.returncode, result.stdout.split()) == (0, ["handled", "alive"])


def test_uninstall_gives_the_signal_back(emulated: Emulator) -> None:
    result = run_child(str(emulated.path), FULL, ["release"], ["uninstall"])
    assert (result.returncode, result.stdout) == (0, "alive\n")
    result = run_child(str(emulated.path), FULL, ["release"], ["uninstall"], FULL)
    assert (result.returncode, result.stdout) == (-signal.SIGILL, "")


def test_amx_may_be_entered_within_itself(amx: Emulator | None) -> None:
    with emulator.amx():
        emulator.load_shim().shim_release()
    emulator.load_shim().shim_release()


# ---- The CPU's features


def features(**environment: str) -> tuple[str, str]:
    """Return the best feature set in use and the best one of the CPU, in a separate process."""
    code = "from ortolan import _native; i = _native.cpu_info(); print(i['isa'], i['detected_features'][-1])"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ORTOLAN_")}
    result = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, timeout=300, check=True
    )
    used, detected = result.stdout.split()
    return used, detected


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 features")
def test_assume_amx_adds_amx_to_avx512bf16_and_nothing_else() -> None:
    best, _ = features()
    assert (best == "amx") == emulator.cpu_has_amx()
    assumed = "amx" if best == "avx512bf16" else best
    assert features(ORTOLAN_ASSUME_AMX="1") == (assumed, assumed)
    for value in ("", "0", "yes"):
        assert features(ORTOLAN_ASSUME_AMX=value) == (best, best)
    least = "scalar" if best == "scalar" else "avx2"
    assert features(ORTOLAN_ASSUME_AMX="1", ORTOLAN_ISA=least)[0] == least


def test_run_python_has_the_features_and_the_instructions(amx: Emulator | None) -> None:
    code = """
from ortolan import _native
from tests.amx.emulator import load_shim
load_shim().shim_release()
print(_native.cpu_info()["isa"], None if emulator is None else emulator.counts())
"""
    result = emulator.run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ("amx None" if amx is None else "amx {'tilerelease': 1}")

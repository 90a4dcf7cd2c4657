"""The estimate of AMX cycles: its arithmetic and its command line."""

import subprocess
import sys

import pytest

from ortolan.benchmarks.amx_cycles import KINDS, dram_cycles, tile_cycles

BF16, INT8, INT4, W4A8, W4A8_SHORT = KINDS


def test_stored_bytes_of_a_tile():
    assert BF16.stored_bytes(0.5) == 64 + 512
    assert INT8.stored_bytes(0.5) == 128 + 512
    assert INT4.stored_bytes(0.5) == 128 + 256 + 16  # half of a group's 16 bf16 scales
    assert W4A8.stored_bytes(0.0) == 512 + 16
    assert W4A8_SHORT.stored_bytes(0.0) == 512 + 2 * 32


def test_cycles_by_hand():
    few = tile_cycles(BF16, 16)
    # Cycles. expand: 16 rows with three uops on port 5. load: the tile, half a tile of x, and a quarter of loading and
    # storing the sums. tdp: one tile product.
    assert (few.expand, few.load, few.tdp, few.scale) == (48, 8 + 4 + 6, 16, 0)
    assert few.core == 48 + 18
    assert tile_cycles(BF16, 1) == few
    more = tile_cycles(BF16, 33)
    assert (more.expand, more.load, more.tdp) == (48, 2 * 8 + 3 * 10, 48)
    assert tile_cycles(INT4, 16).scale == 16  # 16 + 16 cycles for every second tile
    long, short = tile_cycles(W4A8, 16), tile_cycles(W4A8_SHORT, 16)
    assert (long.expand, long.load, long.tdp, long.scale) == (20, 8 + 4, 16, (16 + 24) / 2)
    assert (short.expand, short.load, short.tdp, short.scale) == (20, 8 + 4, 2 * 16, 2 * (16 + 24))


def test_dram_cycles():
    assert dram_cycles(BF16, 0.5, 3.0, 12.0) == pytest.approx(144)


def run(*arguments):
    command = [sys.executable, "-P", "-m", "ortolan.benchmarks.amx_cycles", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_table_says_that_it_is_an_estimate():
    result = run("--clock", "2.5", "--core-bandwidth", "10", "--socket-bandwidth", "250", "--cores", "50")
    assert result.returncode == 0, result.stderr
    title = " ".join(result.stdout.split("┏")[0].split())
    assert title.startswith("ESTIMATE, not measured") and "2.5 GHz" in title and "5 GB/s each for 50" in title
    for kind in KINDS:
        assert f"│ {kind.name} " in result.stdout


@pytest.mark.parametrize(
    "arguments", [("--clock", "0"), ("--core-bandwidth", "fast"), ("--socket-bandwidth", "nan"), ("--cores", "0")]
)
def test_wrong_options_are_refused(arguments):
    result = run(*arguments)
    assert result.returncode == 2
    assert arguments[0] in result.stderr and "Traceback" not in result.stderr

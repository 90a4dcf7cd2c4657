"""Estimates of the AMX kernels' cycles per tile, from instruction counts and published throughputs.

    python -m ortolan.benchmarks.amx_cycles [--clock 3.0] [--core-bandwidth 12] [--socket-bandwidth 280] [--cores 32]

A tile is 16 rows of 64 bytes: 512 weights of bf16, 1024 of int8 or int4. Counts are cycles of one core per tile of
weights, with data in the caches. As in matmul/amx_loop.h, a block of 4 tiles of two panels is expanded, then multiplied
by 32 rows of x at a time. bf16, int8 and int4 are weights of SparseAMXMatMul; w4a8 are weights of W4A8MatMul with f16
scales and its group size, without sparsity.

    expand  each of 16 rows: load the mask, load 64 bytes, kmov, vpexpand, store, popcnt, add, prefetch. int4 adds: and,
            shift (every other row), sub, and a copy of the constant 8, into which vpexpand writes. w4a8 has no mask and
            no vpexpand, and one load for two rows. Counts are from the source, with one register per value. Port 5 is
            the limit: kmov and both uops of vpexpand need it.
    load    load the tile once per 32 rows of x, and the tiles of x (shared by two panels); bf16 and int8 also load and
            store the sums once per block of 4 tiles, so a quarter of that counts
    TDP     one product per tile of up to 16 rows of x; with groups of 32, two products of half the depth
    scale   int4 and w4a8, at the end of each group: the sums leave the tile and are converted, scaled and added
    DRAM    read the tile's stored bytes, with the bandwidth of a core that reads alone, or while all cores read

The load and TDP columns could overlap. Expansion and multiplication of a block are added, although a core starts to
expand a block while it multiplies the previous one. The core and not the memory is the limit if expand + max(load, TDP)
+ scale exceeds DRAM. Measurements: ops/matmul/README.md.

Published figures, Sapphire Rapids (Golden Cove) core:
    TDPBF16PS, TDPBSSD one in 16 cycles, TILELOADD one in 8, TILESTORED one in 16: Intel 64 and IA-32 Architectures
    Optimization Reference Manual, chapter on AMX.
    vpexpandw/b zmm two uops on port 5, kmov k, r one on port 5, popcnt one on port 1, 512-bit loads two a cycle and
    stores one a cycle, 512-bit integer arithmetic on ports 0 and 5: uops.info, Alder Lake P. Six uops issue a cycle.
    Bandwidth: 8 channels of DDR5-4800 give at most 307 GB/s a socket. The bandwidth of one core varies. Options
    set both.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

TDP = 16.0
TILE_LOAD = 8.0
TILE_STORE = 16.0

TILE_ROWS = 16
COLUMNS = 16
BLOCK_TILES = 4  # expanded tiles: kExpandedRows in matmul/amx_loop.h
PANELS = 2
ISSUE_WIDTH = 6

SPARSITY = (0.5, 0.7, 0.9)
BATCH = (16, 32, 64)


@dataclass(frozen=True)
class ExpandLoop:
    """Uops of one row of a tile, by execution port."""

    port5: int  # kmov, vpexpand
    port0_or_5: float  # 512-bit integer arithmetic
    other: int

    @property
    def cycles(self) -> float:
        """Cycles of one row."""
        port5_cycles = max(self.port5, (self.port5 + self.port0_or_5) / 2)
        return max(port5_cycles, (self.port5 + self.port0_or_5 + self.other) / ISSUE_WIDTH)


@dataclass(frozen=True)
class Kind:
    """Weights of one type, and the expansion of a row of their tiles."""

    name: str
    weights: int  # per tile
    weight_bytes: float
    loop: ExpandLoop
    group_size: int | None = None
    all_stored: bool = False
    # Cycles for each row of 16 sums of a group. int4 has two loads, a conversion, an FMA and a store. w4a8 also
    # multiplies by a scale of x: a third load (two loads a cycle) and a third operation (two ports).
    scale_row_cycles: float = 1.0

    @property
    def inputs(self) -> int:
        """Inputs per tile."""
        return self.weights // COLUMNS

    def stored_bytes(self, sparsity: float) -> float:
        """Return the bytes of masks, values and, with groups, 2-byte scales for the tile's columns."""
        scales = 2 * COLUMNS * self.inputs / self.group_size if self.group_size else 0
        masks = 0 if self.all_stored else self.weights / 8
        return masks + self.weights * self.weight_bytes * (1 - sparsity) + scales


# `other` counts mask load, prefetch, value load, popcnt, pointer, store. Masks are prefetched once per cache line.
KINDS = (
    Kind("bf16", 512, 2, ExpandLoop(port5=3, port0_or_5=0, other=6)),
    Kind("int8", 1024, 1, ExpandLoop(port5=3, port0_or_5=0, other=6)),
    # `port0_or_5` counts and, half a shift, sub, copy of the constant 8.
    Kind("int4", 1024, 0.5, ExpandLoop(port5=3, port0_or_5=3.5, other=6), group_size=128),
    *(
        # `port0_or_5` counts and, half a shift, sub. `other` counts half a load, prefetch and pointer, a store.
        Kind(
            f"w4a8, {group}", 1024, 0.5, ExpandLoop(port5=0, port0_or_5=2.5, other=3), group, True, scale_row_cycles=1.5
        )
        for group in (128, 32)
    ),
)


@dataclass(frozen=True)
class TileCycles:
    """Cycles of one tile of weights with m rows of x."""

    expand: float
    load: float
    tdp: float
    scale: float

    @property
    def core(self) -> float:
        """Cycles of the core, without waiting for memory."""
        return self.expand + max(self.load, self.tdp) + self.scale


def tile_cycles(kind: Kind, m: int) -> TileCycles:
    """Return the cycles of one tile with m rows of x."""
    row_tiles = -(-m // 16)
    passes = -(-m // 32)
    load = passes * TILE_LOAD + row_tiles * TILE_LOAD / PANELS
    tdp, scale = row_tiles * TDP, 0.0
    if kind.group_size:
        groups = kind.inputs / kind.group_size
        tdp *= max(1.0, groups)
        scale = row_tiles * groups * (TILE_STORE + TILE_ROWS * kind.scale_row_cycles)
    else:
        load += row_tiles * (TILE_LOAD + TILE_STORE) / BLOCK_TILES
    return TileCycles(TILE_ROWS * kind.loop.cycles, load, tdp, scale)


def dram_cycles(kind: Kind, sparsity: float, clock_ghz: float, gb_s: float) -> float:
    """Return the cycles to read a tile from memory."""
    return kind.stored_bytes(sparsity) / gb_s * clock_ghz


def table(clock_ghz: float, core_gb_s: float, socket_gb_s: float, cores: int) -> Table:
    """Return the table of estimates."""
    shared = min(core_gb_s, socket_gb_s / cores)
    result = Table(
        title=f"ESTIMATE, not measured: cycles per tile of weights on one core, AMX at {clock_ghz:g} GHz; memory "
        f"{core_gb_s:g} GB/s for one core alone, {shared:.3g} GB/s each for {cores} cores",
        title_justify="left",
    )
    for name in ("weights", "zeros", "M", "expand", "load", "TDP", "scale", "core", "DRAM alone", "DRAM shared"):
        result.add_column(name, justify="left" if name == "weights" else "right")
    result.add_column("bound by, alone / shared")
    for kind in KINDS:
        for sparsity in (0.0,) if kind.all_stored else SPARSITY:
            alone = dram_cycles(kind, sparsity, clock_ghz, core_gb_s)
            together = dram_cycles(kind, sparsity, clock_ghz, shared)
            for m in BATCH:
                cycles = tile_cycles(kind, m)
                bounds = ["DRAM" if dram > cycles.core else "core" for dram in (alone, together)]
                counts = (cycles.expand, cycles.load, cycles.tdp, cycles.scale, cycles.core, alone, together)
                rows = "1-16" if m == 16 else str(m)  # partly filled tiles take as long
                zeros = "stored" if kind.all_stored else f"{sparsity:.0%}"
                result.add_row(kind.name, zeros, rows, *(f"{n:.0f}" for n in counts), " / ".join(bounds))
        result.add_section()
    return result


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clock", type=_positive, default=3.0, help="GHz while AMX runs")
    parser.add_argument("--core-bandwidth", type=_positive, default=12.0, help="GB/s that one core reads alone")
    parser.add_argument("--socket-bandwidth", type=_positive, default=280.0, help="GB/s that all cores read together")
    parser.add_argument("--cores", type=int, default=32, help="cores that share the socket's bandwidth")
    arguments = parser.parse_args()
    if arguments.cores < 1:
        parser.error("--cores: expected at least 1")
    Console(width=150).print(
        table(arguments.clock, arguments.core_bandwidth, arguments.socket_bandwidth, arguments.cores)
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


if __name__ == "__main__":
    main()

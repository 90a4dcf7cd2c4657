"""The rate of kernels for matrix products with many rows, compared with the CPU's peak.

    python -m ortolan.benchmarks.peak [--m 128] [--k 768] [--n 3072] [--rounds 20]

On one thread, for all targets of the build that this CPU supports, in 10^9 multiply-adds per second. The peak has all
operands in registers (ortolan._testing.peak). The kernels are those for dense bf16, int8 and W4A8 weights, including
quantization of x. Rounds alternate; the best round counts. Only builds with ORTOLAN_TESTING expose kernels by name.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from ortolan import _native

from .bare_kernels import required_kernels

_VECTORS = {"bf16": "MultiplyAdd", "int8": "DotInt8", "int4 g32": "DotNibbles", "int4 g128": "DotNibbles"}
_TILES = {"bf16": "TileDpBf16", "int8": "TileDpBssd", "int4 g128": "TileDpBssd"}  # groups of 32 take no tiles
_PEAK_ROUNDS = 200_000

Run = Callable[[], object]


def products_of(target: str) -> dict[str, str]:
    """Return the name of a target's product for each kind of weight."""
    return _TILES if target == "amx" else _VECTORS


def kernels(m: int, k: int, n: int, target: str) -> dict[str, Run]:
    """Return a product of each kind of weight for which the target has a kernel."""
    testing = required_kernels()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k), dtype=np.float32)
    panels = -(-n // 16)
    found: dict[str, Run] = {}
    if any(row["name"] == target for row in testing.sparse_amx_matmul_kernels()):
        bf16 = _native.pack_bitmap(rng.standard_normal((k, n), dtype=np.float32), dense=True)
        found["bf16"] = partial(testing.sparse_amx_matmul, x, *bf16, k, n, kernel=target)
    if any(row["name"] == target for row in testing.sparse_amx_matmul_int8_kernels()):
        int8 = _native.pack_bitmap_int8(rng.integers(-127, 128, (k, n), np.int8), dense=True)
        ones = np.ones((panels, 1, 16), np.float32)
        found["int8"] = partial(testing.sparse_amx_matmul_int8, x, *int8, ones, k, n, kernel=target)
    if any(row["name"] == target for row in testing.w4a8_matmul_kernels()):
        int4 = _native.pack_int4_group(rng.integers(0, 16, (k, n), np.uint8))
        for group in (128,) if target == "amx" else (32, 128):
            scales = np.ones((panels, -(-k // group), 16), np.float32)
            found[f"int4 g{group}"] = partial(testing.w4a8_matmul, x, int4, scales, group, k, n, kernel=target)
    return found


def best_seconds(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Return the shortest time of each run. The runs alternate in each round."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds + 1):  # the first round warms up
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure(m: int, k: int, n: int, rounds: int, target: str) -> list[tuple[str, float, float]]:
    """Return (kind of weight, peak, kernel's rate) with rates in 10^9 multiply-adds per second."""
    peak = required_kernels().peak
    products = kernels(m, k, n, target)
    names = products_of(target)
    in_registers = {names[kind]: partial(peak, target, names[kind], _PEAK_ROUNDS) for kind in products}
    best = best_seconds({**in_registers, **products}, rounds)
    rows = []
    for kind in products:
        product = names[kind]
        rows.append((kind, peak(target, product, _PEAK_ROUNDS) / best[product] / 1e9, m * k * n / best[kind] / 1e9))
    return rows


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m ortolan.benchmarks.peak", description=__doc__.split("\n")[0])
    for name, default in (("m", 128), ("k", 768), ("n", 3072), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    table = Table("target", "weights", "peak", "kernel", "kernel / peak", title=_native.cpu_info()["name"])
    for target in required_kernels().simd_lanes():
        if target == "scalar":
            continue
        for kind, peak, rate in measure(options.m, options.k, options.n, options.rounds, target):
            table.add_row(target, kind, f"{peak:.0f}", f"{rate:.0f}", f"{rate / peak:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()

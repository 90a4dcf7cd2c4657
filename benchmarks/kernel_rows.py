"""Times of the same work with the kernels of each target.

    python -m ortolan.benchmarks.kernel_rows [--rounds 50] [--copies 24] [--only "bf16 dense"]

One thread, microseconds, the best of the rounds, in which all kernels alternate. The work is attention of one head with
its data in the cache, and products of few rows of x with bf16 weights of 4096 x 4096 in each storage, including packing
of x. The products use copies of the weights in turn, so that weights are not in the cache. Only builds with
ORTOLAN_TESTING expose kernels by name. Each call copies its arrays and checks packed weights, so times of different
storages are not comparable, and shorter work is not timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ortolan import _native

from .bare_kernels import required_kernels
from .peak import best_seconds

ZEROS = {"50 % zeros": 0.5, "80 % zeros": 0.8}
STORAGES = ("dense", *ZEROS, "2:4")
BF16_KERNELS = ("amx", "avx512bf16", "avx512", "avx2")  # without scalar, which would take most of the time

Run = Callable[[], object]


def here(infos: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the kernels that this CPU can run."""
    return [info["name"] for info in infos if info["runs_here"]]


def attention(queries: int, head_dim: int) -> dict[str, Run]:
    """Return runs of attention of one head with `queries` queries and keys, by kernel."""
    testing = required_kernels()
    q, k, v = np.random.default_rng(0).standard_normal((3, queries, head_dim), dtype=np.float32)
    run = partial(testing.nomad_attention, q[None], k, v, head_dim**-0.5)
    return {name: partial(run, kernel=name) for name in here(testing.nomad_attention_kernels())}


def packed_weight(storage: str, size: int) -> tuple[Any, ...]:
    """Return random bf16 weights [size, size] in a storage of STORAGES."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((size, size), dtype=np.float32)
    if storage == "dense":
        return _native.pack_bitmap(w, dense=True)
    if storage == "2:4":
        w.reshape(-1, 4, size)[:, 1:3] = 0
        return _native.pack_two_four(w)
    w[rng.random(w.shape) < ZEROS[storage]] = 0
    return _native.pack_bitmap(w)


def bf16(rows: int, storage: str, size: int, copies: int) -> dict[str, Run]:
    """Return runs of a product with weights [size, size], by kernel. The copies have the same content."""
    testing = required_kernels()
    x = np.random.default_rng(1).standard_normal((rows, size), dtype=np.float32)
    packed = packed_weight(storage, size)
    turns = cycle([tuple(array.copy() for array in packed) for _ in range(copies)])

    def run(kernel: str) -> object:
        return testing.sparse_amx_matmul(x, *next(turns), size, size, kernel=kernel)

    names = here(testing.sparse_amx_matmul_kernels())
    return {name: partial(run, name) for name in names if name in BF16_KERNELS}


def works(copies: int, size: int = 4096) -> Iterator[tuple[str, Callable[[], dict[str, Run]]]]:
    """Yield the name of each work, and a function that returns its runs by kernel."""
    for queries, head_dim in ((16, 32), (128, 32), (512, 64)):
        yield f"attention {queries} x {head_dim}", partial(attention, queries, head_dim)
    for storage in STORAGES:
        for rows in (1, 2, 3, 4):
            yield f"bf16 {storage}, {rows} rows", partial(bf16, rows, storage, size, copies)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m ortolan.benchmarks.kernel_rows", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--copies", type=int, default=24, help="copies of the 32 MB of weights (default 24)")
    parser.add_argument("--only", default="", help="only work whose name starts with this (default all)")
    options = parser.parse_args()
    table = Table("work", "kernel", "us", "relative to fastest", title=_native.cpu_info()["name"])
    for work, make in works(options.copies):
        if not work.startswith(options.only):
            continue
        best = best_seconds(make(), options.rounds)
        fastest = min(best.values())
        for name, seconds in best.items():
            table.add_row(work, name, f"{1e6 * seconds:.1f}", f"{seconds / fastest:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()

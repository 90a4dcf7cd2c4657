"""What llvm-mca expects of the loops that multiply many rows, for CPUs that are not at hand: estimates.

    python -m ortolan.benchmarks.inner_loops BUILD [--cpu znver3 alderlake]

BUILD is a build folder (build/testing, say). Of each kernel below the longest loop without a jump inside that holds its
products is taken out of the object file (objdump) and given to llvm-mca, which both must be installed (binutils, llvm).
It knows ports and latencies, and nothing of caches.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ortolan.errors import OrtolanError


@dataclass(frozen=True)
class Loop:
    """A kernel's loop: where it is compiled, in which function, and by which instruction it multiplies."""

    column: str
    weights: str
    function: str
    product: str
    multiply_adds: int  # of one such instruction; vpmaddwd behind vpmaddubsw is not counted

    @property
    def object_file(self) -> str:
        return f"CMakeFiles/ortolan_core_{self.column}.dir/ops/matmul/{self.weights}_kernels.cc.o"


LOOPS = (
    Loop("avx2", "bf16", "ExpandedRowsILb0ELi6", "vfmadd", 8),
    Loop("avx2", "int8", "FusedILb0ELi4", "vpmaddubsw", 32),
    Loop("avx2", "group_int4", "ExpandedRowsILb0ELi4", "vpmaddubsw", 32),
    Loop("avxvnni", "int8", "FusedILb0ELi4", "vpdpbusd", 32),
    Loop("avxvnni", "group_int4", "ExpandedRowsILb0ELi4", "vpdpbusd", 32),
)
_JUMP = re.compile(r"^j\w+\s+([0-9a-f]+)")


def is_product(instruction: str, product: str) -> bool:
    """Whether it is this instruction, in either encoding."""
    return instruction.removeprefix("{vex} ").removeprefix("{evex} ").startswith(product)


def disassembly(path: Path, function: str) -> list[tuple[int, str]]:
    """Addresses and instructions of the first function whose symbol contains this name."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True
    ).stdout
    found: list[tuple[int, str]] = []
    inside = False
    for line in text.splitlines():
        if line.endswith(">:"):
            if found:
                break
            inside = function in line
        elif inside and "\t" in line:
            address, instruction = line.split("\t", 1)
            found.append((int(address.strip().rstrip(":"), 16), instruction.split("#")[0].strip()))
    return found


def inner_loop(instructions: list[tuple[int, str]], product: str) -> list[str]:
    """The body of the longest loop without a jump inside among those with products; empty if there is none."""
    places = {address: i for i, (address, _) in enumerate(instructions)}
    best: list[str] = []
    for i, (_, instruction) in enumerate(instructions):
        jump = _JUMP.match(instruction)
        start = places.get(int(jump[1], 16)) if jump else None
        if start is None or start >= i:
            continue
        body = [text for _, text in instructions[start:i]]
        jumps_inside = any(_JUMP.match(text) for text in body)
        if not jumps_inside and len(body) > len(best) and any(is_product(text, product) for text in body):
            best = body
    return best


def cycles(body: list[str], cpu: str) -> float:
    """Of an iteration, by llvm-mca."""
    iterations = 100
    source = "\n".join(body)
    done = subprocess.run(
        ["llvm-mca", f"-mcpu={cpu}", f"-iterations={iterations}"], input=source, capture_output=True, text=True
    )
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if done.returncode != 0 or total is None:
        raise OrtolanError(f"llvm-mca failed for {cpu}: {done.stderr.strip()[:300]}")
    return int(total[1]) / iterations


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ortolan.benchmarks.inner_loops", description=__doc__.split("\n")[0]
    )
    parser.add_argument("build", type=Path)
    parser.add_argument("--cpu", nargs="+", default=["znver3", "alderlake"])
    options = parser.parse_args()
    table = Table("column", "weights", "CPU", "cycles", "multiply-adds a cycle", title="llvm-mca, an estimate")
    for loop in LOOPS:
        path = options.build / loop.object_file
        if not path.exists():
            raise SystemExit(f"{path} is not there: give the folder of a build with CMake")
        body = inner_loop(disassembly(path, loop.function), loop.product)
        if not body:
            raise SystemExit(f"{path} has no loop of {loop.product} in {loop.function}")
        products = sum(is_product(text, loop.product) for text in body)
        for cpu in options.cpu:
            taken = cycles(body, cpu)
            rate = products * loop.multiply_adds / taken
            table.add_row(loop.column, loop.weights, cpu, f"{taken:.0f}", f"{rate:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()

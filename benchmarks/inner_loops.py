"""Estimates by llvm-mca of the kernels' inner loops, for CPUs that are not available here.

    python -m ortolan.benchmarks.inner_loops BUILD [--cpu znver3 alderlake] [--llvm-mca llvm-mca-22]
    python -m ortolan.benchmarks.inner_loops --file LIBRARY [--function SYMBOL] --cpu neoverse-v1

BUILD is a build folder, for x86 (such as build/native) or for Arm (build/aarch64/native, which .ci/aarch64 makes with
gcc; build/wheels/aarch64, which `make wheels` makes with clang). From each kernel's object file, objdump (for Arm:
aarch64-linux-gnu-objdump) extracts the longest loop that contains the kernel's multiply instructions and no inner jump,
for llvm-mca. Both must be installed (binutils, llvm). llvm-mca models ports and latencies, but not caches. Each loop is
shown with three bounds: for its multiply instructions alone, for its loads alone, and for all instructions without
waiting for results. Versions before 16 know the names of Arm's CPUs, but have no models for most of them.

LIBRARY is any other file of Arm code, such as another runtime's. The best loop for each kind of multiply instruction is
shown, among loops with many of these, in all functions or one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortolan.errors import OrtolanError

ARM_TARGETS = ("neon", "dotprod", "i8mm")
# CPUs that run a target's kernels.
CPUS = {
    "neon": ("cortex-a72", "neoverse-n1", "neoverse-v1", "neoverse-v2", "apple-m1"),
    "dotprod": ("neoverse-n1", "cortex-a76", "apple-m1"),
    "i8mm": ("neoverse-n2", "neoverse-v1", "neoverse-v2"),
}
X86_CPUS = ("znver3", "alderlake")
# Maps a multiply instruction to its multiply-adds; for tbl, to the bytes it looks up.
ARM_PRODUCTS = {"smmla": 32, "usmmla": 32, "ummla": 32, "sdot": 16, "usdot": 16, "udot": 16, "bfmmla": 16, "bfdot": 8}


@dataclass(frozen=True)
class Loop:
    """A kernel's loop: the object file, the function, and the multiply instruction."""

    target: str
    name: str
    source: str
    function: str | tuple[str, ...]  # pattern of its symbol, or patterns to try in order
    product: str
    multiply_adds: int  # per multiply instruction; vpmaddwd after vpmaddubsw is not counted

    @property
    def object_file(self) -> str:
        """The object file, relative to the build folder."""
        return f"CMakeFiles/ortolan_core_{self.target}.dir/ops/{self.source}.cc.o"

    @property
    def is_arm(self) -> bool:
        """True for Arm code."""
        return self.target in ARM_TARGETS

    @property
    def cpus(self) -> Sequence[str]:
        """The CPUs to estimate for."""
        return CPUS.get(self.target, X86_CPUS)


BF16, INT8, INT4 = "matmul/bf16_kernels", "matmul/int8_kernels", "matmul/group_int4_kernels"
BLOCKS = "matmul/block_sparse_kernels"
# Loops of int4 in groups of 128, one row. If clang inlines the kernel, its loop is the longest of the target's
# function.
ONE_ROW = ("OneRow.*Int4GroupRows.*ELi4EE3Row", "TargetFunctions.*Int4GroupRows.*8Multiply")
LOOPS = (
    Loop("avx2", "bf16", BF16, "ExpandedRowsILb0ELi6", "vfmadd", 8),
    Loop("avx2", "int8", INT8, "FusedILb0ELi4", "vpmaddubsw", 32),
    Loop("avx2", "int4 in groups", INT4, "ExpandedRowsILb0ELi4", "vpmaddubsw", 32),
    Loop("avxvnni", "int8", INT8, "FusedILb0ELi4", "vpdpbusd", 32),
    Loop("avxvnni", "int4 in groups", INT4, "ExpandedRowsILb0ELi4", "vpdpbusd", 32),
    Loop("dotprod", "int4 in groups, 1 row", INT4, ONE_ROW, "sdot", 16),
    Loop("dotprod", "int4 in groups, blocks of 4 rows", INT4, "Int4GroupRows.*FusedILb0ELi4", "sdot", 16),
    Loop("dotprod", "int8, blocks of 4 rows", INT8, "StorageE1.*FusedILb0ELi4", "sdot", 16),
    Loop("dotprod", "4x1 blocks, 16 tokens", BLOCKS, "TokenBlock.*ELi4EE8Multiply", "sdot", 16),
    Loop("i8mm", "int4 in groups, 1 row", INT4, ONE_ROW, "usdot", 16),
    Loop("i8mm", "int4 in groups, 4 rows", INT4, "Int4GroupRows.*8OneBlockILi4", "usmmla", 32),
    Loop("i8mm", "int4 in groups, more rows", INT4, "Int4GroupRows.*5BlockILi4", "usmmla", 32),
    Loop("i8mm", "int8, 4 rows", INT8, "StorageE1.*8OneBlockILi4", "smmla", 32),
    Loop("i8mm", "int8, more rows", INT8, "StorageE1.*5BlockILi4", "smmla", 32),
    Loop("i8mm", "bf16, 1 row", BF16, "StorageE1.*8OneBlockILi1", "bfmmla", 8),  # the other row is unused
    Loop("i8mm", "bf16, more rows", BF16, "StorageE1.*5BlockILi4", "bfmmla", 16),
    Loop("i8mm", "4x1 blocks, 16 tokens", BLOCKS, "TokenBlock.*ELi4EE8Multiply", "usdot", 16),
    Loop("neon", "4x1 blocks, 8 tokens", BLOCKS, "TokenBlock.*ELi2EE8Multiply", "smlal", 4),
    Loop("neon", "bf16, more rows", BF16, "StorageE1.*ExpandedRowsILb0ELi4", "fmla", 4),
    Loop("neon", "NoMAD scores, lookups", "attention/decode_neon", ("ScoreBlocks", "5Score"), "tbl", 16),
)
_JUMP = re.compile(r"^(?:j\w+|b|b\.\w+|cbn?z\s+\w+,|tbn?z\s+\w+, #\w+,)\s+([0-9a-f]+)\b")
_COMMENT = re.compile(r"\s*(?://|#\s| <).*")


def is_product(instruction: str, product: str) -> bool:
    """Return whether this is the multiply instruction `product`, in either encoding (VEX or EVEX)."""
    return instruction.removeprefix("{vex} ").removeprefix("{evex} ").startswith(product)


def is_load(instruction: str) -> bool:
    """Return whether an instruction reads memory: ld… on Arm; on x86 a memory operand that is not the destination."""
    return bool(re.match(r"ld|(?!lea|prefetch)\S.*\(.*\),", instruction))


def functions(path: Path, objdump: str, only: str | None = None) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield symbols with their addresses and instructions. only: the name of a single symbol."""
    name: str | None = None
    found: list[tuple[int, str]] = []
    command = [objdump, f"--disassemble={only}" if only else "-d", "--no-show-raw-insn", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.endswith(">:\n"):
                if name is not None:
                    yield name, found
                name, found = line, []
            elif name is not None and "\t" in line:
                address, instruction = line.split("\t", 1)
                found.append((int(address.strip().rstrip(":"), 16), _COMMENT.sub("", instruction.strip())))
    if run.returncode != 0:
        raise OrtolanError(f"{objdump} failed for {path}")
    if name is not None:
        yield name, found


def innermost(instructions: list[tuple[int, str]]) -> Iterator[list[str]]:
    """Yield the bodies of loops without an inner jump."""
    indices = {address: i for i, (address, _) in enumerate(instructions)}
    jumps = [i for i, (_, text) in enumerate(instructions) if _JUMP.match(text)]
    last = -1
    for i in jumps:
        jump = _JUMP.match(instructions[i][1])
        start = indices.get(int(jump[1], 16)) if jump else None
        if start is not None and last < start < i:
            yield [text for _, text in instructions[start:i]]
        last = i


def inner_loop(instructions: list[tuple[int, str]], product: str) -> list[str]:
    """Return the longest loop with this multiply instruction, or an empty list."""
    bodies = [body for body in innermost(instructions) if any(is_product(text, product) for text in body)]
    return max(bodies, key=len, default=[])


def find(of_file: Sequence[tuple[str, list[tuple[int, str]]]], loop: Loop) -> list[str]:
    """Return the loop of the first matching function that has a loop, or an empty list."""
    patterns = (loop.function,) if isinstance(loop.function, str) else loop.function
    for pattern in patterns:
        for name, instructions in of_file:
            if re.search(pattern, name):
                body = inner_loop(instructions, loop.product)
                if body:
                    return body
    return []


@dataclass(frozen=True)
class Estimate:
    """Cycles per iteration."""

    total: float
    bound: float  # cycles by ports and dispatch, without waiting for results


class Mca:
    """llvm-mca for one instruction set."""

    def __init__(self, program: str, arm: bool) -> None:
        self.program = program
        self.options = ["-mtriple=aarch64", "-mattr=+dotprod,+i8mm,+bf16,+fullfp16"] if arm else []

    def version(self) -> str:
        """Return the version of llvm-mca."""
        text = subprocess.run([self.program, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"version (\S+)", text)
        return found[1] if found else "unknown"

    def estimate(self, body: Sequence[str], cpu: str) -> Estimate | None:
        """Return the estimate for a loop body, or None if llvm-mca does not know the CPU."""
        iterations = 100
        command = [self.program, *self.options, f"-mcpu={cpu}", f"-iterations={iterations}"]
        done = subprocess.run(command, input="\n".join(body), capture_output=True, text=True)
        if "not a recognized processor" in done.stderr:
            return None
        total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
        bound = re.search(r"Block RThroughput:\s+([\d.]+)", done.stdout)
        if done.returncode != 0 or total is None or bound is None:
            raise OrtolanError(f"{self.program} failed for {cpu}: {done.stderr.strip()[:300]}")
        return Estimate(int(total[1]) / iterations, float(bound[1]))


def heading(mca: Mca, title: str) -> Iterator[str]:
    """Yield the heading of a table, in Markdown."""
    yield f"{title}: estimates by llvm-mca {mca.version()}. Cycles per 64 multiply-adds"
    yield ""
    yield "| loop | CPU | cycles | products alone | loads alone | all, without waiting | products / cycles |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"


def rows(mca: Mca, name: str, body: list[str], product: str, each: int, cpus: Sequence[str]) -> Iterator[str]:
    """Yield one row per CPU."""
    products = [text for text in body if is_product(text, product)]
    loads = [text for text in body if is_load(text)]
    scale = 64 / (len(products) * each)
    for cpu in cpus:
        whole = mca.estimate(body, cpu)
        of_products = mca.estimate(products, cpu)
        of_loads = mca.estimate(loads, cpu) if loads else Estimate(0.0, 0.0)
        if whole is None or of_products is None or of_loads is None:
            yield f"| {name} | {cpu} | not known to this version | | | | |"
            continue
        cycles = (whole.total, of_products.bound, of_loads.bound, whole.bound)
        fraction = f"{of_products.bound / whole.total:.0%}"
        yield f"| {name} | {cpu} | {' | '.join(f'{scale * count:.2f}' for count in cycles)} | {fraction} |"


def of_build(build: Path, mca_program: str, cpus: Sequence[str] | None) -> Iterator[str]:
    """Yield a table of Ortolan's loops for each target."""
    loops = [loop for loop in LOOPS if (build / loop.object_file).exists()]
    if not loops:
        raise SystemExit(f"{build} has no object files of kernels: give the folder of a CMake build")
    for target in dict.fromkeys(loop.target for loop in loops):
        mca = Mca(mca_program, target in ARM_TARGETS)
        yield from heading(mca, target)
        for loop in (loop for loop in loops if loop.target == target):
            path = build / loop.object_file
            objdump = "aarch64-linux-gnu-objdump" if loop.is_arm else "objdump"
            body = find(list(functions(path, objdump)), loop)
            if not body:
                raise SystemExit(f"{path} has no loop of {loop.product} in {loop.function}")
            yield from rows(mca, loop.name, body, loop.product, loop.multiply_adds, cpus or loop.cpus)
        yield ""


def of_file(path: Path, function: str | None, mca_program: str, cpus: Sequence[str] | None) -> Iterator[str]:
    """Yield the best loop of Arm code on the first CPU for each multiply instruction, if it has at least 8 of them."""
    mca = Mca(mca_program, arm=True)
    cpus = cpus or CPUS["i8mm"]
    best: dict[str, tuple[float, int, list[str]]] = {}
    for _, instructions in functions(path, "aarch64-linux-gnu-objdump", function):
        for body in innermost(instructions):
            for product, each in ARM_PRODUCTS.items():
                count = sum(text.startswith(f"{product}\t") for text in body)
                # Loops with several kinds of multiply instructions are skipped, because only one kind would be counted.
                if count < 8 or any(
                    text.startswith(f"{other}\t") for other in ARM_PRODUCTS if other != product for text in body
                ):
                    continue
                estimate = mca.estimate(body, cpus[0])
                if estimate is None:
                    raise SystemExit(f"{mca_program} does not know {cpus[0]}")
                taken = estimate.total * 64 / (count * each)
                if product not in best or taken < best[product][0]:
                    best[product] = (taken, count, body)
    yield from heading(mca, f"{path.name}, {function}" if function else path.name)
    for product, (_, count, body) in best.items():
        name = f"{count} {product} of {len(body)} instructions"
        yield from rows(mca, name, body, f"{product}\t", ARM_PRODUCTS[product], cpus)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m ortolan.benchmarks.inner_loops", description=__doc__.split("\n")[0]
    )
    parser.add_argument("build", type=Path, nargs="?")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--function", help="symbol of one function in the file")
    parser.add_argument("--cpu", nargs="+")
    parser.add_argument("--llvm-mca", default="llvm-mca")
    options = parser.parse_args()
    if (options.build is None) == (options.file is None):
        parser.error("give a build folder or --file")
    if options.build is not None:
        lines = of_build(options.build, options.llvm_mca, options.cpu)
    else:
        lines = of_file(options.file, options.function, options.llvm_mca, options.cpu)
    for line in lines:
        print(line)


if __name__ == "__main__":
    main()

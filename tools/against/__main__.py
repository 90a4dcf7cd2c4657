"""Compare the kernels of another revision with the current kernels, on the same models, in turns.

python -m tools.against REVISION [--operators sparse_amx_matmul,w4a8_matmul,…] [--rows TEXT] [--threads 1,2]
    [--rounds N] [--isa NAME] [--quick] [--json FILE] [--library FILE]

REVISION is built, once, into the cache folder (ORTOLAN_CACHE). It is compared with the installed package, so build and
install the current tree first. Run this in the source tree. Operators are named by their folders in ops/. Each model is
made once. Two processes of each library, pinned to the same CPUs, open it and run in turns. Calls of more than a
millisecond on one thread are timed by the thread's CPU time, others by wall time.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

import onnxruntime
from rich.console import Console

from ortolan.errors import OrtolanError
from ortolan.graph_passes.measure.machine import last_level_cache_bytes
from ortolan.library import get_library_path
from ortolan.session import cpu_info

from ..workers.process import cpus_to_use
from .compare import QUICK_PACE, Pace, Side, compare
from .layers import COLD_BYTES, Work
from .process import WorkerProcess
from .result import Comparison
from .revision import built_library, describe_tree, find_repository, newer_sources, resolve_commit
from .rows import TINY, Sizes, works_of

_ERROR, _INTERRUPTED = 1, 130


def read_threads(text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of numbers of threads."""
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of threads such as 1,2; found {text!r}")
    return counts


def read_rounds(text: str) -> int:
    """Parse a positive number of rounds."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number of rounds, found {text!r}")
    return int(text)


def chosen_works(operators: str | None, part: str, quick: bool) -> list[Work]:
    """Return the models of comma-separated operators with their rows whose names contain `part`.

    Raises:
        OrtolanError: An operator is unknown, or no row matches.
    """
    by_operator = works_of(TINY if quick else Sizes(), tiny_models=quick)
    names = operators.split(",") if operators else list(by_operator)
    for name in names:
        if name not in by_operator:
            raise OrtolanError(f"--operators: unknown operator {name!r}; expected {', '.join(by_operator)}")
    works = [
        Work(work.operator, rows, work.write)
        for name in dict.fromkeys(names)
        for work in by_operator[name]
        if (rows := tuple(row for row in work.rows if part in row.name))
    ]
    if not works:
        raise OrtolanError(f"--rows: no row of {', '.join(names)} has {part!r} in its name")
    return works


def find_sides(arguments: argparse.Namespace) -> tuple[dict[Side, Path], dict[str, str], list[str]]:
    """Return the libraries, their descriptions and notes for the result.

    Raises:
        OrtolanError: The revision is unknown or does not build.
    """
    new = Path(get_library_path())
    if arguments.library is not None:
        return {"old": arguments.library, "new": new}, {"old": arguments.revision, "new": str(new)}, []
    repository = find_repository(Path.cwd())
    commit = resolve_commit(repository, arguments.revision)
    old = built_library(repository, commit, _say)
    notes = []
    if newer := newer_sources(repository, new):
        notes.append(f"BUILD FIRST: {len(newer)} sources changed after {new} was built, for example {newer[0]}.")
        _say(notes[0])
    described = {"old": f"{arguments.revision} ({commit[:12]})", "new": f"{describe_tree(repository)}: {new}"}
    return {"old": old, "new": new}, described, notes


def _notes(quick: bool) -> list[str]:
    if quick:
        return ["Quick: the times are meaningless."]
    cache, copies = last_level_cache_bytes() >> 20, COLD_BYTES >> 20
    if cache >= copies:
        return [f"Copies of a layer take up to {copies} MiB, the L3 cache has {cache} MiB: weights may be warm."]
    return [
        f"Copies of a layer take up to {copies} MiB, the L3 cache has {cache} MiB: only the smallest layers are warm."
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def read_arguments() -> argparse.Namespace:
    """Return the command line's arguments; exit with a message for invalid ones."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.against",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("revision", metavar="REVISION", help="a commit or branch, such as HEAD~3")
    parser.add_argument("--operators", help="operators, comma-separated; default: all")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows with TEXT in their names")
    parser.add_argument("--threads", type=read_threads, default=(1,), help="1,2: once with one thread, once with two")
    parser.add_argument("--rounds", type=read_rounds, help=f"turns of each library per row; default: {Pace().rounds}")
    parser.add_argument("--isa", help="ORTOLAN_ISA for both libraries")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, few turns: a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    parser.add_argument(
        "--library", type=Path, metavar="FILE", help="REVISION's libortolan_ops.so, if it is already built"
    )
    arguments = parser.parse_args()
    if arguments.library is not None and not arguments.library.is_file():
        parser.error(f"--library: file {str(arguments.library)!r} does not exist")
    return arguments


def run(arguments: argparse.Namespace) -> Comparison:
    """Compare all rows and return the result."""
    works = chosen_works(arguments.operators, arguments.rows, arguments.quick)
    libraries, described, notes = find_sides(arguments)
    cpu = cpu_info()
    isa = arguments.isa or cpu["isa"]
    header = described | {
        "cpu": f"{cpu['name']} ({isa})",
        "onnxruntime": onnxruntime.__version__,
        "threads": ", ".join(f"{count} on CPUs {cpus_to_use(count)}" for count in arguments.threads),
        "command": shlex.join(["python", "-m", "tools.against", *sys.argv[1:]]),
    }
    result = Comparison(header, notes + _notes(arguments.quick))
    pace = QUICK_PACE if arguments.quick else Pace()
    if arguments.rounds is not None:
        pace = replace(pace, rounds=arguments.rounds)
    total = len(arguments.threads) * sum(len(work.rows) for work in works)

    def process(side: Side, threads: int) -> WorkerProcess:
        return WorkerProcess(libraries[side], cpus_to_use(threads), threads, arguments.isa)

    try:
        for row in compare(works, arguments.threads, process, pace):
            result.rows.append(row)
            _say(f"[{len(result.rows)}/{total}] {row}")
    except KeyboardInterrupt:
        result.interrupted = True
    result.rows.sort(key=lambda row: arguments.threads.index(row.threads))
    return result


def main() -> None:
    """Run the command."""
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that models in shared memory are deleted
    try:
        result = run(arguments)
    except OrtolanError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_ERROR)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(result)
    if arguments.json is not None:
        arguments.json.write_text(result.to_json())
    sys.exit(_INTERRUPTED if result.interrupted else _ERROR if result.failed else 0)


if __name__ == "__main__":
    main()

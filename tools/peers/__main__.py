"""Compare Ortolan with other runtimes on one machine: encoders, sparse encoders, decoders, layers, serving, sizes.

python -m tools.peers [SECTION …] [--peer NAME … | all | none] [--model NAME …] [--work NAME …]
    [--threads 1 2] [--seconds 20] [--sts sts-dev.csv] [--text wikitext2_valid.txt] [--json FILE.json]
    [--requests 1 4 16 64] [--arrivals 100] [--cache-type bfloat16 int8] [--gguf FILE.gguf]
    [--page PAGE.md] [--pictures FOLDER] [--compare OLD.json]
python -m tools.peers --from FILE.json [--page PAGE.md] [--pictures FOLDER] [--compare OLD.json]

On first use, each runtime is installed into an environment of its own in the cache folder: about 6 GB for all, and
llama.cpp and ik_llama.cpp are compiled. Runtimes whose licenses allow evaluation only (deepsparse) run only if --peer
names them. A runtime that cannot be installed or refuses a model is left out, and the result records why.

Each configuration is a process; all are pinned to the same CPUs and timed in turns. With --json, the rows of a model
are written as soon as they are complete for one number of threads. Models that the file already has with these threads
are not measured again, so an interrupted run can be continued, and one result can be made by several commands. Models
whose rows are older than Ortolan's code are measured again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from ortolan.benchmarks.encoder import PUBLISHED
from ortolan.engine.model import CacheType
from ortolan.errors import OrtolanError

from . import decoders, encoders, freshness, layers, serving, serving_table, sizes, sparse_encoders
from .comparison import ARRIVALS, CACHE_TYPES, REQUESTS, Job
from .environments import ASKED_FOR, REQUIREMENTS, make_environment
from .result import PeersResult
from .verdict import DECODERS, ENCODERS, LAYERS, SECTIONS, SERVING, SIZES, SPARSE_ENCODERS, changes, verdicts

_ALL, _NONE = "all", "none"
_INTERRUPTED = 130
MEASURE: Mapping[str, Callable[[Job, PeersResult], None]] = {
    ENCODERS: encoders.measure,
    SPARSE_ENCODERS: sparse_encoders.measure,
    DECODERS: decoders.measure,
    LAYERS: layers.measure,
    SERVING: serving.measure,
    SIZES: sizes.measure,
}
_MODELS: Mapping[str, Sequence[str]] = {
    ENCODERS: PUBLISHED,
    SPARSE_ENCODERS: tuple(sparse_encoders.MODELS),
    DECODERS: tuple(decoders.MODELS),
    LAYERS: tuple(layer.name for layer in layers.MODELS),
    SERVING: tuple(serving.MODELS),
    SIZES: (*sizes.MODELS, sizes.ONNX_MODEL),
}


def read_arguments() -> argparse.Namespace:
    """Return the command line's arguments; exit with a message for invalid ones."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sections = parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; default: all"
    )
    parser.add_argument(
        "--peer", nargs="+", default=[_ALL], choices=[*REQUIREMENTS, _ALL, _NONE], metavar="NAME",
        help=f"{', '.join(REQUIREMENTS)}; {_ALL}: not {', '.join(ASKED_FOR)}; {_NONE}: ONNX Runtime only",
    )  # fmt: skip
    parser.add_argument("--model", nargs="+", metavar="NAME", help="only these models")
    parser.add_argument("--work", nargs="+", metavar="NAME", help="only these works, by their names in the tables")
    parser.add_argument("--threads", type=int, nargs="+", action="extend", help="default: 1 2")
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        action="extend",
        metavar="N",
        help=f"{SERVING}: requests that come at once; default: {' '.join(map(str, REQUESTS))}",
    )
    parser.add_argument(
        "--arrivals",
        type=int,
        default=ARRIVALS,
        metavar="N",
        help=f"{SERVING}: requests that come at random times; default: {ARRIVALS}; 0: none",
    )
    parser.add_argument(
        "--cache-type",
        nargs="+",
        action="extend",
        choices=get_args(CacheType),
        metavar="TYPE",
        help=f"{SERVING}: types of the KV cache of Ortolan's engine, {' or '.join(get_args(CacheType))} or both; "
        f"default: {CACHE_TYPES[0]}",
    )
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE.gguf", help=f"{SERVING}: measure this model too; needs --text"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="time per kind of work, for all configurations together; at least three turns each",
    )
    parser.add_argument("--sts", type=Path, help="sts-dev.csv: tab-separated, columns 5 to 7 score and two sentences")
    parser.add_argument("--text", type=Path, help="UTF-8 text for perplexity; default: text sampled from the model")
    parser.add_argument("--note", action="append", default=[], help="a remark on the run, shown on the page")
    parser.add_argument(
        "--json", type=Path, metavar="FILE.json", help="write the result there, and skip models that it already has"
    )
    parser.add_argument("--page", type=Path, metavar="PAGE.md", help="write the Markdown page there")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write the pictures there, light and dark")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="print what changed since that result")
    parser.add_argument("--from", dest="data", type=Path, metavar="FILE.json", help="show this result; measure nothing")
    arguments = parser.parse_args()
    arguments.threads = arguments.threads or [1, 2]
    arguments.requests = arguments.requests or list(REQUESTS)
    arguments.cache_type = arguments.cache_type or list(CACHE_TYPES)
    for name in arguments.sections:
        if name not in SECTIONS:
            parser.error(str(argparse.ArgumentError(sections, f"expected {', '.join(SECTIONS)}; found {name!r}")))
    models = dict.fromkeys(name for section in arguments.sections or SECTIONS for name in _MODELS[section])
    if arguments.gguf is not None:
        models[arguments.gguf.stem] = None
    for name in arguments.model or []:
        if name not in models:
            parser.error(f"--model: expected one of {', '.join(models)}; found {name!r}")
    for option in ("sts", "text", "gguf", "compare", "data"):
        path = getattr(arguments, option)
        if path and not path.is_file():
            parser.error(f"--{'from' if option == 'data' else option}: file {str(path)!r} does not exist")
    for option in ("json", "page"):  # a missing folder should be reported before the long measurement
        path = getattr(arguments, option)
        if path and not os.access(path.parent, os.W_OK):
            parser.error(f"--{option}: expected a folder to write to, found {str(path.parent)!r}")
    if arguments.pictures and not arguments.pictures.is_dir():
        parser.error(f"--pictures: expected a folder, found {str(arguments.pictures)!r}")
    for option, least in (("threads", 1), ("requests", 1), ("arrivals", 0)):
        found = getattr(arguments, option)
        smallest = min(found) if isinstance(found, list) else found
        if smallest < least:
            parser.error(f"--{option}: expected {least} or more, found {smallest}")
    return arguments


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def begin(arguments: argparse.Namespace, command: str) -> PeersResult:
    """Return a new result, or the result that --json already has.

    Raises:
        OrtolanError: The file has the result of another CPU or other versions.
    """
    new = PeersResult([command], date.today().isoformat(), arguments.note)
    if arguments.json is None or not arguments.json.is_file():
        return new
    old = PeersResult.from_json(arguments.json.read_text(encoding="utf-8"))
    for what in ("cpu", "versions"):
        if getattr(old, what) != getattr(new, what):
            raise OrtolanError(
                f"{arguments.json} has another {what}: {getattr(old, what)}, now {getattr(new, what)};"
                " name another file"
            )
    old.commands += [one for one in new.commands if one not in old.commands]
    old.notes += [note for note in new.notes if note not in old.notes]
    return old


def environments(asked: Sequence[str], result: PeersResult) -> dict[str, str]:
    """Return the interpreter of each engine. `result.left_out` receives the engines that cannot be installed."""
    names = [] if _NONE in asked else list(asked)
    if _ALL in names:
        names = [name for name in REQUIREMENTS if name in names or name not in ASKED_FOR]
    found = {}
    for name in names:
        try:
            found[name] = make_environment(name, say)
        except OrtolanError as error:
            reason = f"{name}: {error}"
            say(f"left out: {reason}")
            if reason not in result.left_out:
                result.left_out.append(reason)
    return found


def measure(arguments: argparse.Namespace, result: PeersResult) -> None:
    """Measure the chosen sections and add their rows to the result."""
    with tempfile.TemporaryDirectory(prefix="ortolan-", ignore_cleanup_errors=True) as folder:
        job = Job(
            tuple(arguments.threads),
            arguments.seconds,
            environments(arguments.peer, result),
            Path(folder),
            say,
            arguments.sts,
            arguments.text,
            arguments.gguf,
            tuple(sorted(set(arguments.requests))),
            arguments.arrivals,
            tuple(dict.fromkeys(arguments.cache_type)),
            tuple(arguments.model) if arguments.model else None,
            tuple(arguments.work) if arguments.work else None,
            freshness.timed(result),
            lambda: save(result, arguments.json),
        )
        for section in arguments.sections or SECTIONS:
            MEASURE[section](job, result)


def save(result: PeersResult, path: Path | None) -> None:
    """Write the result atomically; do nothing without a path."""
    if path is not None:
        part = path.with_name(f"{path.name}.part")
        part.write_text(result.to_json(), encoding="utf-8")
        part.replace(path)


def seen_from(page: Path, path: Path | None) -> str | None:
    """Return the path relative to the page, for a link."""
    return None if path is None else Path(os.path.relpath(path, page.parent)).as_posix()


def table_of(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """Return a table for the terminal."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for cells in lines:
        table.add_row(*cells)
    return table


def show(result: PeersResult, arguments: argparse.Namespace) -> None:
    """Print the table of ratios and, with --compare, what changed."""
    console = Console(width=180, highlight=False)
    table = Table(
        title=f"{result.cpu} · {result.date}",
        title_justify="left",
        caption="Rows that miss their goal come first.",
    )
    for column in ("", "work", "threads", "Ortolan", "best peer of equal quality", "ratio", "goal"):
        table.add_column(column, justify="right" if column in ("threads", "ratio", "goal") else "left")
    for one in verdicts(result):
        table.add_row(
            one.model,
            one.work,
            "" if one.threads is None else str(one.threads),
            f"{one.ours.name}: {one.our_value:.4g} {one.unit}",
            "none" if one.peer is None else f"{one.peer.name}: {one.peer_value:.4g} {one.unit}",
            "" if one.ratio is None else f"{one.ratio:.2f}x",
            f"{'missed ' if one.missed else ''}{one.goal:g}x",
        )
    console.print(table)
    if served := [row for row in result.rows if row.section == SERVING]:
        console.print(table_of("Serving", serving_table.columns(), serving_table.lines(served)))
    for (section, model), rows in result.groups().items():
        if section == SIZES:
            console.print(table_of(f"Sizes: {model}", sizes.columns(), sizes.lines(rows)))
    for reason in result.left_out:
        console.print(f"left out: {reason}", markup=False)
    if arguments.compare:
        before = PeersResult.from_json(arguments.compare.read_text(encoding="utf-8"))
        for change in changes(before, result):
            console.print(
                f"{change.section}, {change.model}, {change.name}: {change.what}:"
                f" {change.before:.5g} -> {change.after:.5g} ({change.after / change.before:.3f}x)",
                markup=False,
            )


def main() -> None:
    """Run the command."""
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that workers are ended
    try:
        if arguments.page or arguments.pictures:
            from . import page, pictures  # imported before measuring, because imports fail without the extra `peers`
        if arguments.data:
            result = PeersResult.from_json(arguments.data.read_text(encoding="utf-8"))
        else:
            result = begin(arguments, shlex.join(["python", "-m", "tools.peers", *command_words(arguments)]))
            measure(arguments, result)
            save(result, arguments.json)
        if arguments.page:
            seen = [seen_from(arguments.page, path) for path in (arguments.data or arguments.json, arguments.pictures)]
            arguments.page.write_text(page.write(result, *seen), encoding="utf-8")
        if arguments.pictures:
            pictures.draw_all(result, arguments.pictures)
    except OrtolanError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    show(result, arguments)


def command_words(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments that determine the result, with file names instead of paths."""
    words = [*arguments.sections, "--peer", *arguments.peer]
    serves = SERVING in (arguments.sections or SECTIONS)
    of_serving = ("requests", "arrivals", "cache_type") if serves else ()
    for option in ("model", "work", "threads", "seconds", *of_serving):
        value = getattr(arguments, option)
        if value is not None:
            words += [f"--{option.replace('_', '-')}", *map(str, value if isinstance(value, list) else [f"{value:g}"])]
    for option in ("sts", "text", "gguf"):
        if path := getattr(arguments, option):
            words += [f"--{option}", path.name]
    return words


if __name__ == "__main__":
    main()

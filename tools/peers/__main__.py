"""Ortolan beside other runtimes, in one run on one machine: encoders, sparse encoders, decoders, layers.

python -m tools.peers [SECTION …] [--peer NAME … | all | none] [--model NAME …] [--work NAME …]
    [--threads 1 2] [--seconds 20] [--sts sts-dev.csv] [--text wikitext2_valid.txt] [--json FILE.json]
    [--page PAGE.md] [--pictures FOLDER] [--compare OLD.json]
python -m tools.peers --from FILE.json [--page PAGE.md] [--pictures FOLDER] [--compare OLD.json]

Each peer runs in an environment of its own, which is made in the cache when it is first asked for: all of them take
about 6 GB, and llama.cpp is compiled. Peers whose licences allow evaluation alone (deepsparse) run only where they are
named. A peer that cannot be installed or does not take a model is left out, and the result says why.

Forms of a model are processes, pinned to the same CPUs, that are told to run in turns. With --json each model's rows
are written as soon as they are there; models that the file has with those threads are not measured again. So an
interrupted run goes on, and a result may come from several commands.
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

from rich.console import Console
from rich.table import Table

from ortolan.errors import OrtolanError

from . import decoders, encoders, layers, sparse_encoders
from .comparison import Job
from .environments import ASKED_FOR, REQUIREMENTS, make_environment
from .result import PeersResult
from .verdict import DECODERS, ENCODERS, LAYERS, SECTIONS, SPARSE_ENCODERS, changes, verdicts

_ALL, _NONE = "all", "none"
_INTERRUPTED = 130
MEASURE: Mapping[str, Callable[[Job, PeersResult], None]] = {
    ENCODERS: encoders.measure,
    SPARSE_ENCODERS: sparse_encoders.measure,
    DECODERS: decoders.measure,
    LAYERS: layers.measure,
}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all"
    )
    parser.add_argument(
        "--peer", nargs="+", default=[_ALL], choices=[*REQUIREMENTS, _ALL, _NONE], metavar="NAME",
        help=f"{', '.join(REQUIREMENTS)}; {_ALL}: but for {', '.join(ASKED_FOR)}, the default; {_NONE}: ORT alone",
    )  # fmt: skip
    parser.add_argument("--model", nargs="+", metavar="NAME", help="those alone, by their names in the tables")
    parser.add_argument("--work", nargs="+", metavar="NAME", help="that alone, by its names in the tables")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each kind of work; three turns at least")
    parser.add_argument("--sts", type=Path, help="sts-dev.csv: tab-separated, columns 5 to 7 score and two sentences")
    parser.add_argument(
        "--text", type=Path, help="whose perplexity is measured, UTF-8; else it is drawn from the model"
    )
    parser.add_argument("--note", action="append", default=[], help="on how it was measured, for the page")
    parser.add_argument(
        "--json", type=Path, metavar="FILE.json", help="the result; what it has already is not repeated"
    )
    parser.add_argument("--page", type=Path, metavar="PAGE.md", help="write the page there")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the pictures there, light and dark")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="say what changed since that result")
    parser.add_argument("--from", dest="data", type=Path, metavar="FILE.json", help="shows this, and measures nothing")
    arguments = parser.parse_args()
    for name in arguments.sections:
        if name not in SECTIONS:
            parser.error(str(argparse.ArgumentError(sections, f"expected {', '.join(SECTIONS)}; found {name!r}")))
    for option in ("sts", "text", "compare", "data"):
        path = getattr(arguments, option)
        if path and not path.is_file():
            parser.error(f"--{'from' if option == 'data' else option}: file {str(path)!r} does not exist")
    for option in ("json", "page"):  # asked before measuring, which takes long
        path = getattr(arguments, option)
        if path and not os.access(path.parent, os.W_OK):
            parser.error(f"--{option}: expected a folder to write to, found {str(path.parent)!r}")
    if arguments.pictures and not arguments.pictures.is_dir():
        parser.error(f"--pictures: expected a folder, found {str(arguments.pictures)!r}")
    if min(arguments.threads) < 1:
        parser.error(f"--threads: expected 1 or more, found {min(arguments.threads)}")
    return arguments


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def begin(arguments: argparse.Namespace, command: str) -> PeersResult:
    """A new result, or what the file has already. Raises OrtolanError for one of another CPU or other versions."""
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
    """Engine -> interpreter. What cannot be installed is left out."""
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
    with tempfile.TemporaryDirectory(prefix="ortolan-", ignore_cleanup_errors=True) as folder:
        job = Job(
            tuple(arguments.threads),
            arguments.seconds,
            environments(arguments.peer, result),
            Path(folder),
            say,
            arguments.sts,
            arguments.text,
            tuple(arguments.model) if arguments.model else None,
            tuple(arguments.work) if arguments.work else None,
            result.timed(),
            lambda: save(result, arguments.json),
        )
        for section in arguments.sections or SECTIONS:
            MEASURE[section](job, result)


def save(result: PeersResult, path: Path | None) -> None:
    """Whole, or not at all."""
    if path is not None:
        part = path.with_name(f"{path.name}.part")
        part.write_text(result.to_json(), encoding="utf-8")
        part.replace(path)


def seen_from(page: Path, path: Path | None) -> str | None:
    """The path as the page links to it."""
    return None if path is None else Path(os.path.relpath(path, page.parent)).as_posix()


def show(result: PeersResult, arguments: argparse.Namespace) -> None:
    console = Console(width=180, highlight=False)
    table = Table(
        title=f"{result.cpu} · {result.date}", title_justify="left", caption="Rows that miss their goal come first."
    )
    for column in ("", "work", "threads", "ours", "best peer of equal quality", "ratio", "goal"):
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
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers must not stay
    try:
        if arguments.page or arguments.pictures:
            from . import page, pictures  # before measuring: they need what the extra `peers` installs
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
    """What decides on the numbers, with the names of files, not where they lie on one machine."""
    words = [*arguments.sections, "--peer", *arguments.peer]
    for option in ("model", "work", "threads", "seconds"):
        value = getattr(arguments, option)
        if value is not None:
            words += [f"--{option}", *map(str, value if isinstance(value, list) else [f"{value:g}"])]
    for option in ("sts", "text"):
        if path := getattr(arguments, option):
            words += [f"--{option}", path.name]
    return words


if __name__ == "__main__":
    main()

"""Output of the command line: results on stdout; errors, steps and progress on stderr."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from .progress import Progress, no_progress

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_WIDTH = 10_000  # width of tables in a file or pipe: names must not be wrapped, so that grep finds them
_WIDEST = 120  # upper limit for the width of text, because longer lines are hard to read
_FIRST_LINE_SECONDS, _LINE_SECONDS = 10, 30  # between lines of progress without a terminal


def print_result(result: Any, as_json: bool, verbose: int = 0) -> None:
    """Print a result as JSON or text: its summary, its details if `verbose`, or else __rich__ or __str__."""
    if as_json:
        typer.echo(result.to_json())
    elif hasattr(result, "details"):
        # print, because typer.echo ignores stdout's error handler for characters that the encoding lacks.
        print(result.details(text_width(), table_width()) if verbose else result.summary(text_width()))
    elif hasattr(result, "__rich__"):
        make_console().print(result)
    else:
        typer.echo(str(result))


def text_width() -> int:
    """Return the columns of text on stdout: those of the terminal or COLUMNS, else 80."""
    return min(shutil.get_terminal_size((80, 24)).columns, _WIDEST)


def table_width() -> int | None:
    """Return the columns of tables on stdout; None if it is not a terminal and COLUMNS is not set."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else None


def print_error(message: str) -> None:
    """Print an error on stderr."""
    from rich.text import Text

    make_console(stderr=True).print(Text(f"ortolan: {message}", style="bold red"), soft_wrap=True)


def print_step(line: str) -> None:
    """Print a line on stderr; while a progress bar is shown, sys.stderr puts the line above it."""
    print(line, file=sys.stderr)


def make_console(stderr: bool = False) -> Console:
    """Return a console for tables, wide enough for whole names if it is not a terminal."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, _PIPED_WIDTH)
    return console


def progress_lines() -> Progress:
    """Return a callback progress(stage, done, total) that prints a line on stderr every 30 s, the first after 10 s."""
    due = time.monotonic() + _FIRST_LINE_SECONDS

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            typer.echo(f"{stage}: {done} of {total}" if total else stage, err=True)
            due = time.monotonic() + _LINE_SECONDS

    return tell


@contextmanager
def progress_bar(verbose: int = 0, quiet: bool = False) -> Iterator[Progress]:
    """Yield a callback progress(stage, done, total) that moves a bar on stderr.

    If stderr is not a terminal, it prints a line from time to time. It does nothing with `quiet`, or with `verbose`,
    which logs the steps in lines.
    """
    if verbose and quiet:
        raise typer.BadParameter("--quiet and --verbose exclude each other: give one of them")
    if verbose or quiet:
        yield no_progress
        return
    if not sys.stderr.isatty():
        yield progress_lines()
        return
    from rich import progress as rich_progress

    columns = (
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
    )
    with rich_progress.Progress(*columns, console=make_console(stderr=True), transient=True) as bar:
        tasks: dict[str, rich_progress.TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total or None)
            for name, task in tasks.items():
                bar.update(task, visible=name == stage)
            bar.update(tasks[stage], completed=done, total=total or None)

        yield advance

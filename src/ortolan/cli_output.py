"""What commands of the command line print: results to stdout, errors, steps and progress to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from .progress import Progress, no_progress

if TYPE_CHECKING:
    from rich.console import Console

# A table in a file or a pipe has no window to fit in: no name is broken, so that it can be searched for.
_PIPED_WIDTH = 10_000


def print_result(result: Any, as_json: bool) -> None:
    """JSON as it is, or what the result's __rich__ or __str__ makes of it."""
    if as_json:
        typer.echo(result.to_json())
    elif hasattr(result, "__rich__"):
        make_console().print(result)
    else:
        typer.echo(str(result))


def print_error(message: str) -> None:
    from rich.text import Text

    make_console(stderr=True).print(Text(f"ortolan: {message}", style="bold red"), soft_wrap=True)


def print_step(line: str) -> None:
    """Above the progress bar, where there is one: while it is shown, it is sys.stderr that knows of it."""
    print(line, file=sys.stderr)


def make_console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, _PIPED_WIDTH)
    return console


@contextmanager
def progress_bar(verbose: int = 0) -> Iterator[Progress]:
    """A callback progress(stage, done, total) that moves a bar on stderr; silent where that is no terminal, or where
    the steps are told in lines."""
    if verbose or not sys.stderr.isatty():
        yield no_progress
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

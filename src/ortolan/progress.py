"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]  # progress(stage, done, total)


def no_progress(stage: str, done: int, total: int) -> None:
    """Tells nobody."""


@contextmanager
def raising_unchanged(progress: Progress) -> Iterator[Progress]:
    """The same callback; what it raises leaves the block as it is, whatever wraps it inside: callers cancel so."""
    raised: list[Exception] = []

    def tell(stage: str, done: int, total: int) -> None:
        try:
            progress(stage, done, total)
        except Exception as error:
            raised.append(error)
            raise

    try:
        yield tell
    except Exception:
        if raised:
            raise raised[0] from raised[0].__cause__
        raise

"""A temporary folder for unfinished files."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ortolan.errors import OutputError

_STALE_SECONDS = 24 * 3600


@contextmanager
def work_folder(target: Path | None) -> Iterator[Path]:
    """Make a temporary folder beside the output, so that finished files can be renamed. It is always removed.

    Raises:
        OutputError: The folder cannot be created.
    """
    parent = None if target is None else target.absolute().parent
    prefix = "ortolan-" if target is None else _prefix(target)
    if parent is not None:
        _remove_stale(parent, prefix, _STALE_SECONDS)
    try:
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        reason = f"cannot create a temporary folder in {str(parent or tempfile.gettempdir())!r}: {error.strerror}"
        raise OutputError(reason if target is None else f"cannot write {str(target)!r}: {reason}") from error
    with folder as name:
        yield Path(name)


def remove_abandoned(target: Path) -> None:
    """Remove the folders that killed runs left beside an output. The caller must know that no other run writes it."""
    _remove_stale(target.absolute().parent, _prefix(target), 0)


def _prefix(target: Path) -> str:
    return f".{target.name}.ortolan-"


def _remove_stale(parent: Path, prefix: str, seconds: float) -> None:
    """Remove the folders that killed runs left behind: those unchanged for some time."""
    with suppress(OSError):
        for folder in parent.iterdir():
            if folder.name.startswith(prefix):
                written = max(file.stat().st_mtime for file in (folder, *folder.rglob("*")))
                if time.time() - written >= seconds:
                    shutil.rmtree(folder)

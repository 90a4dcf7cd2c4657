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
    prefix = "ortolan-" if target is None else f".{target.name}.ortolan-"
    if parent is not None:
        _remove_stale(parent, prefix)
    try:
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        reason = f"cannot create a temporary folder in {str(parent or tempfile.gettempdir())!r}: {error.strerror}"
        raise OutputError(reason if target is None else f"cannot write {str(target)!r}: {reason}") from error
    with folder as name:
        yield Path(name)


def _remove_stale(parent: Path, prefix: str) -> None:
    """Remove the folders that killed runs left behind: those unchanged for a day."""
    with suppress(OSError):
        for folder in parent.iterdir():
            if folder.name.startswith(prefix):
                written = max(file.stat().st_mtime for file in (folder, *folder.rglob("*")))
                if time.time() - written > _STALE_SECONDS:
                    shutil.rmtree(folder)

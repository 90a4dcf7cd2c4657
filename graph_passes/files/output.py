"""Output paths: checks before work begins, and writes after which either the old or the new file is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ortolan.errors import OutputError

from .work_folder import work_folder


def check_parent(output: Path) -> None:
    """Check that the folder of an output exists and can be written to.

    Raises:
        OutputError: The folder is missing or not writable.
    """
    parent = output.absolute().parent
    if not parent.is_dir():
        raise OutputError(f"the folder of output {str(output)!r} does not exist; create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"the folder of output {str(output)!r} cannot be written to")


def check_file(output: str | os.PathLike[str], example: str = "") -> None:
    """Check that a file can be written, or replaced, at a path.

    example: a file name that the error suggests if the path is a folder.

    Raises:
        OutputError: The path is a folder or a special file, or its folder does not exist or cannot be written to.
    """
    path = Path(output)
    if path.is_dir():
        such_as = f" such as {str(path / example)!r}" if example else ""
        raise OutputError(f"output {str(path)!r} is a folder, expected a file name{such_as}")
    check_parent(path)
    if path.exists() and not path.is_file():
        raise OutputError(f"output {str(path)!r} is not a regular file; choose another output")


def check_new_folder(output: Path, because: str, suffix: str, otherwise: str = "") -> None:
    """Check that a folder can be created at a path. The path may already be an empty folder.

    Args:
        output: The path.
        because: Why the output is a folder, for errors.
        suffix: Suffix of file names that users may give by mistake, such as ".onnx".
        otherwise: An alternative to giving a folder, for errors.

    Raises:
        OutputError: The path is a file or a folder that is not empty, or its folder cannot be written to.
    """
    if output.exists() and not output.is_dir():
        raise OutputError(f"output {str(output)!r} is a file, but {because}; give the name of a new folder")
    if output.suffix == suffix and not output.exists():
        raise OutputError(
            f"output {str(output)!r} is named like a file, but {because}; give a folder's name{otherwise}"
        )
    if output.exists() and any(output.iterdir()):
        raise OutputError(f"output folder {str(output)!r} is not empty; remove it, or choose another one")
    check_parent(output)


@contextmanager
def new_file(output: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a file to write. It replaces `output` when the with statement ends without an error.

    Raises:
        OutputError: The file cannot be written. The old file is unchanged.
    """
    path = Path(output)
    try:
        with work_folder(path) as folder:
            written = folder / path.name
            with written.open("w+b") as file:
                yield file
            sync(written)
            os.replace(written, path)
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def write_text(output: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file, or replace it.

    Raises:
        OutputError: The file cannot be written. The old file is unchanged.
    """
    with new_file(output) as file:
        file.write(text.encode())


def move_folder_into_place(written: Path, output: Path) -> None:
    """Rename a complete folder to `output`, where there may be an empty folder.

    Raises:
        OutputError: The folder cannot be written.
    """
    try:
        for file in written.rglob("*"):
            if file.is_file():
                sync(file)
        os.rename(written, output)
    except OSError as error:
        raise OutputError(f"cannot write {str(output)!r}: {error.strerror}") from error


def sync(file: Path) -> None:
    """Flush a file to disk, because otherwise a later rename may reach the disk before the file's contents."""
    with open(file, "r+b") as stream:
        os.fsync(stream.fileno())

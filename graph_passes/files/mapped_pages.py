"""Gives back the pages of mapped files while a large model is optimized, so that they do not count as its memory.

ONNX Runtime maps the weights of a large model, and one run touches all of them. The system takes such pages back when
it runs out of memory, but until then they count: 2 GB of weights are 2 GB of resident size, in each of two models that
are compared. So a thread looks every few milliseconds how many pages of files are resident, and above a limit asks the
system to take back those of the model, as it would by itself. Nothing can be lost by that, also where a file is
unmapped meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

_LIMIT = 192 << 20  # bytes of file pages, besides those that are resident when the model comes (libraries')
_SECONDS = 0.005
_MADV_PAGEOUT = 21
_STATM, _MAPS = Path("/proc/self/statm"), Path("/proc/self/maps")
_MAPPING = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ +(/.*)")


@contextmanager
def bounded_pages(files: Collection[Path], folder: Path) -> Iterator[None]:
    """Inside, few pages of these files, and of those in the folder, are resident at a time.

    Does nothing without files, or where the system is not Linux.
    """
    if not (files and _MAPS.exists()):
        yield
        return
    names, inside, done = {str(file) for file in files}, f"{folder.resolve()}/", threading.Event()
    most = _resident_pages() * mmap.PAGESIZE + _LIMIT
    thread = threading.Thread(target=_watch, args=(names, inside, most, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


_pauses: list[None] = []  # one for each who needs the pages


@contextmanager
def pages_stay() -> Iterator[None]:
    """Inside, no pages are given back: for what is timed."""
    _pauses.append(None)
    try:
        yield
    finally:
        _pauses.pop()


def _watch(names: Collection[str], folder: str, most: int, done: threading.Event) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    while not done.wait(_SECONDS):
        if not _pauses and _resident_pages() * mmap.PAGESIZE > most:
            for start, stop in _mappings(names, folder):
                madvise(start, stop - start, _MADV_PAGEOUT)  # an older system refuses, and the pages stay


def _resident_pages() -> int:
    """Of mapped files."""
    return int(_STATM.read_bytes().split()[2])


def _mappings(names: Collection[str], folder: str) -> Iterator[tuple[int, int]]:
    """The addresses, from and to, of the files."""
    for line in _MAPS.read_bytes().splitlines():
        found = _MAPPING.fullmatch(line)
        if found is not None:
            path = found[3].decode(errors="surrogateescape").removesuffix(" (deleted)")
            if path in names or path.startswith(folder):
                yield int(found[1], 16), int(found[2], 16)

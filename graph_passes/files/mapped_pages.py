"""Releases pages of mapped files while a large model is optimized, so that they do not count as the process's memory.

ONNX Runtime maps the weights of a large model, and a run touches all of them. The system reclaims such pages only under
memory pressure. Until then they count as resident memory, for both of the compared models. So a thread checks every few
milliseconds how many file pages are resident. Above a limit, it asks the system to reclaim the pages of the model
files. This is always safe: the system reads pages again when they are needed. The limit exceeds the largest matrix: a
product of few rows reads a few columns in all rows of weights, then the next columns of the same pages.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

_LIMIT = 192 << 20  # bytes of file pages beyond the largest tensor and those resident at the start (libraries)
_SECONDS = 0.005
_MADV_PAGEOUT = 21
_STATM, _MAPS = Path("/proc/self/statm"), Path("/proc/self/maps")
_MAPPING = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ +(/.*)")


@contextmanager
def bounded_pages(files: Collection[Path], folder: Path, largest: int) -> Iterator[None]:
    """While the with statement runs, release resident pages of these files and of the files in the folder.

    largest: Bytes of the largest tensor.

    Do nothing if there are no files, or on systems other than Linux.
    """
    if not (files and _MAPS.exists()):
        yield
        return
    names, inside, done = {str(file) for file in files}, f"{folder.resolve()}/", threading.Event()
    limit = _resident_pages() * mmap.PAGESIZE + largest + _LIMIT
    thread = threading.Thread(target=_watch, args=(names, inside, limit, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


_pauses: list[None] = []  # one entry per active pages_stay()


@contextmanager
def pages_stay() -> Iterator[None]:
    """Release no pages inside the with statement. Used while models are timed."""
    _pauses.append(None)
    try:
        yield
    finally:
        _pauses.pop()


def _watch(names: Collection[str], folder: str, limit: int, done: threading.Event) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    while not done.wait(_SECONDS):
        if not _pauses and _resident_pages() * mmap.PAGESIZE > limit:
            for start, stop in _mappings(names, folder):
                madvise(start, stop - start, _MADV_PAGEOUT)  # has no effect on older systems


def _resident_pages() -> int:
    """Return the number of resident pages of mapped files."""
    return int(_STATM.read_bytes().split()[2])


def _mappings(names: Collection[str], folder: str) -> Iterator[tuple[int, int]]:
    """Yield the address ranges of the files."""
    for line in _MAPS.read_bytes().splitlines():
        found = _MAPPING.fullmatch(line)
        if found is not None:
            path = found[3].decode(errors="surrogateescape").removesuffix(" (deleted)")
            if path in names or path.startswith(folder):
                yield int(found[1], 16), int(found[2], 16)

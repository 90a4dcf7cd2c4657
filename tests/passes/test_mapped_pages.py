"""Releasing the pages of memory-mapped files."""

from __future__ import annotations

import ctypes
import mmap
import time
from pathlib import Path

import numpy as np
import pytest

from ortolan.graph_passes.files.mapped_pages import bounded_pages, pages_stay

BYTES = 32 << 20
ALWAYS = -(1 << 50)  # makes a limit that is always exceeded


def resident(path: Path) -> int:
    """Return how many bytes of the file are resident in this process."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.fixture
def mapped(tmp_path: Path) -> tuple[Path, np.memmap]:
    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs Linux")
    path = tmp_path / "weights.data"
    path.write_bytes(np.arange(BYTES // 4, dtype=np.int32).tobytes())
    array = np.memmap(path, np.int32, mode="c")  # private and writable, as ONNX Runtime maps it
    page = ctypes.c_void_p(array.ctypes.data)
    if ctypes.CDLL(None).madvise(page, ctypes.c_size_t(mmap.PAGESIZE), 21):
        pytest.skip("this system takes no pages back when it is asked to")
    return path, array


def wait_until_small(path: Path) -> int:
    for _ in range(200):
        if resident(path) < BYTES // 8:
            break
        time.sleep(0.02)
    return resident(path)


@pytest.mark.parametrize("by_folder", [True, False])
def test_pages_are_given_back(mapped: tuple[Path, np.memmap], by_folder: bool) -> None:
    path, array = mapped
    total = int(array.sum(dtype=np.int64))
    assert resident(path) > BYTES // 2
    other = path.with_name("other")
    other.mkdir()
    with bounded_pages([other / "none"] if by_folder else [path], path.parent if by_folder else other, ALWAYS):
        assert wait_until_small(path) < BYTES // 8
        assert int(array.sum(dtype=np.int64)) == total


def test_pages_below_the_limit_stay(mapped: tuple[Path, np.memmap]) -> None:
    path, array = mapped
    with bounded_pages([path], path.parent, BYTES):
        array.sum()
        time.sleep(0.2)
        assert resident(path) > BYTES // 2


def test_what_was_written_stays(mapped: tuple[Path, np.memmap]) -> None:
    path, array = mapped
    array[:: mmap.PAGESIZE // 4] = -1
    with bounded_pages([path], path.parent, ALWAYS):
        time.sleep(0.2)
        assert (array[:: mmap.PAGESIZE // 4] == -1).all()
        assert array[1] == 1


def test_other_files_stay(mapped: tuple[Path, np.memmap]) -> None:
    path, array = mapped
    array.sum()
    other = path.with_name("other")
    other.mkdir()
    with bounded_pages([other / "none"], other, ALWAYS):
        time.sleep(0.2)
        assert resident(path) > BYTES // 2


def test_what_is_timed_keeps_its_pages(mapped: tuple[Path, np.memmap]) -> None:
    path, array = mapped
    with bounded_pages([path], path.parent, ALWAYS):
        with pages_stay():
            time.sleep(0.05)
            array.sum()
            time.sleep(0.2)
            assert resident(path) > BYTES // 2
        assert wait_until_small(path) < BYTES // 8


def test_without_files_there_is_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.Thread.start", lambda self: pytest.fail("a thread was started"))
    with bounded_pages([], tmp_path, ALWAYS):
        pass

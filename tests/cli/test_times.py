"""`ortolan times`: shows and deletes the kept times of layers. The doctor shows them too."""

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from ortolan import doctor, times_file
from ortolan.times_file import DAYS, MOST_BYTES, KeptTimes, machine, read_times, times_path, today, write_times

REST = "2\t8x64x64\tFLOAT\t0.00\t0.00\tbias, 4 copies: int8"
TODAY = today().isoformat()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))


def test_shows_and_clears(invoke):
    assert invoke("times").stdout.startswith("no times of layers are kept in ")
    assert invoke("times", "--clear").exit_code == 0
    times = KeptTimes(TODAY, {"original": 1.0, "int8": 0.5})
    write_times(times_path(), {f"{machine()}\t{REST}": times, f"another\t{REST}": times})
    found = json.loads(invoke("times", "--json").stdout)
    assert found == {"path": str(times_path()), "used": 1, "others": 1, "oldest": TODAY}
    check = doctor.check_times()
    assert (check.status, check.advice) == ("ok", "to measure again: ortolan times --clear")
    assert f"times of 1 layer, 1 of other CPUs or versions, from {TODAY} on" in check.detail
    assert "no times" in invoke("times", "--clear").stdout
    assert not times_path().exists()
    times_path().mkdir()
    result = invoke("times", "--clear")
    assert result.exit_code == 1 and "cannot delete" in result.stderr


def test_old_lines_are_dropped_and_the_size_is_limited(tmp_path, monkeypatch):
    file = tmp_path / "times.txt"
    ms = {f"format {number}": 1.0 for number in range(400)}
    write_times(file, {f"{number}\t{REST}": KeptTimes(TODAY, ms) for number in range(400)})
    assert file.stat().st_size <= MOST_BYTES
    assert 100 < len(read_times(file)) < 400
    later = today() + times_file.datetime.timedelta(DAYS + 1)
    monkeypatch.setattr(times_file, "today", lambda: later)
    assert read_times(file) == {}


def _write(path: str, number: int) -> None:
    file = Path(path)
    for turn in range(20):
        line = {f"{number} {turn}\t{REST}": KeptTimes(TODAY, {"original": 1.0, "int8": 0.5})}
        write_times(file, read_times(file) | line)


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path):
    file = tmp_path / "times.txt"
    with ProcessPoolExecutor(3) as pool:
        list(pool.map(_write, [str(file)] * 3, range(3)))
    assert len(file.read_text().splitlines()) == 1 + len(read_times(file)) >= 21
    assert [path.name for path in tmp_path.iterdir()] == ["times.txt"]

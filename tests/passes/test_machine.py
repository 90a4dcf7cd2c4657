"""The CPUs and memory that this process may use, and memory limits for copies of weights."""

from __future__ import annotations

import os

import pytest

from ortolan.graph_passes.measure import machine, timing


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """Return a function that writes files of a fake cgroup."""
    monkeypatch.setattr(machine, "_own_cgroups", lambda: [tmp_path])

    def put(**files):
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(text)

    return put


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu__max": "150000 100000\n"}, 1),
        ({"cpu__max": "50000 100000\n"}, 1),
        ({"cpu__cfs_quota_us": "200000\n", "cpu__cfs_period_us": "100000\n"}, 2),
        ({"cpu__max": "max 100000\n"}, 64),
        ({"cpu__cfs_quota_us": "-1\n", "cpu__cfs_period_us": "100000\n"}, 64),
        ({}, 64),
    ],
)
def test_cpus_follow_affinity_and_cgroup(cgroup, monkeypatch, files, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    cgroup(**files)
    assert machine.usable_cpus() == cpus
    assert 1 <= machine.default_threads() <= cpus


def test_free_memory_follows_the_cgroup(cgroup):
    free = machine.free_memory()
    assert free > 0
    cgroup(memory__max="3000000\n", memory__current="1000000\n")
    assert machine.free_memory() == 2000000
    cgroup(memory__stat="anon 300000\ninactive_file 400000\n")  # the kernel can free pages of inactive files
    assert machine.free_memory() == 2400000
    cgroup(memory__max="max\n")
    assert machine.free_memory() > 2000000


@pytest.mark.parametrize("file", ["memory__max", "memory__limit_in_bytes"])
def test_usable_memory_follows_the_cgroup(cgroup, file):
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.usable_memory() == physical
    cgroup(**{file: "3000000\n"})
    assert machine.usable_memory() == 3000000
    for unlimited in ("max\n", "9223372036854771712\n"):
        cgroup(**{file: unlimited})
        assert machine.usable_memory() == physical


def test_copies_of_weights_share_an_eighth_of_free_memory(monkeypatch):
    for module in (machine, timing):
        monkeypatch.setattr(module, "last_level_cache_bytes", lambda: 300 * 2**20)
    monkeypatch.setattr(timing, "cold_budget", lambda: 2**30)
    for size in (2**10, 2**20, 2**24, 2**26):
        copies = timing.copies_to_stay_cold(size)
        assert copies == 1 or copies * size * timing.MAX_CANDIDATES <= 2**30
    assert timing.copies_to_stay_cold(2**29) == 1  # the layer is larger than the memory for one candidate
    assert timing.describe_cold_copies() == (
        "Copies of weights take up to 64 MiB per candidate (all: 1/8 of free memory); L3 cache 300 MiB. "
        "Weights may be warm."
    )
    monkeypatch.setattr(timing, "last_level_cache_bytes", lambda: 2**20)
    assert timing.copies_to_stay_cold(2**20) == 4 and "warm" not in timing.describe_cold_copies()


def test_a_machine_is_busy_where_far_more_runs_than_it_has_cpus(monkeypatch):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    for load, busy in ((11.0, False), (13.0, True)):
        monkeypatch.setattr(machine.os, "getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        assert machine.is_busy() is busy
    monkeypatch.delattr(machine.os, "getloadavg", raising=False)
    assert machine.is_busy() is False

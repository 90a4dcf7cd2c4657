"""CPUs and memory that this process may use, within its CPU affinity and cgroup limits."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_UNKNOWN_MEMORY = 4 * 2**30
_KIB = 1024
_BUSY_LOAD = 3  # limit for runnable processes per CPU, averaged over the last minute


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, by its affinity and the CPU limit of its cgroup; at least 1.

    Systems without affinity (macOS) count all CPUs.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _cgroup_cpus()
    return allowed if limit is None else max(1, min(allowed, int(limit)))


def is_busy() -> bool:
    """Return whether far more processes than CPUs are running, so that times are unreliable."""
    if not hasattr(os, "getloadavg"):
        return False
    return os.getloadavg()[0] > _BUSY_LOAD * (os.cpu_count() or 1)


def default_threads() -> int:
    """Return the default number of threads of a session: one per core that this process may use.

    SMT siblings count once.
    """
    if not hasattr(os, "sched_getaffinity"):
        return usable_cpus()
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return max(1, min(len(cores), usable_cpus()))


def _cgroup_cpus() -> float | None:
    """Return the smallest CPU limit of this cgroup and its parents, in CPUs; None if there is no limit."""
    limits = []
    for folder in _own_cgroups():
        with suppress(OSError, ValueError):  # cgroup version 2
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                limits.append(int(quota) / int(period))
        with suppress(OSError, ValueError):  # cgroup version 1
            quota_v1 = int((folder / "cpu.cfs_quota_us").read_text())
            if quota_v1 > 0:
                limits.append(quota_v1 / int((folder / "cpu.cfs_period_us").read_text()))
    return min(limits, default=None)


def _own_cgroups() -> list[Path]:
    """Return the folders of this process's cgroup and its parents, for each hierarchy."""
    folders: list[Path] = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            roots = [_CGROUPS] if not controllers else [_CGROUPS / controllers, _CGROUPS / controllers.split(",")[0]]
            own = Path(path.lstrip("/"))
            folders += [root / part for root in roots for part in (own, *own.parents)]
    return list(dict.fromkeys(folders))


def usable_memory() -> int:
    """Return the bytes of the machine's memory, or of the smallest limit of this cgroup and its parents if smaller."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _own_cgroups():
        for limit in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # the file holds "max" if there is no limit
                found.append(int((folder / limit).read_text()))
    return min(found)


def free_memory() -> int:
    """Return the bytes that this process can still allocate without swapping, or 4 GiB if unknown."""
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(_KIB * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    for folder in _own_cgroups():
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(OSError, ValueError):  # the file holds "max" if there is no limit
                taken = int((folder / used).read_text()) - _file_cache(folder)
                found.append(max(int((folder / limit).read_text()) - max(taken, 0), 0))
    return min(found, default=_UNKNOWN_MEMORY)


def _file_cache(cgroup: Path) -> int:
    """Return the bytes of inactive file pages, which count as used memory but can be dropped at any time."""
    with suppress(OSError, ValueError):
        fields = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return 0


@functools.cache
def cold_budget() -> int:
    """Return the bytes for all weight copies timed together: an eighth of the memory free at the first call."""
    return free_memory() // 8


def last_level_cache_bytes() -> int:
    """Return the size of the L3 cache, or 32 MiB if it is not known."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return 32 * 2**20

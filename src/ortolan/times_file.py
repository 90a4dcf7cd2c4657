"""The file of measured layer times. The search writes and reads it, the execution provider reads it.

The first line is a header. Each other line has columns separated by tabs: the date, the machine, the threads, the sizes
`ROWSxINPUTSxOUTPUTS`, the type of activations, the fraction of zero weights and of zero blocks of 4x1, other
properties, and then `name=ms` for each format. Names that begin with "ort " are ONNX Runtime's own operators.
ops/provider/kept_times.cc reads the same lines.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from .cache_folder import default_cache_dir
from .errors import OutputError
from .session import cpu_info

FILE = "layer-times.txt"
DAYS = 90  # older times are neither used nor kept; equals kMostDays in ops/provider/kept_times.h
MOST_BYTES = 1 << 20  # the oldest lines are dropped beyond this size; equals kMostBytes there
_HEADER = "ortolan layer times 1"
_COLUMNS = 8  # before the times


@dataclass(frozen=True)
class KeptTimes:
    """Milliseconds of one layer's formats, by name, and the date of the measurement."""

    date: str
    ms: Mapping[str, float]

    @property
    def days(self) -> int:
        """The age in days; negative if the clock was wrong."""
        return (today() - datetime.date.fromisoformat(self.date)).days


def times_path() -> Path:
    """Return the path of the file in the cache folder."""
    return default_cache_dir() / FILE


def machine() -> str:
    """Return what times depend on: CPU, kernels and versions. ops/provider/kept_times.cc makes the same text."""
    import importlib.metadata

    import onnxruntime

    cpu = cpu_info()
    versions = (f"onnxruntime {onnxruntime.__version__}", f"ortolan {importlib.metadata.version('ortolan')}")
    return "; ".join(" ".join(part.split()) for part in (cpu["name"], cpu["microarchitecture"], cpu["isa"], *versions))


def today() -> datetime.date:
    """Return the date in UTC."""
    return datetime.datetime.now(datetime.UTC).date()


def read_times(path: Path) -> dict[str, KeptTimes]:
    """Return times by the columns of the case, without old and damaged lines; none if the file is missing."""
    found = {}
    with suppress(OSError):
        with path.open("rb") as file:
            lines = file.read(MOST_BYTES + 1).decode("utf-8", "replace").split("\n")
        for line in lines[1:] if lines[0] == _HEADER else []:
            date, *columns = line.split("\t")
            with suppress(ValueError):
                times = KeptTimes(date, dict(map(_read_time, columns[_COLUMNS - 1 :])))
                if 0 <= times.days <= DAYS and times.ms:
                    found["\t".join(columns[: _COLUMNS - 1])] = times
    return found


def write_times(path: Path, table: Mapping[str, KeptTimes]) -> None:
    """Replace the file. If it cannot be written, the next search measures again."""
    lines, size = [], len(_HEADER) + 1
    for case, times in sorted(table.items(), key=lambda item: item[1].date, reverse=True):
        line = "\t".join([times.date, case, *(f"{name}={ms:.6g}" for name, ms in times.ms.items())])
        size += len(line.encode()) + 1
        if size <= MOST_BYTES:
            lines.append(line)
    from ortolan.graph_passes.files.output import write_text

    with suppress(OSError, OutputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "\n".join([_HEADER, *lines]) + "\n")


def clear_times() -> None:
    """Delete the file in the cache folder. Raises OutputError if it cannot be deleted."""
    path = times_path()
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot delete {str(path)!r}: {error.strerror or error}") from error


@dataclass(frozen=True)
class TimesSummary:
    """Contents of the file. `print` it, or call `to_json()`.

    Attributes:
        used: The number of layers that were timed with this CPU and these versions.
        others: The number of layers that were timed with others.
        oldest: The date of the oldest time; None: the file has no times.
    """

    path: str
    used: int
    others: int
    oldest: str | None

    def to_json(self) -> str:
        """Return JSON: path, used, others, oldest."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        if self.oldest is None:
            return f"no times of layers are kept in {self.path}"
        from ortolan.graph_passes.report.lines import count

        others = f", {self.others} of other CPUs or versions" if self.others else ""
        return f"times of {count(self.used, 'layer')}{others}, from {self.oldest} on, in {self.path}"


def kept_times() -> TimesSummary:
    """Return what the file in the cache folder has."""
    table = read_times(times_path())
    used = sum(case.startswith(machine() + "\t") for case in table)
    oldest = min((times.date for times in table.values()), default=None)
    return TimesSummary(str(times_path()), used, len(table) - used, oldest)


def _read_time(text: str) -> tuple[str, float]:
    name, ms = text.split("=")
    time = float(ms)
    if not (name and math.isfinite(time) and time > 0):
        raise ValueError(text)
    return name, time

"""Results of one machine in one file, to attach to an issue (`ortolan bench --share FILE`)."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, Protocol

from ..session import cpu_info, package_versions


class Result(Protocol):
    """The result of a benchmark."""

    def to_json(self) -> str:
        """Return the result as JSON."""


def share_json(results: Mapping[str, Result]) -> str:
    """Return the results as JSON, with only the machine's properties listed here.

    {"date", "cpu": ortolan.cpu_info(), "cpu_model", "cores", "machine", "system", "versions", "benchmarks": {name:
    result}}. cpu_model has family, model and stepping, because virtual machines often hide the CPU's name. Each result
    is its `to_json()` without "cpu" and "versions".
    """
    measured: dict[str, Any] = {}
    for name, result in results.items():
        found = json.loads(result.to_json())
        measured[name] = {key: value for key, value in found.items() if key not in ("cpu", "versions")}
    document = {
        "date": date.today().isoformat(),
        "cpu": cpu_info(),
        "cpu_model": _cpu_model(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "versions": package_versions(),
        "benchmarks": measured,
    }
    return json.dumps(document, indent=2)


def _cpu_model() -> dict[str, int]:
    """Return family, model and stepping of the first CPU; empty where Linux does not list them."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = dict(line.replace("\t", "").split(":", 1) for line in first.splitlines() if ":" in line)
    keys = {"family": "cpu family", "model": "model", "stepping": "stepping"}
    return {name: int(pairs[key]) for name, key in keys.items() if pairs.get(key, "").strip().isdigit()}

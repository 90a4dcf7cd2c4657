"""Results of one machine in one file, to attach to an issue (`ortolan bench --share FILE`)."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from typing import Any, Protocol

from ..session import cpu_info, package_versions


class Result(Protocol):
    """The result of a benchmark."""

    def to_json(self) -> str:
        """Return the result as JSON."""


def share_json(results: Mapping[str, Result]) -> str:
    """Return the results as JSON, with only the machine's properties listed here.

    {"cpu": ortolan.cpu_info(), "cores", "machine", "system", "versions", "benchmarks": {name: result}}. Each result is
    its `to_json()` without "cpu" and "versions".
    """
    measured: dict[str, Any] = {}
    for name, result in results.items():
        found = json.loads(result.to_json())
        measured[name] = {key: value for key, value in found.items() if key not in ("cpu", "versions")}
    document = {
        "cpu": cpu_info(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "versions": package_versions(),
        "benchmarks": measured,
    }
    return json.dumps(document, indent=2)

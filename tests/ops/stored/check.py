"""What a process of one instruction set has to say about the stored answers."""

from __future__ import annotations

import json

import ortolan

from .generate import all_cases
from .store import Store, compare


def report(isa: str) -> str:
    """JSON: why it does not run here, or problems and notes (store.Comparison)."""
    info = ortolan.cpu_info()
    if info["isa"] != isa:
        return json.dumps({"skipped": info["isa_problem"] or f"this CPU has {info['detected_features']}"})
    stored = Store.read()
    problems, notes = [], []
    names = set()
    for case in all_cases():
        names.add(case.name)
        found = compare(case, isa, stored)
        problems += found.problems
        notes += found.notes
    problems += [f"{name}: stored, but no longer a case" for name in sorted(stored.records.keys() - names)]
    return json.dumps({"problems": problems, "notes": notes})

"""Compare the outputs of a process with one instruction set with the stored outputs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import ortolan

from .case import THREADS
from .generate import all_cases
from .store import STORED_AS, Store, compare


def report(isa: str, most_rows: int | None = None, all_threads: Iterable[int] = THREADS) -> str:
    """Return JSON: why the instruction set does not run here, or the problems and notes (store.Comparison).

    Args:
        most_rows: check only cases with exact outputs, up to this number of rows; None: all cases.
        all_threads: thread counts of the sessions.
    """
    info = ortolan.cpu_info()
    if info["isa"] != isa:
        return json.dumps({"skipped": info["isa_problem"] or f"this CPU has {info['detected_features']}"})
    stored = Store.read()
    problems, notes = [], []
    names = set()
    for case in all_cases():
        names.add(case.name)
        if most_rows is not None:
            if not case.rows or not case.exact:
                continue
            case = replace(case, rows=tuple(rows for rows in case.rows if rows <= most_rows))
        found = compare(case, STORED_AS.get(isa, isa), stored, all_threads)
        problems += found.problems
        notes += found.notes
    problems += [f"{name}: stored, but no longer a case" for name in sorted(stored.records.keys() - names)]
    return json.dumps({"problems": problems, "notes": notes})

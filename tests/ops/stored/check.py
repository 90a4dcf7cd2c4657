"""Compare the answers of a process with one instruction set with the stored answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import ortolan

from .case import THREADS
from .generate import all_cases
from .store import STORED_AS, Store, compare


def report(isa: str, most_rows: int | None = None, all_threads: Iterable[int] = THREADS) -> str:
    """Return JSON: the reason why the instruction set does not run here, or problems and notes (store.Comparison).

    most_rows: Check only cases with exact answers and at most this number of rows; None: all cases.
    all_threads: Numbers of threads of the sessions, one after another.
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

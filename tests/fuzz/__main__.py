"""Run many graphs, and print a table of their outcomes: python -m tests.fuzz --graphs 2000 --seed 0."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .fuzz import Outcome
from .worker import Worker, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--graphs", type=int, default=200, help="the number of graphs (200)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first graph; the next graphs count up (0)")
    parser.add_argument("--shrink", action="store_true", help="print only the mutations that a defect needs")
    parser.add_argument("--verbose", action="store_true", help="also print refusals")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    worker, begin = Worker(), time.perf_counter()
    for seed in range(options.seed, options.seed + options.graphs):
        outcome = worker.ask(seed)
        outcomes.append(outcome)
        if not outcome.good and options.shrink:
            outcome = shrink(worker, outcome)
        if not outcome.good or (options.verbose and outcome.kind != "equal"):
            lines = [f"{outcome.kind}: seed {seed}, {outcome.base}, {outcome.call}: {outcome.detail}", *outcome.done]
            print("\n    ".join(lines), flush=True)
    worker.close()
    print(f"\n{len(outcomes)} graphs, seeds {options.seed} to {seed}, {time.perf_counter() - begin:.0f} s")
    kinds = Counter(outcome.kind for outcome in outcomes)
    bases = sorted({outcome.base for outcome in outcomes})
    print(f"{'outcome':20} {'all':>6} " + " ".join(f"{base[:9]:>9}" for base in bases))
    for kind, count in kinds.most_common():
        cells = [sum(one.kind == kind and one.base == base for one in outcomes) for base in bases]
        print(f"{kind:20} {count:6} " + " ".join(f"{cell:9}" for cell in cells))
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

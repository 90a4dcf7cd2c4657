"""Run parts of the Makefile, two at a time: parts.py PART ... [then PART ...]

Parts after `then` start when all parts before it have ended; a failed part does not stop the others. The cores are
divided among the parts that run at the same time. Output is printed as it arrives, prefixed with the part's name. The
last lines list skipped tests by reason, then failures. Exits with 1 if a part failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

AT_ONCE = 2
# Lines that pytest -ra, tests/conftest.py and .ci/extra print.
_SKIPPED = re.compile(r"SKIPPED \[(\d+)\] \S+?:(?:\d+:)? (.*)")
_FAILED = ("FAILED ", "ERROR ")
# Notes that tests/conftest.py and the Makefile print on tests that did not run.
_NOTES = ("kernels no test can run", "a sample: ")
_NOT_RUN = "NOT RUN: "
_TOTAL = re.compile(r"=*\s*((?:\d+ \w+, )*\d+ \w+) in [\d.]+s.*")


@dataclass
class Part:
    """A target of the Makefile: its state, and results read from its output."""

    name: str
    code: int = 0
    seconds: float = 0.0
    total: str = ""  # pytest's last line
    not_run: str = ""  # why the part did not run
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def run(self, workers: int) -> None:
        """Run `make NAME` with that many processes of pytest and of the compiler."""
        began = time.monotonic()
        command = [os.environ.get("MAKE", "make"), "--no-print-directory", self.name]
        environment = os.environ | {"WORKERS": str(workers), "CMAKE_BUILD_PARALLEL_LEVEL": str(workers)}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(f"{self.name:8}| {line}", end="", flush=True)
                self._read(line.strip())
        self.code = process.returncode
        self.seconds = time.monotonic() - began

    def _read(self, line: str) -> None:
        if found := _SKIPPED.fullmatch(line):
            self.skipped[found[2]] += int(found[1])
        elif line.startswith(_FAILED):
            self.failures.append(line)
        elif any(note in line for note in _NOTES):
            self.notes += [] if line in self.notes else [line]
        elif line.startswith(_NOT_RUN):
            self.not_run = line.removeprefix(_NOT_RUN)
        elif found := _TOTAL.fullmatch(line):
            self.total = found[1]

    def __str__(self) -> str:
        state = "FAILED" if self.code else "not run" if self.not_run else "passed"
        return f"{self.name:8}  {state:7}  {self.seconds / 60:4.1f} min  {self.not_run or self.total}".rstrip()


def groups(words: list[str]) -> list[list[Part]]:
    """Split the names of parts at each `then`."""
    found: list[list[Part]] = [[]]
    for word in words:
        if word == "then":
            found.append([])
        else:
            found[-1].append(Part(word))
    return found


def _left_out(parts: list[Part]) -> dict[str, list[str]]:
    """Map each line about skipped or excluded tests to the names of the parts that printed it."""
    found: dict[str, list[str]] = {}
    for part in parts:
        for line in [f"{count} skipped: {reason}" for reason, count in part.skipped.items()] + part.notes:
            found.setdefault(line, []).append(part.name)
    return found


def main(words: list[str]) -> int:
    """Run the parts and print the summary."""
    began = time.monotonic()
    parts: list[Part] = []
    cores = len(os.sched_getaffinity(0))
    for group in groups(words):
        at_once = min(AT_ONCE, len(group))
        workers = max(1, cores // at_once)
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(Part.run, group, [workers] * len(group)))
        parts += group
    print()
    for left_out, names in _left_out(parts).items():
        print(f"{' '.join(names):8}  {left_out}")
    for part in parts:
        print(part)
    for part in parts:
        for failure in part.failures:
            print(f"{part.name:8}  {failure}")
    failed = [part.name for part in parts if part.code]
    not_run = [part.name for part in parts if part.not_run]
    outcome = f"failed: {' '.join(failed)}" if failed else "passed"
    minutes = (time.monotonic() - began) / 60
    print(f"{outcome}, in {minutes:.1f} min" + (f"; NOT RUN: {' '.join(not_run)}" if not_run else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

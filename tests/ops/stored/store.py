"""Read and write stored outputs, and compare a build's outputs with them.

For each case, answers.json has the hashes of its inputs and packed tensors, the hash of each output of each call (one
hash, or one per instruction set), and the size of each sampled output. samples.npz has evenly spread values of these
outputs from the scalar kernels, for the largest number of rows.

Outputs that may differ from the stored bits, or have none for their instruction set, must be within the error bound of
the samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .case import THREADS, Case, digest

FOLDER = Path(__file__).parent
# Values of ORTOLAN_ISA to test. A new value has no stored outputs until they are added.
ISAS = ("scalar", "avx2", "avxvnni", "avx512bw", "avx512vnni", "avx512", "avx512bf16", "amx", "neon", "dotprod", "i8mm")
# Maps an instruction set to the one whose stored outputs it must reproduce.
STORED_AS = {"avxvnni": "avx2"}
EVERY = "every"
REFERENCE = "scalar"

Record = dict[str, Any]


@dataclass
class Store:
    records: dict[str, Record] = field(default_factory=dict)
    samples: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path = FOLDER) -> Store:
        if not (folder / "answers.json").exists():
            return cls()
        with np.load(folder / "samples.npz") as samples:
            return cls(json.loads((folder / "answers.json").read_text()), dict(samples))

    def write(self, folder: Path = FOLDER) -> None:
        lines = [f"{json.dumps(name)}: {json.dumps(self.records[name])}" for name in sorted(self.records)]
        (folder / "answers.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        np.savez_compressed(folder / "samples.npz", **{name: self.samples[name] for name in sorted(self.samples)})


def sample_positions(size: int, most: int) -> np.ndarray:
    """Return up to `most` positions in an array of this size, evenly spread, including the first and the last."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64)) if size else np.zeros(0, np.int64)


@dataclass
class Comparison:
    """The result of comparing a case.

    problems: failures. notes: float outputs with other bits than stored, within the bound.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(case: Case, isa: str, store: Store, all_threads: Iterable[int] = THREADS) -> Comparison:
    """Run the case in this process, which must use the instruction set `isa`, and compare its outputs."""
    record = store.records.get(case.name)
    if record is None:
        return Comparison([f"{case.name}: no stored answers; python -m tests.ops.stored adds them"])
    found = Comparison()
    if case.inputs_hash() != record["inputs"]:
        found.problems.append(f"{case.name}: the inputs are not those of the stored answers")
        return found
    for name, value in case.tensor_hashes().items():
        if value != record["tensors"].get(name):
            found.problems.append(f"{case.name}: the packed tensor {name} is not the stored one")
    checks = _Checks(case, isa, store, found)
    for threads in all_threads:
        for label, name, array in case.outputs(threads):
            checks.check(label, name, threads, array)
    return found


@dataclass
class _Checks:
    case: Case
    isa: str
    store: Store
    found: Comparison

    @cached_property
    def error(self) -> np.ndarray | float | None:
        return None if self.case.error is None else self.case.error()

    def check(self, label: str, name: str, threads: int, array: np.ndarray) -> None:
        case, problems = self.case, self.found.problems
        where = f"{case.name}, {label}, {name}, {threads} threads"
        answer = self.store.records[case.name]["answers"].get(output_name(case, label, name, threads))
        if answer is None:
            problems.append(f"{where}: no stored answer")
            return
        hashes, own = by_isa(answer), digest(array)
        stored = hashes.get(EVERY, hashes.get(self.isa))
        if own == stored:
            return
        at, samples = self._samples(label, name, array)
        other_bits = f"{where}: not the stored bits{_difference(array, at, samples)}"
        error = self.error
        if case.is_exact(label, name) and stored is not None:
            if name != "y" or self.isa != REFERENCE or case.scalar_error is None:
                problems.append(other_bits)
                return
            error = case.scalar_error
        if stored is not None:
            self.found.notes.append(other_bits)
        if error is not None:
            problems += [f"{where}: {text}" for text in _beyond(array, at, samples, error)]
        elif own not in hashes.values():
            problems.append(f"{where}: not the bits of any instruction set")

    def _samples(self, label: str, name: str, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sampled positions in the array, and the samples.

        With fewer rows, the array corresponds to the first values of the sampled output.
        """
        output = f"{self.case.sampled_label(label)}: {name}"
        samples = self.store.samples[f"{self.case.name}, {output}"]
        at = sample_positions(self.store.records[self.case.name]["sizes"][output], len(samples))
        kept = at < array.size
        return at[kept], samples[kept]


def _difference(array: np.ndarray, at: np.ndarray, samples: np.ndarray) -> str:
    given = array.reshape(-1)[at]
    differ = ~((given == samples) | ((given != given) & (samples != samples)))
    if not differ.any():
        return f" (equal to the {REFERENCE} kernel's at {len(at)} sampled positions)"
    first = int(np.flatnonzero(differ)[0])
    return (
        f" ({differ.sum()} of {len(at)} sampled values differ from the {REFERENCE} kernel's, "
        f"at {_index(array, at[first])} {given[first]} for {samples[first]})"
    )


def _beyond(array: np.ndarray, at: np.ndarray, samples: np.ndarray, error: np.ndarray | float) -> Iterable[str]:
    """Describe the values that differ from the samples by more than twice the error bound."""
    given, wanted = array.reshape(-1)[at].astype(np.float64), samples.astype(np.float64)
    allowed = 2 * (error.reshape(-1)[at] if isinstance(error, np.ndarray) else np.full(len(at), error))
    with np.errstate(invalid="ignore"):
        close = np.isfinite(given) & np.isfinite(wanted) & (np.abs(given - wanted) <= allowed)
    bad = np.flatnonzero(~((given == wanted) | (np.isnan(given) & np.isnan(wanted)) | close))
    if len(bad):
        i = bad[0]
        yield (
            f"{len(bad)} of {len(at)} sampled values beyond the bound, at {_index(array, at[i])} {given[i]} for "
            f"{wanted[i]}, {allowed[i]:.3g} allowed"
        )


def _index(array: np.ndarray, place: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(place, array.shape))


def by_isa(answer: str | dict[str, str]) -> dict[str, str]:
    """Return the hashes of one output by instruction set; the key EVERY means all of them."""
    return {EVERY: answer} if isinstance(answer, str) else answer


def output_name(case: Case, label: str, name: str, threads: int) -> str:
    """Return the key of an output in a record. Exact outputs have one key for all numbers of threads."""
    return f"{label}: {name}" if case.is_exact(label, name) else f"{label}, {threads} threads: {name}"

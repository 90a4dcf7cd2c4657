"""Make the stored outputs: run each instruction set in a separate process, and merge the results."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import ortolan

from ..isa_process import run_with_isa
from . import attention_cases, linear_cases, other_cases
from .case import THREADS, Case, digest
from .store import EVERY, ISAS, REFERENCE, Record, Store, by_isa, output_name, sample_positions

# Number of sampled values per output: FEW if the bits are equal on all instruction sets, SOME if they are only equal on
# each instruction set, MANY if they may differ.
FEW, SOME, MANY = 12, 150, 400
FEWER = ", few"  # suffix of the key of a sample of FEW values


def all_cases() -> Iterator[Case]:
    yield from linear_cases.cases()
    yield from other_cases.cases()
    yield from attention_cases.cases()


def make_answers(isa: str, folder: Path) -> None:
    """Compute all outputs with the instruction set of this process, and save them as a Store in the folder."""
    made = Store()
    if ortolan.cpu_info()["isa"] == isa:
        for case in all_cases():
            if case.name in made.records:
                raise ValueError(f"two cases are named {case.name}")
            _answer(case, isa, made)
    made.write(folder)


def _answer(case: Case, isa: str, made: Store) -> None:
    hashes: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for threads in THREADS:
        for label, name, array in case.outputs(threads):
            output, value = output_name(case, label, name, threads), digest(array)
            if hashes.setdefault(output, value) != value:
                raise ValueError(f"{case.name}, {output}: {threads} threads give other bits than one")
            if isa == REFERENCE and label == case.sampled_label(label):
                key, flat = f"{label}: {name}", array.reshape(-1)
                sizes[key] = array.size
                most = SOME if case.is_exact(label, name) else MANY
                made.samples[f"{case.name}, {key}"] = flat[sample_positions(array.size, most)]
                made.samples[f"{case.name}, {key}{FEWER}"] = flat[sample_positions(array.size, FEW)]
    made.records[case.name] = {
        "inputs": case.inputs_hash(),
        "tensors": case.tensor_hashes(),
        "sizes": sizes,
        "answers": {output: {isa: value} for output, value in hashes.items()},
    }


def run_all(isas: Sequence[str] = ISAS) -> dict[str, Store]:
    """Return the outputs of each instruction set that this CPU supports."""
    stores = {}
    for isa in isas:
        with tempfile.TemporaryDirectory() as name:
            script = "from pathlib import Path\nfrom tests.ops.stored.generate import make_answers\n"
            done = run_with_isa(isa, f"{script}make_answers(sys.argv[1], Path(sys.argv[2]))", isa, name)
            if done.returncode:
                raise RuntimeError(f"{isa}: {done.stderr}")
            store = Store.read(Path(name))
        if store.records:
            stores[isa] = store
    return stores


def joined(stores: Mapping[str, Store]) -> Store:
    """Merge the outputs of all instruction sets into one store."""
    reference, whole = stores[REFERENCE], Store()
    for name, record in reference.records.items():
        answers = {}
        for output in record["answers"]:
            values = {isa: store.records[name]["answers"][output][isa] for isa, store in stores.items()}
            answers[output] = values if len(set(values.values())) > 1 else values[REFERENCE]
        whole.records[name] = record | {"answers": answers}
        for output in record["sizes"]:
            label, kind = output.split(": ")
            # For cases with `rows`, one sample covers all row counts.
            own = "" if " rows" in label else (f"{label}:", f"{label},")
            alike = [answers[key] for key in answers if key.startswith(own) and key.endswith(f": {kind}")]
            same = all(isinstance(answer, str) for answer in alike)
            whole.samples[f"{name}, {output}"] = reference.samples[f"{name}, {output}{FEWER if same else ''}"]
    return whole


def update(stored: Store, new: Store, isas: Iterable[str], replace: Sequence[str] = ()) -> list[str]:
    """Add outputs that are not stored yet; `isas` are the instruction sets of the new outputs.

    Cases whose names match a pattern of `replace` are replaced. For other cases, the stored outputs stay unchanged, and
    the differences are returned.
    """
    differences = []
    for name, record in new.records.items():
        old = stored.records.get(name)
        if old is None or any(fnmatch(name, pattern) for pattern in replace):
            if old is not None and (lost := _isas(old) - set(isas)):
                differences.append(f"{name}: has answers of {', '.join(sorted(lost))}, which does not run here")
                continue
            stored.records[name] = record
            _move_samples(name, new, stored)
        else:
            differences += [f"{name}: {text}" for text in _add(old, record, isas)]
    gone = [name for name in stored.records if name not in new.records]
    for name in gone:
        if any(fnmatch(name, pattern) for pattern in replace):
            del stored.records[name]
            _move_samples(name, new, stored)
        else:
            differences.append(f"{name}: no longer a case")
    return differences


def _isas(record: Record) -> set[str]:
    return {isa for answer in record["answers"].values() for isa in by_isa(answer)} - {EVERY}


def _add(old: Record, record: Record, isas: Iterable[str]) -> Iterator[str]:
    """Add outputs for instruction sets that the stored record lacks; yield a text for each output that differs."""
    for key in ("inputs", "tensors", "sizes"):
        if old[key] != record[key]:
            yield f"other {key}"
            return
    if old["answers"].keys() != record["answers"].keys():
        yield "other outputs"
        return
    for output, answer in record["answers"].items():
        known = old["answers"][output]
        for isa in isas:
            value = by_isa(answer).get(isa, answer)
            if by_isa(known).get(EVERY, by_isa(known).get(isa, value)) != value:
                yield f"{output}, {isa}"
            elif isinstance(known, dict):
                known.setdefault(isa, value)


def _move_samples(name: str, new: Store, stored: Store) -> None:
    for key in [key for key in stored.samples if key.startswith(f"{name}, ")]:
        del stored.samples[key]
    stored.samples.update({key: array for key, array in new.samples.items() if key.startswith(f"{name}, ")})

"""The operators reproduce the stored outputs: equal bits for integer sums, otherwise within the documented bounds.

tests/ops/stored describes the stored outputs and how to add new ones.
"""

from __future__ import annotations

import copy
import json
import warnings

import numpy as np
import pytest

import ortolan

from .isa_process import run_with_isa
from .stored.case import Case
from .stored.generate import all_cases, update
from .stored.store import ISAS, Store, by_isa, compare


@pytest.mark.parametrize("isa", ISAS)
def test_every_answer_is_the_stored_one(isa: str, pytestconfig: pytest.Config) -> None:
    script = "from tests.ops.stored.check import report\nprint(report(sys.argv[1]))"
    done = run_with_isa(isa, script, isa)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if "skipped" in found:
        pytest.skip(f"{isa}: {found['skipped']}")
    problems, notes = found["problems"], found["notes"]
    if pytestconfig.getoption("--stored-bits"):
        problems += notes
    elif notes:
        count = f"{len(notes)} float answers are within the bound but not the stored bits"
        warnings.warn(f"{isa}: {count}; --stored-bits lists them, the first is: {notes[0]}", stacklevel=1)
    assert not problems, "\n".join([f"{len(problems)} problems on {isa}:", *problems])


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {case.name: case for case in all_cases()}


@pytest.fixture
def store() -> Store:
    return Store.read()


INTEGER = "SparseAMXMatMul int8 bitmap 33x17"
INTEGER_IN_GROUPS = "W4A8MatMul g32 f16 zero points 130x70"
FLOAT = "SparseAMXMatMul bf16 bitmap 130x70"
CACHE = "NoMADAttention cache, codes d1"
ATTENTION = "NoMADAttention packed, precision 32"
MASKED = "MaskedMatMul numbers, B constant"
NORM = "VNNISpMM 80 % zeros, given range 100x96, norm"
HIDDEN = "VNNISpMM 80 % zeros behind 200 80 % 70x42"


def this_isa() -> str:
    return str(ortolan.cpu_info()["isa"])


def test_an_instruction_set_without_answers_is_held_to_the_bound(cases: dict[str, Case], store: Store) -> None:
    for case in cases.values():
        assert not compare(case, "another", store).problems


@pytest.mark.parametrize("name", [INTEGER, INTEGER_IN_GROUPS, HIDDEN])
def test_another_bit_of_an_integer_answer_is_found(name: str, cases: dict[str, Case], store: Store) -> None:
    answers = store.records[name]["answers"]
    label = next(iter(answers))
    answers[label] = dict.fromkeys(by_isa(answers[label]), "0" * 16) | {this_isa(): "0" * 16}
    problems = compare(cases[name], this_isa(), store).problems
    assert len(problems) == 2  # one for each number of threads, 1 and 2
    assert problems[0].startswith(f"{name}, {label.split(': ')[0]}, y, 1 threads: not the stored bits")


def test_another_bit_of_a_cache_is_found(cases: dict[str, Case], store: Store) -> None:
    store.records[CACHE]["answers"]["call 3: present_key"] = "0" * 16
    problems = compare(cases[CACHE], this_isa(), store).problems
    assert len(problems) == 2 and all("call 3, present_key" in problem for problem in problems)


def test_another_bit_of_a_float_answer_is_noted(cases: dict[str, Case], store: Store) -> None:
    for answer in store.records[FLOAT]["answers"].values():
        answer[this_isa()] = "0" * 16
    found = compare(cases[FLOAT], this_isa(), store)
    assert not found.problems and len(found.notes) == 2 * len(cases[FLOAT].rows)


@pytest.mark.parametrize("name", [INTEGER_IN_GROUPS, FLOAT, ATTENTION, MASKED, NORM])
def test_a_number_beyond_the_bound_is_found(name: str, cases: dict[str, Case], store: Store) -> None:
    case = cases[name]
    assert case.error is not None
    label = case.sampled_label("call 0")
    # Replace all hashes, because outputs that match a stored hash are not compared with the bound.
    store.records[name]["answers"] = {key: {"scalar": "0" * 16} for key in store.records[name]["answers"]}
    samples, error = store.samples[f"{name}, {label}: y"], case.error()
    # The first sample is the first value of the output.
    samples[0] += 4 * (error.reshape(-1)[0] if isinstance(error, np.ndarray) else error)
    problems = compare(case, "another", store).problems
    assert problems and all("beyond the bound" in problem for problem in problems)


def test_another_weight_or_input_is_found(cases: dict[str, Case], store: Store) -> None:
    store.records[INTEGER]["tensors"]["values"] = "0" * 16
    assert compare(cases[INTEGER], this_isa(), store).problems == [
        f"{INTEGER}: the packed tensor values is not the stored one"
    ]
    store.records[INTEGER]["inputs"] = "0" * 16
    assert compare(cases[INTEGER], this_isa(), store).problems == [
        f"{INTEGER}: the inputs are not those of the stored answers"
    ]


def small_store(answer: str | dict[str, str]) -> Store:
    record = {"inputs": "", "tensors": {}, "sizes": {"1 rows: y": 1}, "answers": {"1 rows: y": answer}}
    return Store({"case": record}, {"case, 1 rows: y": np.zeros(1)})


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"scalar": "a"}, {"scalar": "a", "avx2": "b"}, {"scalar": "a", "avx2": "b"}),
        ("a", "a", "a"),
        ({"scalar": "a", "amx": "c"}, {"scalar": "a", "avx2": "b"}, {"scalar": "a", "amx": "c", "avx2": "b"}),
    ],
)
def test_what_is_missing_is_added(old: object, new: object, expected: object) -> None:
    stored = small_store(old)
    assert update(stored, small_store(new), ("scalar", "avx2")) == []
    assert stored.records["case"]["answers"]["1 rows: y"] == expected


@pytest.mark.parametrize(
    ("old", "new"), [("a", "b"), ("a", {"scalar": "a", "avx2": "b"}), ({"scalar": "a", "avx2": "c"}, "a")]
)
def test_what_differs_stays_unless_it_is_named(old: object, new: object) -> None:
    stored = small_store(copy.deepcopy(old))
    assert update(stored, small_store(new), ("scalar", "avx2"))
    assert stored.records["case"]["answers"]["1 rows: y"] == old
    assert update(stored, small_store(new), ("scalar", "avx2"), ["c*"]) == []
    assert stored.records["case"]["answers"]["1 rows: y"] == new


def test_answers_that_cannot_be_made_here_are_not_replaced() -> None:
    stored = small_store({"scalar": "a", "amx": "c"})
    differences = update(stored, small_store({"scalar": "b"}), ("scalar",), ["case"])
    assert differences == ["case: has answers of amx, which does not run here"]


def test_a_case_that_is_gone_is_named() -> None:
    stored = small_store("a")
    assert update(stored, Store(), ("scalar",)) == ["case: no longer a case"]
    assert update(stored, Store(), ("scalar",), ["case"]) == [] and not stored.records

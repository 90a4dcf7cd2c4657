"""Comparison with another revision: parts of the tool, and the installed library against itself."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ortolan
from ortolan.errors import OrtolanError
from ortolan.graph_passes.report.figures import Timing
from tests.benchmarks.checkout import ENVIRONMENT
from tools.against import __main__ as against
from tools.against import revision
from tools.against.compare import (
    QUICK_PACE,
    Pace,
    Turn,
    compare,
    compare_answers,
    measure_again,
    rounds_of,
    turn_of,
)
from tools.against.layers import COLD_BYTES, Row, TimedModel, Work, copies_for
from tools.against.process import WorkerProcess
from tools.against.result import Comparison, RowResult, noise_of, timing_of
from tools.against.rows import TINY, Sizes, works_of
from tools.workers.process import WorkerError, cpus_to_use

LIBRARY = Path(ortolan.get_library_path())


def result(operator: str, old: float, new: float, threads: int = 1) -> RowResult:
    return RowResult(operator, "a row", threads, Timing(old, 90), Timing(new, 80))


def worker() -> WorkerProcess:
    return WorkerProcess(LIBRARY, cpus_to_use(1), 1)


# ---- ratios, noise and the table -------------------------------------------------------------------------------------


def test_the_ratio_is_that_of_the_minima() -> None:
    row = RowResult.of_turns("a", "b", 1, [[4, 9], [6, 8]], [[2, 9], [3, 3]], layers=2)
    assert row.old == Timing(2, 3.5) and row.new == Timing(1, 1.5)
    assert row.ratio == 2
    assert row.noise == 0.5  # minima 4 and 6, and 2 and 3, differ by 50 %
    assert timing_of([[3.0], [1.0], [2.0]]) == Timing(1, 2)


def test_noise_is_between_a_sides_own_turns() -> None:
    assert noise_of([[10, 20], [12, 15], [11]]) == pytest.approx(0.2)
    assert noise_of([[10]]) == 0


def test_geometric_means_are_of_operators_and_of_all() -> None:
    rows = [result("a", 4, 1), result("a", 1, 1), result("b", 1, 2), result("b", 3, 1, threads=2)]
    rows.append(RowResult("b", "a row", 1, failure="refused"))
    found = Comparison({}, [], rows)
    assert found.means() == pytest.approx(
        {("a", 1): 2, ("b", 1): 0.5, ("all", 1): 2 ** (1 / 3), ("b", 2): 3, ("all", 2): 3}
    )
    assert found.slower() == [rows[2]]
    assert found.failed


def test_rows_that_stand_out_are_measured_again() -> None:
    assert [measure_again(0.9, repeated) for repeated in range(3)] == [True, True, False]
    assert [measure_again(1.1, repeated) for repeated in range(2)] == [True, False]
    assert not measure_again(0.96, 0) and not measure_again(1.04, 0)


def test_turns_are_of_about_equal_length() -> None:
    pace = Pace(10, warm_up=0.03, turn=0.06)
    assert turn_of(0.02, 1, pace) == Turn(3, 1, cpu_time=True)
    assert turn_of(1, 2, pace) == Turn(1, 1, cpu_time=False)
    assert turn_of(1e-5, 1, pace) == Turn(1200, 5, cpu_time=False)
    assert rounds_of(0.001, pace) == 10
    assert rounds_of(0.2, pace) == 6
    assert rounds_of(30, pace) == 4
    assert rounds_of(30, Pace(1, 0, 0)) == 2


def test_answers() -> None:
    a = np.array([3, 4, np.nan], np.float32)
    assert compare_answers(a, a.copy()) is None
    assert compare_answers(a, a + np.float32([0, 0.5, 0])) == pytest.approx(0.1)
    assert compare_answers(a, np.nan_to_num(a)) == float("inf")
    assert compare_answers(a, a[:2]) == float("inf")
    assert compare_answers(np.float32([0.0]), np.float32([-0.0])) == 0


def test_copies_are_bounded() -> None:
    assert copies_for(1, 1) == 128
    assert copies_for(COLD_BYTES, 1) == 2
    assert copies_for(4 << 20, 4) == 4 * copies_for(4 << 20, 16)
    assert copies_for(1, 128) == 2


# ---- rows and workloads ----------------------------------------------------------------------------------------------


def test_rows_have_names_of_their_own() -> None:
    for sizes in (TINY, Sizes()):
        for operator, works in works_of(sizes, tiny_models=False).items():
            names = [row.name for work in works for row in work.rows]
            assert len(set(names)) == len(names), operator
            assert {work.operator for work in works} == {operator}


def test_operators_and_rows_are_chosen() -> None:
    works = against.chosen_works("lut_post_op,call", "W4A8", quick=True)
    assert [row.name for work in works for row in work.rows] == [
        "W4A8MatMul g32 64x64, 1 a run m=1",
        "W4A8MatMul g32 64x64, 64 a run m=1",
    ]
    with pytest.raises(OrtolanError, match="--operators: unknown operator 'kitchen'; expected sparse_amx_matmul, "):
        against.chosen_works("kitchen", "", quick=True)
    with pytest.raises(OrtolanError, match="--rows: no row of call has 'M=1' in its name"):
        against.chosen_works("call", "M=1", quick=True)


def test_numbers_of_threads() -> None:
    assert against.read_threads("1,2,1") == (1, 2)
    for text in ("", "0", "one", "1,"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected numbers of threads such as 1,2"):
            against.read_threads(text)


# ---- processes -------------------------------------------------------------------------------------------------------


def test_a_model_that_one_side_refuses(tmp_path: Path) -> None:
    """A row that fails must not stop the rows after it."""
    good = works_of(TINY, tiny_models=True)["lut_post_op"][0]

    def write(folder: Path) -> TimedModel:
        (folder / "model.onnx").write_bytes(b"no model")
        return TimedModel(folder / "model.onnx")

    bad = Work("a", (Row("bad", lambda: {"x": np.zeros(1)}),), write)
    found = list(compare([bad, good], [1], lambda side, threads: worker(), QUICK_PACE))
    assert "old side: [ONNXRuntimeError]" in (found[0].failure or "")
    assert found[1].failure is None and found[1].ratio > 0


def test_a_process_that_ends_is_started_again() -> None:
    with WorkerProcess(LIBRARY.with_name("gone.so"), [], 1) as process:
        with pytest.raises(WorkerError, match=r"gone\.so"):
            process.ask("open", model="model.onnx")
        assert process._process is not None
        process._process.kill()
        with pytest.raises(WorkerError, match="the process ended with status -9"):
            process.ask("time", count=1, together=1, cpu_time=False, warm_up=0)
        with pytest.raises(WorkerError, match="no model to time: call `open` and `feed` first"):
            process.ask("time", count=1, together=1, cpu_time=False, warm_up=0)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not pin")
def test_cpus() -> None:
    usable = os.sched_getaffinity(0)
    assert len(cpus_to_use(1)) == 1
    assert set(cpus_to_use(1000)) == usable


# ---- revisions -------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit whose package builds immediately."""
    top = tmp_path / "top"
    (top / "ops").mkdir(parents=True)
    (top / "ops" / "operators.inc").write_text("")
    (top / "ops" / "op.cc").write_text("")
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], cwd=top, check=True)
    return top


def test_a_revision_is_built_once(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = revision.resolve_commit(repository, "HEAD")
    said: list[str] = []

    def build(work: Path) -> None:
        assert (work / "source" / "ops" / "operators.inc").is_file()
        (work / "site" / "ortolan").mkdir(parents=True)
        (work / "site" / "ortolan" / "libortolan_ops.so").write_bytes(b"built")

    monkeypatch.setattr(revision, "_build", build)
    for _ in range(2):
        library = revision.built_library(repository, commit, said.append, tmp_path / "cache")
        assert library.read_bytes() == b"built"
    assert said == [f"building {commit[:12]}: this takes minutes, once"]
    assert [path.name[:12] for path in (tmp_path / "cache" / "against").iterdir()] == [commit[:12]]


def test_what_does_not_build(repository: Path, tmp_path: Path) -> None:
    """The commit has no pyproject.toml, so it cannot be built."""
    commit = revision.resolve_commit(repository, "HEAD")
    with pytest.raises(OrtolanError, match="the revision does not build"):
        revision.built_library(repository, commit, lambda line: None, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "against").iterdir())


def test_sources_that_are_newer_than_the_library(repository: Path, tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"")
    os.utime(library, (0, 0))
    assert revision.newer_sources(repository, library) == ["ops/op.cc", "ops/operators.inc"]
    os.utime(library)
    os.utime(repository / "ops" / "op.cc", (0, 0))
    os.utime(repository / "ops" / "operators.inc", (0, 0))
    assert revision.newer_sources(repository, library) == []


def test_a_tree_with_changes(repository: Path) -> None:
    commit = revision.resolve_commit(repository, "HEAD")[:12]
    assert revision.describe_tree(repository) == commit
    (repository / "ops" / "op.cc").write_text("int x;")
    assert revision.describe_tree(repository) == f"{commit} with changes"


def test_revisions_and_folders_that_are_none(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(OrtolanError, match="nowhere"):
        revision.resolve_commit(repository, "nowhere")
    with pytest.raises(OrtolanError, match="not a git repository"):
        revision.find_repository(tmp_path)
    (repository / "ops" / "operators.inc").unlink()
    with pytest.raises(OrtolanError, match="is not a source tree of Ortolan; run this in one"):
        revision.find_repository(repository)


# ---- whole runs ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_operator_against_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows of each kind: the same library must give the same bits."""
    monkeypatch.setattr("tools.against.layers._MOST_COPIES", 2)
    found = []
    for works in works_of(TINY, tiny_models=True).values():
        some = [Work(work.operator, work.rows[:1], work.write) for work in works]
        found += compare(some, [1], lambda side, threads: worker(), QUICK_PACE)
    assert [row for row in found if row.failure] == []
    assert {row.answers for row in found} == {"same"}
    assert all(row.old is not None and 0 < row.old.min_ms <= row.old.median_ms for row in found)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-P", "-m", "tools.against", "before", "--quick", "--library", str(LIBRARY)]
    command += ["--operators", "lut_post_op", "--threads", "1,2", "--rounds", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["old"] == "before" and document["new"] == str(LIBRARY)
    assert [(row["threads"], row["row"]) for row in document["rows"]] == [
        (threads, f"{kind}, 1000 elements")
        for threads in (1, 2)
        for kind in ("uint8 to uint8", "uint8 to float32", "uint16 to uint16")
    ]
    assert all(row["answers"] == "same" and row["old_ms"] > 0 for row in document["rows"])
    assert [mean["operator"] for mean in document["geometric_means"]] == ["lut_post_op"] * 2 + ["all"] * 2
    words = ("onnxruntime: ", "uint8 to float32, 1000 elements", "Geometric means", "the times are meaningless")
    assert all(word in done.stdout for word in words)
    assert "[6/6] lut_post_op, uint16 to uint16, 1000 elements, threads 2: " in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_what_there_is(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-P", "-m", "tools.against", "before", "--quick", "--library", str(LIBRARY)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, cwd=tmp_path, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("[1/")
        process.send_signal(number)
        printed, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Interrupted: not all rows are measured." in printed
    assert "bf16 dense 96x64 m=1" in printed


def test_a_failure_shows_in_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "libortolan_ops.so"
    broken.write_bytes(b"no library")
    chosen = ["--operators", "call", "--rows", "VNNISpMM 64x64, 1 a run"]
    monkeypatch.setattr(sys, "argv", ["against", "before", "--quick", "--library", str(broken), *chosen])
    with pytest.raises(SystemExit) as exit_:
        against.main()
    assert exit_.value.code == 1
    assert "Failed: call, VNNISpMM 64x64, 1 a run m=1, threads 1: old side: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("before", "--library", "none.so"), 2, "--library: file 'none.so' does not exist"),
        (("before", "--threads", "none"), 2, "expected numbers of threads such as 1,2; found 'none'"),
        (("before", "--rounds", "0"), 2, "expected a positive number of rounds, found '0'"),
        (("before", "--operators", "kitchen"), 1, "error: --operators: unknown operator 'kitchen'"),
        (("before",), 1, "error: git rev-parse --show-toplevel: fatal: not a git repository"),
    ],
)
def test_what_there_is_none_of_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    status: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["against", *arguments])
    with pytest.raises(SystemExit) as exit_:
        against.main()
    assert exit_.value.code == status
    assert words in capsys.readouterr().err

"""Test the figures of tools.evaluate_late on scores and terms that are known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortolan import SparseVectors, TokenVectors
from ortolan.late_interaction import max_sim
from tests.text.late_folders import write_colbert, write_splade
from tools import evaluate_late
from tools.evaluate_late import compare_scores, compare_terms, max_sim_scores, measure_max_sim, measure_terms

PAIRS = [("the cat", "the sleeping cat"), ("sleep", "unaffable cat , sleep"), ("the cat , the", "under the cat")]


def test_scores_are_max_sim() -> None:
    rng = np.random.default_rng(0)

    def vectors(*lengths: int) -> TokenVectors:
        return TokenVectors(rng.standard_normal((sum(lengths), 5)).astype(np.float32), np.array(lengths))

    queries, documents = vectors(3, 3), vectors(4, 1, 2)
    expected = [[max_sim(query, document) for document in documents] for query in queries]
    np.testing.assert_allclose(max_sim_scores(queries, documents), expected, rtol=1e-6)


def test_differences_are_those_of_the_best_documents_and_of_the_pair() -> None:
    original = np.array([[*range(40, 20, -1)], [*range(21, 41)]], float)
    found = original.copy()
    found[0, 12:] *= 2  # neither among the ten best nor the pair's document
    assert compare_scores(found, original, [1, 2]) == {
        "largest difference": 0,
        "mean difference": 0,
        "same best document": 0.5,
    }
    found[1, 2] *= 1.11  # the pair's document
    figures = compare_scores(found, original, [1, 2])
    assert figures["largest difference"] == pytest.approx(0.11)
    assert figures["mean difference"] == pytest.approx(0.11 / 22)


def test_terms_of_which_some_are_equal() -> None:
    def rows(*given: tuple[list[int], list[float]]) -> SparseVectors:
        terms, weights = zip(*given, strict=True)
        lengths = np.array([len(one) for one in terms])
        return SparseVectors(np.concatenate(terms), np.concatenate(weights).astype(np.float32), lengths, 9)

    original = rows(([1, 4], [3, 1]), ([2, 3], [1, 1]))
    assert compare_terms(original, original) == {"same terms": 1, "mean overlap": 1, "weight of other terms": 0}
    figures = compare_terms(rows(([1, 5], [3, 1]), ([2, 3], [2, 1])), original)
    assert figures == pytest.approx({"same terms": 0.5, "mean overlap": 0.75, "weight of other terms": 0.125})


def test_measured_formats(tmp_path: Path) -> None:
    late = measure_max_sim(write_colbert(tmp_path / "late"), ["bf16", "int8"], PAIRS, 2)
    assert 0 < late["bf16"]["largest difference"] < late["int8"]["largest difference"] < 0.1
    terms = measure_terms(write_splade(tmp_path / "terms"), ["bf16", "int8"], [first for first, _ in PAIRS])
    assert 1 >= terms["bf16"]["mean overlap"] >= terms["int8"]["mean overlap"] > 0.8


def test_the_command_prints_both_tables(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    folders = {evaluate_late.LATE_MODEL: write_colbert, evaluate_late.SPLADE: write_splade}
    monkeypatch.setattr(evaluate_late, "write_folder", lambda name, folder, settings=None: folders[name](folder))
    lines = "".join(f"main\tf\t2012\t{number}\t1.0\t{one}\t{two}\n" for number, (one, two) in enumerate(PAIRS))
    (tmp_path / "pairs.csv").write_text(lines)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["evaluate_late", "--pairs", str(tmp_path / "pairs.csv"), *arguments])
        evaluate_late.main()
        return str(capsys.readouterr().out)

    shown = run("--queries", "2", "--formats", "int8")
    assert "MaxSim, all-minilm-l6-v2, 2 queries" in shown and "Top 64 terms, splade-tiny, 2 texts" in shown
    for option, message in ((["--queries", "4"], "expected 1 to 3"), (["--texts", "none"], "'none' does not exist")):
        with pytest.raises(SystemExit):
            run(*option)
        assert message in capsys.readouterr().err

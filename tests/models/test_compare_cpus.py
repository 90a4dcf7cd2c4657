"""Test the figures of tools.compare_cpus on vectors whose neighbours are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.compare_cpus import NEAREST, by_kind, compare, nearest, read_lines


def on_a_circle(count: int, shift: float = 0.0) -> np.ndarray:
    angles = np.arange(count) * 0.01 + shift
    return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def test_nearest_are_the_neighbours_without_the_text_itself() -> None:
    found = nearest(on_a_circle(40), on_a_circle(40))
    assert found.shape == (40, NEAREST)
    assert set(found[20].tolist()) == {*range(15, 20), *range(21, 26)}


def test_figures_of_equal_and_of_turned_vectors() -> None:
    vectors = on_a_circle(40)
    assert compare(vectors, vectors) == pytest.approx({"least cosine": 1.0, "mean cosine": 1.0, "overlap": 1.0})
    turned = compare(vectors, on_a_circle(40, shift=0.02))
    assert turned["least cosine"] == pytest.approx(np.cos(0.02), abs=1e-6) == turned["mean cosine"]
    assert 0.5 < turned["overlap"] < 1  # the ten nearest move by two places


def test_equal_vectors_are_one_kind() -> None:
    a, b = on_a_circle(3), on_a_circle(3, shift=1e-3)
    assert list(by_kind({"scalar": a, "avx2": a.copy(), "amx": b})) == ["scalar = avx2", "amx"]


def test_texts_of_both_file_formats(tmp_path: Path) -> None:
    (tmp_path / "sts-dev.csv").write_text("main\tf\t2012\t0001\t5.0\tA b.\tC d.\nmain\tf\t2012\t0002\t1.0\tA b.\tE.\n")
    (tmp_path / "texts.txt").write_text("A b.\n\nC d.\nA b.\n")
    assert read_lines(tmp_path / "sts-dev.csv") == ["A b.", "C d.", "E."]
    assert read_lines(tmp_path / "texts.txt") == ["A b.", "C d."]

"""The report as an HTML page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ortolan
from ortolan import OptimizationReport
from ortolan.errors import OrtolanError, OutputError
from ortolan.graph_passes.report import page as report_page
from ortolan.graph_passes.report.figures import Timing
from ortolan.graph_passes.report.optimization import LayerReport
from ortolan.graph_passes.report.search import AutoReport, LayerChoice, MeasuredForm, PathPoint, Trial

from ..recipes.forms import NAMED
from .small_models import make_model, random_weight

EVIL = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Collects the texts, tags and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.in_cell = False

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.in_cell:
            self.rows[-1][-1] += data.strip()


def read(path: Path) -> Page:
    page = Page(path.read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)
    return page


def evil_model() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["product"], name=EVIL),
        helper.make_node("MatMul", ["product", "product"], ["y"], name=f"{EVIL}&2"),
    ]
    shape = [64, 64]
    return make_model(
        nodes, {"x": (TensorProto.FLOAT, shape)}, {"y": (TensorProto.FLOAT, shape)}, {"W": random_weight(64, 64)}
    )


def auto_report() -> OptimizationReport:
    layers = [
        LayerReport(EVIL, "MatMul", "W4A8MatMul", 64, 32, 0.25, 8192, 1100, 0.0625, "replaced", weight_bits=4),
        LayerReport("kept", "MatMul", k=64, n=32, bytes_before=8192, reason="not selected"),
    ]
    choices = [
        LayerChoice(
            EVIL, "saves <much>", "int4", 0.0625, [1.5, 2.5], [0.5, 0.75], {"int4": MeasuredForm([0.5, 0.75], 0.0625)}
        ),
        LayerChoice("kept", "the original is faster here", before_ms=[1.25, 2.25]),
    ]
    trials = [
        Trial(2, False, False, "cosine 0.9", 0.4, 0.2, 0.9, 20000),
        Trial(1, True, True, "cosine 0.995", 0.6, 0.1, 0.995, 30000, True),
    ]
    auto = AutoReport(
        "cosine", [(1, 8), (2, 16)], "1.5x faster", choices,
        [PathPoint(EVIL, "int4", 0.6, 0.1), PathPoint("kept", "int8", 0.4, 0.2)], trials, True, True,
        [Timing(10, 11), Timing(20, 21)], [Timing(5, 6), Timing(8, 9)],
    )  # fmt: skip
    return OptimizationReport(
        {"name": "auto"}, input=EVIL, layers=layers, auto=auto, file_size_before=40000, file_size_after=30000,
        notes=[f"a note {EVIL}"],
    )  # fmt: skip


def test_names_are_escaped(tmp_path: Path) -> None:
    report = ortolan.optimize_onnx(evil_model(), recipe=NAMED["sparse-int8"], options={"sparsity": 0.5})
    report.save_html(tmp_path / "report.html")
    page = read(tmp_path / "report.html")
    assert page.addresses  # plots
    layer = next(row for row in page.rows if row[:1] == [EVIL])
    assert {"MatMul", "SparseAMXMatMul", "64 x 64", "8", "replaced"} <= set(layer)
    assert any(row[:1] == [f"{EVIL}&2"] for row in page.rows)


def test_the_page_holds_what_json_and_the_table_hold(tmp_path: Path) -> None:
    report = auto_report()
    report.save_html(tmp_path / "report.html")
    page = read(tmp_path / "report.html")
    assert len(page.addresses) == 3
    text = " ".join("".join(page.texts).split())
    table = " ".join(report.details().split())
    document = json.loads(report.to_json())
    assert json.dumps(document["auto"]["trials"][1]["cosine"]) in text
    for fact in ("1.5x faster", "cosine 0.995", "saves <much>", "the original is faster here", f"a note {EVIL}"):
        assert fact in text
        assert fact in table
    replaced, kept = (next(row for row in page.rows if row[0] == name) for name in (EVIL, "kept"))
    assert replaced[3:12] == [
        "int4",
        "64 x 32",
        "25.0 %",
        "4",
        "8.0 KiB",
        "1.1 KiB",
        "0.0625",
        "1.5 / 2.5",
        "0.5 / 0.75",
    ]
    assert kept[-1] == "the original is faster here; not selected"
    assert ["1 x 8 tokens, min / median ms", "10 / 11", "5 / 6", "2"] in page.rows
    assert "1.5 / 2.5" in report.details() and "0.5 / 0.75" in report.details()
    assert "1 layer, attention fused: cosine 0.995" in table
    chosen = [row for row in page.rows if "yes, chosen" in row]
    assert [row[:3] for row in chosen] == [["1", "yes", "0.6"]]


def test_only_what_was_measured_is_drawn(tmp_path: Path) -> None:
    report = OptimizationReport({"name": "r"}, layers=[LayerReport("a", "MatMul", reason="computed at run time")])
    report.save_html(tmp_path / "report.html")
    assert read(tmp_path / "report.html").addresses == []


def test_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report_page, "find_spec", lambda name: None if name == "matplotlib" else object())
    with pytest.raises(OrtolanError, match=r"needs matplotlib, .*pip install matplotlib"):
        auto_report().save_html(tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write '.*report\.html': .*No such file"):
        auto_report().save_html(tmp_path / "no folder" / "report.html")


def test_permissions_are_those_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    auto_report().save_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "report.html"]


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    report = auto_report()
    report.layers[0].output_error = float("nan")
    assert report.auto is not None
    report.auto.trials[0].cosine = float("inf")
    report.save_html(tmp_path / "report.html")
    read(tmp_path / "report.html")


def test_auto_fills_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a search, the curve ends at the shortest time, and its points include the chosen model."""
    from ortolan.graph_passes.auto import layer_times, search
    from ortolan.graph_passes.auto.candidates import ORIGINAL

    def time_models(original: Any, paths: Any, shapes: Any) -> Any:
        return [Timing(10.0, 10.0)], [[Timing(5.0, 5.0)] for _ in paths]

    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(layer_times, "measure", lambda *arguments: {ORIGINAL: 1.0, "bf16": 0.5, "int8": 0.25})
    monkeypatch.setattr(search, "time_models", time_models)
    feeds = {"x": np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)}
    found = ortolan.search(evil_model(), calibration=feeds, budget=0.5)
    report = ortolan.optimize_onnx(evil_model(), recipe=found, calibration=feeds)
    assert report.auto is not None
    assert [(point.layer, point.form, point.time) for point in report.auto.path][-1] == (EVIL, "int8", 0.25)
    (trial,) = report.auto.trials
    assert trial.chosen and trial.time == 0.25 and trial.error == report.auto.path[-1].error > 0
    assert trial.bytes is not None and trial.bytes > 64 * 64
    report.save_html(tmp_path / "report.html")
    assert len(read(tmp_path / "report.html").addresses) == 3

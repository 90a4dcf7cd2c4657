"""The report in its two written forms."""

from __future__ import annotations

import json
import re

import pytest

from ortolan import OptimizationReport
from ortolan.graph_passes.report.figures import Timing, human_bytes
from ortolan.graph_passes.report.optimization import LayerReport, OutputDeviation
from ortolan.graph_passes.report.search import AutoReport, LayerChoice


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, ""), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.0 GiB")],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


def report(outputs: int = 1) -> OptimizationReport:
    errors = [OutputDeviation(f"out{index}", 0.1 * index, 0.99, float("inf")) for index in range(outputs)]
    layers = [
        LayerReport("[red]/a[/red]", "MatMul", "SparseAMXMatMul", 8, 16, 0.5, 512, 300, float("nan"), "replaced"),
        *(LayerReport(f"/scores{index}", "MatMul", reason="computed at run time") for index in range(3)),
    ]
    return OptimizationReport({"name": "r"}, layers=layers, output_error=errors, notes=["a note"])


def test_a_model_that_grew_is_not_called_smaller():
    grown = report()
    grown.file_size_before, grown.file_size_after = 1000, 2000
    grown.latency_before, grown.latency_after = Timing(1, 2), Timing(4, 5)
    assert "2.00x larger" in str(grown) and "4.00x slower by the minimum" in str(grown)


def test_a_model_that_did_not_change_is_called_neither():
    same = report()
    same.file_size_before, same.file_size_after = 100000, 100001
    same.latency_before, same.latency_after, same.latency_threads = Timing(1, 2), Timing(1, 2), 3
    text = str(same)
    assert "(about the same)" in text and "about the same by the minimum" in text and "1.00x" not in text
    assert "by the minimum, 3 threads each)" in " ".join(text.split())


def test_padding_stands_beside_the_speed():
    padded = report()
    padded.latency_before, padded.latency_after, padded.latency_threads = Timing(61, 62), Timing(1, 2), 1
    padded.latency_padding = (243, 256)
    assert "61.00x faster by the minimum, 243 of 256 tokens are padding, 1 thread each" in " ".join(str(padded).split())


def test_a_report_of_a_search_has_one_speedup():
    searched = report()
    searched.latency_before, searched.latency_after, searched.latency_threads = Timing(4, 4), Timing(1, 2), 1
    searched.auto = AutoReport("", [(1, 128)], "3.00x faster in the mean", changed=True)
    searched.auto.before, searched.auto.after = [Timing(3, 3)], [Timing(1, 1)]
    assert re.findall(r"\d\.\d+x", str(searched)) == ["3.00x"]


def test_numbers_that_json_does_not_know_become_null():
    table = json.loads(report().to_json())
    assert table["layers"][0]["output_error"] is None and table["output_error"][0]["max_abs"] is None
    assert "model" not in table


def test_text_groups_reasons_and_outputs_and_takes_names_literally():
    text = str(report(6))
    assert "[red]/a[/red]" in text
    assert "computed at run time: /scores0 and 2 more" in text
    assert "out2: relative error 0.2" in text and "3 more: relative error up to 0.5 (out5)" in text
    assert "a note" in text


def test_products_of_attention_are_counted_by_themselves():
    fused = report()
    assert "replaced 1 of 4 matrix products\n" in str(fused)
    for layer in fused.layers[1:3]:
        layer.status, layer.reason = "replaced", None
    assert "replaced 3 of 4 matrix products, 2 of them in attention\n" in str(fused)


def names_of_bert(layers: int) -> list[str]:
    parts = ("attention/self/query", "attention/output/dense", "intermediate/dense")
    return [f"/encoder/layer.{layer}/{part}/MatMul" for layer in range(layers) for part in parts]


def report_of_search() -> OptimizationReport:
    """As the search makes it of an encoder: two forms, and names as Optimum exports them."""
    names = names_of_bert(6)
    layers = [
        LayerReport(
            name, "MatMul+Add", "SparseAMXMatMul", 384, 1536, 0.01 + 0.001 * index, 2359296, 595968, 0.0087,
            "replaced", weight_bits=4 if index % 3 else 8,
        )
        for index, name in enumerate(names)
    ]  # fmt: skip
    choices = [
        LayerChoice(layer.name, "saves time", f"int{layer.weight_bits}", 0.0087, [1.47, 0.138], [0.275, 0.0305])
        for layer in layers
    ]
    auto = AutoReport("cosine", [(1, 128), (1, 16)], "2x faster", choices, changed=True)
    return OptimizationReport({"name": "auto"}, layers=layers, auto=auto)


def test_names_of_layers_stay_whole_in_a_report_of_the_search():
    text = str(report_of_search())
    assert max(map(len, text.splitlines())) <= 120
    for name in names_of_bert(6):
        assert f" {name} " in text
    times = "1.47 / 0.138 -> 0.275 / 0.0305 ms (1 x 128 / 1 x 16 tokens)"
    assert f"layer times   6 of 384 x 1536, int8: {times}" in text
    assert f"layer times   12 of 384 x 1536, int4: {times}" in text


def test_what_all_layers_share_is_told_once():
    searched = report_of_search()
    assert "all layers    op MatMul+Add, status replaced\n" in str(searched)
    assert str(searched).count("MatMul+Add") == 1 and "\u2503 weights" in str(searched)
    searched.layers[0].status = "kept"
    text = str(searched)
    assert "all layers    op MatMul+Add\n" in text and text.count(" replaced ") == len(searched.layers)
    searched.layers = searched.layers[:1]
    assert "all layers" not in str(searched) and " kept " in str(searched)


def test_a_model_that_stays_as_it_is_is_not_counted():
    left = OptimizationReport({"name": "auto", "pass": []}, auto=AutoReport("cosine", [(1, 16)], "nothing is faster"))
    assert str(left).startswith("recipe auto: the model stays as it is\nauto ")
    others = OptimizationReport({"name": "mine", "pass": [{"name": "normalize"}]}, dry_run=True)
    assert str(others).strip() == "recipe mine: would replace no matrix products"

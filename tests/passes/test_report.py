"""The report as text and as JSON."""

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
    assert str(grown).startswith("4.00x slower, 2.00x larger, ")
    assert "(2.00x larger)" in str(grown) and "speed         4.00x slower (the smaller" in str(grown)


def test_a_model_that_did_not_change_is_called_neither():
    same = report()
    same.file_size_before, same.file_size_after = 100000, 100001
    same.latency_before, same.latency_after, same.latency_threads = Timing(1, 2), Timing(1, 2), 3
    text = str(same)
    assert text.startswith("the same speed, the same size, ") and "1.00x" not in text
    assert text.count("about the same") == 2 and "speed         about the same (the smaller" in text
    assert "3 threads per model" in text


def test_padding_stands_beside_the_speed():
    padded = report()
    padded.latency_before, padded.latency_after, padded.latency_threads = Timing(61, 62), Timing(1, 2), 1
    padded.latency_padding = (243, 256)
    lines = str(padded).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("speed"))
    assert (
        "31.00x faster" in lines[start] and lines[start + 3].strip() == "1 thread per model"
    )  # 62 / 2 is less than 61 / 1
    assert lines[start + 4].strip() == "243 of 256 tokens of the timed inputs are padding"


def test_a_report_of_a_search_has_one_speedup():
    searched = report()
    searched.latency_before, searched.latency_after, searched.latency_threads = Timing(4, 4), Timing(1, 2), 1
    searched.auto = AutoReport("", [(1, 128)], "found", changed=True, gain=3.0)
    searched.auto.before, searched.auto.after = [Timing(3, 3)], [Timing(1, 1)]
    assert set(re.findall(r"\d\.\d+x", str(searched))) == {"2.00x"}


def test_times_of_a_busy_machine_are_named():
    busy = report()
    busy.latency_before, busy.latency_after = Timing(132, 133), Timing(2.52, 62.6)
    text = str(busy)
    assert text.startswith("2.12x faster") and "52" not in text.splitlines()[0]
    assert "times vary widely: the machine is busy" in text


def test_numbers_that_json_does_not_know_become_null():
    table = json.loads(report().to_json())
    assert table["layers"][0]["output_error"] is None and table["output_error"][0]["max_abs"] is None
    assert "model" not in table


def test_text_groups_reasons_and_outputs_and_takes_names_literally():
    text = str(report(6))
    assert "[red]/a[/red]" in report(6).table() and "[red]/a[/red]" in report(6).details()
    assert "computed at run time: /scores0 and 2 more" in text
    assert "out2: relative error 0.2" in text and "3 more outputs: relative error at most 0.5 (out5)" in text
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
    """Return the report of a search on an encoder, with two formats and layer names as Optimum exports them."""
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
    text = report_of_search().details()
    for name in names_of_bert(6):
        assert f"\n{name} " in text
    times = "1.47 / 0.138 -> 0.275 / 0.0305 ms (1 x 128 / 1 x 16 tokens)"
    text = " ".join(text.split())
    assert f"layer times 6 layers of 384 x 1536, int8: {times}" in text
    assert f"layer times 12 layers of 384 x 1536, int4: {times}" in text


def test_what_all_layers_share_is_told_once():
    searched = report_of_search()
    assert "all layers    op MatMul+Add, new op SparseAMXMatMul, status replaced\n" in searched.table(90)
    assert searched.table().count("MatMul+Add") == 1 and " format " in searched.table()
    searched.layers[0].status = "kept"
    text = searched.table()
    assert "all layers    op MatMul+Add, new op SparseAMXMatMul\n" in text
    assert text.count(" replaced\n") + text.endswith(" replaced") == len(searched.layers) - 1
    searched.layers = searched.layers[:1]
    assert "all layers" not in searched.table() and searched.table().endswith(" kept")


def test_a_model_that_stays_as_it_is_is_not_counted():
    left = OptimizationReport({"name": "auto", "pass": []}, auto=AutoReport("cosine", [(1, 16)], "nothing is faster"))
    assert str(left) == "nothing is faster\n\nrecipe        auto"
    left = OptimizationReport({"name": "mine", "pass": []}, output="new.onnx")
    assert str(left) == "the model is unchanged: new.onnx\n\nrecipe        mine"
    others = OptimizationReport({"name": "mine", "pass": [{"name": "normalize"}]}, dry_run=True)
    assert str(others).splitlines()[0] == "dry run, nothing was written: would replace no matrix products"
    assert "recipe        mine\nlayers        would replace no matrix products" in str(others)


def test_the_first_line_sums_up():
    done = report_of_search()
    done.output, done.file_size_before, done.file_size_after = "fast.onnx", 4000, 1000
    done.latency_before, done.latency_after = Timing(6, 9), Timing(2, 3)
    done.output_error = [OutputDeviation("y", 0.1, 0.998, 0.2), OutputDeviation("z", 0.1, 0.9951, 0.2)]
    first, empty, *facts = str(done).splitlines()
    assert (first, empty) == ("3.00x faster, 4.00x smaller, cosine similarity 0.9951: fast.onnx", "")
    assert {line[:14].strip() for line in facts} >= {"speed", "size", "accuracy", "layers", "int4", "int8", "search"}


def test_a_report_names_one_speed():
    done = report_of_search()
    assert done.auto is not None
    done.auto.before, done.auto.after, done.auto.gain = [Timing(6, 6)] * 2, [Timing(4, 4), Timing(3, 3)], 1.73
    searched = str(done)
    assert searched.startswith("1.73x faster") and "1 x 128 tokens: fastest run 6 -> 4 ms" in searched
    done.latency_before, done.latency_after = Timing(8, 12), Timing(2, 3)
    for text in (str(done), done.details()):
        # The speedup is in the first line, and beside the times.
        assert text.count("x faster") == 2 and text.count("4.00x faster") == 2
        assert "1.73" not in text and "(2.00x)" not in text


def test_equal_layers_are_one_line_in_80_columns():
    text = str(report_of_search())
    assert max(map(len, text.splitlines())) <= 80
    assert "layers        replaced 18 of 18 matrix products\n" in text
    assert "int8          6 layers of 384 x 1536; error at most 0.0087\n" in text
    assert "int4          12 layers of 384 x 1536; error at most 0.0087\n" in text
    for detail in ("/encoder", "SparseAMXMatMul", "MatMul+Add"):
        assert detail not in text


def test_sparsity_is_told_where_something_is_sparse():
    """Rounding makes some weights zero, especially in 4 bits; that alone does not add a line on sparsity."""
    layer = LayerReport("a", "MatMul", "SparseAMXMatMul", 8, 16, 0.15, 512, 300, 0.1, "replaced", storage="dense")
    done = OptimizationReport({"name": "r", "pass": [{"name": "quantize"}]}, layers=[layer])
    assert "%" not in done.details() and "sparsity" not in done.details()
    done.recipe["pass"].append({"name": "prune"})
    assert "15.0 % zeros" in str(done) and "sparsity" in done.table() and "15.0 %" in done.table()
    done.recipe["pass"].pop()
    layer.storage = "bitmap"
    assert "15.0 % zeros" in str(done) and "15.0 %" in done.table()


def test_tables_fold_to_the_terminal_and_text_to_its_width():
    done = report_of_search()
    assert max(map(len, done.table(60).splitlines())) <= 60 < max(map(len, done.table().splitlines()))
    assert max(map(len, done.details(100, 60).splitlines())) <= 100
    done.output = "/a" * 50
    assert done.output in str(done)  # paths stay whole


def test_reports_of_a_folder_begin_with_the_whole():
    part = report()
    whole = OptimizationReport({"name": "r"}, output="fast/", layers=part.layers, parts={"encoder.onnx": part})
    whole.file_size_before, whole.file_size_after, whole.notes = 2000, 1000, ["encoder.onnx: a note", "of the folder"]
    text = str(whole)
    assert text.startswith("2.00x smaller, cosine similarity 0.9900: fast/\n\nencoder.onnx\ncosine similarity 0.9900\n")
    assert text.count("a note") == 1 and text.endswith("note          of the folder")
    assert whole.table().startswith("encoder.onnx\n") and "[red]/a[/red]" in whole.details()

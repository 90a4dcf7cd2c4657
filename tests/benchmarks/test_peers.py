"""Comparison with other runtimes on synthetic data: verdicts, result file, pages and pictures."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from ortolan.errors import OrtolanError
from tests.benchmarks.checkout import ENVIRONMENT
from tools.peers import environments, freshness, names, page, pictures, site
from tools.peers.comparison import outrun_by
from tools.peers.configuration import speed_of
from tools.peers.result import PeersResult, Row, Speed
from tools.peers.verdict import (
    DECODERS,
    ENCODERS,
    LAYERS,
    ONE_AT_A_TIME,
    ONE_AT_A_TIME_ENGINE,
    RULES,
    SECTIONS,
    SERVING,
    SIZES,
    SPARSE_ENCODERS,
    changes,
    goal_of,
    verdicts,
)

from ..docs.pages import ROOT


def row(
    name: str, quality: float | None, *speeds: float, section: str = ENCODERS, works=("1x16", "8x64"), **others
) -> Row:
    """Return a row with `speeds` at `works` on one thread. A name that begins with "our" belongs to Ortolan."""
    ours = name.startswith("our")
    measured = {} if quality is None else {RULES[section].quality: quality}
    timed = [Speed(work, 1, "texts/s", speed, speed / 1.1, 0.1) for work, speed in zip(works, speeds, strict=False)]
    made = Row(
        section, "a model", name, "ortolan" if ours else name.split()[0], ours, "call()", {"package": "1.0"}, 10.0
    )
    code = freshness.digest_of(section) if ours else None
    return replace(made, **{"quality": measured, "speeds": timed, "code": code, **others})


def result_of(*rows: Row) -> PeersResult:
    return PeersResult(["python …"], "2026-01-02", cpu="a CPU", versions={"onnxruntime": "1.0"}, rows=list(rows))


def speed_verdicts(*rows: Row) -> dict[str, tuple[str, str | None, float | None]]:
    """Return the verdicts: work -> (name of Ortolan's row, name of the other runtime's row, ratio)."""
    found = [one for one in verdicts(result_of(*rows)) if one.threads]
    return {one.work: (one.ours.name, one.peer and one.peer.name, one.ratio) for one in found}


def test_the_fastest_peer_of_equal_quality_counts():
    found = speed_verdicts(
        row("ours", 0.998, 30, 40), row("slow", 1.0, 10, 10), row("fast", 0.992, 20, 5), row("bad", 0.9, 99, 99)
    )
    assert found == {"1x16": ("ours", "fast", 1.5), "8x64": ("ours", "slow", 4.0)}


def test_a_peer_with_a_better_spearman_counts_at_any_cosine():
    ours, peer = row("ours", 0.998, 30), row("peer", 0.98, 20)
    assert speed_verdicts(ours, peer)["1x16"][1] is None
    ours.quality["Spearman"], peer.quality["Spearman"] = 0.86, 0.87
    assert speed_verdicts(ours, peer)["1x16"] == ("ours", "peer", 1.5)


def test_our_form_with_the_best_ratio_counts_and_none_below_the_least_cosine():
    found = speed_verdicts(
        row("our int8", 0.998, 30), row("our int4", 0.995, 60), row("our bad", 0.9, 900), row("peer", 1.0, 20)
    )
    assert found["1x16"] == ("our int4", "peer", 3.0)


def outrun(*rows: Row, threads: int = 1) -> list[str | None]:
    return [outrun_by(one, rows, "step at 4096", threads) for one in rows]


def test_what_can_decide_nothing_is_outrun():
    def step(name: str, perplexity: float, speed: float) -> Row:
        return row(name, perplexity, speed, section=DECODERS, works=("step at 4096",))

    slow, fast, bad = step("slow", 30.0, 10), step("fast", 30.2, 12.5), step("bad", 40.0, 99)
    assert outrun(step("ours", 30.0, 99), slow, fast, bad) == [None, "fast", None, None]
    # "slow" is as good as "ours" and "fast" is not, so "slow" may decide the verdict although it is slower.
    assert outrun(step("ours", 29.8, 99), slow, fast, bad) == [None, None, "bad", None]
    assert outrun(step("ours", 30.0, 99), step("our better", 29.0, 99), slow, fast) == [None, None, "fast", None]
    assert outrun(step("ours", 30.0, 10), step("our better", 29.9, 13)) == ["our better", None]
    assert outrun(step("ours", 30.0, 10), step("our worse", 30.1, 13)) == [None, None]
    assert outrun(slow, fast, threads=2) == [None, None]  # not timed


def test_what_has_no_quality_is_not_compared():
    assert speed_verdicts(row("ours", 0.998, 30), row("peer", None, 90), row("slow", 1.0, 10))["1x16"][1] == "slow"
    assert speed_verdicts(row("ours", None, 30), row("slow", 1.0, 10)) == {}


@pytest.mark.parametrize(("quality", "counts"), [(20.19, True), (20.21, False), (19.0, True)])
def test_decoders_are_equal_within_a_percent_of_perplexity(quality, counts):
    names = {"section": DECODERS, "works": ("decode",)}
    found = speed_verdicts(row("ours", 20.0, 30, **names), row("peer", quality, 20, **names))
    assert (found["decode"][1] == "peer") == counts


@pytest.mark.parametrize(("quality", "counts"), [(280_000, True), (400_000, False)])
def test_random_weights_are_equal_within_a_percent_of_the_logarithm_of_perplexity(quality, counts):
    names = {"section": SIZES, "works": ("decode",)}
    found = speed_verdicts(row("ours", 270_000, 30, **names), row("peer", quality, 20, **names))
    assert (found["decode"][1] == "peer") == counts


def test_layers_are_equal_within_a_tenth_of_error():
    names = {"section": LAYERS, "works": ("1 row",)}
    found = speed_verdicts(
        row("ours", 0.01, 30, **names), row("more", 0.012, 90, **names), row("peer", 0.0109, 15, **names)
    )
    assert found["1 row"] == ("ours", "peer", 2.0)


def test_requests_one_at_a_time_do_not_stand_for_many_at_once():
    works = ("1 request, whole", "16 requests, whole")
    rows = (
        row("our engine", 20.0, 90.0, section=SERVING, works=works),
        row(ONE_AT_A_TIME, 20.0, 100.0, 120.0, section=SERVING, works=works, ours=True, engine=ONE_AT_A_TIME_ENGINE),
        row("peer", 20.0, 50.0, 60.0, section=SERVING, works=works),
    )
    for result in (result_of(*rows), freshness.marked(result_of(*rows))):  # the row is older: it has no digest
        compared = {one.work: one.ours.engine for one in verdicts(result) if one.threads is not None}
        assert compared == {"1 request, whole": ONE_AT_A_TIME_ENGINE}


def test_goals():
    assert [goal_of(DECODERS, work) for work in ("prompt 128", "decode", "step at 1024", "step at 16384")] == [
        2,
        1.4,
        1.4,
        3,
    ]
    assert [goal_of(ENCODERS, work) for work in ("8x64", "mixed 8-256, sorted")] == [1.5, 2.5]
    assert [goal_of(section, "1x16") for section in (ENCODERS, SPARSE_ENCODERS, LAYERS)] == [1.5, 2.5, 1.0]


def test_misses_come_first_and_less_is_better_for_files_and_load_times():
    ours, peer = row("ours", 0.998, 29, 80, load_seconds=1.0), row("peer", 1.0, 20, 20, load_seconds=0.5)
    peer.megabytes = 20.0
    found = verdicts(result_of(ours, peer))
    assert [(one.work, one.ratio, one.missed) for one in found] == [
        ("1x16", 1.45, True),
        ("load time", 0.5, True),
        ("8x64", 4.0, False),
        ("file size", 2.0, False),
    ]


def test_changes_are_speeds_that_moved_and_qualities_that_are_others():
    before = result_of(row("ours", 0.998, 30, 40), row("gone", 1.0, 1))
    after = result_of(row("ours", 0.997, 31, 50), row("new", 1.0, 1))
    found = [(one.name, one.what, one.before, one.after) for one in changes(before, after)]
    assert found == [("ours", "8x64, 1 thread, texts/s", 40, 50), ("ours", "cosine", 0.998, 0.997)]


def test_a_speed_has_the_shortest_time_the_median_and_the_spread():
    assert speed_of("1x16", 1, 10, "texts/s", [1.0, 2.0, 4.0]) == Speed("1x16", 1, "texts/s", 10.0, 5.0, 0.75)
    assert speed_of("1x16", 1, 10, "texts/s", [2.0]).spread == 0


def test_the_file_comes_back():
    result = result_of(row("ours", 0.998, 30, 40))
    assert PeersResult.from_json(result.to_json()) == result


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"name": 1}]}'])
def test_other_files_are_refused(text):
    with pytest.raises(OrtolanError, match="not the result of a comparison"):
        PeersResult.from_json(text)


def made_up() -> PeersResult:
    shapes = ("mixed 8-256", "1x16", "8x64")
    steps = {"section": DECODERS, "works": ("decode", "step at 1024", "step at 16384")}
    return result_of(
        row("ORT fp32", 1.0, 10, 20, 30, works=shapes),
        row("our int8", 0.998, 100, 21, 90, works=shapes),
        row("OpenVINO", 1.0, 30, 20, 60, works=shapes),
        row("ORT fp32", 19.8, 20, 19, 3, **steps),
        row("our int4", 19.9, 90, 80, 70, **steps),
    )


def test_the_page_lists_ratios_below_one_first():
    result = made_up()
    result.rows[1].speeds[1] = Speed("1x16", 1, "texts/s", 19.0, 18.0, 0.1)
    text = page.write(result, "data/peers.json", "pictures")
    lines = [line for line in text.splitlines() if line.startswith("| a model |")]
    assert lines[0] == "| a model | 1x16 | our int8 | 19 | ONNX Runtime fp32 | 20 | **0.95** | 0.99 |"
    assert len(lines) == 6
    assert "### Decoders: a model" in text and "| **our int4** | 10 |" in text
    assert "[Data](data/peers.json)" in text and "](pictures/peers-context-dark.svg#" in text
    alone = page.write(made_up())
    assert "Data" not in alone and ".svg" not in alone


def test_pictures_are_drawn_for_light_and_for_dark_pages(tmp_path):
    drawn = pictures.draw_all(made_up(), tmp_path)
    assert [path.name for path in drawn] == [
        f"peers-{name}-{theme}.svg" for name in ("summary", "context", "shapes") for theme in ("light", "dark")
    ]
    texts = [path.read_text() for path in drawn]
    assert "OpenVINO -->" in texts[0] and "ORT -->" in texts[2] and "8 × 64 -->" in texts[4]
    assert texts[0] != texts[1]
    pictures.draw_all(made_up(), tmp_path)
    assert [path.read_text() for path in drawn] == texts


def test_the_summary_shows_each_runtime_in_its_fastest_accurate_form():
    result = made_up()
    result.rows.append(row("openvino inaccurate", 0.9, 200, works=("mixed 8-256",)))
    result.rows[0] = replace(result.rows[0], engine="onnxruntime")
    result.rows[2] = replace(result.rows[2], engine="openvino")
    embeddings, decoding = pictures.find_panels(result)
    assert embeddings.speeds == {"Ortolan": 100, "OpenVINO": 30, "ONNX Runtime": 10}
    assert list(decoding.speeds) == ["Ortolan", "ORT"] and decoding.unit == "tokens/s"


def test_names_of_lines_do_not_overlap_one_another(tmp_path):
    steps = {"section": DECODERS, "works": ("step at 1024", "step at 4096", "step at 16384")}
    peers = [
        replace(row(f"peer {number}", 19.0, 50 + number, 20 + number, 10 + number / 9, **steps), engine=engine)
        for number, engine in enumerate(("openvino", "llama.cpp", "torch", "onnxruntime"))
    ]
    figure = pictures.draw_context(result_of(row("ours", 19.0, 90, 80, 70, **steps), *peers), pictures.LIGHT)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for plot in figure.axes for text in plot.texts]
    assert len(boxes) == 5
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_a_result_with_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(OrtolanError, match="no data for any picture"):
        pictures.draw_all(result_of(), tmp_path)


def without_marks(text: str) -> str:
    """Return a page without the marks of rows that are older than the code, and without their explanation."""
    return text.replace(page.EXPLANATION, "").replace(freshness.MARK, "")


def test_older_rows_are_marked_and_measured_again():
    steps = {"section": DECODERS, "works": ("decode",)}
    old, new = row("our int8", 19.9, 30, code="0123", **steps), row("our int4", 19.9, 31, **steps)
    peer = row("ORT fp32", 19.8, 20, **steps)
    text = page.write(result_of(new, old, peer))
    assert f"**our int8{freshness.MARK}**" in text and "**our int4**" in text and page.EXPLANATION in text
    assert page.EXPLANATION not in page.write(result_of(new, peer))
    group = (DECODERS, "a model")
    assert freshness.timed(result_of(new, peer)) == {group: {1}} and freshness.timed(result_of(new, old)) == {}
    kept = result_of(new, replace(old, model="another"), row("our int8", 0.99, 30))
    kept.left_out = ["decoders, another: peer: none", "decoders, a model: peer: none"]
    kept.drop(*group)
    assert [one.model for one in kept.rows] == ["another", "a model"]
    assert kept.left_out == ["decoders, another: peer: none"]


def test_a_digest_changes_with_its_sources_alone(monkeypatch, tmp_path):
    assert set(freshness.SOURCES) == set(SECTIONS)
    folders = {folder for folders in freshness.SOURCES.values() for folder in folders}
    for folder in folders:
        assert any((ROOT / folder).glob("*.*")), folder
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(freshness, "_ROOT", tmp_path)

    def digests() -> dict[str, str]:
        freshness.digest_of.cache_clear()
        return {section: freshness.digest_of(section) for section in SECTIONS}

    try:
        empty = digests()
        (tmp_path / "src/ortolan/engine/step.py").touch()
        (tmp_path / "ops/isa/README.md").touch()
        changed = digests()
    finally:
        freshness.digest_of.cache_clear()
    assert {section for section in SECTIONS if empty[section] != changed[section]} == {SERVING, SIZES}


def test_the_committed_pages_and_pictures_show_the_committed_data():
    pages = site.pages(ROOT / "docs")
    assert len(pages) >= 4
    # Marks of rows that are older than the code depend on the checkout. `tools.peers.site` renews them.
    written = {path: without_marks(path.read_text(encoding="utf-8")) for path in pages}
    assert written == {path: without_marks(text) for path, text in pages.items()}
    for path in site.data_files(ROOT / "docs"):
        result = site.read(path)
        for name in pictures.PICTURES:
            picture = ROOT / "docs" / "pictures" / path.stem.split("-")[1] / f"peers-{name}-dark.svg"
            assert result.date in picture.read_text(encoding="utf-8")


def test_the_index_explains_the_names_of_our_forms():
    text = (ROOT / "docs" / "measurements" / "index.md").read_text(encoding="utf-8")
    results = [site.read(path) for path in site.data_files(ROOT / "docs")]
    ours = {row.name for result in results for row in result.rows if row.ours}
    parts = {part.strip() for name in ours for part in re.split(", | in ", name.removeprefix("Ortolan"))} - {""}
    explained = " ".join(text.split())
    assert len(parts) > 8
    assert [part for part in parts if f"`{part.removeprefix('sparse ')}`" not in explained] == []


@pytest.mark.parametrize(
    ("cpu", "label"),
    [
        ("Intel(R) Xeon(R) Processor (amx)", "Intel Xeon (AMX)"),
        ("AMD EPYC (avx512bf16)", "AMD EPYC (AVX-512)"),
        ("AMD EPYC (avx2)", "AMD EPYC (AVX2)"),
    ],
)
def test_a_cpu_is_named_without_trademarks(cpu, label):
    assert names.cpu_label(cpu) == label


def test_requirements_are_pinned_and_an_environment_changes_with_them(monkeypatch, tmp_path):
    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path))
    for requirements in environments.REQUIREMENTS.values():
        assert "==" in requirements[0]
    before = environments.environment_folder("openvino")
    assert before.parent == tmp_path / "peers"
    monkeypatch.setitem(environments.REQUIREMENTS, "openvino", ("openvino==1.0",))
    assert environments.environment_folder("openvino") != before


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_says_why_and_is_tried_again(monkeypatch, tmp_path):
    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path))
    monkeypatch.setitem(environments.REQUIREMENTS, "openvino", (str(tmp_path / "no-such-package-1.0.whl"),))
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(OrtolanError, match=r"openvino cannot be installed: .*no-such-package"):
            environments.make_environment("openvino", said.append)
    assert len(said) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("decoder",), "expected encoders, sparse encoders, decoders, layers, serving, sizes; found 'decoder'"),
        (("serving", "--model", "SmolLM2"), "--model: expected one of smollm2-135m-instruct; found 'SmolLM2'"),
        (("--peer", "tensorflow"), "invalid choice: 'tensorflow'"),
        (("--sts", "none.csv"), "--sts: file 'none.csv' does not exist"),
        (("--from", "none.json"), "--from: file 'none.json' does not exist"),
        (("--json", "none/one.json"), "--json: expected a folder to write to, found 'none'"),
        (("--pictures", "none"), "--pictures: expected a folder, found 'none'"),
        (("--threads", "0"), "--threads: expected 1 or more, found 0"),
        (("--requests", "4", "0"), "--requests: expected 1 or more, found 0"),
        (("--cache-type", "int4"), "--cache-type: invalid choice: 'int4'"),
        (("--arrivals", "-1"), "--arrivals: expected 0 or more, found -1"),
        (("--gguf", "none.gguf"), "--gguf: file 'none.gguf' does not exist"),
    ],
)
def test_what_there_is_none_of_is_refused(arguments, words, tmp_path):
    command = [sys.executable, "-P", "-m", "tools.peers", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr

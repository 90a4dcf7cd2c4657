"""The section "sizes": a tiny random model in Ortolan's engine, and the rows and their table."""

from __future__ import annotations

import dataclasses

import pytest

from tests.models import gguf_file
from tools import random_gguf
from tools.peers import page, sizes
from tools.peers.comparison import Job
from tools.peers.result import PeersResult, Row
from tools.peers.serving_times import MIXED, Run
from tools.peers.verdict import SIZES, verdicts

NAME = "qwen2.5-0.5b"


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Replace the shapes by a tiny one, whose tokenizer needs no download."""
    shape = random_gguf.Shape(2, 64, 256, 4, 2, 16, 1000, tied=True)
    tokenizer = tmp_path / "tokenizer.gguf"
    gguf_file.write(tokenizer, table="Q8_0")

    def write_shape(name, path, weights):
        random_gguf.write_random_gguf(shape, name, path, tokenizer, weights)

    monkeypatch.setattr(sizes, "MODELS", (NAME,))
    monkeypatch.setattr(sizes, "LARGEST", NAME)
    monkeypatch.setattr(sizes, "write_shape", write_shape)
    small = [dataclasses.replace(work, count=min(work.count, 2)) for work in sizes.WORKS]
    monkeypatch.setattr(sizes, "WORKS", tuple(small))
    return tmp_path


def test_a_model_is_converted_and_timed(tiny):
    job, result = Job((1,), 0.0, {}, tiny, print), PeersResult(["python …"], "2026-01-02", cpu="a CPU", versions={})
    sizes.measure(job, result)
    assert not result.left_out
    served, optimized = result.rows
    assert (served.name, optimized.name) == ("Ortolan, engine", "Ortolan int4")
    for row in result.rows:
        assert row.make_seconds and row.measured and row.code
        assert row.make_megabytes is None or row.make_megabytes > 10
    assert served.load_seconds and served.quality["perplexity"] > 1
    assert [speed.work for speed in served.speeds] == ["prompt 128", "decode", "prompt 512", "2 requests"]
    assert served.measure("prompt 512", 1, sizes.FIRST).value > 0
    share = served.measure("decode", 1, sizes.SHARE)
    assert bool(share) == bool(sizes.plain_read(1))
    assert list(tiny.iterdir()) == [tiny / "tokenizer.gguf"]
    done = dataclasses.replace(job, done=result.timed())
    sizes.measure(done, result)  # measures nothing again
    assert result.rows == [served, optimized]


def row(name: str, ours: bool) -> Row:
    made = {"make_seconds": 30.0, "make_megabytes": 900.0} if ours else {}
    return Row(SIZES, NAME, name, "any", ours, "call()", {}, 400.0, 0.5, quality={"perplexity": 9.0}, **made)


def note_all(made: Row, seconds: float) -> None:
    """Add works that take `seconds` for each token."""
    for work in sizes.WORKS:
        first = work.prompt * work.count * seconds
        times = [[first + seconds * step for step in range(work.answer)]] * work.count
        run = Run([work.prompt] * work.count, [0.0] * work.count, times, MIXED, 2000.0)
        sizes.note(made, work, 2, [run, run])
    sizes.add_share(made, 2, 10**9, 2e11)


def test_speeds_and_measures_are_shown():
    ours, peer = row("Ortolan, engine", True), row("llama.cpp, as it is", False)
    note_all(ours, 0.01)
    note_all(peer, 0.02)
    assert ours.measure("decode", 2, sizes.SHARE).value == pytest.approx(50)
    result = PeersResult(["python …"], "2026-01-02", cpu="a CPU", versions={"onnxruntime": "1.0"}, rows=[ours, peer])
    ratios = {one.work: (one.ratio, one.goal) for one in verdicts(result) if one.threads}
    twice = pytest.approx(2)
    goals = {"prompt 128": 2.0, "prompt 512": 2.0, "decode": 1.4, "16 requests": 1.5}
    assert ratios == {work: (twice, goal) for work, goal in goals.items()}
    cells = sizes.lines(result.rows)
    assert all(len(line) == len(sizes.columns()) for line in cells)
    figures = ["2", "400", "9", "30", "0.9", "0.5", "1.28", "5.12", "100", "50", "94.3", "2"]
    assert cells[0] == ["Ortolan, engine", *figures]
    assert cells[1][4:6] == ["-", "-"]
    text = page.write(result)
    assert "### Sizes: Qwen2.5-0.5B" in text and "| Ortolan, engine" in text


def test_only_a_table_that_is_no_head_is_not_read_for_each_token(tmp_path):
    gguf_file.write(tmp_path / "tokenizer.gguf", table="Q8_0")
    found = {}
    for tied in (True, False):
        shape = random_gguf.Shape(1, 64, 256, 4, 2, 16, 1000, tied=tied)
        path = tmp_path / f"{tied}.gguf"
        random_gguf.write_random_gguf(shape, "small", path, tmp_path / "tokenizer.gguf", "Q4_0")
        found[tied] = sizes.bytes_of_a_token(path)
    assert found[True] == found[False] > 1000 * 64

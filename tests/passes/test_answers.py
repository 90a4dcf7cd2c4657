"""Memory for answers is limited: inputs are shortened, and large answers are stored in files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from ortolan.errors import OutputError
from ortolan.graph_passes.measure import answers
from ortolan.graph_passes.measure.answers import cut, keep, shorten
from ortolan.graph_passes.measure.sessions import open_quietly
from ortolan.models import tiny

from .small_models import optimize


def decoder_feeds(tokens: int = 100, count: int = 3) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(0, 50, (1, tokens))} for _ in range(count)]


def test_large_answers_are_mapped_from_files_that_are_gone(tmp_path):
    large, small = np.arange(3 * 2**20, dtype=np.float32).reshape(3, -1), np.ones(5)
    kept = keep([large, None, small], tmp_path)
    assert isinstance(kept[0], np.memmap) and kept[0].shape == large.shape and (kept[0] == large).all()
    assert kept[1] is None and type(kept[2]) is np.ndarray and kept[2].base is None
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_large_answers_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: Path("/dev/full").open("wb"))  # noqa: SIM115
    with pytest.raises(OutputError, match=f"cannot write a file for the model's answers in '{tmp_path}': No space"):
        keep([np.zeros(3 * 2**20, np.float32)], tmp_path)


def test_small_answers_do_not_keep_the_memory_of_a_session(tmp_path):
    whole = np.zeros(100)
    (kept,) = keep([whole[:3]], tmp_path)
    assert kept is not None and kept.base is None


def test_feeds_of_large_answers_are_cut_short():
    session = open_quietly(ir.to_proto(tiny.tiny_bert(vocab_size=50)).SerializeToString())
    ids = np.arange(200).reshape(2, 100) % 50
    mask = np.ones_like(ids)
    mask[:, :30] = 0
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    few = {name: array[:, :20] for name, array in feeds.items()}
    assert shorten([feeds], lambda: session, 2**20) == [feeds]
    of_token = sum(one.nbytes for one in session.run(None, few)) // few["input_ids"].size
    shorter, same = shorten([feeds, few], lambda: session, 80 * of_token)
    assert same is few
    assert all(np.array_equal(shorter[name], feeds[name][:, 30:70]) for name in feeds)


def test_a_cache_is_kept_where_feeds_are_cut():
    past = np.zeros((1, 2, 5, 4), np.float32)
    feeds = {"input_ids": np.arange(9)[None], "attention_mask": np.ones((1, 14)), "past_key": past}
    shorter = cut(feeds, 4)
    assert shorter is not None
    assert shorter["input_ids"].tolist() == [[0, 1, 2, 3]] and shorter["attention_mask"].shape == (1, 9)
    assert shorter["past_key"] is past
    assert cut(feeds | {"pixels": np.zeros(3)}, 4) is None


@pytest.mark.parametrize("cache", [None, "float32"])
def test_verification_of_cut_feeds_and_mapped_answers(monkeypatch, cache):
    """A small memory limit changes the reported errors only because fewer tokens are compared."""
    model = ir.to_proto(tiny.tiny_llama(vocab_size=50))
    arguments = {"recipe": None, "weights": "int8", "cache": cache, "calibration": decoder_feeds()}
    before = optimize(model, **arguments)
    monkeypatch.setattr(answers, "_IN_MEMORY", 0)
    mapped = optimize(model, **arguments)
    assert mapped.output_error == before.output_error and mapped.rounding_error == before.rounding_error
    monkeypatch.setattr(answers, "_MAX_BYTES", 70 * 50 * 4)
    shorter = optimize(model, **arguments)
    assert [error.name for error in shorter.output_error] == [error.name for error in before.output_error]
    told = ["answers are compared on" in " ".join(report.notes) for report in (before, shorter)]
    assert told == [False, True]
    assert 0 < shorter.output_error[0].relative_l2 < 2 * before.output_error[0].relative_l2

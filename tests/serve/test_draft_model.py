"""A decoder with a draft model: answers are those without it, and its own draft is right nearly always."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import ortolan
from ortolan.benchmarks.same_answers import make_requests, run, together
from ortolan.engine import DraftModel, Engine, Request, SamplingOptions
from ortolan.engine.speculation import Speculation

from ..passes.cached_llama import llama
from .paged import open_model

GREEDY = SamplingOptions(temperature=0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a decoder and a smaller one of the same vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    sizes: dict[str, dict[str, int]] = {"model": {}, "draft": {"num_hidden_layers": 1, "seed": 5}}
    for name, options in sizes.items():
        onnx.save(llama("gqa", **options), folder / f"{name}.onnx")
        ortolan.optimize_onnx(folder / f"{name}.onnx", folder / f"{name}-serving.onnx", weights="int8", serve=True)
    return folder / "model-serving.onnx", folder / "draft-serving.onnx"


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts not depend on the times of steps."""
    monkeypatch.setattr(Speculation, "observe", lambda *_: None)


@pytest.mark.parametrize(("which", "accepted"), [(0, 20), (1, 0)])
@pytest.mark.parametrize("blocks", [12, 200])
def test_answers_depend_on_their_request_alone(
    files: tuple[Path, Path], which: int, accepted: int, blocks: int
) -> None:
    """Tokens and log probabilities, with seeds, penalties, preemptions and cancellations."""
    model = open_model(files[0], blocks=160)
    requests = make_requests(40, model.vocabulary, seed=3)
    source = DraftModel(open_model(files[which], blocks=blocks))
    with Engine(model, max_step_tokens=128, max_sequences=16, speculation=source) as engine:
        answers, cancelled = together(engine, requests, seed=3)
        stats = engine.stats()
    assert stats.drafted_tokens > 10 and stats.accepted_tokens >= accepted
    with Engine(model, speculation=None) as engine:
        for request, found, stopped in zip(requests, answers, cancelled, strict=True):
            alone = run(engine, request)
            for one, two in zip(alone, found, strict=True):
                length = len(two[0]) if stopped else None
                assert (one[0][:length], one[1][:length]) == two


def test_a_model_drafts_for_itself(files: tuple[Path, Path]) -> None:
    model, draft = (open_model(files[0], blocks=100) for _ in range(2))
    requests = [Request(tuple(range(start, start + 9)), 60, GREEDY) for start in range(0, 50, 10)]
    with Engine(model, speculation=None) as engine:
        expected = [run(engine, request) for request in requests]
        plain = engine.stats()
    source = DraftModel(draft)
    with Engine(model, speculation=source) as engine:
        streams = [engine.submit(request) for request in requests]
        found = [[token for output in stream for token in output.tokens] for stream in streams]
        stats = engine.stats()
    assert found == [one[0][0] for one in expected]
    assert stats.accepted_tokens > 0.9 * stats.drafted_tokens > 100 and source.accuracy > 0.9
    assert stats.steps < plain.steps / 8

"""Perplexity after pruned prompts, with pruned float caches and with the operator."""

import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortolan.errors import OrtolanError
from ortolan.models import tiny
from ortolan.models.perplexity import Score, score_tokens
from ortolan.session import create_session
from tools.evaluate_prompt import PromptedDecoder, cut_windows, mean, score_operator

IDS = np.random.default_rng(0).integers(0, tiny.TINY_LLAMA.vocab_size, 60)
CUT = 40


@pytest.fixture(scope="module", params=["standard", "gqa"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(ir.to_proto(tiny.tiny_llama(attention=request.param, head_dim=16)), path)
    return path


def test_an_exact_cache_gives_the_model_s_own_score(model):
    session = create_session(model)
    decoder = PromptedDecoder(session)
    whole, prompt = (score_tokens(session, IDS[:end], len(IDS)) for end in (len(IDS), CUT + 1))
    score = decoder.score(decoder.exact(IDS[:CUT]), IDS[CUT:])
    expected = whole.cross_entropy * whole.tokens - prompt.cross_entropy * prompt.tokens
    assert score.tokens == len(IDS) - CUT - 1
    assert score.cross_entropy * score.tokens == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("sparsities", [(0.0, 0.0), (0.3, 0.5), (0.7, 0.7)])
def test_the_operator_is_the_pruned_cache(model, sparsities):
    decoder = PromptedDecoder(create_session(model))
    exact = decoder.exact(IDS[:CUT])
    caches = decoder.pruned(exact, sparsities)
    for name, cache in caches.items():
        zeros = sparsities[0] if name.endswith("key") else sparsities[1]
        assert ((cache == 0).sum(-1) == round(zeros * cache.shape[-1])).all()
        largest = np.where(cache == 0, np.abs(exact[name]), 0).max(-1)
        assert (largest <= np.where(cache != 0, np.abs(exact[name]), np.inf).min(-1)).all()
    simulated = decoder.score(caches, IDS[CUT:])
    operator = score_operator(model, IDS[:CUT], IDS[CUT:], sparsities)
    assert operator.tokens == simulated.tokens
    assert operator.cross_entropy == pytest.approx(simulated.cross_entropy, rel=2e-3)
    if any(sparsities):
        unpruned = decoder.score(exact, IDS[CUT:])
        assert abs(operator.cross_entropy - simulated.cross_entropy) < 0.2 * abs(
            unpruned.cross_entropy - simulated.cross_entropy
        )


def test_mean_counts_tokens():
    found = mean([Score(1.0, 1), Score(3.0, 3)])
    assert found == Score(2.5, 4) and found.perplexity == math.exp(2.5)


def test_windows():
    assert cut_windows(range(100), 10, 4) == [range(s, s + 10) for s in (0, 30, 60, 90)]
    with pytest.raises(OrtolanError, match="the text has 9 tokens, fewer than a window of 10"):
        cut_windows(range(9), 10, 1)

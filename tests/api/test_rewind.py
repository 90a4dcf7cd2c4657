"""A rewound decoder gives, bit for bit, the logits of a decoder that never went ahead."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortolan
from ortolan import Recipe, _native
from ortolan.errors import ArgumentError, ArgumentTypeError
from ortolan.generate import Decoder
from ortolan.graph_passes.names import OPTIONS_KEY
from ortolan.rewinding import key_block_to_rows, value_block_to_rows

from ..passes.cached_llama import VOCABULARY, llama, prompt, session

IDS = np.random.default_rng(0).integers(0, VOCABULARY, 160)
OTHERS = (IDS + 1) % VOCABULARY
ROOM = 128
EXACT = {"window": 6, "sinks": 2}
CACHES: dict[str, dict[str, Any]] = {
    "codes": {},
    "codes of 12 parts": {"head_dim": 48, "d_sub": 4},
    "codes and float values": {"d_sub": 2, "values": "float32"},
    "floats": {"keys": "float32", "values": "float32"},
    "equal rows": {"d_sub": 4, "equal_rows": True},
    "exact keys": EXACT,
    "exact keys of many tokens": {"window": 37, "sinks": 3, "d_sub": 2},
    "exact keys without sinks": {"window": 5},
    "exact sinks": {"sinks": 40},
    "exact keys and equal rows": EXACT | {"equal_rows": True},
    "exact keys and a prompt": EXACT | {"prompt_tokens": 20},
}


@cache
def make_model(head_dim: int = 16, layers: int = 2, prompt_tokens: int = 0, **options: Any) -> onnx.ModelProto:
    """Return a decoder with a compressed cache. In its int8 layers, rows of a call do not depend on each other."""
    model = llama("gqa", head_dim=head_dim, num_hidden_layers=layers)
    recipe = Recipe.load("int8", cache="codes").with_options(options)
    ids = IDS[-prompt_tokens:] if prompt_tokens else None
    report = ortolan.optimize_onnx(
        model, recipe=recipe, calibration=[prompt(model, batch=1 if prompt_tokens else 2)], prompt=ids
    )
    assert report.model is not None
    return report.model


@cache
def make_session(**options: Any) -> onnxruntime.InferenceSession:
    return session(make_model(**options))


def make_decoder(name: str, rewindable: int = 0, layers: int = 2) -> Decoder:
    options = CACHES[name]
    head_size = 16 if "equal_rows" in options else None
    return Decoder(make_session(layers=layers, **options), ROOM, head_size, rewindable=rewindable)


def run(decoder: Decoder, end: int, ids: np.ndarray = IDS, at_once: int = 1) -> np.ndarray:
    """Continue with ids[length:end] in calls of `at_once` tokens, and return the logits."""
    cuts = range(decoder.length, end, at_once)
    logits = [decoder.step(ids[begin : min(begin + at_once, end)]) for begin in cuts]
    return np.concatenate([np.empty((0, VOCABULARY), np.float32), *logits])


@pytest.mark.parametrize("d_sub", [1, 2, 4])
@pytest.mark.parametrize("length", [0, 10, 31, 32, 33, 63, 64, 65, 69, 70])
def test_codes_are_rewound_to_any_length(d_sub: int, length: int) -> None:
    decoder, expected = (Decoder(make_session(d_sub=d_sub), ROOM) for _ in range(2))
    for one in (decoder, expected):
        run(one, length, at_once=max(length, 1))
    run(decoder, 70, OTHERS, at_once=7)
    decoder.rewind(length)
    assert decoder.length == length
    np.testing.assert_array_equal(run(decoder, 100), run(expected, 100))


@pytest.mark.parametrize("length", [59, 63, 64, 65, 70])
@pytest.mark.parametrize("name", CACHES)
def test_every_cache_is_rewound(name: str, length: int) -> None:
    decoder, expected = make_decoder(name, 20), make_decoder(name)
    for one in (decoder, expected):
        run(one, 40, at_once=40)
        run(one, length)
    run(decoder, length + 20, OTHERS, at_once=5)
    decoder.rewind(length)
    np.testing.assert_array_equal(run(decoder, 100), run(expected, 100))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CACHES)
def test_speculative_decoding(name: str, seed: int) -> None:
    """Drafts of up to three tokens are verified together with a token, and their wrong end is removed.

    A call of several tokens rounds its logits otherwise than single tokens do, where it fills a block or reads exact
    keys. With one layer, its keys and values have the same bits.
    """
    rng = np.random.default_rng(seed)
    decoder, expected = make_decoder(name, 3, layers=1), make_decoder(name, layers=1)
    run(decoder, 20, at_once=20)
    run(expected, 20, at_once=20)
    exact = 0
    while (begin := decoder.length) < 100:
        right, wrong = rng.integers(0, 3), rng.integers(0, 2)
        accepted = begin + 1 + right
        logits = decoder.step(np.concatenate([IDS[begin:accepted], OTHERS[:wrong]]))
        decoder.rewind(accepted)
        wanted = run(expected, accepted)
        np.testing.assert_allclose(logits[: accepted - begin], wanted, atol=0.1)
        if right + wrong == 0:
            exact += 1
            np.testing.assert_array_equal(logits, wanted)
    assert exact > 3
    np.testing.assert_array_equal(run(decoder, 110), run(expected, 110))


def test_several_rewinds_without_a_step() -> None:
    decoder, expected = make_decoder("exact keys", 30), make_decoder("exact keys")
    run(decoder, 70)
    for length in (69, 66, 66, 59, 45, 40):
        decoder.rewind(length)
    np.testing.assert_array_equal(
        run(decoder, 80, OTHERS), np.concatenate([run(expected, 40), run(expected, 80, OTHERS)])[40:]
    )


@pytest.mark.parametrize("name", ["exact keys", "exact keys of many tokens"])
def test_keys_of_removed_tokens_are_not_restored(name: str) -> None:
    """Some tokens of a long step are never in the ring, and copies of removed tokens must not take their place."""
    decoder = make_decoder(name, 100)
    run(decoder, 100, OTHERS)
    decoder.rewind(10)
    run(decoder, 90, at_once=80)
    with pytest.raises(ArgumentError, match="not into a step of more than"):
        decoder.rewind(60)
    decoder.rewind(10)
    expected = make_decoder(name)
    run(expected, 10, OTHERS)
    np.testing.assert_array_equal(run(decoder, 30), run(expected, 30))


def test_exact_keys_that_were_not_kept() -> None:
    message = "length is 39, .* with rewindable={}, a Decoder can go back {} tokens .* more than 6 tokens; use reset"
    for rewindable in (0, 10):
        decoder, expected = make_decoder("exact keys", rewindable), make_decoder("exact keys")
        run(decoder, 50)
        with pytest.raises(ArgumentError, match=message.format(rewindable, rewindable)):
            decoder.rewind(39)
        run(expected, 50)
        for name, array in decoder.cache().items():
            np.testing.assert_array_equal(array, expected.cache()[name])
        decoder.rewind(50 - rewindable)
        run(decoder, 50)
        np.testing.assert_array_equal(run(decoder, 60), run(expected, 60))


def test_a_filled_cache_is_rewound() -> None:
    source, decoder, expected = make_decoder("exact keys", 8), make_decoder("exact keys", 8), make_decoder("exact keys")
    run(source, 70)
    run(decoder, 40, OTHERS)
    decoder.fill(source.cache(), 70)
    with pytest.raises(ArgumentError, match="length is 69"):
        decoder.rewind(69)  # the copies are of other tokens
    run(decoder, 75, OTHERS)
    decoder.rewind(70)
    run(expected, 70)
    np.testing.assert_array_equal(run(decoder, 80), run(expected, 80))


@pytest.mark.parametrize(
    "passes", [None, "[", "3", [], [{}], [{"window": [6], "sinks": 2}], [EXACT, {"window": 5, "sinks": 3}]]
)
def test_unknown_window(passes: Any) -> None:
    model = with_passes(make_model(**EXACT), passes)
    with pytest.raises(ArgumentError, match=r"do not state window and sinks of '.*exact_key' \(8 slots\)"):
        Decoder(session(model), ROOM, rewindable=1)
    decoder = Decoder(session(model), ROOM)
    decoder.step(IDS[:9])
    with pytest.raises(ArgumentError, match=r"do not state window and sinks of '.*exact_key' \(8 slots\)"):
        decoder.rewind(9)


def with_passes(model: onnx.ModelProto, passes: Any) -> onnx.ModelProto:
    """Return a model whose metadata has these passes compress_cache, or this text; None: no entry."""
    made = copy.deepcopy(model)
    kept = [entry for entry in made.metadata_props if entry.key != OPTIONS_KEY]
    del made.metadata_props[:]
    made.metadata_props.extend(kept)
    if passes is not None:
        steps = passes if isinstance(passes, str) else json.dumps([{"name": "compress_cache"} | one for one in passes])
        made.metadata_props.add(key=OPTIONS_KEY, value=steps)
    return made


def test_equal_rows_of_unknown_size() -> None:
    model = make_model(d_sub=4, equal_rows=True)
    for head_size in (None, 8, 32):
        decoder = Decoder(session(model), ROOM, head_size)
        with pytest.raises(ArgumentError, match=f"head_size is {head_size}, .* multiple of 16 up to 16.*equal_rows"):
            decoder.rewind(0)
    both = [{"equal_rows": True, "d_sub": d_sub} for d_sub in (1, 2)]
    for passes in (None, [{"equal_rows": True, "d_sub": [4]}], both):
        decoder = Decoder(session(with_passes(model, passes)), ROOM, 16)
        with pytest.raises(ArgumentError, match=r"do not state d_sub of 'past_key_values\.0\.key'"):
            decoder.rewind(0)


def test_arguments() -> None:
    runner = make_session()
    for rewindable, cache_length in ((-1, ROOM), (1, None)):
        with pytest.raises(ArgumentError, match=f"rewindable is {rewindable}, expected 0, or more with a cache_length"):
            Decoder(runner, cache_length, rewindable=rewindable)
    with pytest.raises(ArgumentTypeError, match="rewindable is a str, expected an integer"):
        Decoder(runner, ROOM, rewindable="1")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="only a shared cache can be rewound; give Decoder a cache_length"):
        Decoder(runner).rewind(0)


@pytest.mark.parametrize("head_dim", [16, 48, 64])
def test_blocks_become_the_rows_that_they_were_made_of(head_dim: int) -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 3, 32, head_dim), np.float32)
    for d_sub in (1, 2, 4):
        books = rng.standard_normal((head_dim // d_sub, 16, d_sub), np.float32)
        rows, block = (np.zeros((3, 32, head_dim // d_sub // 2), np.uint8) for _ in range(2))
        for head in range(3):
            _native.append_keys(rows[head], 0, keys[head, :31], books)
            _native.append_keys(block[head], 0, keys[head], books)
        assert (rows != block).any()
        np.testing.assert_array_equal(key_block_to_rows(block.reshape(3, -1))[:, :31], rows[:, :31])
    rows, block = (np.zeros((3, 32, 2 + head_dim), np.uint8) for _ in range(2))
    for head in range(3):
        _native.append_values(rows[head], 0, values[head, :31])
        _native.append_values(block[head], 0, values[head])
    np.testing.assert_array_equal(value_block_to_rows(block.reshape(3, -1))[:, :31], rows[:, :31])

"""Decoding with a cache that is never copied to NumPy, and sampling."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from ortolan.errors import OrtolanError
from ortolan.generate import (
    Decoder,
    generate,
    generate_tokens,
    read_context,
    read_head_size,
    shares_cache,
)
from ortolan.models import tiny

VOCABULARY = tiny.TINY_LLAMA.vocab_size
PROMPT = [1, 20, 30, 4, 4, 90]


def make_session(model):
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


SESSIONS = {
    "standard": (make_session(tiny.tiny_llama(head_dim=16)), None),
    "gqa": (make_session(tiny.tiny_llama(attention="gqa", head_dim=16)), None),
    "gqa shared": (make_session(tiny.tiny_llama(attention="gqa", head_dim=16)), 24),
}


@pytest.fixture(params=SESSIONS)
def decoder(request):
    session, cache_length = SESSIONS[request.param]
    return Decoder(session, cache_length)


def logits_without_cache(ids):
    session, _ = SESSIONS["standard"]
    past = {
        value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past")
    }
    ids = np.array([ids])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]}
    return session.run(["logits"], feeds | past)[0][0]


@pytest.mark.parametrize("cuts", [(), (5,), (1, 2, 3, 4, 5), (2, 4)], ids=str)
def test_steps_of_any_length_give_the_logits_of_the_whole(decoder, cuts):
    found = []
    for part in np.split(np.array(PROMPT), cuts):
        found.append(decoder.step(part))
    assert decoder.length == len(PROMPT)
    np.testing.assert_allclose(np.concatenate(found), logits_without_cache(PROMPT), atol=1e-4)


def test_a_reset_decoder_forgets(decoder):
    first = decoder.step(PROMPT)
    kept = first.copy()
    decoder.step([5, 6])
    np.testing.assert_array_equal(first, kept)
    decoder.reset()
    np.testing.assert_allclose(decoder.step(PROMPT), kept, atol=1e-6)


def test_a_shared_cache_is_written_in_place():
    session, cache_length = SESSIONS["gqa shared"]
    decoder = Decoder(session, cache_length)
    pointers = [value.data_ptr() for value in decoder._values]
    decoder.step(PROMPT)
    decoder.step([7])
    assert [value.data_ptr() for value in decoder._values] == pointers
    for value in decoder._values:
        cache = value.numpy()
        assert cache.shape[2] == cache_length
        assert np.abs(cache[:, :, : len(PROMPT) + 1]).min(axis=(1, 3)).max() > 0
        assert not cache[:, :, len(PROMPT) + 1 :].any()


def test_a_cache_is_filled_with_another_ones_numbers(decoder):
    decoder.step(PROMPT)
    kept = decoder.cache()
    expected = decoder.step([7])
    other = Decoder(decoder.session, decoder.cache_length)
    other.fill(kept, len(PROMPT))
    assert other.length == len(PROMPT)
    np.testing.assert_allclose(other.step([7]), expected, atol=1e-6)
    name = next(iter(kept))
    with pytest.raises(OrtolanError, match=rf"'{name}' is missing, expected float32 \[1, 2, "):
        other.fill({}, len(PROMPT))
    with pytest.raises(OrtolanError, match=rf"'{name}' is int8 \[1, 2, \d+, 16\], expected float32"):
        other.fill({key: array.astype(np.int8) for key, array in kept.items()}, len(PROMPT))


def test_a_shared_cache_is_rewound():
    session, cache_length = SESSIONS["gqa shared"]
    decoder = Decoder(session, cache_length)
    expected = decoder.step(PROMPT)
    decoder.step([7, 8])
    decoder.rewind(2)
    np.testing.assert_allclose(decoder.step(PROMPT[2:]), expected[2:], atol=1e-6)
    with pytest.raises(OrtolanError, match=f"length is 7, expected 0 to the cache's {len(PROMPT)} tokens"):
        decoder.rewind(7)
    with pytest.raises(OrtolanError, match="length is 25, expected at most the cache's 24 tokens"):
        decoder.fill(decoder.cache(), 25)
    with pytest.raises(OrtolanError, match="only a shared cache"):
        Decoder(session).rewind(0)


def test_a_full_cache_is_refused():
    session, _ = SESSIONS["gqa shared"]
    decoder = Decoder(session, 7)
    decoder.step(PROMPT)
    decoder.step([1])
    with pytest.raises(OrtolanError, match=r"the cache has 7 of 7 tokens, so that 1 more"):
        decoder.step([1])
    with pytest.raises(OrtolanError, match="no tokens"):
        decoder.step([])


def test_mask_and_positions_are_optional():
    model = tiny.tiny_llama(head_dim=16)
    for name in ("attention_mask", "position_ids"):
        value = next(value for value in model.graph.inputs if value.name == name)
        model.graph.inputs.remove(value)
        constant = ir.node("Constant", [], {"value": ir.tensor(np.arange(len(PROMPT))[None], name=name)})
        if name == "attention_mask":
            constant = ir.node("Constant", [], {"value": ir.tensor(np.ones((1, len(PROMPT)), np.int64), name=name)})
        constant.outputs[0].name = f"{name}_constant"
        model.graph.insert_before(model.graph[0], constant)
        value.replace_all_uses_with(constant.outputs[0])
    found = Decoder(make_session(model)).step(PROMPT)
    np.testing.assert_allclose(found, logits_without_cache(PROMPT), atol=1e-5)


def test_other_models_are_refused():
    with pytest.raises(OrtolanError, match=r"not a decoder with a cache: inputs x, outputs y"):
        Decoder(make_session(tiny.mlp()))
    model = tiny.tiny_llama(head_dim=16)
    model.graph.inputs[3].shape = ir.Shape(["batch", "heads", "past_sequence", 16])
    with pytest.raises(OrtolanError, match=r"'past_key_values.0.key' has shape .*expected a fixed size at axis 1"):
        Decoder(make_session(model))


def test_the_size_of_a_head_that_the_inputs_leave_open(tmp_path):
    model = tiny.tiny_llama(attention="gqa", head_dim=16)
    for value in model.graph.inputs:
        if value.name.startswith("past_key_values"):
            value.shape = ir.Shape(["batch", 2, "past_sequence", "kv_cache_dim"])
    ir.save(model, tmp_path / "open.onnx")
    session = make_session(model)
    with pytest.raises(OrtolanError, match="expected a fixed size at axis 3"):
        Decoder(session)
    assert read_head_size(tmp_path / "open.onnx") == 16
    for cache_length in (None, 24):
        found = Decoder(session, cache_length, read_head_size(tmp_path / "open.onnx")).step(PROMPT)
        np.testing.assert_allclose(found, logits_without_cache(PROMPT), atol=1e-4)
    ir.save(tiny.mlp(), tmp_path / "mlp.onnx")
    assert read_head_size(tmp_path / "mlp.onnx") is None


def test_how_many_positions_a_file_has(tmp_path):
    for attention in ("standard", "gqa"):
        ir.save(tiny.tiny_llama(attention=attention, head_dim=16), tmp_path / f"{attention}.onnx")
    assert read_context(tmp_path / "standard.onnx") is None
    assert read_context(tmp_path / "gqa.onnx") == tiny.TINY_LLAMA.max_position_embeddings


@pytest.mark.parametrize(
    ("domain", "operator", "names"),
    [
        ("", "Gather", ["table", "flat_positions"]),
        ("", "RotaryEmbedding", ["x", "table", "table", "position_ids"]),
        ("com.microsoft", "RotaryEmbedding", ["x", "position_ids", "table", "table"]),
        ("ai.ortolan", "NoMADAttention", ["x"] * 8 + ["table", "table"]),
    ],
)
def test_tables_of_positions(tmp_path, domain, operator, names):
    for shape, expected in (([7, 4], 7), ([1, 7, 4], None)):
        values = {name: ir.Value(name=name) for name in ("x", "position_ids")}
        table = ir.tensor(np.zeros(shape, np.float32), name="table")
        values["table"] = ir.Value(name="table", const_value=table)
        flatten = ir.node("Reshape", [values["position_ids"], values["x"]])
        values["flat_positions"] = flatten.outputs[0]
        node = ir.node(operator, [values[name] for name in names], domain=domain)
        inputs, opsets = [values["x"], values["position_ids"]], {"": 23, domain: 23}
        nodes, initializers = [flatten, node], [values["table"]]
        graph = ir.Graph(inputs, node.outputs, nodes=nodes, initializers=initializers, opset_imports=opsets)
        ir.save(ir.Model(graph, ir_version=10), tmp_path / "model.onnx")
        assert read_context(tmp_path / "model.onnx") == expected


def test_a_file_tells_whether_its_cache_may_be_shared(tmp_path):
    for attention in ("standard", "gqa"):
        ir.save(tiny.tiny_llama(attention=attention, head_dim=16), tmp_path / f"{attention}.onnx")
    assert not shares_cache(tmp_path / "standard.onnx")
    assert shares_cache(tmp_path / "gqa.onnx")


def test_greedy_generation(decoder):
    made = generate(decoder, PROMPT, max_new_tokens=8)
    expected = list(PROMPT)
    while len(expected) < len(PROMPT) + 8:
        expected.append(int(logits_without_cache(expected)[-1].argmax()))
    assert made == expected[len(PROMPT) :]
    assert decoder.length == len(PROMPT) + 7
    stop = made[3]
    decoder.reset()
    assert generate(decoder, PROMPT, max_new_tokens=8, stop={stop}) == made[: made.index(stop)]
    decoder.reset()
    assert generate(decoder, PROMPT, max_new_tokens=8, stop=stop) == made[: made.index(stop)]


def test_tokens_come_one_by_one():
    session, _ = SESSIONS["standard"]
    decoder = Decoder(session)
    tokens = generate_tokens(decoder, PROMPT)
    first = next(tokens)
    assert decoder.length == len(PROMPT)
    assert [first, next(tokens)] == generate(session, PROMPT, 2)
    assert decoder.length == len(PROMPT) + 1
    assert list(generate_tokens(session, PROMPT, stop={first})) == []


def test_seeds_choose_the_text():
    session, _ = SESSIONS["standard"]
    texts = [generate(session, PROMPT, 12, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert generate(session, PROMPT, 6, temperature=2.0, top_k=1, seed=3) == generate(session, PROMPT, 6)


@pytest.mark.parametrize("option", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_impossible_options_are_refused(option):
    (name,) = option
    with pytest.raises(OrtolanError, match=f"{name} is .*, expected"):
        generate(SESSIONS["standard"][0], PROMPT, 1, **option)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"stop": "</s>"}, "stop is '</s>', expected token ids"),
        ({"stop": ["</s>"]}, r"stop is \['</s>'\], expected token ids"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1, expected an integer, 0 or more"),
        ({"max_new_tokens": "5"}, "max_new_tokens is a str, expected an integer"),
        ({"ids": [1, 999999]}, f"token 999999 is out of range, expected 0 to {VOCABULARY - 1}"),
        ({"ids": [-1]}, f"token -1 is out of range, expected 0 to {VOCABULARY - 1}"),
    ],
    ids=str,
)
def test_tokens_and_numbers_that_are_refused(option, message):
    with pytest.raises(OrtolanError, match=message):
        generate(SESSIONS["standard"][0], **{"ids": PROMPT, **option})


@pytest.mark.parametrize(("prompt", "found"), [("once", "a text"), (["once"], "a text"), ([0.5], "of type float64")])
def test_a_prompt_that_is_not_encoded(prompt, found):
    session, _ = SESSIONS["standard"]
    with pytest.raises(OrtolanError, match=f"prompt is {found}, expected token ids; encode texts first"):
        generate(session, prompt)
    with pytest.raises(OrtolanError, match=r"session is a str, .* open one with ortolan.create_session"):
        generate("model.onnx", PROMPT)

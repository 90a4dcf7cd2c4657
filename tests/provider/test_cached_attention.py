"""GroupQueryAttention with float caches: the provider gives the bits of NoMADAttention, also in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

import ortolan
from ortolan.generate import generate

from ..ops.cached_attention import node_model
from ..ops.isa_process import run_with_isa
from ..ops.single_node import assert_same_bits
from ..passes import cached_graphs
from ..passes.attention_graphs import D, H
from ..passes.cached_llama import LAYERS, RECENT, Decoding, llama
from ..passes.small_models import op_types, run
from .cached_models import FLOAT, INT32, NAME, Arrays, Form
from .sessions import ORT_VERSION, claimed, needs_provider, plain_session, provider_session
from .test_attention import four_bits
from .test_context import check_round_trip, compile_model, compiled_session

pytestmark = needs_provider

FORMS = {
    "separate": Form(),
    "packed": Form(packed=True),
    "rotary": Form(rotary="half"),
    "packed, interleaved": Form(packed=True, rotary="interleaved"),
    "scale": Form(scale=0.4, packed=True, rotary="half"),
    "softcap": Form(softcap=0.6, packed=True, rotary="half"),
    "one head of keys": Form(kv_heads=1, head_dim=64),
    "as many heads of keys": Form(kv_heads=6, head_dim=16, rotary="half"),
    "window": Form(window=9, rotary="half"),
    "window, wide heads": Form(window=40, heads=4, kv_heads=1, head_dim=256, scale=0.1, softcap=2.0, packed=True),
    "sinks": Form(sinks="head_sink", window=12, rotary="half"),
    "smooth softmax": Form(sinks="smooth", packed=True),
    "a part of the head turned": Form(rotary="half", head_dim=32, rotary_dim=16),
}
# batch, rows, past
CALLS = [(1, 1, 0), (2, 1, 37), (1, 4, 20), (2, 5, 0), (1, 70, 0), (1, 33, 40), (2, 70, 0)]


def operator_answers(form: Form, feeds: Arrays) -> list[np.ndarray]:
    """Run with NoMADAttention."""
    options = ort.SessionOptions()
    ortolan.register(options)
    sinks = {} if form.sinks is None else {"head_sink": form.sink_scores}
    session = ort.InferenceSession(node_model(form.setup, **sinks).SerializeToString(), options)
    answers: list[np.ndarray] = session.run(None, {name: feeds[name] for name in feeds if name != "total"})
    return answers


def check(form: Form, session: ort.InferenceSession, feeds: Arrays) -> None:
    assert claimed(session) == [NAME]
    for found, expected in zip(session.run(None, feeds), operator_answers(form, feeds), strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str, threads: int) -> None:
    form = FORMS[name]
    session, plain = provider_session(form.model(), threads), plain_session(form.model())
    for call in CALLS:
        feeds = form.feeds(*call)
        check(form, session, feeds)
        for found, expected in zip(session.run(None, feeds), plain.run(None, feeds), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["separate", "packed, interleaved"])
def test_sequences_of_different_lengths(name: str) -> None:
    """Shorter sequences have padding rows in the prompt, and unused cache in the next call."""
    form = FORMS[name]
    session, plain = provider_session(form.model()), plain_session(form.model())
    prompt, step = form.feeds(3, 20, 0, [20, 1, 13]), form.feeds(3, 1, 20, [21, 2, 14])
    for feeds in (prompt, step):
        check(form, session, feeds)
        found, expected = session.run(None, feeds), plain.run(None, feeds)
        for sequence, last in enumerate(feeds["lengths"]):
            seen = slice(0, min(feeds["query"].shape[1], last + 1))
            np.testing.assert_allclose(found[0][sequence, seen], expected[0][sequence, seen], atol=1e-5)
            for ours, theirs in zip(found[1:], expected[1:], strict=True):
                assert ours.shape == theirs.shape
                np.testing.assert_allclose(ours[sequence, :, : last + 1], theirs[sequence, :, : last + 1], atol=1e-6)


def test_the_cache_is_as_long_as_the_host_says() -> None:
    """The cache has the length of the `total` input, although no sequence is that long."""
    form = FORMS["rotary"]
    feeds = form.feeds(2, 1, 20, [15, 3]) | {"total": np.array(21, np.int32)}
    session, plain = provider_session(form.model()), plain_session(form.model())
    found, expected = session.run(None, feeds), plain.run(None, feeds)
    assert [one.shape for one in found] == [one.shape for one in expected]
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    assert found[1].shape[2] == 21 and not found[1][0, :, 15:].any()


def bound(session: ort.InferenceSession, feeds: Arrays, shared: bool) -> tuple[list[np.ndarray], bool]:
    """Run with IOBinding. Return the outputs, and True if the present caches are in the memory of the past caches."""
    binding, values = session.io_binding(), {}
    for name, array in feeds.items():
        values[name] = ort.OrtValue.ortvalue_from_numpy(array.copy())
        binding.bind_ortvalue_input(name, values[name])
    for output in session.get_outputs():
        past = output.name.replace("present", "past")
        if shared and past in values:
            binding.bind_ortvalue_output(output.name, values[past])
        else:
            binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    made = binding.get_outputs()
    places = [value.data_ptr() for value in made[1:]]
    return [value.numpy().copy() for value in made], places == [
        values[f"past_{one}"].data_ptr() for one in ("key", "value")
    ]


@pytest.mark.parametrize("name", ["separate", "packed, interleaved"])
@pytest.mark.parametrize("call", [(2, 1, 37), (1, 4, 20), (2, 30, 0), (1, 20, 10)])
def test_in_place(name: str, call: tuple[int, int, int]) -> None:
    """Past and present caches are one buffer of 64 tokens: memory after the tokens stays unchanged."""
    form, (_, rows, past) = FORMS[name], call
    session, plain = provider_session(form.model()), plain_session(form.model())
    assert claimed(session) == [NAME]
    feeds = form.feeds(*call, room=64)
    found, in_place = bound(session, feeds, shared=True)
    assert in_place
    apart, in_place = bound(session, feeds, shared=False)
    assert not in_place
    assert_same_bits(found[0], apart[0])
    theirs, _ = bound(plain, feeds, shared=True)
    np.testing.assert_allclose(found[0], theirs[0], atol=1e-5)
    for ours, own, expected, before in zip(
        found[1:], apart[1:], theirs[1:], (feeds["past_key"], feeds["past_value"]), strict=True
    ):
        assert_same_bits(ours[:, :, : past + rows], own[:, :, : past + rows])
        assert_same_bits(ours[:, :, :past], before[:, :, :past])
        assert_same_bits(ours[:, :, past + rows :], before[:, :, past + rows :])
        np.testing.assert_allclose(ours[:, :, : past + rows], expected[:, :, : past + rows], atol=1e-6)


def test_one_buffer_that_is_too_short() -> None:
    form = FORMS["separate"]
    session = provider_session(form.model())
    binding, values = session.io_binding(), {}
    feeds = form.feeds(1, 1, 8)
    for name, array in feeds.items():
        values[name] = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(name, values[name])
    binding.bind_output("y")
    for one in ("key", "value"):
        binding.bind_ortvalue_output(f"present_{one}", values[f"past_{one}"])
    with pytest.raises(Exception, match=r"present_key|shape"):
        session.run_with_iobinding(binding)
    for one in ("key", "value"):
        np.testing.assert_array_equal(values[f"past_{one}"].numpy(), feeds[f"past_{one}"])


def decoder_answers(session: ort.InferenceSession, model: onnx.ModelProto) -> list[np.ndarray]:
    """Return the outputs for a prompt and three more tokens."""
    ids = np.random.default_rng(0).integers(0, 90, (2, 23))
    decoding, begin, answers = Decoding(model, ids), 0, []
    names = [output.name for output in session.get_outputs()]
    for end in (20, 21, 22, 23):
        outputs = dict(zip(names, session.run(None, decoding.feeds(begin, end)), strict=True))
        decoding.caches = {name: outputs[name.replace("past_key_values", "present")] for name in decoding.caches}
        answers += outputs.values()
        begin = end
    return answers


@pytest.mark.parametrize("kind", ["float", "4 bits"])
def test_a_decoder_answers_as_the_optimized_file(kind: str) -> None:
    """The optimized file has NoMADAttention instead; its linear layers run on the provider too."""
    model = llama("gqa") if kind == "float" else four_bits(llama("gqa"))
    session = provider_session(model)
    steps = [
        {"name": "normalize"},
        {
            "name": "compress_cache",
            "keys": "float32",
            "values": "float32",
            "precision": "f32" if kind == "float" else "bf16",
        },
        {"name": "verify", "seconds": 0.0},
    ]
    recipe = ortolan.Recipe.from_dict({"name": "float caches", "pass": steps})
    expected = ortolan.optimize_onnx(model, recipe=recipe).model
    assert expected is not None and op_types(expected).count("NoMADAttention") == LAYERS
    optimized = provider_session(expected)
    kinds = {node.name: node.op_type for node in model.graph.node}
    assert [kinds.get(name) for name in claimed(session)].count("GroupQueryAttention") == LAYERS
    assert len(claimed(session)) == len(claimed(optimized)) + LAYERS
    for found, wanted in zip(decoder_answers(session, model), decoder_answers(optimized, expected), strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("form", ["standard", "gqa"])
@pytest.mark.parametrize("kind", RECENT)
def test_recent_decoders(form: str, kind: str) -> None:
    model = llama(form, **RECENT[kind])
    provider, plain = provider_session(model), plain_session(model)
    kinds = {node.name: node.op_type for node in model.graph.node}
    taken = [kinds.get(name) for name in claimed(provider)]
    assert taken.count("GroupQueryAttention" if form == "gqa" else "Softmax") == LAYERS
    ids = [1, 20, 30, 4, 4, 90]
    assert generate(provider, ids, 30) == generate(plain, ids, 30)
    for found, expected in zip(decoder_answers(provider, model), decoder_answers(plain, model), strict=True):
        np.testing.assert_allclose(found, expected, atol=3e-5)


def test_nobody_reads_the_present() -> None:
    form = FORMS["rotary"]
    model, feeds = form.model(), form.feeds(2, 3, 5)
    for wanted in ("y", "present_value"):
        some = onnx.ModelProto.FromString(model.SerializeToString())
        kept = [output for output in model.graph.output if output.name == wanted]
        del some.graph.output[:]
        some.graph.output.extend(kept)
        session = provider_session(some)
        assert claimed(session) == [NAME]
        expected = operator_answers(form, feeds)[["y", "present_key", "present_value"].index(wanted)]
        assert_same_bits(session.run(None, feeds)[0], expected)


def test_numbers_at_odd_addresses(tmp_path: Path) -> None:
    """The tables of the rotary embedding are mapped from a file at an odd offset."""
    form = FORMS["rotary"]
    model, data = form.model(), b"?"
    for tensor in model.graph.initializer:
        entries = {"location": "tables.bin", "offset": str(len(data)), "length": str(len(tensor.raw_data))}
        data += tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in entries.items():
            tensor.external_data.add(key=key, value=text)
    (tmp_path / "tables.bin").write_bytes(data)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    check(form, provider_session(str(tmp_path / "model.onnx")), form.feeds(2, 3, 5))


def with_input(place: int, name: str) -> onnx.NodeProto:
    node = FORMS["rotary"].node()
    node.input.extend([""] * (place + 1 - len(node.input)))
    node.input[place] = name
    return node


def without_inputs(form: Form, *places: int) -> onnx.NodeProto:
    node = form.node()
    for place in places:
        node.input[place] = ""
    return node


ROTARY = FORMS["rotary"]
CACHE = ["batch", 2, "past", 16]
NOT_KNOWN = "which NoMADAttention does not support"
# Maps a case to the node, types and shapes of changed inputs, and the reason for which it is not claimed.
LEFT: dict[str, tuple[onnx.NodeProto, dict[str, Any], str]] = {
    "softcap": (
        ROTARY.node(softcap=1e7),
        {},
        "its scores are capped (softcap) at 1e+07, expected 0.0009765625 to 1048576",
    ),
    "positions": (
        with_input(9, "position_ids"),
        {"position_ids": (TensorProto.INT64, ["batch", "rows"])},
        "it has an input position_ids",
    ),
    "a mask": (with_input(10, "bias"), {"bias": (FLOAT, [1, 1, "rows", "all"])}, "it has an input attention_bias"),
    "sinks": (
        with_input(11, "sink"),
        {"sink": (FLOAT, [6])},
        "its sinks 'sink' are not 6 finite constant floats, one a head",
    ),
    "no cache": (without_inputs(ROTARY, 3, 4), {}, "it has no cache of keys and values"),
    "unknown width": (
        ROTARY.node(),
        {name: (FLOAT, None) for name in ("query", "key", "value", "past_key", "past_value")},
        "the width of its heads is not known: its cache 'past_key' has shape unknown",
    ),
    "other heads": (
        ROTARY.node(),
        {"past_value": (FLOAT, ["batch", 3, "past", 16])},
        "its cache 'past_value' has shape [batch, 3, past, 16], expected [batch, 2, tokens, 16]",
    ),
    "another width": (
        ROTARY.node(),
        {"value": (FLOAT, ["batch", "rows", 30])},
        "its value 'value' has shape [batch, rows, 30], expected [batch, rows, 32]",
    ),
    "another rank": (
        ROTARY.node(),
        {"value": (FLOAT, ["batch", 2, "rows", 16])},
        "its value 'value' has shape [batch, 2, rows, 16], expected [batch, rows, 32]",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_with_a_reason(name: str) -> None:
    node, inputs, reason = LEFT[name]
    model = ROTARY.model(node, **inputs)
    session = provider_session(model)
    assert claimed(session) == []
    found = ortolan.inspect_provider(model, claims="all").nodes
    assert [(one.node, one.taken, one.reason) for one in found] == [(NAME, False, reason)]


def test_different_tables() -> None:
    model = ROTARY.model()
    (table,) = (tensor for tensor in model.graph.initializer if tensor.name == "sin")
    table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table)[:, :4], "sin"))
    (found,) = ortolan.inspect_provider(model, claims="all").nodes
    expected = "its rotary tables have shapes [128, 8] and [128, 4], expected [positions, 8] or fewer columns"
    assert (found.taken, found.reason) == (False, expected)


@pytest.mark.skipif(ORT_VERSION < (1, 32), reason="the attribute is newer")
def test_every_token_sees_every_other() -> None:
    (found,) = ortolan.inspect_provider(ROTARY.model(ROTARY.node(causal=0)), claims="all").nodes
    assert (found.taken, found.reason) == (False, f"it has causal 0, {NOT_KNOWN}")
    assert claimed(provider_session(ROTARY.model(ROTARY.node(causal=1)))) == [NAME]


BAD: dict[str, tuple[Arrays, str]] = {
    "width": (
        {"query": np.zeros((1, 1, 95), np.float32)},
        r"'query' has shape \[1, 1, 95\], expected \[batch, rows, 96\]",
    ),
    "rank": ({"query": np.zeros((1, 96), np.float32)}, r"'query' has shape \[1, 96\]"),
    "keys": (
        {"key": np.zeros((1, 2, 32), np.float32)},
        r"'value' has shape \[1, 1, 32\], expected \[1, 2, 32\]",
    ),
    "keys and values": (
        {name: np.zeros((1, 2, 32), np.float32) for name in ("key", "value")},
        "there are 1 queries and 2 new keys, expected equal counts",
    ),
    "a cache of two": ({"past_value": np.zeros((2, 2, 9, 16), np.float32)}, r"'past_value' has shape \[2, 2, 9, 16\]"),
    "fewer values": (
        {"past_value": np.zeros((1, 2, 8, 16), np.float32)},
        "'past_key' holds 9 tokens and 'past_value' 8",
    ),
    "negative": (
        {"lengths": np.array([-1], np.int32)},
        "'lengths' is -1 for sequence 0, expected the number of its tokens",
    ),
    "too many": (
        {"lengths": np.array([10], np.int32)},
        "sequence 0 has 11 tokens after this call of 1, but 'past_key' has room for 9",
    ),
    "lowest": ({"lengths": np.array([-(2**31)], np.int32)}, "'lengths' is -2147483648"),
    "two lengths": ({"lengths": np.array([9, 9], np.int32)}, r"'lengths' has shape \[2\], expected \[1\]"),
    "two totals": ({"total": np.array([9, 9], np.int32)}, r"'total' has shape \[2\], expected one element"),
    "room for all": (
        {"total": np.array(2**31 - 1, np.int32)},
        "'total' is 2147483647, but 'past_key' holds 9 tokens and the call 1",
    ),
    "positions": (
        {
            "past_key": np.zeros((1, 2, 128, 16), np.float32),
            "past_value": np.zeros((1, 2, 128, 16), np.float32),
            "lengths": np.array([128], np.int32),
        },
        "a sequence has 129 tokens, but 'cos' and 'sin' are for 128 positions",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_feeds_that_do_not_fit(name: str) -> None:
    """Invalid inputs give an error that names the node; the next call works."""
    odd, message = BAD[name]
    free = {one: (FLOAT, None) for one in ("query", "key", "value")} | {
        one: (INT32, None) for one in ("lengths", "total")
    }
    batches = {one: (FLOAT, ["any", 2, "past", 16]) for one in ("past_key", "past_value")}
    session = provider_session(ROTARY.model(**free, **batches))
    feeds = ROTARY.feeds(1, 1, 9)
    with pytest.raises(Exception, match=f"GroupQueryAttention node '{NAME}': .*{message}"):
        session.run(None, feeds | odd)
    check(ROTARY, session, feeds)


@pytest.mark.parametrize("call", [(0, 3, 4), (2, 0, 5), (0, 0, 0)])
def test_nothing_to_do(call: tuple[int, int, int]) -> None:
    session = provider_session(ROTARY.model())
    batch, rows, past = call
    feeds = ROTARY.feeds(batch, rows, past, [past + rows])
    feeds["lengths"] = np.full(batch, past + rows - 1, np.int32)
    y, key, value = session.run(None, feeds)
    assert y.shape == (batch, rows, 96) and key.shape == value.shape == (batch, 2, past + rows, 16)
    assert_same_bits(key[:, :, :past], feeds["past_key"])


# --- other forms of attention with a cache ----------------------------------------------------------------------------

CACHED_CALLS = ((0, 7), (9, 1), (9, 5), (0, 2))  # past, rows


# The masks of the other form are cut to the length of its own keys, so only a pass can change them.
@pytest.mark.parametrize(
    "form",
    [one for one in cached_graphs.FORMS if one is not cached_graphs.constant_masks],
    ids=lambda one: one.__name__,
)
def test_decomposed_forms(form: Callable[[cached_graphs.CachedGraph], str], tmp_path: Path) -> None:
    """A Concat appends to the cache: answers as in the optimized file and in the compiled model."""
    model = cached_graphs.model(form)
    calls = [cached_graphs.feeds(model, past, rows) for past, rows in CACHED_CALLS]
    found = [one.what for one in ortolan.inspect_provider(model, claims="all").nodes if one.taken]
    more = ", with sinks" if form is cached_graphs.with_sinks else ""
    assert found == [f"attention of {H} heads of {D} over a cache of {1 if 'one_head' in form.__name__ else H}{more}"]
    expected = ortolan.optimize_onnx(
        model, recipe=ortolan.Recipe.of(cache="float32"), calibration=calls[:1], options={"verify.seconds": 0.0}
    ).model
    assert expected is not None and op_types(expected).count("NoMADAttention") == 1
    session = provider_session(model)
    for feeds in calls:
        for y, wanted, plain in zip(
            session.run(None, feeds), run(expected, feeds, library=True), run(model, feeds), strict=True
        ):
            assert_same_bits(y, wanted)
            seen = feeds["mask"][:, feeds["past_key"].shape[2] :, None] != 0 if y.ndim == 3 else True
            np.testing.assert_allclose(y * seen, plain * seen, atol=1e-5)
    check_round_trip(model, tmp_path, *calls)


# --- compiled models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_compiled(name: str, tmp_path: Path) -> None:
    """Rotary tables stay in the model, and past and present may still share a buffer."""
    form = FORMS[name]
    calls = [form.feeds(*call) for call in CALLS]
    check_round_trip(form.model(), tmp_path, *calls)
    session, compiled = provider_session(form.model()), compiled_session(tmp_path)
    for feeds in (form.feeds(2, 1, 37, room=64), form.feeds(1, 20, 10, room=64)):
        found, in_place = bound(compiled, feeds, shared=True)
        assert in_place
        for one, expected in zip(found, bound(session, feeds, shared=True)[0], strict=True):
            assert_same_bits(one, expected)


@pytest.mark.parametrize("embed_mode", ["0", "1"])
def test_a_compiled_decoder(embed_mode: str, tmp_path: Path) -> None:
    model = four_bits(llama("gqa"))
    compile_model(model, tmp_path, ep__context_embed_mode=embed_mode)
    compiled = onnx.load(tmp_path / "model_ctx.onnx")
    assert not {"GroupQueryAttention", "MatMulNBits"} & set(op_types(compiled))
    session = provider_session(model)
    for found, expected in zip(
        decoder_answers(compiled_session(tmp_path), model), decoder_answers(session, model), strict=True
    ):
        assert_same_bits(found, expected)


def test_a_cpu_without_vectors_leaves_it(tmp_path: Path) -> None:
    """Without AVX2, the portable kernel is slower than ONNX Runtime's, so it is not claimed by default."""
    onnx.save(ROTARY.model(), tmp_path / "model.onnx")
    code = f"""
import ortolan
for claims in ("faster", "all"):
    (node,) = ortolan.inspect_provider({str(tmp_path / "model.onnx")!r}, claims=claims).nodes
    print(node.taken, node.reason or node.what)
"""
    done = run_with_isa("scalar", code)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == [
        "False without AVX2 ONNX Runtime's attention with a cache is faster",
        "True attention of 6 heads of 16 over a cache of 2, with rotary embedding",
    ]

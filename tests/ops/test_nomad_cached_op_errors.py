"""NoMADAttention with a cache rejects invalid input with an error that names it, and never crashes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ..sampling import examples
from .cached_attention import NOTHING, Decoder, Setup, node_model
from .single_node import session

NODE = "NoMADAttention node 'attention'"


def book(*shape: int) -> dict[str, np.ndarray]:
    return {"codebooks": np.zeros(shape, np.float32)}


def with_number(number: float) -> dict[str, np.ndarray]:
    books = Setup(kind="codes").codebooks()
    books[1, 3, 7, 0] = number
    return {"codebooks": books}


@pytest.mark.parametrize("kind", ["codes", "codes_float"])
@pytest.mark.parametrize(
    ("constants", "message"),
    [
        (
            book(2, 32, 16),
            r"codebooks 'codebooks' has shape \[2, 32, 16\], expected \[2, head_dim / d_sub, 16, d_sub\]",
        ),
        (book(1, 32, 16, 1), r"codebooks 'codebooks' has shape \[1, 32, 16, 1\], expected \[2, "),
        (book(2, 32, 15, 1), "codebooks 'codebooks' has shape"),
        (book(2, 32, 16, 3), "d_sub is 3, expected 1, 2 or 4"),
        (book(2, 24, 16, 1), "head_dim is 24, expected a multiple of 16 from 16 to 1024"),
        (book(2, 0, 16, 1), "head_dim is 0"),
        (book(2, 32, 16, 0), "head_dim is 0"),
        (book(2, 1040, 16, 1), "head_dim is 1040"),
        (book(0), "codebooks 'codebooks' has shape"),
        (with_number(np.nan), r"codebooks 'codebooks' contains nan at index 567, expected finite values"),
        (with_number(-np.inf), r"codebooks 'codebooks' contains -inf at index 567"),
    ],
)
def test_bad_codebooks(kind: str, constants: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(Exception, match=f"{NODE}: .*{message}"):
        session(node_model(Setup(kind=kind), constants=constants))


def test_codebooks_that_are_no_constants() -> None:
    model = node_model(Setup(kind="codes"))
    (books,) = [tensor for tensor in model.graph.initializer if tensor.name == "codebooks"]
    model.graph.initializer.remove(books)
    model.graph.input.append(helper.make_tensor_value_info("codebooks", TensorProto.FLOAT, books.dims))
    with pytest.raises(Exception, match=rf"{NODE}: .*\(codebooks\) 'codebooks' is computed at run time"):
        session(model)


def test_codes_without_codebooks() -> None:
    model = node_model(Setup(kind="codes"))
    del model.graph.node[0].input[6:]
    with pytest.raises(Exception, match=rf"{NODE}: .*\(codebooks\) is missing"):
        session(model)


def cut_inputs(count: int) -> Callable[[onnx.NodeProto], None]:
    return lambda node: node.input.__delitem__(slice(count, None))


def without(*names: str) -> Callable[[onnx.NodeProto], None]:
    def change(node: onnx.NodeProto) -> None:
        for values in (node.input, node.output):
            for i, name in enumerate(values):
                if name in names:
                    values[i] = ""

    return change


def cut_outputs(count: int) -> Callable[[onnx.NodeProto], None]:
    return lambda node: node.output.__delitem__(slice(count, None))


@pytest.mark.parametrize("kind", ["float", "codes"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_inputs(5), "past_key is given without past_value"),
        (cut_inputs(9), "only one of the inputs cos and sin is given"),
        (without("cos"), "only one of the inputs cos and sin is given"),
        (without("past_key"), "input 5 'past_value' is given without past_key"),
        (without("past_key", "past_value"), "input .* is given without past_key"),
        (cut_inputs(4), "output 1 'present_key' belongs to a cache, but past_key is missing"),
        (cut_outputs(1), r"output 1 \(present_key\) is missing"),
        (cut_outputs(2), r"output 2 \(present_value\) is missing"),
        (without("present_key"), r"output 1 \(present_key\) is missing"),
    ],
)
def test_what_belongs_together(kind: str, change: Callable[[onnx.NodeProto], None], message: str) -> None:
    model = node_model(Setup(kind=kind, rotary="half"))
    change(model.graph.node[0])
    left = set(model.graph.node[0].output)
    for output in list(model.graph.output):
        if output.name not in left:
            model.graph.output.remove(output)
    with pytest.raises(Exception, match=f"{NODE}: .*{message}|Type.*(past_key|present_key|past_value)"):
        session(model)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"rotary_interleaved": 2}, "rotary_interleaved is 2, expected 0 or 1"),
        ({"num_heads": 2**62}, "num_heads is 4611686018427387904"),
        ({"num_heads": 2**20}, "num_heads is 1048576 and kv_num_heads 2, expected 1 to 65536 heads"),
        ({"kv_num_heads": 3}, "num_heads is 4 and kv_num_heads 3"),
        ({"kv_num_heads": -(2**63)}, "num_heads is 4 and kv_num_heads -9223372036854775808"),
    ],
)
def test_bad_attributes(attributes: dict[str, int], message: str) -> None:
    with pytest.raises(Exception, match=f"{NODE}: {message}"):
        session(node_model(Setup(rotary="half"), **attributes))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2**63 - 1), (2**62, 2**62), (1, 2**16 + 1)])
def test_heads_whose_sums_overflow(heads: int, kv_heads: int) -> None:
    """Shape inference of Y must reject the attributes too, because it runs before the kernel is created."""
    model = node_model(Setup(packed=True), num_heads=heads, kv_num_heads=kv_heads)
    (query,) = [value for value in model.graph.input if value.name == "query"]
    query.CopyFrom(helper.make_tensor_value_info("query", TensorProto.FLOAT, [2, 3, 128]))
    with pytest.raises(Exception, match=f"{NODE}: num_heads is {heads} and kv_num_heads {kv_heads}, expected"):
        session(model)


def test_only_key() -> None:
    for name in ("key", "value"):
        model = node_model(Setup())
        i = list(model.graph.node[0].input).index(name)
        model.graph.node[0].input[i] = "none"
        with pytest.raises(Exception, match=f"{NODE}: only one of the inputs key and value is given"):
            session(model)


def zeros(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def codes(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8)


FLOAT = Setup(rotary="half", positions=16, mask=True)
CODES = Setup(kind="codes", rotary="half", positions=16, mask=True)


@pytest.mark.parametrize(
    ("setup", "feeds", "message"),
    [
        (FLOAT, {"query": zeros(2, 3, 126)}, r"query 'query' has shape \[2, 3, 126\], expected \[B, S, 4 heads\] or"),
        (FLOAT, {"query": zeros(3, 128)}, r"query 'query' has shape \[3, 128\]"),
        (FLOAT, {"query": zeros(2, 3, 3, 32)}, r"expected \[B, S, 4 heads\] or \[B, 4, S, D\]"),
        (FLOAT, {"query": zeros(2, 4, 3, 0)}, r"query 'query' has shape \[2, 4, 3, 0\]"),
        (FLOAT, {"query": zeros(2, 3, 256)}, "key 'key' has shape .* 2 heads of 64, like the query"),
        (FLOAT, {"key": zeros(2, 4, 64)}, "key 'key' has shape .* 2 sequences of 3 tokens"),
        (FLOAT, {"value": zeros(1, 3, 64)}, "value 'value' has shape .* 2 sequences of 3 tokens"),
        (FLOAT, {"value": zeros(2, 4, 3, 32)}, r"value 'value' has shape \[2, 4, 3, 32\]"),
        (FLOAT, {"key": zeros(2, 3, 63)}, r"key 'key' has shape \[2, 3, 63\]"),
        (
            FLOAT,
            {"mask": zeros(2, 1, 1, 8)},
            r"mask 'mask' has shape .*, expected a shape that broadcasts to \[2, 4, 3, 9\]",
        ),
        (FLOAT, {"mask": zeros(1, 2, 1, 1, 9)}, "mask 'mask' has shape"),
        (FLOAT, {"past_key": zeros(2, 2, 6, 31)}, r"past cache 'past_key' has shape .* \[2, 2, tokens, 32\]"),
        (FLOAT, {"past_value": zeros(2, 2, 6, 34)}, r"past cache 'past_value' has shape .* \[2, 2, tokens, 32\]"),
        (FLOAT, {"past_key": zeros(1, 2, 6, 32)}, "past cache 'past_key' has shape"),
        (FLOAT, {"past_key": zeros(2, 4, 6, 32)}, "past cache 'past_key' has shape"),
        (FLOAT, {"past_key": zeros(2, 6, 32)}, r"past cache 'past_key' has shape \[2, 6, 32\]"),
        (FLOAT, {"past_key": zeros(0)}, r"past cache 'past_key' has shape \[0\]"),
        (FLOAT, {"past_key": zeros(2, 2, 7, 32)}, "past_key 'past_key' holds 7 tokens and past_value 'past_value' 6"),
        (CODES, {"past_key": codes(2, 2, 6, 32)}, r"past cache 'past_key' has shape .* \[2, 2, tokens, 16\]"),
        (CODES, {"past_value": codes(2, 2, 6, 32)}, r"past cache 'past_value' has shape .* \[2, 2, tokens, 34\]"),
        (CODES, {"past_value": codes(2, 2, 5, 34)}, "past_key 'past_key' holds 6 tokens and past_value 'past_value' 5"),
        (
            CODES,
            {"query": zeros(2, 3, 256), "key": zeros(2, 3, 128), "value": zeros(2, 3, 128)},
            "head size is 64, but codebooks have 32",
        ),
        (FLOAT, {"lengths": zeros(3, dtype=np.int32)}, r"lengths has shape \[3\], expected \[2\]"),
        (FLOAT, {"lengths": zeros(dtype=np.int32)}, r"lengths has shape \[\]"),
        (FLOAT, {"lengths": zeros(0, 2**31, dtype=np.int32)}, r"lengths has shape \[0, 2147483648\]"),
        (FLOAT, {"lengths": np.array([8, -1], np.int32)}, "lengths is -1 for sequence 1"),
        (FLOAT, {"lengths": np.array([8, -(2**31)], np.int32)}, "lengths is -2147483648 for sequence 1"),
        (
            FLOAT,
            {"lengths": np.array([8, 9], np.int32)},
            "sequence 1 has 10 tokens after this call of 3, but past_key 'past_key' has room for 6",
        ),
        (CODES, {"lengths": np.array([2**31 - 1, 8], np.int32)}, "sequence 0 has 2147483648 tokens after this call"),
    ],
)
def test_bad_feeds(setup: Setup, feeds: dict[str, np.ndarray], message: str) -> None:
    decoder = Decoder(setup)
    decoder.call(6, mask=NOTHING)
    good = decoder.call(3, mask=np.zeros((2, 1, 1, 9), np.float32)).feeds
    ours = session(node_model(setup))
    ours.run(None, good)
    with pytest.raises(Exception, match=f"{NODE}: .*{message}"):
        ours.run(None, good | feeds)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("query", np.float16),
        ("key", np.float64),
        ("mask", np.bool_),
        ("past_key", np.uint8),
        ("past_value", np.int8),
        ("lengths", np.int64),
    ],
)
def test_wrong_types(name: str, wrong: type) -> None:
    """ONNX Runtime rejects wrong types in models and in feeds."""
    decoder = Decoder(FLOAT)
    good = decoder.call(3, mask=NOTHING).feeds
    with pytest.raises(Exception, match="Unexpected input data type"):
        session(node_model(FLOAT)).run(None, good | {name: good[name].astype(wrong)})
    model = node_model(FLOAT)
    (value,) = [value for value in model.graph.input if value.name == name]
    value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(wrong))
    with pytest.raises(Exception, match=r"[Tt]ype"):
        session(model)


def tables(cos: tuple[int, ...], sin: tuple[int, ...] | None = None) -> dict[str, np.ndarray]:
    return {"cos": np.zeros(cos, np.float32), "sin": np.zeros(sin or cos, np.float32)}


@pytest.mark.parametrize("setup", [FLOAT, CODES])
@pytest.mark.parametrize(
    ("constants", "message"),
    [
        (tables((8, 16)), "longest sequence has 9 tokens, but cos and sin have 8 positions"),
        (tables((0, 16)), "longest sequence has 9 tokens, but cos and sin have 0 positions"),
        (tables((9, 17)), r"cos has shape \[9, 17\] and sin \[9, 17\], expected \[positions, 16\] for both, or fewer"),
        (tables((9, 16), (8, 16)), r"cos has shape \[9, 16\] and sin \[8, 16\]"),
        (tables((9, 32)), r"cos has shape \[9, 32\]"),
        (tables((144,)), r"cos has shape \[144\]"),
        (tables((1, 9, 16)), r"cos has shape \[1, 9, 16\]"),
    ],
)
def test_bad_tables(setup: Setup, constants: dict[str, np.ndarray], message: str) -> None:
    decoder = Decoder(setup)
    decoder.call(6, mask=NOTHING)
    feeds = decoder.call(3, mask=NOTHING).feeds
    with pytest.raises(Exception, match=f"{NODE}: {message}"):
        session(node_model(setup, constants=constants)).run(None, feeds)


def test_odd_heads_cannot_be_rotated() -> None:
    setup = Setup(head_dim=15, rotary="half")
    feeds = Decoder(Setup(head_dim=15)).call(3).feeds
    with pytest.raises(Exception, match=f"{NODE}: head size is 15, expected an even size for rotary embedding"):
        session(node_model(setup, constants=tables((9, 7)))).run(None, feeds)


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("kind", ["float", "codes"])
def test_huge_sizes_of_nothing(lengths: bool, kind: str) -> None:
    """Empty tensors may have dimensions of any size."""
    setup = Setup(kind=kind, lengths=lengths)
    ours = session(node_model(setup))
    keys, values = setup.rows
    big = 2**40
    feeds = {
        "query": zeros(0, big, 128),
        "key": zeros(0, big, 64),
        "value": zeros(0, big, 64),
        "past_key": np.zeros((0, 2, big, keys), setup.dtypes[0]),
        "past_value": np.zeros((0, 2, big, values), setup.dtypes[1]),
    } | ({"lengths": zeros(0, dtype=np.int32)} if lengths else {})
    with pytest.raises(Exception, match=f"{NODE}: cache has {big} tokens and the call {big}"):
        ours.run(None, feeds)
    many = {
        "query": zeros(big, 0, 128),
        "key": zeros(big, 0, 64),
        "value": zeros(big, 0, 64),
        "past_key": np.zeros((big, 2, 0, keys), setup.dtypes[0]),
        "past_value": np.zeros((big, 2, 0, values), setup.dtypes[1]),
    }
    if not lengths:
        assert [y.shape[:2] for y in ours.run(None, many)] == [(big, 0), (big, 2), (big, 2)]


SIZES = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 31, 32, 33, 34, 64, 128])


@examples(200)
@given(
    kind=st.sampled_from(["float", "codes", "codes_float"]),
    packed=st.booleans(),
    rotary=st.sampled_from([None, "half"]),
    use_lengths=st.booleans(),
    shapes=st.dictionaries(
        st.sampled_from(["query", "key", "value", "mask", "past_key", "past_value"]),
        st.lists(SIZES, max_size=5),
        max_size=2,
    ),
    lengths=st.lists(st.sampled_from([-(2**31), -1, 0, 1, 7, 8, 9, 40, 2**31 - 1]), max_size=3),
    bad_lengths=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_feed_is_answered_or_refused(
    kind: str,
    packed: bool,
    rotary: str | None,
    use_lengths: bool,
    shapes: dict[str, list[int]],
    lengths: list[int],
    bad_lengths: bool,
    seed: int,
) -> None:
    """Caches with any bytes, and shapes and lengths of any size, give an error or an output."""
    setup = Setup(kind=kind, packed=packed, rotary=rotary, lengths=use_lengths, mask=True, positions=12)
    rng = np.random.default_rng(seed)
    decoder = Decoder(setup, seed=seed)
    decoder.call(6, mask=NOTHING)
    feeds: dict[str, Any] = dict(decoder.call(3, mask=NOTHING).feeds)
    for name in ("past_key", "past_value"):
        if feeds[name].dtype == np.uint8:
            feeds[name] = rng.integers(0, 256, feeds[name].shape).astype(np.uint8)
    for name, shape in shapes.items():
        if name in feeds and np.prod(shape) < 2**20:
            feeds[name] = rng.integers(0, 256, shape).astype(feeds[name].dtype)
    if use_lengths and bad_lengths:
        feeds["lengths"] = np.array(lengths, np.int32)
    ours = session(node_model(setup), threads=2)
    try:
        y, *present = ours.run(None, feeds)
    except Exception as error:
        assert NODE in str(error)
    else:
        assert y.shape[:2] == feeds["query"].shape[:2]
        assert [x.shape[:2] for x in present] == [(len(y), 2)] * 2


def test_one_buffer_for_caches_of_two_sizes() -> None:
    """Past and present cache may share a buffer only if they have the same number of tokens."""
    setup = Setup(kind="float", lengths=False)
    made = session(node_model(setup))
    feeds = Decoder(setup, batch=1, room=20).call(1).feeds
    buffer = np.zeros(2 * 21 * 32 + 16, np.float32)
    binding = made.io_binding()
    for name, array in feeds.items():
        if name != "past_key":
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
    shapes = {"past_key": (1, 2, 20, 32), "present_key": (1, 2, 21, 32)}
    pointer = buffer.ctypes.data
    binding.bind_input("past_key", "cpu", 0, np.float32, shapes["past_key"], pointer)
    binding.bind_output("present_key", "cpu", 0, np.float32, shapes["present_key"], pointer)
    binding.bind_output("present_value", "cpu")
    binding.bind_output("y", "cpu")
    with pytest.raises(
        Exception, match=f"{NODE}: past and present of 'past_key' share a buffer of 20 tokens, expected 21"
    ):
        made.run_with_iobinding(binding)


PROMPTED = Setup(prompt=40)


def prompt_tensors(setup: Setup = PROMPTED) -> dict[str, np.ndarray]:
    """Return the prompt's initializers of node_model, for damaging them."""
    names = {tensor.name: tensor for tensor in node_model(setup).graph.initializer if tensor.name.startswith("prompt_")}
    return {name: numpy_helper.to_array(tensor).copy() for name, tensor in names.items()}


def damaged(name: str, change: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
    return {name: change(prompt_tensors()[name])}


def with_bit(masks: np.ndarray) -> np.ndarray:
    """Set a mask bit of token 40, although the prompt has only 40 tokens (0 to 39)."""
    masks.reshape(-1, 64)[2, 32] |= 1
    return masks


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        (
            damaged("prompt_key_masks", lambda a: a[:-1]),
            "malformed prompt_key in tensors 'prompt_key_masks', 'prompt_key_values', 'prompt_key_offsets': masks "
            "hold 320 bytes, expected 384",
        ),
        (damaged("prompt_key_offsets", lambda a: a[::-1].copy()), r"malformed prompt_key .*offsets\[0\] is"),
        (damaged("prompt_key_values", lambda a: a[:-1]), r"malformed prompt_key .*values hold"),
        (damaged("prompt_value_offsets", lambda a: a[:-1]), r"malformed prompt_value .*offsets hold 4 entries"),
        (damaged("prompt_value_masks", lambda a: a | np.uint8(1)), r"malformed prompt_value .*masks of panel"),
        ({"prompt_value_masks": np.zeros(0, np.uint8)}, "malformed prompt_value"),
        (
            damaged("prompt_key_masks", lambda a: a[:0]) | damaged("prompt_key_offsets", lambda a: a[:0]),
            "malformed prompt_key .*values hold .* entries, expected 3072",
        ),
    ],
)
def test_bad_prompts(constants: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(Exception, match=f"{NODE}: .*{message}"):
        session(node_model(PROMPTED, constants=constants))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"prompt_tokens": -1}, "prompt_tokens is -1, expected 0 to"),
        ({"prompt_tokens": 2**40}, "prompt_tokens is 1099511627776, expected 0 to"),
        ({"prompt_tokens": 0}, r"input 11 'prompt_key_masks' belongs to a prompt, but prompt_tokens is 0"),
        ({"prompt_tokens": 49}, "malformed prompt_key"),
        ({"prompt_head_dim": 24}, "prompt_head_dim is 24, expected a multiple of 16 from 16 to 1024"),
        ({"prompt_head_dim": -16}, "prompt_head_dim is -16"),
        ({"prompt_head_dim": 48}, "malformed prompt_key"),
    ],
)
def test_bad_attributes_of_prompts(attributes: dict[str, int], message: str) -> None:
    with pytest.raises(Exception, match=f"{NODE}: {message}"):
        session(node_model(PROMPTED, **attributes))


def test_prompts_that_do_not_fit_the_call() -> None:
    call = Decoder(PROMPTED).call(2)
    ours = session(node_model(PROMPTED))
    with pytest.raises(
        Exception, match=r"lengths is 39 for sequence 0, expected .* at least 40 .including the tokens of the model"
    ):
        ours.run(None, call.feeds | {"lengths": np.array([39, 50], np.int32)})
    other = Setup(prompt=40, head_dim=16)
    with pytest.raises(Exception, match="head size is 16, but prompt_head_dim is 32"):
        ours.run(None, Decoder(other).call(2).feeds)
    rotary = Setup(prompt=40, rotary="half", positions=44)
    ours = session(node_model(rotary))
    decoder = Decoder(dataclasses.replace(rotary, positions=256))
    ours.run(None, decoder.call(4).feeds)
    with pytest.raises(Exception, match="longest sequence has 45 tokens, but cos and sin have 44 positions"):
        ours.run(None, decoder.call(1).feeds)


def test_a_prompt_without_a_cache() -> None:
    model = node_model(PROMPTED)
    node = model.graph.node[0]
    del node.input[4:], node.output[1:], model.graph.output[1:]
    with pytest.raises(Exception, match=f"{NODE}: prompt_tokens is 40, but past_key is missing"):
        session(model)


@examples(60)
@given(seed=st.integers(0, 2**32 - 1))
def test_damaged_prompts_never_crash(seed: int) -> None:
    """Random damage to the prompt gives an error or an output."""
    rng = np.random.default_rng(seed)
    dense = rng.random() < 0.3
    setup = dataclasses.replace(PROMPTED, prompt_sparsity=(0.0, 0.0) if dense else (0.3, 0.5))
    tensors = prompt_tensors(setup)
    name = list(tensors)[rng.integers(len(tensors))]
    content = bytearray(tensors[name].tobytes())
    for _ in range(rng.integers(1, 4) if content else 0):
        content[rng.integers(len(content))] = rng.integers(256)
    array = np.frombuffer(bytes(content), tensors[name].dtype)
    if rng.random() < 0.4:
        array = np.resize(array, rng.integers(2 * array.size + 1)) if array.size else np.zeros(1, array.dtype)
    attributes = {"prompt_tokens": int(rng.integers(30, 50))} if rng.random() < 0.3 else {}
    call = Decoder(setup, 1).call(int(rng.choice([1, 6])))
    try:
        session(node_model(setup, constants={name: array}, **attributes)).run(None, call.feeds)
    except Exception as error:
        assert NODE in str(error)

"""Attention of one token over long caches: NoMADAttention and its kernels compared with ONNX Runtime.

One layer has 32 query and 8 key heads of size 128. Kernels of ops/attention/decode.h are called without ONNX Runtime.

A measurement is one context length, with all candidates in the same rounds and cold caches. Parts:

    step      the kernel for scores, softmax and values, with keys as codes and values in int8; on one thread
    scores    the kernel for the products of queries and keys; on one thread
    node      NoMADAttention in an ORT session, with past and present in one buffer: it appends the 17th token of a
                block and attends to all tokens; on the given number of threads
    prompt    NoMADAttention in a session, with float caches that hold only the new token, and `context` tokens as a
                pruned prompt in the model (`keys` and `values`: the fractions of zeros); on one thread

Peers:

    ort_f32, ort_int8, ort_int4    step, node, prompt (only ort_f32): ORT GroupQueryAttention with caches of this type,
                                  past and present in one buffer; it also appends the token
    ortolan_float, ortolan_codes   prompt: NoMADAttention with `context` tokens in caches of float32, or codes and int8
    ortolan_step                   node: the kernel alone with the same number of tokens, on one thread
    ort_matmul_f32                 scores: ORT FusedMatMul of the queries that share a key head with its float32 keys
    ortolan_f32                    scores: Ortolan's kernel with float32 keys; step: also with float32 values
    stream_read                    reading the caches' bytes at the measured memory bandwidth; a ratio of 0.8 means that
                                  Ortolan reaches 80 % of it

65,536 tokens need 4 GB of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import GraphProto, NodeProto, ValueInfoProto, helper, numpy_helper

from ortolan.graph_passes.measure.machine import last_level_cache_bytes
from ortolan.graph_passes.measure.timing import cold_bytes_each, describe_cold_copies, interleave, pinned
from ortolan.graph_passes.operators.prompt_cache import PromptCache
from ortolan.graph_passes.passes.prompt import prune_prompt
from ortolan.graph_passes.report.figures import Timing

from .. import _native
from ..errors import OrtolanError
from ..progress import Progress, no_progress
from ..session import register
from .bare_kernels import required_kernels
from .cold_layers import cold_copies
from .result import BenchOptions, BenchResult, BenchRow
from .stream_reader import StreamReader

OP, DOMAIN = "NoMADAttention", "ai.ortolan"
KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
SCALE = HEAD_DIM**-0.5
CONTEXTS = (512, 2048, 16384, 65536)
QUICK_CONTEXTS = (2048,)
D_SUB = (1, 2)
PRUNED = ((0.0, 0.0), (0.3, 0.5), (0.5, 0.5))  # fractions of keys and of values pruned from prompts
ROOM_LEFT = 15  # unused tokens of buffers in `node`: blocks have 32 tokens, so the last block is half full
SECONDS, QUICK_SECONDS = 4.0, 0.5
ROUNDS = 5
_ORT_KINDS = {"ort_f32": np.float32, "ort_int8": np.int8, "ort_int4": np.uint8}

Call = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """A timed call. It processes all copies of a layer's caches, each of `stored_bytes`."""

    call: Call
    copies: int
    stored_bytes: int


def run(options: BenchOptions, progress: Progress = no_progress) -> BenchResult:
    """Measure every context. An interrupt returns the results so far."""
    for name in ("cases", "sparsity", "layers", "batch", "kinds", "group_size"):
        if getattr(options, name) is not None:
            raise OrtolanError(f"{OP} has no weights: options about layers and weights do not apply; leave them out")
    required_kernels()
    result = BenchResult(
        notes=[
            "step, scores: the kernel alone, on one thread. node: NoMADAttention in a session.",
            "Caches are cold. stream_read: time to read their bytes from memory.",
            describe_cold_copies(),
        ]
    )
    contexts = QUICK_CONTEXTS if options.quick else CONTEXTS
    try:
        for done, context in enumerate(contexts):
            progress(f"{context} tokens", done, len(contexts))
            seconds = QUICK_SECONDS if options.quick else SECONDS
            for threads in options.threads:
                with pinned(threads):
                    if threads == 1:
                        result.rows += _measure(context, seconds)
                        result.rows += _measure_prompt(context, seconds)
                    result.rows += _measure_node(context, threads, seconds)
    except KeyboardInterrupt:
        if not result.rows:
            raise
        result.interrupted = True
        result.notes.append("Interrupted: not all contexts are measured.")
    progress("done", len(contexts), len(contexts))
    return result


def _measure(context: int, seconds: float) -> Iterator[BenchRow]:
    measured = candidates(context)
    stream = StreamReader(1)
    timings = interleave(
        {name: one.call for name, one in measured.items()} | stream.candidates(), seconds=seconds, min_rounds=ROUNDS
    )
    times = {name: timings[name].scaled(1 / one.copies) for name, one in measured.items()}
    for part, peers in (("step", (*_ORT_KINDS, "ortolan_f32")), ("scores", ("ort_matmul_f32", "ortolan_f32"))):
        for d_sub in D_SUB:
            ours = f"{part} d_sub {d_sub}"
            case = {"part": part, "context": context, "d_sub": d_sub}
            against: dict[str, Timing] = {peer: times[f"{part} {peer}"] for peer in peers}
            against["stream_read"] = stream.time_for(timings, measured[ours].stored_bytes)
            for peer, time in against.items():
                yield BenchRow(OP, case, 1, times[ours], peer, time)


def _measure_node(context: int, threads: int, seconds: float) -> Iterator[BenchRow]:
    measured = node_candidates(context, threads)
    timings = interleave({name: one.call for name, one in measured.items()}, seconds=seconds, min_rounds=ROUNDS)
    times = {name: timings[name].scaled(1 / one.copies) for name, one in measured.items()}
    for d_sub in D_SUB:
        against = {peer: times[peer] for peer in _ORT_KINDS}
        if threads == 1:
            against["ortolan_step"] = times[f"step d_sub {d_sub}"]
        for peer, time in against.items():
            yield BenchRow(
                OP,
                {"part": "node", "context": context, "d_sub": d_sub},
                threads,
                times[f"node d_sub {d_sub}"],
                peer,
                time,
            )


def _measure_prompt(context: int, seconds: float) -> Iterator[BenchRow]:
    measured = prompt_candidates(context)
    stream = StreamReader(1)
    timings = interleave(
        {name: one.call for name, one in measured.items()} | stream.candidates(), seconds=seconds, min_rounds=ROUNDS
    )
    times = {name: timings[name].scaled(1 / one.copies) for name, one in measured.items()}
    for keys, values in PRUNED:
        ours = _prompt_name(keys, values)
        case = {"part": "prompt", "context": context, "keys": keys, "values": values}
        against = {peer: times[peer] for peer in ("ort_f32", "ortolan_float", "ortolan_codes")}
        against["stream_read"] = stream.time_for(timings, measured[ours].stored_bytes)
        for peer, time in against.items():
            yield BenchRow(OP, case, 1, times[ours], peer, time)


def prompt_candidates(context: int) -> dict[str, Measured]:
    """Return sessions that decode one token after `context` tokens, by name."""
    rng = np.random.default_rng(context)
    inputs = _inputs(rng)
    result = {}
    for sparsities in PRUNED:
        shape = (KV_HEADS, context, HEAD_DIM)
        prompt = prune_prompt(_floats(rng, shape), _floats(rng, shape), *sparsities)
        stored = sum(tensor.array.nbytes for tensor in prompt.pack().values())
        count = _count(stored)
        runs = [behind_prompt(inputs, prompt) for _ in range(count)]
        result[_prompt_name(*sparsities)] = Measured(_one_after_another(runs), count, stored)
    codebooks, *caches = compressed_caches(rng, context, 1)
    copies = _copies([cache[None] for cache in caches])
    result["ortolan_codes"] = _in_turn(cached_attention(inputs, codebooks, copies, context), copies)
    copies = _copies(_ort_caches(rng, context, np.float32))
    result["ortolan_float"] = _in_turn(cached_attention(inputs, np.zeros(0, np.float32), copies, context), copies)
    result["ort_f32"] = _in_turn(group_query_attention(inputs, copies), copies)
    return result


def _prompt_name(keys: float, values: float) -> str:
    return f"prompt {keys:g} {values:g}"


def node_candidates(context: int, threads: int) -> dict[str, Measured]:
    """Return sessions that decode one token into buffers of `context` tokens, by name."""
    rng = np.random.default_rng(context)
    tokens = context - ROOM_LEFT
    inputs = _inputs(rng)
    q = inputs["query"].reshape(KV_HEADS, GROUP, HEAD_DIM)
    result = {}
    for d_sub in D_SUB:
        codebooks, *caches = compressed_caches(rng, context, d_sub)
        copies = _copies([cache[None] for cache in caches])
        result[f"node d_sub {d_sub}"] = _in_turn(cached_attention(inputs, codebooks, copies, tokens, threads), copies)
        result[f"step d_sub {d_sub}"] = _ours(caches, _step(q, codebooks, tokens))
    for name, dtype in _ORT_KINDS.items():
        copies = _copies(_ort_caches(rng, context, dtype))
        result[name] = _in_turn(group_query_attention(inputs, copies, tokens=tokens, threads=threads), copies)
    return result


def candidates(context: int) -> dict[str, Measured]:
    """Return calls of kernels and of ONNX Runtime for one context, by part and name."""
    rng = np.random.default_rng(context)
    result = {}
    for d_sub in D_SUB:
        codebooks, keys, values = compressed_caches(rng, context, d_sub)
        q = rng.standard_normal((KV_HEADS, GROUP, HEAD_DIM), dtype=np.float32)
        result[f"step d_sub {d_sub}"] = _ours((keys, values), _step(q, codebooks))
        result[f"scores d_sub {d_sub}"] = _ours((keys,), _scores(q, codebooks))
    shape = (KV_HEADS, context, HEAD_DIM)
    floats = (_floats(rng, shape), _floats(rng, shape))
    result["step ortolan_f32"] = _ours(floats, _step(q, None))
    result["scores ortolan_f32"] = _ours(floats[:1], _scores(q, None))
    result["scores ort_matmul_f32"] = _ort_scores(q, floats[0])
    inputs = _inputs(rng)
    for name, dtype in _ORT_KINDS.items():
        copies = _copies(_ort_caches(rng, context, dtype))
        result[f"step {name}"] = _in_turn(group_query_attention(inputs, copies), copies)
    return result


def compressed_caches(
    rng: np.random.Generator,
    context: int,
    d_sub: int,
    *,
    tokens: int | None = None,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codebooks, keys and values of a layer with room for `context` tokens; only `tokens` tokens are written."""
    codebooks = rng.standard_normal((kv_heads, head_dim // d_sub, 16, d_sub), dtype=np.float32)
    keys = rng.integers(0, 256, (kv_heads, context, head_dim // d_sub // 2), dtype=np.uint8)
    values = np.zeros((kv_heads, context, head_dim + 2), np.uint8)
    for head in values:
        _native.append_values(head, 0, _floats(rng, (tokens or context, head_dim)))
    return codebooks, keys, values


def _inputs(rng: np.random.Generator) -> dict[str, np.ndarray]:
    heads = {"query": KV_HEADS * GROUP, "key": KV_HEADS, "value": KV_HEADS}
    return {name: rng.standard_normal((1, 1, count * HEAD_DIM), dtype=np.float32) for name, count in heads.items()}


def _floats(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return normally distributed values that repeat, which are fast to make and suffice for timing."""
    return np.resize(rng.standard_normal(1 << 20, dtype=np.float32), shape)


def _copies(arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    return cold_copies(arrays, _count(sum(array.nbytes for array in arrays)))


def _count(bytes_each: int) -> int:
    """Return the number of copies that keeps a cache out of the L3, within the memory of one candidate."""
    return max(2, min(-(-4 * last_level_cache_bytes() // bytes_each), cold_bytes_each() // bytes_each))


def _ours(caches: Sequence[np.ndarray], attend: Callable[..., object]) -> Measured:
    copies = _copies(caches)

    def call() -> None:
        for copy in copies:
            attend(*copy)

    return Measured(call, len(copies), sum(cache.nbytes for cache in caches))


def _step(q: np.ndarray, codebooks: np.ndarray | None, tokens: int | None = None) -> Callable[..., object]:
    kernels = required_kernels()
    return lambda keys, values: kernels.finish_decode(
        kernels.decode_attention(q, SCALE, keys, values, codebooks, tokens)
    )


def _scores(q: np.ndarray, codebooks: np.ndarray | None) -> Callable[..., object]:
    kernels = required_kernels()
    return lambda keys: kernels.decode_scores(q, SCALE, keys, codebooks)


def _ort_caches(rng: np.random.Generator, context: int, dtype: type) -> list[np.ndarray]:
    row = HEAD_DIM // 2 if dtype is np.uint8 else HEAD_DIM
    return [
        _floats(rng, (1, KV_HEADS, context, row))
        if dtype is np.float32
        else np.resize(rng.integers(-127, 128, 1 << 20, dtype=np.int8).view(dtype), (1, KV_HEADS, context, row))
        for _ in range(2)
    ]


def _in_turn(calls: Iterator[Call], copies: Sequence[Sequence[np.ndarray]]) -> Measured:
    runs = list(calls)
    return Measured(_one_after_another(runs, copies), len(runs), sum(cache.nbytes for cache in copies[0]))


def _one_after_another(runs: Sequence[Call], keep: object = None) -> Call:
    def call(_keep: object = keep) -> None:
        for one in runs:
            one()

    return call


def group_query_attention(
    inputs: Mapping[str, np.ndarray],
    caches: Sequence[Sequence[np.ndarray]],
    y: np.ndarray | None = None,
    *,
    tokens: int | None = None,
    threads: int = 1,
) -> Iterator[Call]:
    """Yield one call of ORT GroupQueryAttention per pair of caches [1, kv_heads, context, row].

    It writes key and value into row `tokens` - 1 of the caches (default: the last row), and its answer into y. Caches
    in int8, or int4 (stored as uint8), have scales of 0.01.
    """
    tokens = tokens or caches[0][0].shape[2]
    dtype = caches[0][0].dtype
    given = {
        **inputs,
        "seqlens_k": np.array([tokens - 1], np.int32),
        "total_sequence_length": np.array([tokens], np.int32),
    }
    names = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"]
    attributes: dict[str, Any] = {"num_heads": KV_HEADS * GROUP, "kv_num_heads": KV_HEADS}
    if dtype != np.float32:
        given |= dict.fromkeys(("k_scale", "v_scale"), np.full(KV_HEADS * HEAD_DIM, 0.01, np.float32))
        names += ["", "", "", "", "", "k_scale", "v_scale"]
        attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
        attributes["kv_cache_bit_width"] = 8 if dtype == np.int8 else 4
    node = helper.make_node(
        "GroupQueryAttention", names, ["y", "present_key", "present_value"], domain="com.microsoft", **attributes
    )
    yield from _decode_calls(node, given, {}, caches, y, threads)


def cached_attention(
    inputs: Mapping[str, np.ndarray],
    codebooks: np.ndarray,
    caches: Sequence[Sequence[np.ndarray]],
    tokens: int,
    threads: int = 1,
    y: np.ndarray | None = None,
) -> Iterator[Call]:
    """Yield one call of NoMADAttention per pair of caches [1, kv_heads, context, row].

    The caches are codes and int8 values, or floats (with codebooks of shape [0]). It appends key and value as token
    number `tokens`, and writes its answer into y.
    """
    constants = {"nothing": np.zeros(1, np.float32), "codebooks": codebooks}
    node = helper.make_node(
        OP,
        ["query", "nothing", "key", "value", "past_key", "past_value", "codebooks", "lengths"],
        ["y", "present_key", "present_value"],
        domain=DOMAIN,
        num_heads=KV_HEADS * GROUP,
        kv_num_heads=KV_HEADS,
        causal=1,
        scale=SCALE,
    )
    given = {**inputs, "lengths": np.array([tokens - 1], np.int32)}
    yield from _decode_calls(node, given, constants, caches, y, threads)


def behind_prompt(
    inputs: Mapping[str, np.ndarray], prompt: PromptCache, y: np.ndarray | None = None, threads: int = 1
) -> Call:
    """Return a call of NoMADAttention with the prompt in its session, and a float cache for one new token."""
    packed = {
        name: tensor.array.view(ml_dtypes.bfloat16) if tensor.array.dtype == np.uint16 else tensor.array
        for name, tensor in prompt.pack().items()
    }
    constants = {"nothing": np.zeros(1, np.float32), "no_codebooks": np.zeros(0, np.float32), **packed}
    names = ["query", "nothing", "key", "value", "past_key", "past_value", "no_codebooks", "lengths"]
    node = helper.make_node(
        OP,
        [*names, "nothing", "nothing", "nothing", *packed],
        ["y", "present_key", "present_value"],
        domain=DOMAIN,
        num_heads=KV_HEADS * GROUP,
        kv_num_heads=KV_HEADS,
        causal=1,
        scale=SCALE,
        prompt_tokens=prompt.tokens,
        prompt_head_dim=HEAD_DIM,
    )
    given = {**inputs, "lengths": np.array([prompt.tokens], np.int32)}
    cache = [np.zeros((1, KV_HEADS, 1, HEAD_DIM), np.float32) for _ in range(2)]
    return next(_decode_calls(node, given, constants, [cache], y, threads))


def _decode_calls(
    node: NodeProto,
    given: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray],
    caches: Sequence[Sequence[np.ndarray]],
    y: np.ndarray | None,
    threads: int,
) -> Iterator[Call]:
    """Yield one call of a node's session per pair of caches, with past and present in one buffer."""
    pasts = ("past_key", "past_value")
    shaped = dict(zip(pasts, caches[0], strict=True))
    answer = np.ones_like(given["query"]) if y is None else y
    graph = helper.make_graph(
        [node],
        "step",
        [_declared(name, array) for name, array in (dict(given) | shaped).items()],
        [_declared("y", answer), *(_declared(name.replace("past", "present"), shaped[name]) for name in pasts)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    session = _session(graph, threads)
    for pair in caches:
        binding = session.io_binding()
        bound = {**given, **dict(zip(pasts, pair, strict=True))}
        values_of = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in bound.items()}
        for name, value in values_of.items():
            binding.bind_ortvalue_input(name, value)
        for name in pasts:
            binding.bind_ortvalue_output(name.replace("past", "present"), values_of[name])
        binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(answer))
        yield _bound(session, binding, (values_of, answer))


def _ort_scores(q: np.ndarray, keys: np.ndarray) -> Measured:
    node = helper.make_node("FusedMatMul", ["q", "k"], ["s"], domain="com.microsoft", transB=1, alpha=SCALE)
    scores = np.ones((KV_HEADS, GROUP, keys.shape[1]), np.float32)
    graph = helper.make_graph([node], "scores", [_declared("q", q), _declared("k", keys)], [_declared("s", scores)])
    session = _session(graph)
    runs = []
    copies = _copies([keys])
    for (copy,) in copies:
        binding = session.io_binding()
        values = {
            name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in {"q": q, "k": copy, "s": scores}.items()
        }
        binding.bind_ortvalue_input("q", values["q"])
        binding.bind_ortvalue_input("k", values["k"])
        binding.bind_ortvalue_output("s", values["s"])
        runs.append(_bound(session, binding, (values, copy, scores, q)))

    def call() -> None:
        for one in runs:
            one()

    return Measured(call, len(runs), keys.nbytes)


def _bound(session: ort.InferenceSession, binding: ort.IOBinding, keep: object) -> Call:
    def call(_keep: object = keep) -> None:
        session.run_with_iobinding(binding)

    return call


def _declared(name: str, array: np.ndarray) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def _session(graph: GraphProto, threads: int = 1) -> ort.InferenceSession:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid(DOMAIN, 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    register(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

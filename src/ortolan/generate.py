"""Generation with decoders that have a KV cache, greedily or by sampling, without copying the cache."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from ortolan.graph_passes.names import PROMPT_KEY

from .errors import ArgumentError, ArgumentTypeError, OrtolanError, wrong_type
from .rewinding import Rewinder

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime as ort

    from .engine.rows import RowState, TokenSampler

_LENGTHS = 7  # index of NoMADAttention's input `lengths`
_PAST, _PRESENT = "past_key_values.", "present."
_STATE_PAST = "past."  # of recurrent states in models of ONNX Runtime GenAI
_TYPES: dict[str, type[np.generic]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
# uint8 and int8 are the types of compressed caches, of Ortolan's pass compress_cache and of GroupQueryAttention.
_CACHE_TYPES = _TYPES | {"tensor(uint8)": np.uint8, "tensor(int8)": np.int8}


class Decoder:
    """One sequence that a session decodes, with its KV cache.

    The cache never passes through NumPy. There are two kinds:
    - growing (any decoder): the outputs present.N.* of a step become the inputs past_key_values.N.* of the next step.
      Inside the graph, the node that appends (Concat or GroupQueryAttention) copies the whole cache in each step.
    - shared (GroupQueryAttention, and NoMADAttention that replaces it): one buffer is both past and present, and is
    written in place. Tensors with a fixed number of tokens, such as past_key_values.N.exact_key of NoMADAttention, have
    this number in all calls.

    Hybrid models also have recurrent states of a fixed size, such as past_key_values.N.conv_state or past.N.recurrent.
    Each step replaces them, with both kinds of caches.

    Attributes:
        vocabulary: The number of token ids.
        cache_length: The capacity of a shared cache; None: the cache grows.
        prompt_tokens: The number of tokens of a prompt that is part of the model, before those of the cache.
        only_last_logits: The model returns only the logits of the last token of a call.
        token_bytes: The bytes of a token's keys and values.
        has_states: The model has recurrent states.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        cache_length: int | None = None,
        head_size: int | None = None,
        *,
        rewindable: int = 0,
    ) -> None:
        """Create a decoder with an empty cache.

        Args:
            session: A decoder with the names of Optimum and ONNX Runtime GenAI: inputs input_ids int64 [batch,
                sequence], past_key_values.N.key and .value [batch, heads, past_sequence, head_dim] (and other
                past_key_values.N.*), optionally attention_mask int64 [batch, past_sequence + sequence] and position_ids
                int64 [batch, sequence] or [3, batch, sequence]; recurrent states past.N.* or past_key_values.N.*
                [batch, …]; outputs logits [batch, sequence, vocabulary], present.N.key and .value, and of states.
            cache_length: The capacity of a shared cache, for graphs that support it (`shares_cache`). None: the cache
                grows.
            head_size: The head size of the cache, if the inputs leave it open (`read_head_size`). `rewind` needs it if
                pass compress_cache has padded the rows (equal_rows).
            rewindable: The number of latest tokens that `rewind` can remove if the model has exact keys. Each step then
                copies the exact keys that it replaces. Other shared caches can be rewound to any length.

        Raises:
            ArgumentTypeError: `session` is not a session, or `rewindable` is not an integer.
            ArgumentError: `rewindable` is negative, or above 0 for a cache that cannot be rewound.
            OrtolanError: The session has other inputs, or no cache of known size.
        """
        if not hasattr(session, "run_with_iobinding"):
            expected = "an onnxruntime.InferenceSession; open one with ortolan.create_session(path)"
            raise wrong_type("session", session, expected)
        self.session = session
        inputs = {value.name: value for value in session.get_inputs()}
        self._outputs = {value.name: value for value in session.get_outputs()}
        self._past = [name for name in inputs if name.startswith((_PAST, _STATE_PAST))]
        self._present = [_present_name(name) for name in self._past]
        unknown = inputs.keys() - {"input_ids", "attention_mask", "position_ids", *self._past}
        missing = {"logits", *self._present} - self._outputs.keys()
        if unknown or missing or not self._past or "input_ids" not in inputs:
            raise OrtolanError(
                f"the model is not a decoder with a cache: inputs {', '.join(inputs)}, outputs "
                f"{', '.join(self._outputs)}; expected input_ids, attention_mask, position_ids, "
                f"{_PAST}N.key and .value, and the outputs logits, {_PRESENT}N.key and .value"
            )
        self._has_mask = "attention_mask" in inputs
        positions = inputs.get("position_ids")
        # Qwen's models of images and text have a position for each of time, height and width: [3, batch, sequence].
        self._positions: list[int] | None = None
        if positions is not None:
            self._positions = [_dimension(positions, 0), 1] if len(positions.shape) == 3 else [1]
        self._states = {name for name in self._past if is_state(name, inputs[name].shape)}
        # Read the shape after the batch (-1: tokens) and the type of each cache input: keys and values may differ.
        self._caches = [
            (self._cache_shape(inputs[name], head_size), _dtype(inputs[name], _CACHE_TYPES)) for name in self._past
        ]
        self.has_states = bool(self._states)
        self.token_bytes = sum(
            math.prod(shape[:1] + shape[2:]) * np.dtype(dtype).itemsize
            for name, (shape, dtype) in zip(self._past, self._caches, strict=True)
            if name not in self._states
        )
        # Caches that each step returns as new tensors.
        self._replaced = [
            index for index, name in enumerate(self._past) if cache_length is None or name in self._states
        ]
        self.vocabulary = _dimension(self._outputs["logits"], 2)
        self._logits_dtype = _dtype(self._outputs["logits"])
        self.only_last_logits = self._outputs["logits"].shape[1] == 1
        self.cache_length = cache_length
        self.length = 0
        # Masks and positions count the tokens of a prompt that is part of the model, although the cache does not hold
        # them.
        self._metadata = session.get_modelmeta().custom_metadata_map
        self.prompt_tokens = int(self._metadata.get(PROMPT_KEY, 0))
        if not isinstance(rewindable, Integral):
            raise wrong_type("rewindable", rewindable, "an integer, 0 or more")
        if rewindable < 0 or (rewindable and cache_length is None):
            raise ArgumentError(f"rewindable is {rewindable}, expected 0, or more with a cache_length (a shared cache)")
        if rewindable and self.has_states:
            raise ArgumentError(f"rewindable is {rewindable}, expected 0: {_NO_REWIND.format(min(self._states))}")
        self._head_size: int | None = head_size
        self._rewindable: int = rewindable
        self.reset()

    def reset(self) -> None:
        """Empty the cache."""
        tokens = self.cache_length or 0
        self._hold([np.zeros(_sized(shape, tokens), dtype) for shape, dtype in self._caches], 0)

    def _cache_shape(self, value: Any, head_size: int | None) -> tuple[int, ...]:
        if value.name in self._states:
            return tuple(_dimension(value, axis) for axis in range(1, len(value.shape)))
        return _dimension(value, 1), _fixed_tokens(value), _dimension(value, 3, head_size)

    def fill(self, cache: Mapping[str, np.ndarray], length: int) -> None:
        """Replace the cache by arrays such as those of `cache`. A shared cache then writes to these arrays.

        Args:
            cache: Arrays by input name.
            length: The number of tokens in them.

        Raises:
            ArgumentError: Names, shapes or types differ from those of `cache`, or there is no room for `length` tokens.
        """
        arrays = []
        for name, (sizes, dtype) in zip(self._past, self._caches, strict=True):
            shape, array = _sized(sizes, self.cache_length or length), cache.get(name)
            if array is None or array.shape != shape or array.dtype != dtype:
                found = "missing" if array is None else f"{array.dtype} {list(array.shape)}"
                raise ArgumentError(f"{name!r} is {found}, expected {np.dtype(dtype)} {list(shape)}")
            arrays.append(np.ascontiguousarray(array))
        if self.cache_length is not None and length > self.cache_length:
            raise ArgumentError(f"length is {length}, expected at most the cache's {self.cache_length} tokens")
        self._hold(arrays, length)

    def rewind(self, length: int) -> None:
        """Keep only the first `length` tokens of a shared cache.

        The cache is then the same as if the sequence had never had the other tokens.

        Raises:
            ArgumentError: The cache grows or has fewer tokens, its layout is unknown, the exact keys that it needs were
                not kept (`rewindable`), or the model has recurrent states. The cache is unchanged.
        """
        if self.has_states:
            raise ArgumentError(_NO_REWIND.format(min(self._states)))
        if self._rewinder is None:
            raise ArgumentError("only a shared cache can be rewound; give Decoder a cache_length, or use reset")
        if not 0 <= length <= self.length:
            raise ArgumentError(f"length is {length}, expected 0 to the cache's {self.length} tokens")
        self._rewinder.rewind(self.length, length)
        self.length = length

    def _hold(self, arrays: Sequence[np.ndarray], length: int) -> None:
        import onnxruntime as ort

        self.length = length
        self._binding: Any = self.session.io_binding()
        self._values: list[Any] = [ort.OrtValue.ortvalue_from_numpy(array) for array in arrays]
        self._rewinder: Rewinder | None = None
        if self.cache_length is not None:
            # On CPUs the values share the arrays' memory, so a rewind writes to what the session reads.
            named = dict(zip(self._past, arrays, strict=True))
            self._rewinder = Rewinder(named, self.cache_length, self._metadata, self._head_size, self._rewindable)
            for past, present, value in zip(self._past, self._present, self._values, strict=True):
                if past not in self._states:
                    self._binding.bind_ortvalue_input(past, value)
                    self._binding.bind_ortvalue_output(present, value)

    def cache(self) -> dict[str, np.ndarray]:
        """Return copies of the cache's arrays by input name. Arrays of a shared cache have their full capacity."""
        return {name: value.numpy().copy() for name, value in zip(self._past, self._values, strict=True)}

    def step(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Append at least one token to the sequence.

        Returns:
            Their logits [tokens, vocabulary]; [1, vocabulary] if the model returns only those of the last token.

        Raises:
            ArgumentTypeError: `ids` are not integers.
            ArgumentError: There are no tokens, tokens outside the vocabulary, or too many for a shared cache.
        """
        tokens = _token_ids(ids)
        count = tokens.shape[1]
        total = self.length + count
        if count == 0:
            raise ArgumentError("ids has no tokens; give at least one")
        if outside := [int(token) for token in tokens[0] if not 0 <= token < self.vocabulary]:
            raise ArgumentError(
                f"token {outside[0]} is out of range, expected 0 to {self.vocabulary - 1}; use the model's tokenizer"
            )
        if self.cache_length is not None and total > self.cache_length:
            raise ArgumentError(
                f"the cache has {self.length} of {self.cache_length} tokens, so that {count} more do not fit; give a "
                "larger cache_length"
            )
        binding = self._binding
        # The binding refers to the memory of these arrays, which must live until the run ends.
        rows = 1 if self.only_last_logits else count
        logits: np.ndarray = np.empty((1, rows, self.vocabulary), self._logits_dtype)
        feeds = {"input_ids": tokens}
        if self._has_mask:
            feeds["attention_mask"] = np.ones((1, self.prompt_tokens + total), np.int64)
        if self._positions is not None:
            positions = self.prompt_tokens + np.arange(self.length, total, dtype=np.int64)
            feeds["position_ids"] = np.broadcast_to(positions, (*self._positions, count)).copy()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("logits", "cpu", 0, self._logits_dtype, logits.shape, logits.ctypes.data)
        for index in self._replaced:
            binding.bind_ortvalue_input(self._past[index], self._values[index])
            binding.bind_output(self._present[index], "cpu")
        if self._rewinder is not None:
            self._rewinder.before_step(self.length, total)
        self.session.run_with_iobinding(binding)
        if self._replaced:
            # Outputs are returned in the order in which they were first bound: shared caches, logits, other caches.
            outputs = binding.get_outputs()[-len(self._replaced) :]
            for index, value in zip(self._replaced, outputs, strict=True):
                self._values[index] = value
        self.length = total
        return logits.reshape(rows, self.vocabulary)


_NO_REWIND = "the model has recurrent states, such as {!r}, which cannot be rewound; use reset"


def is_state(name: str, shape: Sequence[Any]) -> bool:
    """Return True if an input is a recurrent state: a cache of a fixed size that holds no keys or values of tokens."""
    kind = name.rpartition(".")[2]
    is_cache = name.startswith((_PAST, _STATE_PAST, _PRESENT))
    return is_cache and "key" not in kind and "value" not in kind and all(isinstance(one, int) for one in shape[1:])


def _present_name(past: str) -> str:
    return _PRESENT + past.removeprefix(_PAST).removeprefix(_STATE_PAST)


def _sized(shape: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Return a cache's shape for one sequence of `tokens` tokens."""
    return (1, *(tokens if size < 0 else size for size in shape))


def _token_ids(ids: Any) -> np.ndarray:
    """Return token ids as int64 [1, tokens]. Raises ArgumentTypeError for anything else, such as a text."""
    found = np.asarray(ids)
    if found.size and found.dtype.kind not in "iu":
        what = "a text" if isinstance(ids, str) or found.dtype.kind == "U" else f"of type {found.dtype}"
        raise ArgumentTypeError(
            f"prompt is {what}, expected token ids; encode texts first: "
            "ortolan.models.tokenizer.load_tokenizer('tokenizer.json').encode(text)"
        )
    return np.ascontiguousarray(found, np.int64).reshape(1, -1)


def _stop_ids(stop: Any) -> Collection[int]:
    """Return the token ids in `stop`. Raises ArgumentTypeError for anything else, such as a text."""
    ids = [stop] if isinstance(stop, Integral) else stop
    if not isinstance(ids, Iterable) or not all(isinstance(token, Integral) for token in ids):
        raise ArgumentTypeError(
            f"stop is {stop!r}, expected token ids; use the tokenizer's: "
            "ortolan.models.tokenizer.load_tokenizer('tokenizer.json').stop"
        )
    return frozenset(ids)


def _fixed_tokens(value: Any) -> int:
    size = value.shape[2] if len(value.shape) > 2 else None
    return size if isinstance(size, int) else -1


def _dimension(value: Any, axis: int, default: int | None = None) -> int:
    size = value.shape[axis] if len(value.shape) > axis else None
    if isinstance(size, str) and default is not None:
        return default
    if not isinstance(size, int):
        raise OrtolanError(
            f"{value.name!r} has shape {value.shape}, expected a fixed size at axis {axis}; export the model with it"
        )
    return size


def _dtype(value: Any, types: Mapping[str, type[np.generic]] = _TYPES) -> type[np.generic]:
    if value.type not in types:
        raise OrtolanError(f"{value.name!r} has type {value.type}, expected one of {', '.join(types)}")
    return types[value.type]


def shares_cache(path: str | os.PathLike[str]) -> bool:
    """Return True if past and present of a model file's cache may be one buffer.

    GroupQueryAttention writes in place, and NoMADAttention does if it has the lengths of the sequences as an input.
    """
    import onnx

    graph = onnx.load(os.fspath(path), load_external_data=False).graph
    empty = {tensor.name for tensor in graph.initializer if list(tensor.dims) == [0]}
    caches = {value.name for value in graph.output if value.name.startswith(_PRESENT) and not _is_state_output(value)}
    kept = [node for node in graph.node if caches.intersection(node.output[1:])]
    return bool(kept) and all(
        node.op_type == "GroupQueryAttention"
        or (node.op_type == "NoMADAttention" and {*node.input[_LENGTHS : _LENGTHS + 1]} - {"", *empty} != set())
        for node in kept
    )


def _is_state_output(value: Any) -> bool:
    sizes = value.type.tensor_type.shape.dim
    return is_state(value.name, [size.dim_value if size.HasField("dim_value") else None for size in sizes])


def read_head_size(model: ir.Model | str | os.PathLike[str]) -> int | None:
    """Return the head size of a model's cache, if GroupQueryAttention has it; else None.

    The inputs of models from newer builders of ONNX Runtime GenAI leave it open.
    """
    from ortolan.graph_passes.find.dimensions import head_sizes

    past = [value for value in _graph(model).inputs if (value.name or "").startswith(_PAST)]
    return next(iter(head_sizes(past[:1]).values()), None)


def _graph(model: ir.Model | str | os.PathLike[str]) -> ir.Graph:
    import onnx_ir as ir

    return model.graph if isinstance(model, ir.Model) else ir.load(model).graph


def read_context(model: ir.Model | str | os.PathLike[str]) -> int | None:
    """Return the number of positions of a model: the rows of its rotary or learned position tables.

    None if there is no such table. A graph that computes cosines and sines itself has no limit.
    """
    from ortolan.graph_passes.find.positions import count_positions

    return count_positions(_graph(model))


def generate(
    session: ort.InferenceSession | Decoder,
    ids: Sequence[int],
    max_new_tokens: int = 200,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | Collection[int] = (),
) -> list[int]:
    """Generate tokens after `ids`, greedily by default, until a token of `stop` or `max_new_tokens`.

    Args:
        session: A session, as for `Decoder`, or a Decoder, which is continued. Its cache then holds `ids` and the new
            tokens except the last one.
        ids: Token ids, at least one.
        max_new_tokens: The largest number of new tokens.
        temperature: Divides the logits; 0: greedy.
        top_k: Draw among this number of most likely tokens; 0: all.
        top_p: Draw among the smallest set of tokens whose probabilities sum to at least this, after top_k.
        seed: Seed of the random generator. Equal seeds give equal tokens on every machine.
        stop: The token or tokens that end the text, such as a tokenizer's `stop`.

    Returns:
        The new tokens, without the one that ended the text.

    Raises:
        ArgumentTypeError: `ids` or `stop` are not token ids, or `max_new_tokens` is not an integer.
        ArgumentError: A number is out of range.
        OrtolanError: The session is not a decoder with a cache.
    """
    if not isinstance(max_new_tokens, Integral):
        raise wrong_type("max_new_tokens", max_new_tokens, "an integer, 0 or more")
    if max_new_tokens < 0:
        raise ArgumentError(f"max_new_tokens is {max_new_tokens}, expected an integer, 0 or more")
    tokens = generate_tokens(session, ids, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop)
    return list(islice(tokens, max_new_tokens))


def generate_tokens(
    session: ort.InferenceSession | Decoder,
    ids: Sequence[int],
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | Collection[int] = (),
) -> Iterator[int]:
    """Like `generate`, but yield tokens one by one and without a limit. Arguments are those of `generate`."""
    from .engine.requests import SamplingOptions
    from .engine.rows import RowState
    from .engine.sampling import NativeSampler

    options = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p)
    ends = _stop_ids(stop)
    decoder = session if isinstance(session, Decoder) else Decoder(session)

    def tokens() -> Iterator[int]:
        sampler, row = NativeSampler(), RowState(options, (), [], 0, seed)
        step = ids
        while (token := _draw(sampler, row, decoder.step(step))) not in ends:
            row.answer.append(token)
            yield token
            step = [token]

    return tokens()


def _draw(sampler: TokenSampler, row: RowState, logits: np.ndarray) -> int:
    return sampler.sample(logits[-1:].astype(np.float32, copy=False), [row])[0].token

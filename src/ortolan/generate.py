"""Runs decoders that keep a key/value cache: token by token, greedily or by sampling, without copying the cache."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from ortolan.graph_passes.names import ORTOLAN_DOMAIN, PROMPT_KEY

from .errors import OrtolanError

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime as ort

_LENGTHS = 7  # the input of NoMADAttention
_PAST, _PRESENT = "past_key_values.", "present."
_TYPES: dict[str, type[np.generic]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
# Compressed caches: those of Ortolan's pass compress_cache, and of GroupQueryAttention.
_CACHE_TYPES = _TYPES | {"tensor(uint8)": np.uint8, "tensor(int8)": np.int8}


class Decoder:
    """One sequence being decoded by an ONNX Runtime session, and its cache.

    The cache never passes through numpy. It is kept in one of two ways:
    - growing (any decoder): each step's present.N.* outputs are the next step's past_key_values.N.* inputs, as they
      are; but inside the graph, the node that appends (Concat, or GroupQueryAttention) copies all of it at each step,
      and each step binds every input and output anew.
    - shared (graphs of GroupQueryAttention, and of NoMADAttention in its place): one buffer, which is both past and
      present, is written in place.
    What has a fixed number of tokens, as past_key_values.N.exact_key of NoMADAttention, keeps that in both.

    length: the number of tokens in the cache. session: the one given. prompt_tokens: of a prompt that is part of the
    model, in front of those of the cache. only_last_logits: whether a call gives those of its last token alone.
    """

    def __init__(
        self, session: ort.InferenceSession, cache_length: int | None = None, head_size: int | None = None
    ) -> None:
        """session: a decoder with inputs and outputs as Optimum and ONNX Runtime GenAI name them: input_ids int64
            [batch, sequence], past_key_values.N.key and .value [batch, heads, past_sequence, head_dim] (others of such
            names and shapes are carried on alike), optionally attention_mask int64 [batch, past_sequence + sequence]
            and position_ids int64 [batch, sequence]; logits [batch, sequence, vocabulary], present.N.key and .value.
        cache_length: None: a growing cache. A number: a shared one for that many tokens; only for graphs that can do
            that (see shares_cache).
        head_size: of the cache, where the session's inputs leave it open (see read_head_size).

        Raises OrtolanError when the session has other inputs, or no cache of known size.
        """
        if not hasattr(session, "run_with_iobinding"):
            raise OrtolanError(
                f"session is a {type(session).__name__}, expected an onnxruntime.InferenceSession; make one with "
                "ortolan.create_session(path)"
            )
        self.session = session
        inputs = {value.name: value for value in session.get_inputs()}
        self._outputs = {value.name: value for value in session.get_outputs()}
        self._past = [name for name in inputs if name.startswith(_PAST)]
        self._present = [name.replace(_PAST, _PRESENT, 1) for name in self._past]
        unknown = inputs.keys() - {"input_ids", "attention_mask", "position_ids", *self._past}
        missing = {"logits", *self._present} - self._outputs.keys()
        if unknown or missing or not self._past or "input_ids" not in inputs:
            raise OrtolanError(
                f"the model is no decoder with a cache: inputs {', '.join(inputs)}, outputs "
                f"{', '.join(self._outputs)}; expected input_ids, attention_mask, position_ids, "
                f"{_PAST}N.key and .value, and the outputs logits, {_PRESENT}N.key and .value"
            )
        self._has_mask, self._has_positions = "attention_mask" in inputs, "position_ids" in inputs
        # Heads, tokens, head size and type of each one: those of keys and values may differ.
        self._caches = [
            (
                _dimension(inputs[name], 1),
                _fixed_tokens(inputs[name], cache_length or 0),
                _dimension(inputs[name], 3, head_size),
                _dtype(inputs[name], _CACHE_TYPES),
            )
            for name in self._past
        ]
        self.vocabulary = _dimension(self._outputs["logits"], 2)
        self._logits_dtype = _dtype(self._outputs["logits"])
        self.only_last_logits = self._outputs["logits"].shape[1] == 1
        self.cache_length = cache_length
        self.length = 0
        # Of a prompt that is part of the model: masks and positions count its tokens, the cache does not hold them.
        self.prompt_tokens = int(session.get_modelmeta().custom_metadata_map.get(PROMPT_KEY, 0))
        self.reset()

    def reset(self) -> None:
        """Empties the cache."""
        self._hold([np.zeros((1, heads, tokens, size), dtype) for heads, tokens, size, dtype in self._caches], 0)

    def fill(self, cache: Mapping[str, np.ndarray], length: int) -> None:
        """Takes a cache of `length` tokens, such as cache() has given, in place of what is there. The arrays become the
        cache itself: a shared one is written in them.

        Raises OrtolanError when names, shapes or types are others than those of cache().
        """
        arrays = []
        for name, (heads, tokens, size, dtype) in zip(self._past, self._caches, strict=True):
            shape, array = (1, heads, tokens or length, size), cache.get(name)
            if array is None or array.shape != shape or array.dtype != dtype:
                found = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
                raise OrtolanError(f"{name!r} is {found}, expected {np.dtype(dtype)} {list(shape)}")
            arrays.append(np.ascontiguousarray(array))
        if self.cache_length is not None and length > self.cache_length:
            raise OrtolanError(f"the cache is for {self.cache_length} tokens, {length} do not fit")
        self._hold(arrays, length)

    def rewind(self, length: int) -> None:
        """Forgets the tokens behind the first `length`, of a shared cache.

        Raises OrtolanError for another cache, one that keeps its latest tokens apart (exact keys), and for a length
        that is more than there are tokens.
        """
        if self.cache_length is None or any(tokens != self.cache_length for _, tokens, _, _ in self._caches):
            raise OrtolanError(
                "only a shared cache, without exact keys of its latest tokens, can be rewound; use reset"
            )
        if not 0 <= length <= self.length:
            raise OrtolanError(f"the cache holds {self.length} tokens, it cannot be rewound to {length}")
        self.length = length

    def _hold(self, arrays: Sequence[np.ndarray], length: int) -> None:
        import onnxruntime as ort

        self.length = length
        self._binding: Any = self.session.io_binding()
        self._values: list[Any] = [ort.OrtValue.ortvalue_from_numpy(array) for array in arrays]
        if self.cache_length is not None:
            for past, present, value in zip(self._past, self._present, self._values, strict=True):
                self._binding.bind_ortvalue_input(past, value)
                self._binding.bind_ortvalue_output(present, value)

    def cache(self) -> dict[str, np.ndarray]:
        """Copies of what the cache holds, by the names of the inputs; of a shared one with the room behind."""
        return {name: value.numpy().copy() for name, value in zip(self._past, self._values, strict=True)}

    def step(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Appends tokens to the sequence. Returns their logits [tokens, vocabulary], which belong to the caller; of a
        model that keeps those of the last token alone (keep_last_logits), [1, vocabulary].

        Raises OrtolanError when there are no tokens, tokens outside the vocabulary, or more than fit into a shared
        cache.
        """
        tokens = _token_ids(ids)
        count = tokens.shape[1]
        total = self.length + count
        if count == 0:
            raise OrtolanError("no tokens to decode; give at least one")
        if outside := [int(token) for token in tokens[0] if not 0 <= token < self.vocabulary]:
            raise OrtolanError(
                f"token {outside[0]}, the model knows 0 to {self.vocabulary - 1}; use the tokenizer of this model"
            )
        if self.cache_length is not None and total > self.cache_length:
            raise OrtolanError(
                f"the cache is for {self.cache_length} tokens; {self.length} are in it, and {count} more do not fit: "
                "give a larger cache_length"
            )
        binding = self._binding
        # The binding refers to these arrays' memory; they live until the run is over.
        rows = 1 if self.only_last_logits else count
        logits: np.ndarray = np.empty((1, rows, self.vocabulary), self._logits_dtype)
        feeds = {"input_ids": tokens}
        if self._has_mask:
            feeds["attention_mask"] = np.ones((1, self.prompt_tokens + total), np.int64)
        if self._has_positions:
            feeds["position_ids"] = self.prompt_tokens + np.arange(self.length, total, dtype=np.int64)[None]
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("logits", "cpu", 0, self._logits_dtype, logits.shape, logits.ctypes.data)
        if self.cache_length is None:
            for past, present, value in zip(self._past, self._present, self._values, strict=True):
                binding.bind_ortvalue_input(past, value)
                binding.bind_output(present, "cpu")
        self.session.run_with_iobinding(binding)
        if self.cache_length is None:
            # In the order in which they were bound first.
            self._values = binding.get_outputs()[1:]
        self.length = total
        return logits.reshape(rows, self.vocabulary)


def _token_ids(ids: Any) -> np.ndarray:
    """Return token ids as int64 [1, tokens]. Raises OrtolanError for anything else, such as a text."""
    found = np.asarray(ids)
    if found.size and found.dtype.kind not in "iu":
        what = "a text" if isinstance(ids, str) or found.dtype.kind == "U" else f"of type {found.dtype}"
        raise OrtolanError(
            f"the prompt is {what}, expected token ids; encode texts first: "
            "ortolan.models.tokenizer.load_tokenizer('tokenizer.json').encode(text)"
        )
    return np.ascontiguousarray(found, np.int64).reshape(1, -1)


def _stop_ids(stop: Any) -> Collection[int]:
    """Return the token ids that end a text. Raises OrtolanError for anything but ids, such as a text."""
    ids = [stop] if isinstance(stop, Integral) else stop
    if not isinstance(ids, Iterable) or not all(isinstance(token, Integral) for token in ids):
        raise OrtolanError(
            f"stop is {stop!r}, expected token ids; use the tokenizer's: "
            "ortolan.models.tokenizer.load_tokenizer('tokenizer.json').stop"
        )
    return frozenset(ids)


def _fixed_tokens(value: Any, otherwise: int) -> int:
    size = value.shape[2] if len(value.shape) > 2 else None
    return size if isinstance(size, int) else otherwise


def _dimension(value: Any, axis: int, default: int | None = None) -> int:
    size = value.shape[axis] if len(value.shape) > axis else None
    if isinstance(size, str) and default is not None:
        return default
    if not isinstance(size, int):
        raise OrtolanError(
            f"{value.name!r} has shape {value.shape}, expected a number at axis {axis}; export the model with it fixed"
        )
    return size


def _dtype(value: Any, types: Mapping[str, type[np.generic]] = _TYPES) -> type[np.generic]:
    if value.type not in types:
        raise OrtolanError(f"{value.name!r} is a {value.type}, expected one of {', '.join(types)}")
    return types[value.type]


def shares_cache(path: str | os.PathLike[str]) -> bool:
    """Whether a model file's cache may be shared between past and present: GroupQueryAttention writes in place, and so
    does NoMADAttention that is told the lengths of the sequences."""
    import onnx

    graph = onnx.load(os.fspath(path), load_external_data=False).graph
    empty = {tensor.name for tensor in graph.initializer if list(tensor.dims) == [0]}
    kept = [node for node in graph.node if node.output[1:] and _is_cache(node.output[1:], graph)]
    return bool(kept) and all(
        node.op_type == "GroupQueryAttention"
        or (node.op_type == "NoMADAttention" and {*node.input[_LENGTHS : _LENGTHS + 1]} - {"", *empty} != set())
        for node in kept
    )


def _is_cache(names: Sequence[str], graph: Any) -> bool:
    return any(value.name in names and value.name.startswith(_PRESENT) for value in graph.output)


def read_head_size(model: ir.Model | str | os.PathLike[str]) -> int | None:
    """The size of a head in a model's (or its file's) cache, if GroupQueryAttention keeps it; else None.

    The inputs of models from ONNX Runtime GenAI's newer builders leave it open.
    """
    from ortolan.graph_passes.find.dimensions import head_size

    past = [value for value in _graph(model).inputs if (value.name or "").startswith(_PAST)]
    return head_size(past[0]) if past else None


def _graph(model: ir.Model | str | os.PathLike[str]) -> ir.Graph:
    import onnx_ir as ir

    return model.graph if isinstance(model, ir.Model) else ir.load(model).graph


# The operators that read a table of positions, and which input that is: cos of a rotary embedding.
_POSITION_TABLES = {
    ("com.microsoft", "GroupQueryAttention"): 7,
    ("com.microsoft", "RotaryEmbedding"): 2,
    ("", "RotaryEmbedding"): 1,
    (ORTOLAN_DOMAIN, "NoMADAttention"): 8,
}


def read_context(model: ir.Model | str | os.PathLike[str]) -> int | None:
    """For how many tokens a model (or its file) has positions: the rows of its tables of rotary or learned embeddings;
    None if it has no such tables (a graph that computes cos and sin itself goes on for ever)."""
    import onnx_ir as ir

    rows: list[int] = []
    for node in _graph(model):
        index = _POSITION_TABLES.get((node.domain, node.op_type))
        if (node.domain, node.op_type) == ("", "Gather") and _is_position_ids(node.inputs[1]):
            index = 0
        table = node.inputs[index] if index is not None and index < len(node.inputs) else None
        tensor = None if table is None else ir.convenience.get_const_tensor(table)
        # Of three axes: cos of the tokens at hand, which is no table.
        if tensor is not None and len(tensor.shape) == 2:
            rows.append(int(tensor.shape.numpy()[0]))
    return min(rows, default=None)


def _is_position_ids(value: ir.Value | None) -> bool:
    while value is not None and (node := value.producer()) is not None and node.op_type in ("Cast", "Reshape"):
        value = node.inputs[0]
    return value is not None and value.name == "position_ids"


def sample(
    logits: np.ndarray, rng: np.random.Generator, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> int:
    """Draws a token from softmax(logits / temperature), of the likeliest ones only.

    logits: [vocabulary]. temperature: 0 (below 1e-6) takes the likeliest token. top_k: among so many (0: all). top_p:
    among the fewest whose probabilities sum to at least this, after top_k.
    """
    if temperature < 1e-6:  # less makes numbers too large
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    # Stable: equal logits keep the order of their ids, on every machine.
    order = np.argsort(-scaled, kind="stable")[: top_k or None]
    probabilities = np.exp(scaled[order] - scaled[order[0]])
    probabilities /= probabilities.sum()
    kept = int(np.searchsorted(np.cumsum(probabilities), top_p)) + 1
    probabilities = probabilities[:kept] / probabilities[:kept].sum()
    return int(rng.choice(order[:kept], p=probabilities))


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
    """Continues `ids`, greedily unless a temperature is given, until a token of `stop` comes or enough are made.

    session: as Decoder takes it; or a Decoder, which is continued: its cache holds `ids` and the new tokens but the
        last afterwards.
    ids: at least one token. temperature, top_k, top_p: see `sample`. seed: the same one gives the same tokens.
    stop: the token, or tokens, that end the text, such as a tokenizer's `stop`.

    Returns the new tokens, without the one that ended the text. Raises OrtolanError as Decoder does, and for a
    temperature below 0, top_k below 0, top_p outside of (0, 1], max_new_tokens below 0, or a stop that is not token
    ids.
    """
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 0:
        raise OrtolanError(f"max_new_tokens is {max_new_tokens!r}, expected an integer, 0 or more")
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
    """The new tokens of `generate`, one by one and without a limit: each is computed when it is asked for."""
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise OrtolanError(
            f"temperature {temperature}, top_k {top_k}, top_p {top_p}; expected temperature >= 0, top_k >= 0, "
            "0 < top_p <= 1"
        )
    ends = _stop_ids(stop)
    decoder = session if isinstance(session, Decoder) else Decoder(session)

    def tokens() -> Iterator[int]:
        rng = np.random.default_rng(seed)
        step = ids
        while (token := sample(decoder.step(step)[-1], rng, temperature, top_k, top_p)) not in ends:
            yield token
            step = [token]

    return tokens()

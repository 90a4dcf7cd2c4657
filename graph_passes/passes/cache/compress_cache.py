"""Replace attention with a cache by NoMADAttention, and compress the cache.

Keys become 4-bit codes of product quantization, with codebooks for each layer and head. Values become int8 with a scale
for each token. The cache remains a set of graph inputs and outputs with the same names, but its element type is uint8
and its last dimension the bytes per token and head (weights/cache_format.py). Keys and values have different widths,
except with equal_rows.

With a window or sinks, keys of the most recent and of the first tokens are also kept as floats. Each attention then has
one more input and output, of fixed size: past_key_values.N.exact_key and present.N.exact_key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ortolan.errors import ModelError, NothingToReplaceError, RecipeError
from ortolan.progress import Stage

from ...find.attention import NotAttention
from ...find.cached_attention import CachedAttention, find_cached_attentions
from ...find.dimensions import Dimensions
from ...find.node_checks import integer_attribute, is_op
from ...names import ORTOLAN_DOMAIN, PROMPT_KEY
from ...operators.nodes import (
    UNPACK_ONCE_LIMIT,
    fill_missing,
    in_order,
    input_of,
    new_initializer,
    nodes_of,
    put_function,
)
from ...operators.nomad_attention_function import OP_TYPE, is_given, uses_of
from ...operators.nomad_cache_function import INPUTS, CacheUses, nomad_cache_function
from ...operators.replacement import stored_tensor
from ...options import takes
from ...report.lines import count
from ...report.optimization import CacheReport
from ...weights.cache_format import CacheFormat, CacheUse, ExactKeys
from ...weights.quantizers.codebooks import CENTROIDS
from ..attention.rewrite import ROUNDING, AttentionOptions, AttentionRewrite, Refused
from .codebooks import learn_codebooks

_CODES, _FLOAT, _INT8 = "codes", "float32", "int8"
_MAX_HEAD_DIM = 1024
# Expected ||Y - exact|| / ||Y|| of an attention that reads the cache, for pass verify.
_VALUE_ROUNDING = 0.01
_PROMPT_ROUNDING = 0.004  # with a prompt, short calls round queries and attention weights to bf16
# Expected error if linear layers round their inputs to int8: a tiny difference can change a rounded value by a step.
_ROUNDED_INPUTS = 0.01
_ROUNDING_LAYERS = ("MatMulNBits", "MatMulInteger", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "QLinearMatMul")
_KEY_ROUNDING = {1: 0.1, 2: 0.2, 4: 0.3}


@dataclass(frozen=True)
class CompressCacheOptions(AttentionOptions):
    """Options of pass `compress_cache`."""

    keys: str = field(default=_CODES, metadata=takes("str", choices=(_CODES, _FLOAT)))
    values: str = field(default=_INT8, metadata=takes("str", choices=(_INT8, _FLOAT)))
    # Number of a key's elements that share a 4-bit code; a compressed key has head_dim / d_sub / 2 bytes.
    d_sub: int = field(default=1, metadata=takes("int", choices=(1, 2, 4)))
    # window, sinks: numbers of most recent and of first tokens whose keys are also kept as floats.
    window: int = field(default=0, metadata=takes("int", low=0))
    sinks: int = field(default=0, metadata=takes("int", low=0))
    # Make key caches as wide as value caches, for hosts that give all caches one shape (onnxruntime-genai).
    equal_rows: bool = field(default=False, metadata=takes("bool"))
    max_tokens: int = field(
        default=8192, metadata=takes("int", low=1)
    )  # limit of the tokens that codebooks are learned from

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys == _FLOAT and self.values == _INT8:
            raise RecipeError(
                'keys = "float32" needs values = "float32"; the operator has no cache with float keys and int8 values'
            )
        if self.equal_rows and _FLOAT in (self.keys, self.values):
            raise RecipeError(
                f'equal_rows = true needs keys = "codes" and values = "int8"; keys are "{self.keys}" and values '
                f'"{self.values}"'
            )
        if self.keys == _FLOAT and (self.window or self.sinks):
            raise RecipeError(
                f'window = {self.window} and sinks = {self.sinks} need keys = "codes"; float32 keys are exact'
            )


class CompressCachePass(AttentionRewrite[CachedAttention]):
    """Replace attention with a cache."""

    pass_name = "compress_cache"
    stage = Stage.COMPRESS_CACHE
    refusal = "cache not compressed"
    options_type: ClassVar[type[AttentionOptions]] = CompressCacheOptions
    options: CompressCacheOptions
    _equal_width: int | None = None

    def find(self, model: ir.Model) -> Sequence[CachedAttention | NotAttention]:
        """Return the attentions with a cache, and record how they use their caches."""
        found = [match for graph in model.graphs() for match in find_cached_attentions(graph)]
        matches = [match for match in found if isinstance(match, CachedAttention)]
        for match in matches:
            for past, present in () if _is_in_branch(match) else _caches(match):
                self._set_use(past, present, match.node.name or "")
        if matches:  # pass fuse_attention handles attention without its own cache, such as cross-attention
            found = [match for match in found if isinstance(match, CachedAttention) or match.cached]
        return found

    def why_not(self, match: CachedAttention) -> str | None:
        """Explain why this attention cannot be replaced; None if it can."""
        compressed = (
            self.options.keys == _CODES or self.options.values == _INT8 or self.context.caches.prompt_ids is not None
        )
        if compressed and (match.head_dim % CENTROIDS or match.head_dim > _MAX_HEAD_DIM):
            return f"its head size is {match.head_dim}, expected a multiple of 16 up to {_MAX_HEAD_DIM}"
        if match.window and self.context.caches.prompt_ids is not None:
            return f"its window of {match.window} tokens can hide a part of the prompt"
        if compressed and _is_in_branch(match):
            return "it is in a branch of an If, and the other branch has float caches"
        return None

    def announce(self, chosen: Sequence[CachedAttention], refused: Refused) -> None:
        """Note what happens to the caches.

        Raises:
            ModelError: a prompt is given, and an attention is not replaced.
            NothingToReplaceError: the recipe changes nothing.
        """
        context = self.context
        context.caches.taken |= {match.past_key.name or "" for match in chosen}
        rows = [max(self._key_bytes(match), self._value_bytes(match)) for match in chosen]
        self._equal_width = max(rows, default=0) if self.options.equal_rows else None
        if chosen:
            self._announce_caches(chosen, refused)
        elif not refused:
            context.note("no attention with a cache was found")
        self.note_refused(refused)
        if context.caches.prompt is not None and refused:
            reason, names = next(iter(refused.items()))
            raise ModelError(
                f"a prompt needs all attentions to be replaced, but {names[0]!r} is not: {reason}; give no prompt, or "
                "select all attentions"
            )
        if not chosen and not context.plan.replaces:
            raise NothingToReplaceError(_why_nothing(context.source.name, refused))
        if chosen and context.dry_run and context.evidence.made_up and self.options.keys == _CODES:
            context.note("pass 'compress_cache' needs calibration inputs (calibration=…): without them, a run fails")

    def _announce_caches(self, chosen: Sequence[CachedAttention], refused: Refused) -> None:
        options, verb, note = self.options, self.verb, self.context.note
        bytes_before = sum(8 * match.head_dim * match.kv_heads for match in chosen)
        bytes_after = sum(sum(self._widths(match)) * match.kv_heads for match in chosen)
        keys = f"4-bit codes of {count(options.d_sub, 'element')}" if options.keys == _CODES else options.keys
        self.context.report.cache = CacheReport(
            len(chosen),
            keys,
            options.values,
            bytes_before=bytes_before,
            bytes_after=bytes_after,
        )
        fraction = bytes_after / bytes_before
        note(
            f"{count(len(chosen), 'attention')} with a cache {verb} one NoMADAttention each: keys {keys}, values "
            f"{options.values}" + ("" if fraction == 1 else f"; the cache takes {fraction:.3g} of the bytes")
        )
        if self._equal_width is not None:
            note(
                f"caches of keys and values {verb} equally wide, {self._equal_width} bytes per token and head; keys do "
                "not use all bytes"
            )
            if refused:
                note("some caches stay float32: hosts that give all caches one shape cannot run the model")
        if options.window or options.sinks:
            note(
                f"keys of the first {options.sinks} and the last {options.window} tokens {verb} exact (float32): each "
                "attention has an input and an output for them, which a generate loop passes on like the cache"
            )

    def _key_bytes(self, match: CachedAttention) -> int:
        return match.head_dim // self.options.d_sub // 2 if self.options.keys == _CODES else 4 * match.head_dim

    def _value_bytes(self, match: CachedAttention) -> int:
        return CacheFormat(match.head_dim).row_bytes if self.options.values == _INT8 else 4 * match.head_dim

    def _widths(self, match: CachedAttention) -> tuple[int, int]:
        """Return the bytes per token and head in the caches of keys and of values."""
        own = self._key_bytes(match), self._value_bytes(match)
        return own if self._equal_width is None else (self._equal_width, self._equal_width)

    def has_function(self, model: ir.Model, chosen: Sequence[CachedAttention]) -> bool:
        """Return True if one ONNX function can serve these nodes and the operator's existing nodes."""
        return _with_others(_find_uses(model, chosen, self.options, 0), nodes_of(model, OP_TYPE)) is not None

    # ---- The graph ---------------------------------------------------------------------------------------------------

    def prepare(self, model: ir.Model, chosen: Sequence[CachedAttention]) -> None:
        """Learn codebooks, and find the inputs that the ONNX function needs."""
        options = self.options
        # Codebooks and spreads, by the name of the key cache's output.
        self._books: dict[str, np.ndarray] = {}
        self._spreads: dict[str, np.ndarray] = {}
        if options.keys == _CODES:
            self._books, self._spreads = learn_codebooks(model, self.context, chosen, options.d_sub, options.max_tokens)
        prompt_tokens = 0 if self.context.caches.prompt is None else self.context.caches.prompt.tokens
        self._exact_rounding, self._cache_rounding = _rounding(model, options, prompt_tokens)
        self._uses = _find_uses(model, chosen, options, prompt_tokens)

    def outputs_of(self, match: CachedAttention) -> list[ir.Value]:
        """Return the attention's output and its two cache outputs."""
        return [match.output, match.present_key, match.present_value]

    def make_node(self, model: ir.Model, match: CachedAttention, mask: ir.Value | None, made: list[ir.Node]) -> ir.Node:
        """Return the NoMADAttention node, and set the formats of its caches."""
        graph, prompt = match.node.graph, self.context.caches.prompt
        assert isinstance(graph, ir.Graph)
        book = self._books.get(match.present_key.name or "")
        given = {
            "query": match.query,
            "mask": mask,
            "key": match.key,
            "value": match.value,
            "past_key": match.past_key,
            "past_value": match.past_value,
            "codebooks": self._constant(model, graph, f"{match.node.name}/codebooks", book),
            "lengths": match.lengths,
            "cos": match.cos,
            "sin": match.sin,
            "past_exact_key": self._past_exact_key(model, match),
            **self._prompt_inputs(model, graph, match),
        }
        exact = given["past_exact_key"] is not None
        attributes = self.attributes(match) | {"rotary_interleaved": int(match.interleaved)}
        if exact:
            attributes |= {"window": self.options.window, "sinks": self.options.sinks}
        if prompt is not None:
            attributes |= {"prompt_tokens": prompt.tokens, "prompt_head_dim": match.head_dim}
        node = ir.node(
            OP_TYPE,
            in_order(INPUTS, given),
            attributes,
            domain=ORTOLAN_DOMAIN,
            name=match.node.name,
            num_outputs=4 if exact else 3,
        )
        keys = None if book is None else CacheFormat(match.head_dim, book, self._equal_width)
        values = CacheFormat(match.head_dim, equal_width=self._equal_width) if self.options.values == _INT8 else None
        for (past, present), cache_format in zip(_caches(match), (keys, values), strict=True):
            self._set_format(past, present, cache_format, match.head_dim)
            if not _is_in_branch(match):
                self._set_use(past, present, node.name or "", cache_format, given["codebooks"])
        return node

    def placed(self, model: ir.Model, match: CachedAttention, node: ir.Node) -> None:
        """Add the output of exact keys, record expected errors, and lengthen the past by the prompt."""
        if len(node.outputs) == 4:
            self._add_present_exact_key(model, match, node)
        node.outputs[0].dtype = ir.DataType.FLOAT
        self.context.layers.rounding[node.outputs[0]] = self._exact_rounding
        self.context.caches.rounding[node.outputs[0]] = self._cache_rounding
        if self.context.caches.prompt is not None:
            for past in (match.past_key, match.past_value):
                _lengthen(past, self.context.caches.prompt.tokens)

    def _prompt_inputs(self, model: ir.Model, graph: ir.Graph, match: CachedAttention) -> dict[str, ir.Value]:
        if self.context.caches.prompt is None:
            return {}
        packed = self.context.caches.prompt.caches[match.past_key.name or ""].pack()
        inputs = {}
        for name, tensor in packed.items():
            wanted = self.context.new_name(model, f"{match.node.name}/{name}")
            inputs[name] = new_initializer(graph, stored_tensor(self.context.spill, wanted, tensor))
        self.context.layers.packed_weights += _prompt_weights([match], self.context.caches.prompt.tokens)
        return inputs

    def _past_exact_key(self, model: ir.Model, match: CachedAttention) -> ir.Value | None:
        keys = ExactKeys(match.past_key.name or "", self.options.window, self.options.sinks)
        if not keys.slots:
            return None
        value = self._exact_key(model, match, match.past_key, keys)
        model.graph.inputs.append(value)
        self.context.caches.exact_keys[value.name or ""] = keys
        return value

    def _add_present_exact_key(self, model: ir.Model, match: CachedAttention, node: ir.Node) -> None:
        keys = ExactKeys(match.past_key.name or "", self.options.window, self.options.sinks)
        like = self._exact_key(model, match, match.present_key, keys)
        value = node.outputs[3]
        value.name, value.type, value.shape = like.name, like.type, like.shape
        model.graph.outputs.append(value)

    def _exact_key(self, model: ir.Model, match: CachedAttention, cache: ir.Value, keys: ExactKeys) -> ir.Value:
        """Return a value float32 [batch, kv_heads, slots, head_dim], named after the cache of keys."""
        name = cache.name or ""
        wanted = name.removesuffix("key") + "exact_key" if name.endswith("key") else f"{name}_exact_key"
        batch = None if cache.shape is None else cache.shape[0]
        return ir.Value(
            name=self.context.new_name(model, wanted),
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape([batch, match.kv_heads, keys.slots, match.head_dim]),
        )

    def _set_format(self, past: ir.Value, present: ir.Value, cache_format: CacheFormat | None, head_dim: int) -> None:
        """Set the type and shape of a cache's input and output; None means float32.

        The last dimension is always set, because the node from which ONNX Runtime could infer it is gone.
        """
        for value in (past, present):
            if value.shape is not None:
                last = head_dim if cache_format is None else cache_format.width
                value.shape = ir.Shape([*value.shape[:3], last])
            if cache_format is not None:
                value.dtype = ir.DataType.UINT8
        if cache_format is not None:
            self.context.caches.formats[past.name or ""] = cache_format
            self.context.caches.outputs.add(present.name or "")

    def _set_use(
        self,
        past: ir.Value,
        present: ir.Value,
        node: str,
        cache_format: CacheFormat | None = None,
        codebooks: ir.Value | None = None,
    ) -> None:
        spread = self._spreads.get(present.name or "") if cache_format is not None else None
        books = "" if codebooks is None else codebooks.name or ""
        use = CacheUse(past.name or "", present.name or "", node, cache_format, books, spread)
        self.context.caches.uses[use.past] = use

    def _constant(self, model: ir.Model, graph: ir.Graph, name: str, array: np.ndarray | None) -> ir.Value | None:
        if array is None:
            return None
        return new_initializer(graph, ir.Tensor(array, name=self.context.new_name(model, name)))

    def finish(self, model: ir.Model, nodes: Sequence[ir.Node]) -> None:
        """Fill in missing inputs, and add the operator's ONNX function to a portable model."""
        context = self.context
        all_nodes = nodes_of(model, OP_TYPE)
        others = [node for node in all_nodes if node not in set(nodes)]
        uses = _with_others(self._uses, others)
        nothing = np.zeros(1, np.float32)
        neutral = dict.fromkeys(("mask", "key", "value", "cos", "sin", "past_exact_key"), nothing)
        neutral |= {"codebooks": np.zeros(0, np.float32), "lengths": np.zeros(0, np.int32)}
        # An ONNX function cannot test whether an input is present, so all are given.
        needed = INPUTS[: INPUTS.index("sin" if uses.rotary else "lengths") + 1] if uses and context.portable else ()
        fill_missing(nodes, INPUTS, needed, lambda _: neutral, lambda name: context.new_name(model, name))
        if context.caches.prompt is not None:
            _rename_lengths(model)
            model.metadata_props[PROMPT_KEY] = str(context.caches.prompt.tokens)
        if not context.portable:
            return
        if uses is None:
            context.portable = context.report.portable = False
            context.note(
                f"the model needs Ortolan's library: its {OP_TYPE} nodes have different kinds of inputs, which one "
                "ONNX function cannot serve"
            )
            model.functions.pop(
                (ORTOLAN_DOMAIN, OP_TYPE, ""), None
            )  # remove the function for attention without a cache
            return
        if others:
            none = neutral | {"past_key": nothing, "past_value": nothing}
            fill_missing(others, INPUTS, needed, lambda _: none, lambda name: context.new_name(model, name))
            for node in others:
                node.attributes.setdefault("rotary_interleaved", ir.AttrInt64("rotary_interleaved", 0))
                node.resize_outputs(len(nodes[0].outputs))  # a call of an ONNX function must have all its outputs
                for value in node.outputs[1:]:
                    value.name = context.new_name(model, f"{node.name}/no_cache")
        put_function(model, nomad_cache_function(model.opset_imports[""], uses))


def _with_others(uses: CacheUses | None, others: Sequence[ir.Node]) -> CacheUses | None:
    """Extend the uses by those of existing NoMADAttention nodes; None if one function cannot serve all nodes."""
    if uses is None or not others:
        return uses
    if any(is_given(input_of(node, INPUTS, "past_key")) for node in others):
        return None
    own = uses_of(others)
    special = uses.d_sub or uses.int8_values or uses.packed or uses.rotary or uses.exact_keys or uses.prompt
    if special or uses.lengths or own.packed:
        return None
    names = frozenset(("query", "key", "value"))
    some_by_heads = uses.by_heads | uses.mixed | own.by_heads
    some_by_rows = (names - uses.by_heads) | (names & own.by_rows)
    return replace(
        uses,
        by_heads=some_by_heads - some_by_rows,
        mixed=some_by_heads & some_by_rows,
        uncached=True,
        mask=uses.mask or own.mask,
        grouped=uses.grouped or own.grouped,
        causal=uses.causal or own.causal,
        zero_hidden_rows=uses.zero_hidden_rows or own.zero_hidden_rows,
        softcap=uses.softcap or own.softcap,
        reproducible=uses.reproducible or own.reproducible,
        sinks=uses.sinks or own.sinks,
        window=uses.window or own.window,
    )


def _why_nothing(name: str, refused: Refused) -> str:
    """Return the error text if no cache is compressed and the recipe changes nothing else."""
    if not refused:
        return (
            f"{name} holds no attention with a cache, so no cache can be compressed: leave the cache option out; to "
            "export a decoder with its cache: optimum-cli export onnx --task text-generation-with-past --model "
            "MODEL FOLDER"
        )
    reasons = "; ".join(f"{names[0]}: {reason}" for reason, names in list(refused.items())[:5])
    return f"{name} has no cache that can be compressed: {reasons}"


def _rounding(model: ir.Model, options: CompressCacheOptions, prompt_tokens: int) -> tuple[float, float]:
    """Return the expected error of tokens that do not read the cache, and of tokens that read it."""
    rounds = any(node.op_type in _ROUNDING_LAYERS for node in model.graph.all_nodes())
    exact = _ROUNDED_INPUTS if rounds else ROUNDING[options.precision]
    if prompt_tokens:
        exact = max(exact, _PROMPT_ROUNDING)
    keys = _KEY_ROUNDING[options.d_sub] if options.keys == _CODES else 0.0
    values = _VALUE_ROUNDING if options.values == _INT8 else 0.0
    return exact, max(exact, keys, values)


def _find_uses(
    model: ir.Model, chosen: Sequence[CachedAttention], options: CompressCacheOptions, prompt_tokens: int
) -> CacheUses | None:
    """Return what the ONNX function of these attentions must support; None if one function cannot serve all.

    Call this before the attentions are replaced.
    """
    dims = {graph: Dimensions(graph) for graph in model.graphs()}

    def by_heads(match: CachedAttention) -> frozenset[str]:
        given = {"query": match.query, "key": match.key, "value": match.value}
        assert isinstance(match.node.graph, ir.Graph)
        shape = dims[match.node.graph].shape
        return frozenset(name for name, value in given.items() if len(shape(value) or ()) == 4)

    kinds = {match.key is None for match in chosen}
    if len(kinds) > 1:
        return None
    rotated = sum(match.cos is not None for match in chosen)
    layouts = [by_heads(match) for match in chosen]
    common = frozenset.intersection(*layouts)
    return CacheUses(
        d_sub=options.d_sub if options.keys == _CODES else 0,
        int8_values=options.values == _INT8,
        packed=kinds.pop(),
        by_heads=common,
        mixed=frozenset.union(*layouts) - common,
        mask=any(match.masks for match in chosen),
        grouped=any(match.kv_heads != match.heads for match in chosen),
        causal=any(match.causal for match in chosen),
        zero_hidden_rows=any(match.zero_hidden_rows for match in chosen),
        softcap=any(match.softcap for match in chosen),
        sinks=any(match.sinks for match in chosen),
        window=any(match.window for match in chosen),
        reproducible=options.reproducible is not None,
        lengths=any(match.lengths is not None for match in chosen),
        rotary=rotated > 0,
        unrotated=0 < rotated < len(chosen),
        equal_rows=options.equal_rows,
        exact_keys=options.window + options.sinks > 0,
        prompt=prompt_tokens > 0,
        unpack_prompt_once=_prompt_weights(chosen, prompt_tokens) <= UNPACK_ONCE_LIMIT,
    )


def _prompt_weights(matches: Sequence[CachedAttention], prompt_tokens: int) -> int:
    """Return the number of elements in the keys and values of a prompt."""
    return sum(2 * match.kv_heads * prompt_tokens * match.head_dim for match in matches)


def _caches(match: CachedAttention) -> tuple[tuple[ir.Value, ir.Value], ...]:
    """Return input and output of the keys' cache, and of the values' cache."""
    return (match.past_key, match.present_key), (match.past_value, match.present_value)


def _is_in_branch(match: CachedAttention) -> bool:
    """Return True if the attention is in a subgraph of the graph that has its caches as inputs."""
    return match.node.graph is not match.past_key.graph


def _lengthen(past: ir.Value, tokens: int) -> None:
    """Add the prompt's tokens to each length that the graph reads from a cache."""
    for shape in [use.node for use in past.uses() if is_op(use.node, "Shape")]:
        graph = shape.graph
        assert isinstance(graph, ir.Graph)
        end = shape.attributes["end"].as_int() if "end" in shape.attributes else None
        more = np.array([0, 0, tokens, 0], np.int64)[integer_attribute(shape, "start", 0) : end]
        if not more.any():
            continue
        constant = ir.node("Constant", [], {"value": ir.tensor(more)})
        added = ir.node("Add", [shape.outputs[0], constant.outputs[0]])
        graph.insert_after(shape, [constant, added])
        shape.outputs[0].replace_all_uses_with(added.outputs[0])
        added.replace_input_with(0, shape.outputs[0])


def _rename_lengths(model: ir.Model) -> None:
    """Give the mask's length its own symbolic dimension: with a prompt, the mask is longer than the cache."""
    for value in model.graph.inputs:
        if value.name == "attention_mask" and value.shape is not None and len(value.shape) == 2:
            value.shape = ir.Shape([value.shape[0], "prompt_and_total_sequence_length"])

"""Changes an optimized decoder with a cache into its form for serving.

    input_ids, position_ids  int64 [tokens]: tokens of all sequences of a call, one sequence after another
    sequence_starts          int32 [sequences + 1]: the first token of each sequence, then the number of tokens
    past_lengths             int32 [sequences]: tokens of each sequence that the pools hold
    block_table              int32 [sequences, columns]: the blocks of each sequence
    logit_rows               int32 [rows]: the tokens of this call whose logits are returned
    kv_cache.N.key, .value   bfloat16 [blocks, 16, kv_heads, head size], the pools of keys and values of layer N
    -> logits float [rows, vocabulary]; new_kv_cache.N.key and .value, the pools with the tokens appended

A caller binds one buffer to a pool and its output, so that nothing is copied. PagedNoMADAttention
(ops/nomad_attention/op_paged.cc) describes the pools: the order of a block's elements is not that of the dimensions.
int8_cache.py makes the pools int8.

Types and shapes are those of onnxruntime-genai's Engine, whose configuration maps the names (genai.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as onnx_passes

from ortolan.errors import ModelError

from ..find.head import LOGITS, find_logits, select_rows
from ..find.positions import count_positions
from ..names import CONTEXT_KEY, ORTOLAN_DOMAIN, SERVING_KEY
from ..operators.nodes import NewNames, declare_operators, fill_missing, input_of, new_initializer, put_function
from ..operators.nomad_attention_function import OP_TYPE as ATTENTION
from ..operators.nomad_attention_function import SINKS, WINDOW, is_given
from ..operators.nomad_cache_function import INPUTS as CACHE_INPUTS
from ..operators.paged_attention_function import BLOCK_TOKENS, paged_attention_function, paged_uses_of
from ..operators.paged_attention_function import INPUTS as PAGED_INPUTS
from ..operators.paged_attention_function import OP_TYPE as PAGED
from .mask import read_window

POOL = "kv_cache."  # prefix of the inputs that are pools
# The value of SERVING_KEY. Increase the number when `to_serving_form` makes another graph of the same decoder, or when
# callers must give other inputs: stored conversions of `ortolan serve` are then made again.
FORM_VERSION = "paged 1"
_PAST, _PRESENT = "past_key_values.", "present."
_TOKENS = ("input_ids", "position_ids")
# Inputs that only attention reads, or masks and lengths for attention.
_DROPPED = ("attention_mask",)
_KEPT_ATTRIBUTES = ("num_heads", "kv_num_heads", "scale", "softcap", "rotary_interleaved")


def is_serving_form(model: ir.Model) -> bool:
    """Return True if the model has the form for serving.

    Raises:
        ModelError: It has another version of the form.
    """
    if SERVING_KEY not in model.metadata_props:
        return False
    check_form_version(model.metadata_props[SERVING_KEY])
    return True


def check_form_version(found: str) -> None:
    """Check the value of SERVING_KEY in a model's metadata.

    Raises:
        ModelError: The form is of another version.
    """
    if found != FORM_VERSION:
        raise ModelError(
            f"the model has version {found!r} of the form for serving, expected {FORM_VERSION!r}; make it again from "
            "the original model"
        )


def to_serving_form(model: ir.Model, name: str) -> None:
    """Change a decoder into its form for serving, in place.

    Args:
        model: A decoder whose attention is NoMADAttention with a float cache, with the names of Optimum: input_ids,
            attention_mask and position_ids [batch, …], past_key_values.N.key and .value, logits and present.N.*.
        name: The model's name in error messages.

    Raises:
        ModelError: The model is not such a decoder, or its attention is not causal.
    """
    check_decoder(model, name)
    context = count_positions(model.graph)
    form = _Form(model, name)
    for cached in form.find(context):
        form.replace(cached)
    form.take_tokens()
    form.ask_rows()
    form.finish()
    if context is not None:
        model.metadata_props[CONTEXT_KEY] = str(context)
    model.metadata_props[SERVING_KEY] = FORM_VERSION


def check_decoder(model: ir.Model, name: str) -> None:
    """Check that a model has the inputs and outputs of a decoder with a cache. Raises ModelError."""
    names = [value.name or "" for value in model.graph.inputs]
    unknown = [one for one in names if one not in (*_TOKENS, *_DROPPED) and not one.startswith(_PAST)]
    if unknown or "input_ids" not in names or not any(one.startswith(_PAST) for one in names):
        raise ModelError(
            f"{name} has inputs {', '.join(names[:8])}, expected input_ids, attention_mask, position_ids and "
            f"{_PAST}N.key and .value; export a decoder with a cache"
        )
    find_logits(model.graph, name)


@dataclass(frozen=True)
class _Cached:
    """A NoMADAttention with a cache, and the number of latest keys that a token sees (0: all)."""

    node: ir.Node
    layer: str
    window: int

    def given(self, name: str) -> ir.Value | None:
        value = input_of(self.node, CACHE_INPUTS, name)
        return value if is_given(value) else None


class _Form:
    def __init__(self, model: ir.Model, name: str) -> None:
        self._model, self._graph, self._name = model, model.graph, name
        self._new_name = NewNames(model)
        sequences = ir.SymbolicDim("sequences")
        self._sequence_inputs = [
            self._input("sequence_starts", [None], ir.DataType.INT32),
            self._input("past_lengths", [sequences], ir.DataType.INT32),
            self._input("block_table", [sequences, ir.SymbolicDim("columns")], ir.DataType.INT32),
        ]
        self._sequences = [self._as_int64(value) for value in self._sequence_inputs]
        self._logit_rows = self._input("logit_rows", [ir.SymbolicDim("rows")], ir.DataType.INT32)
        self._pools: list[ir.Value] = []
        self._new_pools: list[ir.Value] = []

    def _input(
        self, name: str, shape: Sequence[int | ir.SymbolicDim | None], dtype: ir.DataType = ir.DataType.INT64
    ) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))

    def _as_int64(self, value: ir.Value) -> ir.Value:
        node = ir.node("Cast", [value], {"to": ir.DataType.INT64}, name=self._new_name(f"{value.name}/int64"))
        new = node.outputs[0]
        new.name, new.shape = self._new_name(f"{value.name}/int64_output"), value.shape
        new.type = ir.TensorType(ir.DataType.INT64)
        self._graph.insert_before(next(iter(self._graph)), node)
        return new

    def find(self, context: int | None) -> list[_Cached]:
        """Return the attentions of all caches. Raises ModelError if a cache has another reader that computes values."""
        found: list[_Cached] = []
        windows: dict[tuple[ir.Value, bool], int] = {}
        for past in self._graph.inputs:
            parts = (past.name or "").split(".")
            if not (past.name or "").startswith(_PAST):
                continue
            readers = [use.node for use in past.uses() if use.node.op_type == ATTENTION]
            if len(readers) != 1 or parts[-1] not in ("key", "value") or len(parts) != 3:
                others = ", ".join(f"{use.node.name!r}, a {use.node.op_type}" for use in list(past.uses())[:3])
                raise ModelError(
                    f"cache {past.name!r} of {self._name} is read by {others or 'no node'}, expected one "
                    f"{ATTENTION}; optimize the model with weights='int8' or 'int4', which replace attention"
                )
            if parts[-1] == "value":
                continue
            mask = input_of(readers[0], CACHE_INPUTS, "mask")
            attributes = readers[0].attributes
            is_causal = attributes["causal"].as_int() == 1
            limits = [attributes[WINDOW.name].as_int()] if WINDOW.name in attributes else []
            if mask is not None and is_given(mask):
                if (mask, is_causal) not in windows:
                    windows[mask, is_causal] = read_window(mask, self._name, context, is_causal)
                limits.append(windows[mask, is_causal])
            cached = _Cached(readers[0], parts[1], min(filter(None, limits), default=0))
            self._check(cached)
            found.append(cached)
        return found

    def _check(self, cached: _Cached) -> None:
        node = cached.node
        causal = node.attributes["causal"].as_int() == 1
        if not causal and cached.given("mask") is None:
            raise ModelError(f"attention {node.name!r} of {self._name} is not causal, so the model cannot be served")
        for unsupported in ("codebooks", "past_exact_key", "prompt_key_masks"):
            if (value := input_of(node, CACHE_INPUTS, unsupported)) is not None and value.name and _has_values(value):
                raise ModelError(
                    f"attention {node.name!r} of {self._name} has input {unsupported} ({value.name!r}), expected a "
                    "float cache; optimize the model without cache='codes' and without a prompt"
                )
        past = cached.given("past_key")
        assert past is not None
        shape = past.shape if past.shape is not None and len(past.shape) == 4 else (None,) * 4
        heads, size = shape[1], shape[3]
        if not isinstance(heads, int) or not isinstance(size, int) or size % BLOCK_TOKENS:
            raise ModelError(
                f"cache {past.name!r} of {self._name} has shape {past.shape}, expected [batch, heads, tokens, head "
                f"size] with a head size that is a multiple of {BLOCK_TOKENS}"
            )

    def replace(self, cached: _Cached) -> None:
        """Replace an attention by PagedNoMADAttention over pools."""
        node, past = cached.node, cached.given("past_key")
        assert past is not None and past.shape is not None
        shape = ir.SymbolicDim("blocks"), BLOCK_TOKENS, past.shape[1], past.shape[3]
        pools = [self._input(f"{POOL}{cached.layer}.{part}", shape, ir.DataType.BFLOAT16) for part in ("key", "value")]
        operands = [cached.given(one) for one in ("query", "key", "value")]
        rotary = [cached.given(one) for one in ("cos", "sin")]
        inputs = [*operands, *pools, *self._sequences, *rotary]
        if SINKS.name in node.attributes:
            sinks = np.array(node.attributes[SINKS.name].as_floats(), np.float32)
            inputs.append(new_initializer(self._graph, ir.Tensor(sinks, name=self._new_name(f"{node.name}/sinks"))))
        attributes = [node.attributes[one] for one in _KEPT_ATTRIBUTES if one in node.attributes]
        paged = ir.Node(
            ORTOLAN_DOMAIN,
            PAGED,
            inputs,
            [*attributes, ir.AttrInt64("window", cached.window)],
            num_outputs=3,
            name=node.name,
        )
        y, *new_pools = paged.outputs
        y.name, y.type, y.shape = node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape
        for old, new in zip(pools, new_pools, strict=True):
            new.name, new.type, new.shape = f"new_{old.name}", old.type, old.shape
        self._graph.insert_after(node, paged)
        node.outputs[0].replace_all_uses_with(y)
        outputs = set(node.outputs)
        self._graph.outputs[:] = [value for value in self._graph.outputs if value not in outputs]
        self._graph.remove(node, safe=True)
        self._pools += pools
        self._new_pools += new_pools

    def take_tokens(self) -> None:
        """Replace input_ids and position_ids by inputs without a batch axis."""
        tokens = ir.SymbolicDim("tokens")
        axis = ir.Tensor(np.zeros(1, np.int64), name=self._new_name("batch_axis"))
        first = next(iter(self._graph))
        given = {value.name: value for value in self._graph.inputs}
        made, batch_axis = [], None
        for name in _TOKENS:
            new = self._input(name, [tokens])
            made.append(new)
            old = given.get(name)
            if old is None or not old.uses():
                continue
            batch_axis = batch_axis or new_initializer(self._graph, axis)
            node = ir.node("Unsqueeze", [new, batch_axis], name=self._new_name(f"{name}/batch"))
            node.outputs[0].name, node.outputs[0].type = self._new_name(f"{name}/batch_output"), new.type
            self._graph.insert_before(first, node)
            old.replace_all_uses_with(node.outputs[0])
        self._token_inputs = made

    def ask_rows(self) -> None:
        """Compute the logits of `logit_rows` only, and return them as [rows, vocabulary]."""
        rows = self._logit_rows.shape[0] if self._logit_rows.shape is not None else None

        def select(hidden: ir.Value) -> ir.Node:
            node = ir.node("Gather", [hidden, self._logit_rows], {"axis": 1}, name=self._new_name("logits/rows"))
            node.outputs[0].name, node.outputs[0].type = self._new_name("logits/rows_output"), hidden.type
            return node

        logits = find_logits(self._graph, self._name)
        select_rows(self._model, self._name, select, rows or ir.SymbolicDim("rows"))
        vocabulary = logits.shape[2] if logits.shape is not None else None
        axis = new_initializer(self._graph, ir.Tensor(np.zeros(1, np.int64), name=self._new_name("logits/axis")))
        node = ir.node("Squeeze", [logits, axis], name=self._new_name("logits/squeeze"))
        self._graph.append(node)
        logits.name = self._new_name("logits/batch")
        found = node.outputs[0]
        found.name, found.type, found.shape = LOGITS, logits.type, ir.Shape([rows, vocabulary])
        self._graph.outputs[:] = [found if value is logits else value for value in self._graph.outputs]

    def finish(self) -> None:
        """Set inputs and outputs, and remove nodes and functions that are no longer used."""
        self._graph.outputs.extend(self._new_pools)
        before = list(self._graph.inputs)
        self._graph.inputs[:] = [*self._token_inputs, *self._sequence_inputs, self._logit_rows, *self._pools]
        onnx_passes.RemoveUnusedNodesPass()(self._model)
        for value in before:
            if users := [use.node for use in value.uses()]:
                raise ModelError(
                    f"node {users[0].name!r} of {self._name}, a {users[0].op_type}, reads input {value.name!r} outside "
                    "of attention, so its result depends on the other sequences of a call; export the model with "
                    "position_ids as an input"
                )
        used = {node.op_identifier() for node in self._graph.all_nodes()}
        for identifier in [one for one in self._model.functions if one not in used]:
            del self._model.functions[identifier]
        put_paged_function(self._model, self._new_name)
        declare_operators(self._model)


def paged_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes of PagedNoMADAttention."""
    return [node for node in graph if (node.domain, node.op_type) == (ORTOLAN_DOMAIN, PAGED)]


def put_paged_function(model: ir.Model, new_name: NewNames) -> None:
    """Put the ONNX function that serves all nodes of PagedNoMADAttention, and give them all inputs that it has."""
    nodes = paged_nodes(model.graph)
    uses = paged_uses_of(nodes)
    fill_missing(nodes, PAGED_INPUTS, uses.inputs(), _neutral, new_name)
    put_function(model, paged_attention_function(model.graph.opset_imports[""], uses))


def _neutral(node: ir.Node) -> dict[str, np.ndarray]:
    """Return the constants that stand for missing inputs of PagedNoMADAttention: see op_paged.cc."""
    zero = np.zeros(1, np.float32)
    sinks = np.full(node.attributes["num_heads"].as_int(), -np.inf, np.float32)
    return {**dict.fromkeys(("key", "value", "cos", "sin"), zero), "sinks": sinks}


def _has_values(value: ir.Value) -> bool:
    """Return False for the constants that stand for missing inputs: no element, or one."""
    return value.const_value is None or value.const_value.size > 1

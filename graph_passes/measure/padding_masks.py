"""Classification of attention masks: the nodes that compute a mask from attention_mask are run on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from ..files.model_file import to_bytes, to_proto
from ..find.constants import constant_tensor, remove_unused
from ..find.fused_forms import EMBED_LAYER_NORMALIZATION
from ..names import ORTOLAN_DOMAIN
from .feeds import Sizes, synthetic_feeds
from .sessions import open_quietly, run_session

_HIDES = -1e4  # addends up to this value mask a key; exporters write it or a far lower value
_SIZES = (Sizes(4, 6, 0), Sizes(5, 9, 0))
# Operators that treat all positions alike. Other operators may mask distant tokens, which a run on a few tokens would
# not reveal.
_POSITION_FREE = """
    Add And Cast Clip Concat Constant ConstantOfShape Div Equal Expand Gather Greater GreaterOrEqual Identity Less
    LessOrEqual Max Min Mul Neg Not Or Reshape Shape Slice Squeeze Sub Transpose Unsqueeze Where
"""
_POSITION_FREE_OPS = frozenset(_POSITION_FREE.split())
# Operators that also tell positions apart, but only by integers among the constants that they read.
_BY_POSITION_OPS = _POSITION_FREE_OPS | frozenset(("And", "CumSum", "Flatten", "Range", "Trilu"))
_COUNTING = frozenset(("Cast", "Constant", "Equal", "ReduceSum", "Unsqueeze"))
_MAX_SIZES = 8  # longer constants are not shapes
_ANGLE_ERROR = 1e-3  # largest difference of a table from cosines or sines
_MAX_WINDOW = 4224  # windows up to this number of tokens are looked for by a run on more tokens
_VIEWS = frozenset(("Cast", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"))
_FROM_TOKENS = frozenset(("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "MatMulInteger", "Einsum", "Softmax"))


class MaskError(Exception):
    """The reason why a mask is not a padding mask."""


class PaddingMasks:
    """The padding masks of one model."""

    def __init__(
        self,
        model: ir.Model,
        attention_mask: ir.Value,
        read_if_hidden: slice = slice(0),
        first_tokens: ir.Value | None = None,
    ) -> None:
        """Remember the model and its attention_mask.

        Args:
            model: The model.
            attention_mask: The input [batch, tokens], 0 for padding.
            read_if_hidden: Positions whose vectors are used even if attention_mask masks them.
            first_tokens: The result of `find_first_tokens`, if attention uses that mask instead of attention_mask.
        """
        self._model = model
        self._attention_mask = attention_mask
        self._read_if_hidden = read_if_hidden
        self._first_tokens = first_tokens
        self._kinds: dict[ir.Value, str] = {}
        self._causal: dict[ir.Value, bool] = {}
        self._dropped: dict[ir.Value, None] = {}

    def beside_padding(self, mask: ir.Value | None) -> ir.Value | None:
        """Return the addend that remains of a mask without its padding part, or None if nothing remains.

        Raises:
            MaskError: It is not certain that the mask hides padding.
        """
        if mask is None or constant_tensor(mask) is not None:
            raise MaskError("attention has no mask that depends on attention_mask")
        kind = self._kind(mask)
        if kind == "other":
            raise MaskError(f"mask {mask.name!r} does not mask all tokens that attention_mask masks")
        if kind == "hides more":
            own = self._other_summand(mask)
            if own is None:
                return mask
            self._dropped[mask] = None
            return own
        self._dropped[mask] = None
        return None

    def is_causal(self, mask: ir.Value) -> bool:
        """Return whether a mask hides padding and all tokens after the query, and changes no other scores.

        Only for masks that `beside_padding` accepts.
        """
        if mask not in self._causal:
            self._causal[mask] = self._kind(mask) == "hides more" and self._hides_later_tokens(mask)
            if self._causal[mask]:
                self._dropped[mask] = None
        return self._causal[mask]

    def _hides_later_tokens(self, mask: ir.Value) -> bool:
        longest = _longest_distance(mask)
        if longest is None or self._first_tokens is not None:
            return False
        sizes = _SIZES if longest < _SIZES[0].sequence else (*_SIZES, Sizes(2, longest + 2, 0))
        for kept, added in self._runs(mask, sizes=sizes):
            batch, tokens = kept.shape
            if added is None or added.ndim != 4:
                return False
            added = np.broadcast_to(added, (batch, *added.shape[1:3], tokens))
            if added.shape[2] != tokens:
                return False
            earlier = np.tri(tokens, dtype=bool)
            for row, shown in zip(kept, added, strict=True):
                queries = shown[:, row]
                if queries[:, earlier[row] & row].any() or (queries[:, ~earlier[row] & row] > _HIDES).any():
                    return False
        return True

    def is_at_hidden(self, number: bool, factor: ir.Value | None, hidden: ir.Value) -> bool:
        """Return whether `factor` equals `number` at all tokens that attention_mask masks.

        Args:
            number: The value at masked tokens: 0 or 1.
            factor: A factor of `hidden`, or the condition of a Where. It may depend on the shape of `hidden`.
            hidden: A value [batch, tokens, width].
        """
        if factor is None or constant_tensor(factor) is not None or self._from_tokens(factor, hidden) is not None:
            return False
        width = 4 if hidden.shape is None or not isinstance(hidden.shape[-1], int) else hidden.shape[-1]
        for kept, found in self._runs(factor, hidden, width):
            if found is None or found.ndim not in (2, 3) or found.shape[:2] != kept.shape:
                return False
            if (found[~kept] != number).any():
                return False
        return True

    def are_at_tokens(
        self,
        indices: ir.Value,
        read: ir.Value,
        pad: int | None,
        positions: Callable[[np.ndarray, int, int], np.ndarray | None],
    ) -> bool:
        """Return whether indices, computed from the model's inputs, are positions that attention_mask does not mask.

        Args:
            indices: The indices.
            read: The value [batch, tokens, width] that they index.
            pad: The token at masked positions; None: any token.
            positions: Returns positions [batch, any] of indices, for numbers of sequences and tokens; None: the indices
                have another form.
        """
        if self._from_tokens(indices, by_shapes=False) is not None:
            return False
        width = read.shape[-1] if read.shape is not None and isinstance(read.shape[-1], int) else 1
        for kept, found in self._runs(indices, read, width, pad=pad):
            if found is None or not found.size or found.size % len(kept):
                return False
            at = positions(found, *kept.shape)
            if at is None or not np.take_along_axis(kept, at % kept.shape[1], axis=1).all():
                return False
        return True

    def rotations(self, values: Collection[ir.Value]) -> list[ir.Value]:
        """Return the tables of rotary embedding among values that depend only on the position in a sequence.

        In such a table, row i has the cosines or sines of i times an angle, perhaps all times one factor, and only
        products with it are computed. A table is returned if that of the other function is there too.
        """
        found: dict[ir.Value, tuple[str, np.ndarray]] = {}
        inputs = set(self._model.graph.inputs)
        for value in values:
            if not _is_only_multiplied(value):
                continue
            if inputs & sources_of(value, by_shapes=False).keys() or self._from_tokens(value, by_shapes=False):
                continue
            table = [rows for _, rows in self._runs(value)][-1]
            if table is None or table.ndim < 2 or table.size != table.shape[-2] * table.shape[-1]:
                continue
            table = table.reshape(table.shape[-2:])
            if (kind := _function_of_angles(table)) is not None:
                found[value] = kind, table
        # The tables of one embedding have one scale and equal angles.
        return [
            value
            for value, (kind, table) in found.items()
            if any(
                other != kind and rows.shape == table.shape and _is_constant(table**2 + rows**2)
                for other, rows in found.values()
            )
        ]

    def find_first_tokens(self, mask: ir.Value | None) -> ir.Value | None:
        """Return the source of a mask that keeps the first n tokens, where n is the number of ones in attention_mask.

        The source has truth values [batch, 1, 1, tokens]. ONNX Runtime's transformers optimizer makes such masks
        (mask_index).
        """
        for source in {} if mask is None else sources_of(mask):
            node = source.producer()
            if node is None or node.op_type != "Less" or node.inputs[1] is None:
                continue
            positions = None if node.inputs[0] is None else node.inputs[0].producer()
            if positions is None or positions.op_type != "Range" or not _counts(node.inputs[1]):
                continue
            runs = list(self._runs(source))
            if all(found is not None and np.array_equal(found, _first(kept)[:, None, None]) for kept, found in runs):
                return source
        return None

    def remove_unused(self) -> None:
        """Remove the nodes of masks that are no longer used."""
        for mask in self._dropped:
            remove_unused(mask)

    def _other_summand(self, mask: ir.Value) -> ir.Value | None:
        """Return the value to which a padding mask was added, if that value does not depend on attention_mask."""
        node = mask.producer()
        if node is None or node.op_type != "Add" or len(mask.uses()) == 0:
            return None
        for one, other in (node.inputs, reversed(node.inputs)):
            assert one is not None and other is not None
            if self._attention_mask in sources_of(other) or self._attention_mask not in sources_of(one):
                continue
            if self._kind(one) == "padding":
                return other
        return None

    def _kind(self, mask: ir.Value) -> str:
        """Classify a mask.

        "padding": it only hides padding. "hides more": it hides padding, and may change scores of other tokens.
        "other": it does not hide padding.
        """
        if mask not in self._kinds:
            self._kinds[mask] = self._find_kind(mask)
        return self._kinds[mask]

    def _find_kind(self, mask: ir.Value) -> str:
        node = self._from_tokens(mask)
        if node is not None:
            raise MaskError(f"mask {mask.name!r} is computed from tokens (by {node.op_type} {node.name!r})")
        does_more = False
        reads_all = self._read_if_hidden == slice(None)
        for kept, added in self._runs(mask):
            kept = kept if self._first_tokens is None else _first(kept)
            batch, tokens = kept.shape
            if added is None or added.ndim > 4:
                return "other"
            heads = added.shape[1] if added.ndim == 4 else added.shape[0] if added.ndim == 3 else 1
            try:
                added = np.broadcast_to(added, (batch, heads, tokens, tokens))
            except ValueError:
                return "other"
            queries = np.broadcast_to(kept[:, None, :], added.shape[:3]).copy()
            # If the local window of a query holds only padding, the query sees no key and its result is undefined.
            shown: np.ndarray = np.asarray(added > _HIDES)
            sees: np.ndarray = np.asarray(shown.any(axis=-1))
            # The first sequence has no padding, so its mask gives the keys that each query sees without padding.
            if reads_all and (~sees & (shown[:1] & kept[:, None, None, :]).any(axis=-1)).any():
                raise MaskError(
                    f"mask {mask.name!r} hides all tokens from the queries of masked positions, which are read"
                )
            queries[:, :, self._read_if_hidden] |= sees[:, :, self._read_if_hidden]
            seen = queries[..., None] & kept[:, None, None, :]
            hidden = queries[..., None] & ~kept[:, None, None, :]
            if not (added[hidden] <= _HIDES).all():
                return "other"
            does_more = does_more or bool(added[seen].any())
        return "padding" if not does_more and _is_position_free(mask, self._first_tokens) else "hides more"

    def _from_tokens(self, value: ir.Value, but: ir.Value | None = None, by_shapes: bool = True) -> ir.Node | None:
        """Return a node that computes the value from tokens, or None. Arguments as for `sources_of`."""
        for source in sources_of(value, but, by_shapes):
            node = source.producer()
            if source is but or node is None:
                continue
            if node.domain == ORTOLAN_DOMAIN or node.op_type in _FROM_TOKENS:
                return node
        return None

    def _runs(
        self,
        value: ir.Value,
        given: ir.Value | None = None,
        width: int = 0,
        sizes: Sequence[Sizes] = _SIZES,
        pad: int | None = None,
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yield some attention masks, as truth values, each with the value that the model computes from it.

        Args:
            value: The value to compute.
            given: A value [batch, tokens, width] to replace by zeros.
            width: Its width.
            sizes: The sizes of the masks.
            pad: The token at all masked positions, and at no other; None: any token.
        """
        inputs = [*self._model.graph.inputs, *([] if given is None else [given])]
        part = ir.Model(ir.convenience.extract(self._model.graph, inputs, [value]), ir_version=self._model.ir_version)
        if given is not None:
            part.graph.inputs[-1].type = ir.TensorType(ir.DataType.FLOAT)
            part.graph.inputs[-1].shape = ir.Shape([None] * 3)
        session = open_quietly(to_bytes(to_proto(part)))
        known = {one.name for one in session.get_inputs()}
        name = self._attention_mask.name or ""
        for one in sizes:
            feeds = synthetic_feeds(self._model, one)
            kept = _kept(*feeds[name].shape)
            feeds[name] = kept.astype(feeds[name].dtype)
            if pad is not None:
                ids = feeds["input_ids"]
                feeds["input_ids"] = np.where(kept, np.where(ids == pad, ids + 1, ids), pad).astype(ids.dtype)
            if given is not None:
                feeds[given.name or ""] = np.zeros((*kept.shape, width), np.float32)
            feeds = {key: array for key, array in feeds.items() if key in known}
            try:
                (found,) = run_session(session, feeds, "the part that computes it", MaskError)
            except MaskError:
                shapes = ", ".join(f"{key} {list(array.shape)}" for key, array in feeds.items())
                raise MaskError(
                    f"the nodes that compute {value.name!r} do not run on synthetic inputs: {shapes}"
                ) from None
            yield kept, found


def _kept(batch: int, tokens: int) -> np.ndarray:
    """Return masks of sequences: full, padded at the end, padded at the start, with gaps."""
    kept = np.random.default_rng(0).random((batch, tokens)) < 0.5
    kept[:, tokens // 2] = True
    kept[:1] = True
    kept[1:2] = np.arange(tokens) < tokens - 2
    kept[2:3] = np.arange(tokens) >= 2
    return kept


def _counts(value: ir.Value) -> bool:
    """Return whether a value is the number of ones in each sequence of a mask."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if node is None or (node.op_type == EMBED_LAYER_NORMALIZATION and value is node.outputs[1]):
            continue
        if node.op_type not in _COUNTING:
            return False
        waiting += [source for source in node.inputs if source is not None]
    return True


def _first(kept: np.ndarray) -> np.ndarray:
    """Return a mask of the first n tokens of each sequence, where n is the number of kept tokens."""
    first: np.ndarray = np.arange(kept.shape[1]) < kept.sum(axis=1, keepdims=True)
    return first


def _function_of_angles(table: np.ndarray) -> str | None:
    """Return "cos" or "sin" if row i has that of i times an angle, with one factor for each column; else None."""
    steps = np.arange(len(table))[:, None]
    if len(table) < 3 or not np.isfinite(table).all():
        return None
    if (np.abs(table[0]) > _ANGLE_ERROR).all():
        angles = np.arccos(np.clip(table[1] / table[0], -1, 1))
        made = table[0] * np.cos(steps * angles)
    elif not table[0].any():
        # sin(2 a) = 2 sin(a) cos(a)
        some = np.abs(table[1]) > 0
        angles = np.arccos(np.clip(np.divide(table[2], 2 * table[1], out=np.ones_like(table[1]), where=some), -1, 1))
        scale = np.divide(table[1], np.sin(angles), out=np.zeros_like(table[1]), where=np.sin(angles) != 0)
        made = scale * np.sin(steps * angles)
    else:
        return None
    return ("sin" if not table[0].any() else "cos") if np.abs(made - table).max() <= _ANGLE_ERROR else None


def _is_only_multiplied(value: ir.Value) -> bool:
    """Return whether a value is read only as a factor, perhaps after views."""
    return all(
        use.node.op_type == "Mul"
        or (use.node.op_type in _VIEWS and use.idx == 0 and _is_only_multiplied(use.node.outputs[0]))
        for use in value.uses()
    )


def _is_constant(rows: np.ndarray) -> bool:
    return bool(np.abs(rows - rows[0]).max() <= _ANGLE_ERROR)


def _is_position_free(mask: ir.Value, but: ir.Value | None) -> bool:
    """Return whether all nodes that compute a mask, except the nodes that compute `but`, treat all positions alike."""
    for source in sources_of(mask, but):
        tensor, node = constant_tensor(source), source.producer()
        if source is but:
            continue
        if tensor is not None:
            if tensor.size > _MAX_SIZES:
                return False
        elif node is not None and node.op_type not in _POSITION_FREE_OPS:
            return False
    return True


def _longest_distance(mask: ir.Value) -> int | None:
    """Return the largest integer that a mask may compare distances of tokens with.

    A run on more tokens shows every window. None: the mask may depend on positions in other ways, or the integer is
    too large for a run.
    """
    longest = 0
    for source in sources_of(mask, by_shapes=False):
        tensor, node = constant_tensor(source), source.producer()
        if tensor is not None:
            if tensor.size > _MAX_SIZES:
                return None
            numbers = tensor.numpy().astype(np.float64).reshape(-1)
            # Other numbers are values of masks and ends of slices.
            longest = max([longest, *(int(abs(one)) for one in numbers if one > _HIDES and abs(one) < 2**24)])
        elif node is not None and node.op_type not in _BY_POSITION_OPS:
            return None
    return longest if longest <= _MAX_WINDOW else None


def sources_of(value: ir.Value, but: ir.Value | None = None, by_shapes: bool = True) -> dict[ir.Value, None]:
    """Return the value and all values that it is computed from, except the sources of `but`.

    by_shapes: Include values that only a Shape reads.
    """
    found: dict[ir.Value, None] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        found[one] = None
        node = None if one is but else one.producer()
        node = None if node is not None and node.op_type == "Shape" and not by_shapes else node
        waiting += [] if node is None else [source for source in node.inputs if source is not None]
    return found

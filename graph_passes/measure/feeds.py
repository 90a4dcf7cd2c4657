"""Feeds, the inputs on which a model runs: given by the user, or synthetic inputs that fit the model's signature."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, listing, wrong_type

from ..find.constants import constant_tensor
from ..find.dimensions import head_sizes
from .input_dimensions import InputDimensions, Meaning, is_token_input, parts_of
from .media_inputs import media_of

Feeds = dict[str, np.ndarray]
Outputs = list[np.ndarray | None]  # outputs of one run; None: not a numeric tensor, so not compared
Calibration = str | os.PathLike[str] | Mapping[str, Any] | Iterable[Mapping[str, Any]] | Iterable[str]

_UNKNOWN_VOCABULARY = 8  # synthetic ids are below this number if the size of the embedding table is unknown

_MAX_AXES = 8  # longer constants are not shapes
_MAX_TOKENS, _MAX_BATCH = 4096, 16  # bounds for sizes read from the graph (sizes_in_graph)
_SIZES_OF_GRAPH = 12  # number of sizes that sizes_in_graph returns at most


@dataclass(frozen=True)
class Sizes:
    """Values for the symbolic dimensions of a transformer's inputs. `past` is the length of the cache."""

    batch: int
    sequence: int
    past: int


# Sizes are tried in this order. Exports differ in which dimensions they fix.
SIZES_TO_TRY = (Sizes(2, 16, 8), Sizes(1, 16, 8), Sizes(1, 16, 0), Sizes(1, 1, 8))


def sizes_in_graph(model: ir.Model) -> list[Sizes]:
    """Return sizes to try, for an export that runs only at the shape with which it was traced.

    Integers in the graph's constant and declared shapes are used as tokens and as batch, the most frequent integers
    first.
    """
    counts: Counter[int] = Counter()
    for node in model.graph:
        # A shape is a constant, or a Concat of computed and constant parts.
        sources = node.inputs[1:2] if node.op_type in ("Reshape", "Expand") else node.inputs
        for source in sources if node.op_type in ("Reshape", "Expand", "Concat") else ():
            tensor = constant_tensor(source)
            if tensor is not None and tensor.dtype == ir.DataType.INT64 and tensor.size <= _MAX_AXES:
                counts.update(set(tensor.numpy().reshape(-1).tolist()))
        for value in node.outputs:
            counts.update({size for size in value.shape or () if isinstance(size, int)})
    found = [size for size, _ in counts.most_common() if 1 < size <= _MAX_TOKENS][:_SIZES_OF_GRAPH]
    batches = [1, 2, 4, 8, *(size for size in found if size <= _MAX_BATCH)]
    return [Sizes(batch, tokens, 0) for tokens in found for batch in dict.fromkeys(batches)]


def read_calibration(calibration: Calibration, model: ir.Model) -> list[Feeds]:
    """Return the user's feeds, checked against the model's inputs.

    Raises:
        ArgumentTypeError: They are not files, arrays or dicts of arrays.
        CalibrationError: They cannot be read, or do not fit the model.
    """
    if isinstance(calibration, str | os.PathLike):
        try:
            with np.load(calibration, allow_pickle=False) as arrays:
                given: list[Any] = [{name: arrays[name] for name in arrays.files}]
        except FileNotFoundError:
            raise CalibrationError(f"calibration file {os.fspath(calibration)!r} does not exist") from None
        except Exception as error:  # numpy, zipfile and zlib raise various exceptions for a damaged file
            raise CalibrationError(
                f"calibration file {os.fspath(calibration)!r} is not an .npz file of arrays named "
                "like the model's inputs; texts, one a line, must be in a .txt file"
            ) from error
    elif isinstance(calibration, Mapping):
        given = [calibration]
    else:
        try:
            given = list(calibration)
        except TypeError:
            expected = "texts, the path of a .txt or .npz file, a dict of arrays, or an iterable of such dicts"
            raise wrong_type("calibration", calibration, expected) from None
    if not given:
        raise CalibrationError("calibration holds no feeds, expected at least one")
    return [_check_feeds(feeds, model, f"calibration feeds {number}") for number, feeds in enumerate(given, 1)]


def hold_out(feeds: Sequence[Feeds], every: int) -> tuple[list[Feeds], list[Feeds]]:
    """Split feeds into those for fitting weights, and every n-th feed (if there are n), held out for evaluation."""
    if not 1 < every <= len(feeds):
        return list(feeds), []
    held = list(range(every - 1, len(feeds), every))
    return [one for number, one in enumerate(feeds) if number not in held], [feeds[number] for number in held]


def read_prompt(prompt: Any) -> np.ndarray:
    """Return the tokens of a prompt, int64 [1, tokens], from an array, a sequence or an .npy file.

    Raises:
        CalibrationError: The prompt cannot be read, or is not token ids.
    """
    where = "prompt"
    if isinstance(prompt, str | os.PathLike):
        where = f"prompt file {os.fspath(prompt)!r}"
        try:
            prompt = np.load(prompt, allow_pickle=False)
        except FileNotFoundError:
            raise CalibrationError(f"{where} does not exist") from None
        except Exception as error:  # numpy raises various exceptions for a damaged file
            raise CalibrationError(f"{where} is not an .npy file of token ids, as numpy.save writes it") from error
    try:
        ids = np.asarray(prompt)
    except ValueError as error:
        raise CalibrationError(f"{where} is not an array of token ids: {error}") from error
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size or int(ids.min()) < 0:
        raise CalibrationError(
            f"{where} is {ids.dtype} {list(ids.shape)}, expected token ids: non-negative integers [tokens]"
        )
    return ids.astype(np.int64)[None]


def prompt_feeds(ids: np.ndarray, model: ir.Model) -> Feeds:
    """Return a decoder's feeds for tokens [1, tokens]: an empty cache, masks and positions.

    Raises:
        CalibrationError: The model has other inputs.
    """
    return _check_feeds({"input_ids": ids}, model, "the prompt")


def count_padding(feeds: Feeds) -> tuple[int, int] | None:
    """Return (number of tokens that attention_mask masks, number of all tokens), or None if they are not known."""
    ids, mask = feeds.get("input_ids"), feeds.get("attention_mask")
    if ids is None or mask is None or ids.shape != mask.shape:
        return None
    return ids.size - int(np.count_nonzero(mask)), ids.size


def model_inputs(model: ir.Model) -> list[ir.Value]:
    """Return the inputs that a caller must give: those without a default."""
    return [value for value in model.graph.inputs if not value.is_initializer()]


def fixed_sizes(shape: Iterable[Any] | None) -> tuple[int | None, int | None]:
    """Return batch and tokens from the shape of input_ids [batch, tokens]; None for a symbolic dimension."""
    sizes = [size if isinstance(size, int) and size > 0 else None for size in shape or ()]
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (None, None)


def _check_feeds(feeds: Any, model: ir.Model, where: str) -> Feeds:
    if not isinstance(feeds, Mapping):
        raise wrong_type(where, feeds, "a dict of arrays")
    required = {value.name or "": value for value in model_inputs(model)}
    known = {value.name or "": value for value in model.graph.inputs}
    ids = np.asarray(feeds.get("input_ids", 0))
    # input_ids is checked first, because other inputs are derived from it
    if "input_ids" in known and ids.dtype.kind not in "iub":
        raise CalibrationError(f"{where}: input 'input_ids' has type {ids.dtype}, expected integer token ids")
    feeds = {**_beginning_of_text(feeds, required), **feeds}
    missing, unknown = set(required) - set(feeds), set(feeds) - set(known)
    if missing or unknown:
        raise CalibrationError(
            f"{where}: missing inputs: {listing(missing)}; unknown inputs: {listing(unknown)}; "
            f"the model's inputs are: {listing(known)}"
        )
    checked = {}
    for name, given in feeds.items():
        value = known[name]
        try:
            array = np.asarray(given)
        except ValueError as error:
            raise CalibrationError(f"{where}: input {name!r} is not an array: {error}") from error
        if value.dtype is not None and array.dtype != value.dtype.numpy():
            wanted = value.dtype.numpy()
            if array.dtype.kind != wanted.kind and not (array.dtype.kind in "iub" and wanted.kind in "iub"):
                raise CalibrationError(f"{where}: input {name!r} has type {array.dtype}, expected {wanted}")
            array = array.astype(wanted)
        shape = value.shape
        if shape is not None and (
            len(shape) != array.ndim
            or any(isinstance(size, int) and size != found for size, found in zip(shape, array.shape, strict=True))
        ):
            raise CalibrationError(f"{where}: input {name!r} has shape {list(array.shape)}, expected {shape}")
        checked[name] = array
    return checked


def _beginning_of_text(feeds: Mapping[str, Any], required: Mapping[str, ir.Value]) -> Feeds:
    """Return the inputs that can be derived from input_ids [batch, tokens]: an empty cache, and no padding."""
    ids: np.ndarray = np.asarray(feeds.get("input_ids", ())) if "input_ids" in required else np.empty(0)
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        return {}
    plain = {"attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    plain["position_ids"] = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    made = {name: array for name, array in plain.items() if name in required}
    widths = head_sizes(required.values())
    for name, value in required.items():
        shape = value.shape
        if "past" not in name or shape is None or len(shape) != 4 or value.dtype is None:
            continue
        heads, width = shape[1], shape[3] if isinstance(shape[3], int) else widths.get(value)
        if isinstance(heads, int) and width is not None and not isinstance(shape[2], int):
            made[name] = np.zeros((len(ids), heads, 0, width), value.dtype.numpy())
    return made


def synthetic_feeds(model: ir.Model, sizes: Sizes, seed: int = 0) -> Feeds:
    """Return random inputs that fit the model's signature; the seed determines them.

    Raises:
        CalibrationError: An input's type or rank is not known.
    """
    rng = np.random.default_rng(seed)
    inputs = model_inputs(model)
    has_past = any("past" in (value.name or "") and len(value.shape or ()) > 2 for value in inputs)
    batch, sequence = sizes.batch, sizes.sequence
    dimensions = InputDimensions.of(inputs)
    for value in inputs:
        # A decoder of one token per call has a fixed length in input_ids, which the mask must match.
        if "input_ids" in (value.name or "") and value.shape is not None and len(value.shape) == 2:
            rows, tokens = value.shape
            batch = rows if isinstance(rows, int) else batch
            sequence = tokens if isinstance(tokens, int) else sequence
    sequence *= max([media_of(value).samples_per_step for value in inputs], default=1)
    sizes = Sizes(batch, sequence, sizes.past if has_past else 0)
    widths = head_sizes(inputs)
    return {value.name or "": _make_up(value, sizes, dimensions, rng, has_past, widths.get(value)) for value in inputs}


def _make_up(
    value: ir.Value,
    sizes: Sizes,
    dimensions: InputDimensions,
    rng: np.random.Generator,
    has_past: bool,
    head_size: int | None,
) -> np.ndarray:
    name = (value.name or "").lower()
    if not isinstance(value.type, ir.TensorType) or value.shape is None or value.dtype is None:
        raise CalibrationError(
            f"no synthetic value for input {value.name!r}: it is not a tensor of known rank and "
            "type; give calibration=… with inputs for this model"
        )
    shape = [_dimension(value, axis, sizes, dimensions) for axis in range(len(value.shape))]
    shape[3:4] = [head_size] if head_size else shape[3:4]
    media = media_of(value)
    if media.picture is not None:
        given = zip(value.shape, (shape[0], *media.picture), strict=True)
        shape = [size if isinstance(size, int) else found for size, found in given]
    if media.frames is not None and not isinstance(value.shape[2], int):
        shape[2] = media.frames
    dtype = value.dtype.numpy()
    counts_past = "attention_mask" in name and not name.startswith("encoder") and has_past
    if counts_past and len(shape) == 2 and not isinstance(value.shape[1], int):
        shape[1] = sizes.past + sizes.sequence
    if value.dtype is ir.DataType.BOOL:
        return np.ones(shape, bool)
    if value.dtype.is_integer():
        if "mask" in name:
            return np.ones(shape, dtype)
        if "token_type" in name or "segment" in name:
            return np.zeros(shape, dtype)
        if "position" in name:
            steps = np.arange(sizes.past, sizes.past + (shape[-1] if shape else 1))
            return np.broadcast_to(steps, shape).astype(dtype)
        if "past" in name and not shape:
            return np.asarray(sizes.past, dtype)
        return rng.integers(0, _vocabulary(value), shape).astype(dtype)
    if not value.dtype.is_floating_point():
        raise CalibrationError(
            f"no synthetic value for input {value.name!r} of type {value.dtype.name}; "
            "give calibration=… with inputs for this model"
        )
    if "past" in name or "cache" in name:
        return np.zeros(shape, dtype)
    if "mask" in name:
        return np.ones(shape, dtype)
    return rng.standard_normal(shape).astype(dtype)


def _dimension(value: ir.Value, axis: int, sizes: Sizes, dimensions: InputDimensions) -> int:
    assert value.shape is not None
    size = value.shape[axis]
    if isinstance(size, int):
        return size
    if not size.value:
        name = (value.name or "").lower()
        only_axis = len(value.shape) == 1 and is_token_input(value) and ("ids" in name or "mask" in name)
        if axis == 0 and not only_axis:
            return sizes.batch
        return sizes.past if "past" in name else sizes.sequence
    return sum(_part_size(part, sizes, dimensions) for part in parts_of(size))


def _part_size(part: str, sizes: Sizes, dimensions: InputDimensions) -> int:
    if not part or part.isdigit():
        return int(part or 0)
    return {
        Meaning.BATCH: sizes.batch,
        Meaning.TOKENS: sizes.sequence,
        Meaning.PAST: sizes.past,
        Meaning.TOTAL: sizes.past + sizes.sequence,
    }[dimensions.meanings[part]]


def _vocabulary(value: ir.Value) -> int:
    """Return the number of rows of the embedding table that this input selects from, found through the Gather."""
    sizes = []
    seen: set[ir.Value] = set()
    front = [value]
    while front:
        current = front.pop()
        if current in seen:
            continue
        seen.add(current)
        for node, index in current.uses():
            if node.op_type in ("Gather", "EmbedLayerNormalization") and (index == 1 or node.op_type != "Gather"):
                # Inputs 2, 3 and 4 of EmbedLayerNormalization are the tables for input 0, for input 1 and for
                # positions.
                table = constant_tensor(node.inputs[0 if node.op_type == "Gather" else index + 2])
                if table is not None and len(table.shape) >= 1:
                    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
                    sizes.append(table.shape.numpy()[axis])
            elif node.op_type in ("Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Flatten") and index == 0:
                front.append(node.outputs[0])
    return min(sizes) if sizes else _UNKNOWN_VOCABULARY


def has_past(model: ir.Model) -> bool:
    """Return whether the model is a decoder with a cache: it has inputs for the keys and values of earlier tokens."""
    return any("past" in (value.name or "") for value in model_inputs(model))

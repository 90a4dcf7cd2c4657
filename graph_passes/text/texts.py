"""Calibration texts as feeds: one text, or one piece of a long text, per feed.

Feeds have no padding, unless the model accepts only one number of tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, ModelError, listing, type_name, wrong_type

from ..measure.feeds import Feeds, fixed_sizes, model_inputs
from .tokenizer_file import load_tokenizer, read_tokenizer_file

# A tokenizer is the path of a tokenizer.json, of llama2.c's tokenizer.bin, or of an ONNX graph of
# onnxruntime-extensions; or an object whose encode(text) returns token ids, or an object with an attribute `ids`.
Tokenizer = str | os.PathLike[str] | Any

TOKENS_OF_PIECE = 256  # longer texts are cut into pieces; every encoder supports this length
_PIECES, _MIN_TOKENS_OF_PIECE = 8, 64
# Tokens in a piece of joined texts, for decoders; fewer if the model's context is shorter.
TOKENS_OF_DECODER = 512
_SHORTEST_PIECE = 16  # a last piece with fewer tokens is dropped
_FILE = "tokenizer.json"
_COS_CACHE = 7  # index of GroupQueryAttention's input cos_cache [positions, width]


def read_texts(path: str | os.PathLike[str]) -> list[str]:
    """Return the non-empty lines of a UTF-8 text file: one text each.

    Raises:
        CalibrationError: The file cannot be read, or is empty.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CalibrationError(f"calibration file {os.fspath(path)!r} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"calibration file {os.fspath(path)!r} cannot be read as UTF-8 text: {error}") from error
    texts = [line.strip() for line in content.split("\n") if line.strip()]
    if not texts:
        raise CalibrationError(f"calibration file {os.fspath(path)!r} holds no text, expected one a line")
    return texts


def find_tokenizer(model: Path | None) -> Path | None:
    """Return the tokenizer.json beside the model, or above a folder onnx/ as on model hubs."""
    if model is None:
        return None
    folders = [model.parent, model.parent.parent] if model.parent.name == "onnx" else [model.parent]
    return next((folder / _FILE for folder in folders if (folder / _FILE).is_file()), None)


def feeds_of_texts(texts: Sequence[str], tokenizer: Tokenizer | None, model: ir.Model) -> list[Feeds]:
    """Return input_ids int64 [1, tokens] for each text, or for each piece of a text above TOKENS_OF_PIECE tokens.

    For a model with a cache, texts are joined into long pieces, because keys and values depend on earlier tokens. For
    an encoder with a fixed batch or number of tokens, rows are padded.

    Raises:
        CalibrationError: There is no usable tokenizer, or the model has no input_ids.
    """
    inputs = [value.name or "" for value in model_inputs(model)]
    if "input_ids" not in inputs:
        raise CalibrationError(
            f"calibration holds texts, but the model has no input 'input_ids': its inputs are {listing(inputs)}; give "
            "arrays instead (an .npz file, a dict of arrays, or a list of such dicts)"
        )
    if tokenizer is None:
        raise CalibrationError(
            "calibration holds texts, but no tokenizer was given and there is no tokenizer.json beside the model; give "
            "tokenizer=… (--tokenizer), the path of the model's tokenizer.json"
        )
    encode = _open(tokenizer)
    rows, length = fixed_sizes(next(value.shape for value in model_inputs(model) if value.name == "input_ids"))
    encoded: list[np.ndarray] = []
    limit = TOKENS_OF_PIECE
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise wrong_type(f"calibration item {number}", text, "a text like the items before it")
        encoded.append(encode(text))
    if any(name.startswith("past_key") for name in inputs):
        encoded, limit = [np.concatenate(encoded)] if encoded else [], min(TOKENS_OF_DECODER, _context(model))
        # Even a few texts are cut into several pieces, so that some pieces can be held out.
        limit = min(limit, max(_MIN_TOKENS_OF_PIECE, -(-sum(map(len, encoded)) // _PIECES)))
        rows = length = None
    pieces = [piece for ids in encoded for piece in _pieces(ids, limit if length is None else length)]
    if not pieces:
        raise CalibrationError("the calibration texts hold no tokens, expected at least one")
    if rows is None and length is None:
        return [{"input_ids": piece[None]} for piece in pieces]
    rows, pad_id = rows or 1, _pad_id(tokenizer)
    pieces += pieces[:1] * (-len(pieces) % rows)
    padded = (_padded(pieces[start : start + rows], length, pad_id) for start in range(0, len(pieces), rows))
    return [feeds if "attention_mask" in inputs else {"input_ids": feeds["input_ids"]} for feeds in padded]


def _padded(pieces: Sequence[np.ndarray], length: int | None, pad_id: int) -> Feeds:
    """Return one batch of padded rows. length: tokens per row; None: the length of the longest piece."""
    shape = (len(pieces), length or max(map(len, pieces)))
    ids, mask = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)
    for row, piece in enumerate(pieces):
        ids[row, : len(piece)], mask[row, : len(piece)] = piece, 1
    return {"input_ids": ids, "attention_mask": mask}


def _pad_id(tokenizer: Tokenizer) -> int:
    """Return the padding id of a tokenizer.json, or 0 if it is not known."""
    if isinstance(tokenizer, str | os.PathLike) and Path(tokenizer).suffix == ".json":
        with suppress(ModelError):
            return read_tokenizer_file(tokenizer).pad_id
    return 0


def count_tokens(feeds: Sequence[Mapping[str, np.ndarray]]) -> int | None:
    """Return the number of tokens in the feeds that are not masked out, or None if feeds have no tokens."""
    if not all("input_ids" in one for one in feeds):
        return None
    total = 0
    for one in feeds:
        mask, ids = one.get("attention_mask"), one["input_ids"]
        total += int(np.count_nonzero(mask)) if mask is not None and mask.shape == ids.shape else ids.size
    return total


def _context(model: ir.Model) -> int:
    """Return the number of positions of a decoder's rotary embeddings; TOKENS_OF_PIECE if it is not known."""
    lengths = [
        value.shape[0]
        for node in model.graph
        if node.op_type == "GroupQueryAttention" and len(node.inputs) > _COS_CACHE
        if (value := node.inputs[_COS_CACHE]) is not None and value.shape is not None
        if isinstance(value.shape[0], int)
    ]
    return min(lengths, default=TOKENS_OF_PIECE)


def _pieces(ids: np.ndarray, limit: int) -> Iterator[np.ndarray]:
    for start in range(0, len(ids), limit):
        piece = ids[start : start + limit]
        if start == 0 or len(piece) >= _SHORTEST_PIECE:
            yield piece


def _open(tokenizer: Tokenizer) -> Callable[[str], np.ndarray]:
    """Return a function from text to token ids, int64 [tokens]."""
    encode = _open_file(tokenizer) if isinstance(tokenizer, str | os.PathLike) else getattr(tokenizer, "encode", None)
    if encode is None:
        expected = "the path of a tokenizer.json, or an object with a method encode(text)"
        raise wrong_type("tokenizer", tokenizer, expected)

    def ids(text: str) -> np.ndarray:
        encoded = encode(text)
        try:
            return np.asarray(getattr(encoded, "ids", encoded), np.int64).reshape(-1)
        except (TypeError, ValueError) as error:
            raise CalibrationError(
                f"the tokenizer's encode() returns {type_name(encoded)}, expected token ids: {error}"
            ) from error

    return ids


def _open_file(path: str | os.PathLike[str]) -> Callable[[str], Any]:
    if not Path(path).is_file():
        raise CalibrationError(f"tokenizer file {os.fspath(path)!r} does not exist")
    if Path(path).suffix == ".bin":
        from .llama2c import Llama2cTokenizer

        return Llama2cTokenizer(path).encode
    if Path(path).suffix == ".onnx":
        return _open_graph(path)
    try:
        tokenizer = load_tokenizer(path)
    except ModelError as error:
        raise CalibrationError(str(error)) from error
    return lambda text: tokenizer.encode(text)


def _open_graph(path: str | os.PathLike[str]) -> Callable[[str], Any]:
    """Return a tokenizing function that runs an ONNX graph (gen_processing_models of onnxruntime-extensions)."""
    from ortolan.errors import one_line
    from ortolan.session import create_session

    session = create_session(path)
    given = session.get_inputs()
    outputs = [value.name for value in session.get_outputs()]
    if len(given) != 1 or given[0].type != "tensor(string)":
        raise CalibrationError(
            f"tokenizer graph {os.fspath(path)!r} has inputs {listing(f'{one.name} {one.type}' for one in given)}, "
            "expected a single one of strings"
        )
    wanted = "input_ids" if "input_ids" in outputs else outputs[0]

    def encode(text: str) -> Any:
        try:
            (ids,) = session.run([wanted], {given[0].name: np.array([text], object)})
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise CalibrationError(
                f"tokenizer graph {os.fspath(path)!r} fails on {text[:60]!r}: {one_line(error)}"
            ) from error
        return ids

    return encode

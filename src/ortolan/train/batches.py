"""Batches of texts with equal lengths, without padding. The batch of a step depends only on its number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, ModelError, listing
from ortolan.graph_passes.measure.feeds import model_inputs
from ortolan.graph_passes.text.texts import Tokenizer, feeds_of_texts

_SHORTEST = 4  # least tokens of a text, including special tokens; shorter texts teach little
_KNOWN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


class Batches:
    """Batches of texts with equal lengths."""

    def __init__(self, ids: Sequence[np.ndarray], batch_tokens: int, seed: int) -> None:
        """Sort texts, given as tokens int64 [tokens], by length. `seed` determines the order of batches."""
        self._rows, self._seed = list(ids), seed
        self._by_length: dict[int, np.ndarray] = {}
        lengths = np.array([len(row) for row in self._rows])
        for length in np.unique(lengths).tolist():
            self._by_length[length] = np.flatnonzero(lengths == length)
        self._sizes = {length: max(1, batch_tokens // length) for length in self._by_length}
        self.per_epoch = sum(-(-len(rows) // self._sizes[length]) for length, rows in self._by_length.items())
        self._epoch, self._order = -1, list[np.ndarray]()

    @property
    def digest(self) -> str:
        """A digest of texts, tokens and batch sizes."""
        sha = hashlib.sha256(repr((self._sizes, self._seed)).encode())
        for row in self._rows:
            sha.update(row.tobytes())
        return sha.hexdigest()

    @property
    def tokens(self) -> int:
        """The number of tokens of all texts."""
        return sum(map(len, self._rows))

    def batch(self, step: int) -> np.ndarray:
        """Return the input_ids of a step, int64 [texts, tokens]. Each epoch uses all texts, in a different order."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        return np.stack([self._rows[row] for row in self._order[index]])

    def _shuffled(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.default_rng((self._seed, epoch))
        found: list[np.ndarray] = []
        for length, rows in self._by_length.items():
            shuffled = rng.permutation(rows)
            found += np.array_split(shuffled, -(-len(rows) // self._sizes[length]))
        return [found[index] for index in rng.permutation(len(found))]


def token_ids(texts: Sequence[str], tokenizer: Tokenizer | None, model: ir.Model, max_tokens: int) -> list[np.ndarray]:
    """Return the tokens of each distinct text, int64 [tokens], split into pieces of at most `max_tokens`.

    Very short pieces are left out.

    Raises:
        CalibrationError: There is no usable text, or no tokenizer.
        ModelError: The model is not an encoder.
    """
    inputs = [value.name or "" for value in model_inputs(model)]
    unknown = set(inputs) - set(_KNOWN_INPUTS)
    if unknown or "input_ids" not in inputs:
        raise ModelError(
            f"model has inputs {listing(inputs)}, expected those of an encoder: input_ids and any of "
            f"{listing(_KNOWN_INPUTS[1:])}"
        )
    feeds = feeds_of_texts(list(dict.fromkeys(texts)), tokenizer, model)
    rows = [feed["input_ids"][0] for feed in feeds]
    pieces = [row[start : start + max_tokens] for row in rows for start in range(0, len(row), max_tokens)]
    found = [piece for piece in pieces if len(piece) >= _SHORTEST]
    if not found:
        raise CalibrationError(f"texts have fewer than {_SHORTEST} tokens each; give sentences, one a line")
    return found


def feeds_of(ids: np.ndarray, model: ir.Model) -> dict[str, np.ndarray]:
    """Return the inputs for token ids, int64 [texts, tokens], without padding."""
    made = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": np.zeros_like(ids),
        "position_ids": np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy(),
    }
    return {
        value.name or "": made[value.name or ""].astype(value.dtype.numpy() if value.dtype else np.int64)
        for value in model_inputs(model)
    }

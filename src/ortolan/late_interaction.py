"""Queries and documents of a late-interaction model (ColBERT): their tokens, and the vectors of these tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from ortolan.graph_passes.text.padding import MASK_NAMES, named_ids
from ortolan.graph_passes.text.text_plan import TextSettings
from ortolan.graph_passes.text.token_outputs import LateInteraction, Role, TokenLayer

from .errors import ModelError
from .tokens import Tokens, apply_dense, unit_length

_PROJECTED = ("last_hidden_state", "token_embeddings")  # outputs of models without the folder's linear layers


class LateTokens:
    """Turns texts into tokens as PyLate does, and the model's rows into token vectors."""

    def __init__(self, settings: TextSettings, width: int | None) -> None:
        """Read the settings. width: the width of the model's output, if known.

        Raises:
            ModelError: The output has neither the width before the folder's linear layers nor the one behind them.
        """
        late = settings.folder.late
        assert late is not None
        self._settings, self._late = settings, late
        self._layers = _missing_layers(late, settings.output, width)
        self.width = len(self._layers[-1].layer.weight) if self._layers else width

    def tokens(self, texts: Sequence[str], query: bool) -> list[Tokens]:
        """Return the tokens of queries or documents."""
        late, tokenizer = self._late, self._settings.file.tokenizer
        role = late.query if query else Role(late.document.prefix, self._settings.max_tokens)
        room = role.length - len(role.prefix[:1]) - self._settings.file.single.added
        if room < 1:
            raise ModelError(f"a text of {role.length} tokens has no room for words; restore the model's folder")
        prefix = [self._id_of(role.prefix)] if role.prefix else []
        found = []
        for encoding in tokenizer.encode_batch([text.strip() for text in texts], add_special_tokens=False):
            encoding.truncate(room)
            ids = tokenizer.post_process(encoding).ids
            ids = [*ids[:1], *prefix, *ids[1:]]
            attended = len(ids)
            if query and late.expands:
                ids += [self._mask_id] * (role.length - len(ids))
                attended = len(ids) if late.attends else attended
            kept = None if query else ~np.isin(ids, self._skipped)
            found.append(Tokens((), ids, [0] * len(ids), attended, kept))
        return found

    def vectors(self, rows: np.ndarray, tokens: Tokens) -> np.ndarray:
        """Return the vectors of a text, float32 [tokens, width], from the model's rows for its tokens.

        Each text is computed alone, so that results do not depend on the batch.
        """
        rows = rows.astype(np.float32, copy=False)
        for one in self._layers:
            made = apply_dense(one.layer, rows)
            if one.adds_input:
                made = made + (rows if one.residual is None else rows @ one.residual.T)
            rows = made
        if tokens.kept is not None:
            rows = rows[tokens.kept]
        return unit_length(rows) if self._settings.normalize else np.ascontiguousarray(rows)

    def _id_of(self, token: str) -> int:
        found: int | None = self._settings.file.tokenizer.token_to_id(token)
        if found is None:
            raise ModelError(
                f"tokenizer file {self._settings.file.path!r} has no token {token!r}, which the model's folder puts "
                "before texts; save the folder with PyLate, which adds the token"
            )
        return found

    @cached_property
    def _mask_id(self) -> int:
        """The token that expands queries: the mask token, or else the end of a text."""
        tokenizer = self._settings.file.tokenizer
        folder = Path(self._settings.file.path).parent
        usual = [one for name in MASK_NAMES if (one := tokenizer.token_to_id(name)) is not None]
        ids: list[int] = [*named_ids(folder, "mask"), *usual, *named_ids(folder, "eos")]
        if not ids:
            raise ModelError(
                f"no file beside {self._settings.file.path!r} names a mask token, which expands queries; add "
                "mask_token to tokenizer_config.json"
            )
        return ids[0]

    @cached_property
    def _skipped(self) -> list[int]:
        """The tokens that documents leave out. As in PyLate, a word without a token stands for the unknown token."""
        tokenizer = self._settings.file.tokenizer
        unknown = next(iter(named_ids(Path(self._settings.file.path).parent, "unk")), None)
        ids = (tokenizer.token_to_id(word) for word in self._late.skipped)
        return sorted({one for one in (unknown if one is None else one for one in ids) if one is not None})


def max_sim(query: np.ndarray, document: np.ndarray) -> np.float32:
    """Return the score of a document, float32 [tokens, width], for a query of such vectors.

    It is the sum, over the query's tokens, of the largest dot product with a token of the document.
    """
    if not len(document):
        return np.float32(0)
    return np.float32((query @ document.T).max(axis=1).sum())


def _missing_layers(late: LateInteraction, output: str, width: int | None) -> tuple[TokenLayer, ...]:
    """Return the folder's linear layers if the ONNX model does not contain them."""
    if not late.layers:
        return ()
    before, behind = late.layers[0].layer.weight.shape[1], late.layers[-1].layer.weight.shape[0]
    if width not in (None, before, behind):
        raise ModelError(
            f"output {output!r} has width {width}, expected {before}, before the folder's linear layers, or {behind}, "
            "behind them; restore the model's folder"
        )
    if width is None or before == behind:
        return late.layers if output in _PROJECTED else ()
    return late.layers if width == before else ()

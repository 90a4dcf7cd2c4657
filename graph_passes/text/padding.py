"""Reads the padding token's id from the files in a model's folder.

A late-interaction model (ColBERT) pads queries with mask tokens, hides them from attention, and reads their vectors. So
the mask token never counts as padding, even if a file names it (PyLate): then the padding token is the one of another
file, or the tokenizer's token with a usual name. If that is missing, or if files disagree, padding cannot be
distinguished from text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortolan.errors import ModelError

from .tokenizer_file import PAD_NAMES, read_json

_CONFIG, _TOKENIZER, _BESIDE, _SPECIAL, _SENTENCE = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config_sentence_transformers.json",
)
MASK_NAMES = ("[MASK]", "<mask>")


class UnknownPaddingError(Exception):
    """The reason why the padding token of a folder is not known."""


def read_padding_id(folder: Path | None) -> int:
    """Return the padding token's id.

    Raises:
        UnknownPaddingError: No file names it, the files disagree, or it is or may be the mask token.
    """
    if folder is None:
        raise UnknownPaddingError("the model was not read from a file")
    try:
        said = _read(folder)
        pads, masks, unlisted = _ids(said, "pad"), _ids(said, "mask"), _names(said, "mask")
        named = {name: _id_of(name, said[_TOKENIZER], said[_BESIDE]) for name in (*PAD_NAMES, *MASK_NAMES)}
    except (ModelError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnknownPaddingError(f"a file in {str(folder)!r} cannot be read: {error}") from error
    if not pads:
        raise UnknownPaddingError(f"no file in {str(folder)!r} names a padding token")
    expanding = {*masks.values(), *(named[name] for name in MASK_NAMES)}
    if set(pads.values()) <= expanding:
        pads |= {f"{_TOKENIZER} ({name})": one for name in PAD_NAMES if (one := named[name]) is not None}
    pads = {name: one for name, one in pads.items() if one not in expanding} or pads
    if len(set(pads.values())) > 1:
        found = ", ".join(f"{one} in {name}" for name, one in pads.items())
        raise UnknownPaddingError(f"the files in {str(folder)!r} disagree on the padding token: {found}")
    (pad,) = set(pads.values())
    if pad in expanding:
        raise UnknownPaddingError(f"token {pad} is both the padding token and the mask token")
    if unlisted and not masks:
        raise UnknownPaddingError(
            f"no file in {str(folder)!r} gives the id of the mask token {unlisted[0]!r}, which may be {pad} as well"
        )
    return pad


def named_ids(folder: Path, kind: str) -> list[int]:
    """Return the ids of the "mask", "eos" or "unk" token that the files of a folder name, without duplicates.

    Raises:
        ModelError: A file is malformed.
    """
    try:
        return list(dict.fromkeys(_ids(_read(folder), kind).values()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"a file in {str(folder)!r} names no valid {kind} token: {error}") from error


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: read_json(folder / name) for name in (_CONFIG, _TOKENIZER, _BESIDE, _SPECIAL, _SENTENCE)}


def _ids(said: Mapping[str, Mapping[str, Any]], kind: str) -> dict[str, int]:
    """Return the id of a token, such as "pad" or "mask", in each file that has it, by file name."""
    config, tokenizer = said[_CONFIG], said[_TOKENIZER]
    text = config.get("text_config") or {}
    given: dict[str, Any] = {_CONFIG: config.get(f"{kind}_token_id", text.get(f"{kind}_token_id"))}
    given[_SENTENCE] = said[_SENTENCE].get(f"{kind}_token_id")
    if kind == "pad":
        given[_TOKENIZER] = (tokenizer.get("padding") or {}).get("pad_id")
    for name in (_BESIDE, _SPECIAL):
        token = _name(said[name], kind)
        given[name] = None if token is None else _id_of(token, tokenizer, said[_BESIDE])
    for name, one in given.items():
        if one is not None and (not isinstance(one, int) or isinstance(one, bool)):
            raise ValueError(f"{name} has {kind} token id {one!r}, expected an integer")
    return {name: one for name, one in given.items() if one is not None}


def _names(said: Mapping[str, Mapping[str, Any]], kind: str) -> list[str]:
    """Return the tokens of this kind ("pad" or "mask") that the tokenizer's settings name."""
    return [token for name in (_BESIDE, _SPECIAL) if (token := _name(said[name], kind)) is not None]


def _name(settings: Mapping[str, Any], kind: str) -> str | None:
    token = settings.get(f"{kind}_token")
    found: str | None = token.get("content") if isinstance(token, dict) else token
    return found


def _id_of(token: str, tokenizer: Mapping[str, Any], beside: Mapping[str, Any]) -> int | None:
    """Return a token's id, or None if no file lists the token."""
    for one in tokenizer.get("added_tokens") or []:
        if one["content"] == token:
            return int(one["id"])
    for number, one in (beside.get("added_tokens_decoder") or {}).items():
        if one["content"] == token:
            return int(number)
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram vocabularies are pairs (token, score)
        return next((number for number, (name, _) in enumerate(vocabulary) if name == token), None)
    found = vocabulary.get(token)
    return None if found is None else int(found)

"""Conversion of text to token ids and back, for every decoder of the catalogue."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ortolan.graph_passes.text.llama2c import Llama2cTokenizer
from ortolan.graph_passes.text.tokenizer_file import load_tokenizer as load_json
from ortolan.graph_passes.text.tokenizer_file import read_json

from ..errors import OrtolanError

# Tokens that end a text or a turn, used if there is only a tokenizer.json. Tokens that end documents come first,
# because the first one also starts a text without a prompt if the model has no start token.
_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>"),
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"),
)


class TextTokenizer(Protocol):
    """A tokenizer for generation.

    Attributes:
        prefix: Tokens that the model expects before every text, such as <s>. It may be empty.
        start: The first token of a text that is sampled without a prompt.
        stop: Tokens that end a text.
    """

    prefix: tuple[int, ...]
    start: int
    stop: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without control tokens."""
        ...


class JsonTokenizer:
    """A Hugging Face tokenizer.json. Control tokens in a text are recognized, but not added.

    The prefix comes from tokenizer_config.json (add_bos_token, bos_token), else from the tokenizer's post-processor.
    Tokens that end a text come from generation_config.json (else config.json, genai_config.json), tokenizer_config.json
    and the post-processor. Without these, they are the control tokens with a common name, such as </s> or <|im_end|>,
    else all control tokens.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the tokenizer and the configuration files beside it.

        Raises:
            OrtolanError: The package `tokenizers` is missing, a file cannot be read, or no token ends a text.
        """
        self._tokenizer = load_json(path)
        folder = Path(path).parent
        config = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
        before, after = _template(self._tokenizer)
        bos = next(iter([*self._named(config, "bos"), *self._declared(folder, "bos")]), None)
        self.prefix = _prefix(config.get("add_bos_token"), bos, before)
        ends = [*self._declared(folder, "eos"), *self._named(config, "eos"), *after]
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: index for index, token in added.items() if token.special}
        ends = ends or [special[name] for name in _ENDS if name in special]
        ends = ends or [index for index in sorted(special.values()) if index not in self.prefix]
        if not ends:
            raise OrtolanError(
                f"{path} has no control token that ends a text, like <|endoftext|>; name it as eos_token_id in "
                "generation_config.json beside it"
            )
        self.stop = frozenset(ends)
        self.start = next(iter([*self.prefix, *([] if bos is None else [bos]), *ends]))

    def _named(self, config: Mapping[str, Any], kind: str) -> list[int]:
        """Return a list with the id of bos_token or eos_token in tokenizer_config.json; it may be empty."""
        token = config.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        index = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        return [] if index is None else [index]

    def _declared(self, folder: Path, kind: str) -> list[int]:
        """Return bos_token_id or eos_token_id as a list, from the first file whose ids are in the vocabulary."""
        for name in ("generation_config.json", "config.json", "genai_config.json"):
            content = read_json(folder / name)
            fields = content.get("model") if name == "genai_config.json" else content
            found = fields.get(f"{kind}_token_id") if isinstance(fields, dict) else None
            ids = found if isinstance(found, list) else [] if found is None else [found]
            if not all(type(index) is int and index >= 0 for index in ids):
                raise OrtolanError(
                    f"{str(folder / name)!r}: {kind}_token_id is {found!r}, expected a token's id, or a list of ids"
                )
            # Default ids of an architecture may be outside this vocabulary.
            if known := [index for index in ids if self._tokenizer.id_to_token(index) is not None]:
                return known
        return []

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without control tokens."""
        return str(self._tokenizer.decode(list(ids)))


def _template(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that the post-processor adds before and after a text."""
    text = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(text) + 1) if text else ():
        if whole[start : start + len(text)] == text:
            return tuple(whole[:start]), tuple(whole[start + len(text) :])
    return (), ()


def _prefix(adds_bos: Any, bos: int | None, before: tuple[int, ...]) -> tuple[int, ...]:
    """Return the prefix. adds_bos: add_bos_token of tokenizer_config.json, which overrides the post-processor."""
    if adds_bos is True and bos is not None and bos not in before:
        return (bos, *before)
    return tuple(index for index in before if index != bos) if adds_bos is False else before


def load_tokenizer(path: str | os.PathLike[str]) -> TextTokenizer:
    """Return the tokenizer in a file (tokenizer.json, or tokenizer.bin of llama2.c), or in a folder's tokenizer.json.

    Raises:
        OrtolanError: See JsonTokenizer.
    """
    if Path(path).is_dir():
        folder, path = path, Path(path) / "tokenizer.json"
        if not path.is_file():
            raise OrtolanError(f"folder {os.fspath(folder)!r} has no tokenizer.json; give the path of a tokenizer file")
    return Llama2cTokenizer(path) if Path(path).suffix == ".bin" else JsonTokenizer(path)

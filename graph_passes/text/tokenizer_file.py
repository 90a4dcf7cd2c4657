"""A tokenizer.json: its settings, and the tokenizer that `tokenizers` makes of it, which graphs are compared with."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ortolan.errors import ModelError, type_name

Refuse = Callable[[str], ModelError]
FIRST, SECOND = "A", "B"  # names of the two texts in a template
PAD_NAMES = ("[PAD]", "<pad>", "<|padding|>")
_KEY = re.compile(r'\s*,?\s*"(\w+)"\s*:\s*')
_SETTINGS = {"truncation", "padding", "added_tokens", "post_processor"}  # keys of a tokenizer.json
_LARGEST = 2**31  # larger limits mean no limit: transformers writes 10**30


@dataclass(frozen=True)
class Template:
    """The layout of one text or a pair: FIRST, SECOND or the id of a special token, each with its token type."""

    parts: tuple[tuple[str | int, int], ...]

    @property
    def added(self) -> int:
        """The number of special tokens."""
        return sum(isinstance(part, int) for part, _ in self.parts)


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json.

    Attributes:
        path: The file's path.
        content: The file's text.
        single: Layout of one text.
        pair: Layout of a pair of texts.
        pad_id: The padding token.
        max_tokens: Limit per text, from tokenizer_config.json, else from this file.
        lowercase: Lower-case texts first, if the tokenizer keeps capitals.
    """

    path: str
    content: str
    single: Template
    pair: Template
    pad_id: int
    max_tokens: int | None
    lowercase: bool = False

    def refuse(self, what: str) -> ModelError:
        """Return the error for an unsupported feature. what: the rest of the sentence after the file's name."""
        return ModelError(f"tokenizer file {self.path!r} {what}; keep tokens as the model's inputs")

    # The properties below are computed on first use, because callers that have tokens do not need them.
    @cached_property
    def said(self) -> Mapping[str, Any]:
        """The file's parsed JSON; `tokenizer` reads the file first.

        Raises:
            ModelError: The file is malformed.
        """
        said = _parsed(self.content, self.path)
        if not self._adds_lowercase:
            return said
        before = said.get("normalizer")
        others = before["normalizers"] if before and before["type"] == "Sequence" else [before] if before else []
        return {**said, "normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *others]}}

    @cached_property
    def tokenizer(self) -> Any:
        """A tokenizers.Tokenizer without padding and truncation.

        Raises:
            ModelError: The file is malformed.
        """
        return _open(json.dumps(self.said), self.path) if self._adds_lowercase else self._unchanged

    @cached_property
    def _unchanged(self) -> Any:
        return _open(self.content, self.path)

    @cached_property
    def _adds_lowercase(self) -> bool:
        return self.lowercase and "A" in _normalized(self._unchanged, "A")

    @property
    def added_tokens(self) -> list[Mapping[str, Any]]:
        """The file's added tokens."""
        return list(self.said.get("added_tokens") or [])


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """Return a tokenizers.Tokenizer without padding and truncation.

    Raises:
        ModelError: The file cannot be read.
    """
    return _open(_content(path), os.fspath(path))


def read_tokenizer_file(path: str | os.PathLike[str]) -> TokenizerFile:
    """Read a tokenizer.json and the tokenizer_config.json beside it.

    Raises:
        ModelError: The file cannot be read, or is not supported.
    """
    content, name = _content(path), os.fspath(path)

    def refuse(what: str) -> ModelError:
        return ModelError(f"tokenizer file {name!r} {what}; keep tokens as the model's inputs")

    try:
        return _read(name, content, refuse)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise refuse(f"is not well formed: {error!r}") from error


def _read(path: str, content: str, refuse: Refuse) -> TokenizerFile:
    said = _settings(content) or _parsed(content, path)
    single, pair = _templates(said.get("post_processor"), refuse)
    truncation = said.get("truncation") or {}
    beside = _beside(Path(path))
    if truncation.get("direction", "Right") != "Right" or beside.get("truncation_side", "right") != "right":
        raise refuse("cuts texts at their beginning, which is not supported")
    whole = cache(lambda: _parsed(content, path)["model"]["vocab"])
    vocabulary = _Vocabulary(said.get("added_tokens") or [], whole)
    return TokenizerFile(
        path=path,
        content=content,
        single=single,
        pair=pair,
        pad_id=_pad_id(said, beside, vocabulary, refuse),
        max_tokens=_limit(beside.get("model_max_length")) or truncation.get("max_length"),
    )


def _settings(content: str) -> dict[str, Any] | None:
    """Return the JSON members before "model", because parsing the vocabulary is slow; None if the order differs."""
    said: dict[str, Any] = {}
    decoder, position = json.JSONDecoder(), content.find("{") + 1
    try:
        while (key := _KEY.match(content, position)) is not None and key[1] != "model":
            said[key[1]], position = decoder.raw_decode(content, key.end())
    except (ValueError, RecursionError):
        return None
    return said if key is not None and said.keys() >= _SETTINGS and content.rstrip().endswith("}") else None


def _parsed(content: str, path: str) -> dict[str, Any]:
    """Return the whole JSON.

    Raises:
        ModelError: The content is not a tokenizer.json.
    """
    try:
        said = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"tokenizer file {path!r} is not a tokenizer.json: {error}") from error
    if not isinstance(said, dict) or not isinstance(said.get("model"), dict):
        raise ModelError(f"tokenizer file {path!r} is not a tokenizer.json: it has no model")
    return said


def _content(path: str | os.PathLike[str]) -> str:
    if not Path(path).is_file():
        raise ModelError(f"tokenizer file {os.fspath(path)!r} does not exist")
    try:
        return Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"tokenizer file {os.fspath(path)!r} cannot be read as UTF-8 text: {error}") from error


def _open(content: str, path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ModelError(
            "a tokenizer.json needs the package 'tokenizers'; install it with: pip install tokenizers"
        ) from error
    try:
        tokenizer = Tokenizer.from_str(content)
    except BaseException as error:  # BaseException, because pyo3's PanicException is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise ModelError(f"tokenizer file {path!r} is not a tokenizer.json: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _normalized(tokenizer: Any, text: str) -> str:
    return text if tokenizer.normalizer is None else str(tokenizer.normalizer.normalize_str(text))


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, or an empty one if the file does not exist.

    Raises:
        ModelError: The file cannot be read, or holds something else.
    """
    if not path.is_file():
        return {}
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{str(path)!r} is not a JSON file: {error}") from error
    if not isinstance(said, dict):
        raise ModelError(f"{str(path)!r} holds {type_name(said)}, expected a JSON object")
    return said


def _beside(path: Path) -> dict[str, Any]:
    """Return the tokenizer_config.json that transformers keeps beside a tokenizer.json."""
    return read_json(path.with_name("tokenizer_config.json"))


def _limit(number: Any) -> int | None:
    return int(number) if isinstance(number, int | float) and 0 < number < _LARGEST else None


class _Vocabulary:
    """Tokens and their ids. Added tokens are looked up first; the vocabulary is read only if needed."""

    def __init__(self, added: list[Mapping[str, Any]], read: Callable[[], Any]) -> None:
        self._added, self._read = {one["content"]: one["id"] for one in added}, read

    def id_of(self, token: str) -> int | None:
        found: int | None = self._added.get(token)
        if found is not None:
            return found
        others = self._read()
        if isinstance(others, list):  # Unigram vocabularies are pairs (token, score)
            return next((number for number, (name, _) in enumerate(others) if name == token), None)
        found = others.get(token)
        return found

    def has(self, number: int) -> bool:
        if number in self._added.values():
            return True
        others = self._read()
        return number < len(others) if isinstance(others, list) else number in others.values()


def _pad_id(said: Mapping[str, Any], beside: Mapping[str, Any], vocabulary: _Vocabulary, refuse: Refuse) -> int:
    """Return the padding token's id. Models may use it to find the end of a text (RoBERTa's positions)."""
    number = (said.get("padding") or {}).get("pad_id")
    if number is None:
        named = beside.get("pad_token")
        named = named.get("content") if isinstance(named, dict) else named
        names = [named] if isinstance(named, str) else list(PAD_NAMES)
        number = next((found for name in names if (found := vocabulary.id_of(name)) is not None), 0)
    if not isinstance(number, int) or not 0 <= number < _LARGEST or not vocabulary.has(number):
        raise refuse(f"pads with id {number!r}, which is not a token")
    return number


def _templates(processor: Mapping[str, Any] | None, refuse: Refuse) -> tuple[Template, Template]:
    """Return the layout of one text and of a pair."""
    kind = None if processor is None else processor.get("type")
    if kind == "Sequence":
        assert processor is not None
        others = [one for one in processor["processors"] if one.get("type") != "ByteLevel"]
        if len(others) > 1:
            raise refuse(f"has post-processors {[one.get('type') for one in others]}, expected one")
        return _templates(others[0] if others else None, refuse)
    if processor is None or kind == "ByteLevel":
        return Template(((FIRST, 0),)), Template(((FIRST, 0), (SECOND, 1)))
    if kind == "TemplateProcessing":
        single, pair = _template(processor["single"], processor), _template(processor["pair"], processor)
        for template, texts in ((single, [FIRST]), (pair, [FIRST, SECOND])):
            if sorted(part for part, _ in template.parts if isinstance(part, str)) != texts:
                raise refuse(f"has a template of {template.parts}, expected each of {texts} once")
        return single, pair
    if kind in ("BertProcessing", "RobertaProcessing"):
        (_, begin), (_, end) = processor["cls"], processor["sep"]
        single = Template(((begin, 0), (FIRST, 0), (end, 0)))
        if kind == "BertProcessing":
            return single, Template((*single.parts, (SECOND, 1), (end, 1)))
        return single, Template((*single.parts, (end, 0), (SECOND, 0), (end, 0)))
    raise refuse(f"has a post-processor {kind!r}, expected a template, or BERT's or RoBERTa's")


def _template(parts: list[Mapping[str, Any]], processor: Mapping[str, Any]) -> Template:
    found: list[tuple[str | int, int]] = []
    for part in parts:
        ((kind, said),) = part.items()
        if kind == "Sequence":
            found.append((said["id"], said["type_id"]))
        else:
            found += [(number, said["type_id"]) for number in processor["special_tokens"][said["id"]]["ids"]]
    return Template(tuple(found))

"""The prompt of a reranker with a decoder's layers: the text in which it reads a query and a document.

The file pair_prompt.json in a model's folder holds prompts by name:

    {"default": "query", "prompts": {"query": {"before": "…<Query>: ", "between": "<Document>: ", "after": "…"}}}

A prompt is tokenized as one text, without the tokenizer's special tokens. Texts that are too long are cut in front of
the first added token in `after`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ortolan.errors import ModelError

from .tokenizer_file import Template, TokenizerFile, read_json

PAIR_PROMPT = "pair_prompt.json"
_PARTS = ("before", "between", "after")


@dataclass(frozen=True)
class PairPrompt:
    """The texts before the query, between query and document, and after the document."""

    before: str
    between: str
    after: str

    def split(self, file: TokenizerFile) -> SplitPrompt:
        """Return the prompt, divided at its outermost added tokens, where tokenizers always divide texts."""
        added = {token["id"] for token in file.added_tokens}
        before, after = (file.tokenizer.encode(text, add_special_tokens=False) for text in (self.before, self.after))
        head = max((index + 1 for index, one in enumerate(before.ids) if one in added), default=0)
        tail = next((index for index, one in enumerate(after.ids) if one in added), len(after.ids))
        start = before.offsets[head - 1][1] if head else 0
        end = after.offsets[tail][0] if tail < len(after.ids) else len(self.after)
        inner = PairPrompt(self.before[start:], self.between, self.after[:end])
        return SplitPrompt(tuple(before.ids[:head]), inner, tuple(after.ids[tail:]))


@dataclass(frozen=True)
class SplitPrompt:
    """A prompt whose ends are token ids, which stay if a text is cut."""

    head: tuple[int, ...]
    inner: PairPrompt
    tail: tuple[int, ...]

    @property
    def template(self) -> Template:
        """The ids around the text of a pair."""
        return Template((*((one, 0) for one in self.head), ("A", 0), *((one, 0) for one in self.tail)))

    def join(self, query: str, document: str) -> str:
        """Return the text of a pair."""
        return self.inner.before + query + self.inner.between + document + self.inner.after


@dataclass(frozen=True)
class PairPrompts:
    """The prompts of a folder by name, and the name of the default one."""

    prompts: Mapping[str, PairPrompt]
    default: str

    def to_json(self) -> dict[str, Any]:
        """Return the content of pair_prompt.json."""
        return {"default": self.default, "prompts": {name: asdict(one) for name, one in self.prompts.items()}}


def read_pair_prompts(folder: Path) -> PairPrompts | None:
    """Return the prompts of a folder; None if it has none.

    Raises:
        ModelError: pair_prompt.json is malformed.
    """
    path = folder / PAIR_PROMPT
    said = read_json(path)
    if not said:
        return None
    default, given = said.get("default"), said.get("prompts")
    if not isinstance(given, dict) or not given or not isinstance(default, str) or default not in given:
        raise ModelError(f"{str(path)!r} has default {default!r}, expected the name of one of its prompts")
    for name, one in given.items():
        if not isinstance(one, dict) or not all(isinstance(one.get(part), str) for part in _PARTS):
            raise ModelError(f"prompt {name!r} in {str(path)!r} is {one!r}, expected the texts {', '.join(_PARTS)}")
    return PairPrompts({name: PairPrompt(*(one[part] for part in _PARTS)) for name, one in given.items()}, default)

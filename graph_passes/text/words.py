"""Splits texts into words between marks, as a BPE or Unigram tokenizer.json specifies.

The steps find added tokens, normalize characters and split words. Each step is a find and replace in one string that
joins all texts of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from .marks import LAST_OF_ASCII, MARKS, SPLIT, TEXT_END, found_token, narrowed
from .nodes import Nodes
from .normalizing import Step, Table, read_steps
from .pieces import Kind, PieceModel, Search, byte_texts
from .splitting import Replacements, read_splits, spaces_beside
from .tokenizer_file import TokenizerFile

_MAX_ADDED = 2**16  # found_token writes 16 binary digits
_MAX_PROBED = 100
_LONG = 2000  # expressions of more characters take noticeable time to compile, in each call


@dataclass(frozen=True)
class _Added:
    """An added token. late: it is found after normalization. left, right: it includes the spaces on that side."""

    content: str
    id: int
    mark: str
    late: bool
    left: bool
    right: bool


@dataclass(frozen=True)
class Words:
    """The steps that split texts into words.

    Attributes:
        beside: Replacements that are applied before the steps.
        steps: The steps in order; the first table also adds the mark after each text.
        added: Ids of added tokens, in the order of their marks.
        probes: Texts that these steps might get wrong.
    """

    beside: Replacements
    steps: tuple[Step, ...]
    added: tuple[int, ...]
    probes: tuple[str, ...]

    def split(self, nodes: Nodes, texts: ir.Value) -> ir.Value:
        """Join strings [batch] to one [1]: SPLIT between words and added tokens, TEXT_END after each text."""
        joined = nodes.replace(texts, self.beside)
        is_wide: ir.Value | None = None
        for number, step in enumerate(self.steps):
            if isinstance(step, dict):
                model, becomes = _rewriter(step)
                pieces = nodes.pieces(joined, model, ends=number == 0)
                joined = nodes.join(pieces, becomes, end="" if number else TEXT_END)
                is_wide = _is_any_wide(nodes, pieces, becomes)
            elif is_wide is not None and _may_be_narrowed(step):
                joined = _replace_narrow_or_wide(nodes, joined, step, is_wide)
            else:
                joined, is_wide = nodes.replace(joined, step), None
        return joined

    @property
    def marked_on_both_sides(self) -> bool:
        """True if there is a mark on both sides of each word."""
        last = self.steps[-1]
        return not isinstance(last, dict) and last[-1][1] == rf"{SPLIT}\1{SPLIT}" and last[-1][0].startswith("(")


def _is_any_wide(nodes: Nodes, pieces: ir.Value, becomes: Sequence[str | bytes]) -> ir.Value:
    """Return whether the results of the pieces contain characters other than ASCII and marks."""
    wide = nodes.constant(np.array([not _is_narrow(made) for made in becomes]).astype(np.int32))
    found = nodes.op("Gather", wide, pieces, axis=0)
    found = nodes.op("Concat", found, nodes.constant(np.zeros(1, np.int32)), axis=0)
    return nodes.cast(nodes.largest(found, keepdims=0), ir.DataType.BOOL)


def _replace_narrow_or_wide(nodes: Nodes, text: ir.Value, step: Replacements, is_wide: ir.Value) -> ir.Value:
    narrow = [(narrowed(pattern), by) for pattern, by in step]
    return nodes.choose(is_wide, lambda inner: inner.replace(text, step), lambda inner: inner.replace(text, narrow))


def read_words(file: TokenizerFile) -> Words:
    """Read the steps of a tokenizer.json.

    Raises:
        ModelError: A feature is not supported.
    """
    said, refuse = file.said, file.refuse
    steps = read_steps(said.get("normalizer"), refuse)
    tokens = [_read_added(number, token, file) for number, token in enumerate(file.added_tokens)]
    if len(tokens) > _MAX_ADDED:
        raise refuse(f"has {len(tokens)} added tokens, expected at most {_MAX_ADDED}")
    late = [token for token in tokens if token.late]
    early = [token for token in tokens if not token.late]
    assert isinstance(steps[0], dict)
    steps[0] = steps[0] | {token.content: token.mark for token in early}
    # If spaces can be added tokens, a token includes only spaces beside it that are not tokens themselves.
    spaced = any(token.content.isspace() for token in tokens)
    if spaced and (behind := _spaces(early, marked=True)):
        steps.insert(1, behind)
    if late:
        table = {token.content: token.mark for token in late}
        beside = _spaces(late, marked=spaced)
        steps += [step for step in ((table, beside) if spaced else (beside, table)) if step]
    splits = read_splits(said.get("pre_tokenizer"), refuse)
    return Words(
        beside=[] if spaced else _spaces(early, marked=False),
        steps=(*steps, *([splits] if splits else [])),
        added=tuple(token.id for token in tokens),
        probes=_probes([token["content"] for token in file.added_tokens]),
    )


def marked_tokens(words: Words) -> list[str]:
    """Return the marks of added tokens."""
    return [found_token(number) for number in range(len(words.added))]


def _rewriter(table: Table) -> tuple[PieceModel, list[str | bytes]]:
    """Return a model whose pieces are the table's texts and all bytes, and the replacement of each piece."""
    model = PieceModel(Search.CHARACTERS)
    becomes: list[str | bytes] = [b""] * len(model.pieces)
    model.add_bytes()
    becomes += byte_texts()
    for text, made in table.items():
        model.add(text, Kind.FOUND)
        becomes.append(made)
    return model, becomes


def _is_narrow(text: str | bytes) -> bool:
    """Return whether a text has only ASCII characters and marks."""
    return all(
        one in MARKS or one <= chr(LAST_OF_ASCII) for one in (text if isinstance(text, str) else text.decode("latin-1"))
    )


def _may_be_narrowed(splits: Replacements) -> bool:
    """Return whether the expressions are long, and map ASCII texts to ASCII texts."""
    return all(_is_narrow(by) for _, by in splits) and any(len(pattern) > _LONG for pattern, _ in splits)


def _read_added(number: int, token: Mapping[str, Any], file: TokenizerFile) -> _Added:
    content, late = token["content"], bool(token.get("normalized") and file.said.get("normalizer"))
    content = file.tokenizer.normalizer.normalize_str(content) if late else content
    if token.get("single_word") or not content or any(mark in content for mark in (*MARKS, "\0")):
        raise file.refuse(f"has the added token {token['content']!r} with options that are not supported")
    sides = bool(token.get("lstrip")), bool(token.get("rstrip"))
    return _Added(content, token["id"], SPLIT + found_token(number) + SPLIT, late, *sides)


def _spaces(tokens: Sequence[_Added], marked: bool) -> Replacements:
    return spaces_beside([(token.mark if marked else token.content, token.left, token.right) for token in tokens])


def _probes(contents: Sequence[str]) -> tuple[str, ...]:
    """Return texts that contain added tokens, and beginnings of them."""
    some = contents[:_MAX_PROBED]
    made = [f"a{content} b  {content}  c" for content in some]
    return (*made, "".join(some), " ".join(some), *(f"a{content[:-1]}" for content in some))

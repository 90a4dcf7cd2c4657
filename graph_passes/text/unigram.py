"""A Unigram tokenizer.json (XLM-RoBERTa, T5, ALBERT, DeBERTa, …) as nodes of onnxruntime-extensions.

onnxruntime-extensions' HfJsonTokenizer reads such files, but does not normalize and split texts as they specify. So
these nodes normalize texts and split words, and only the search is left to SentencepieceTokenizer, which gets the
pieces and scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .marks import SPLIT, TEXT_END
from .nodes import EXTENSIONS_DOMAIN, Nodes, Tokens
from .pieces import UNKNOWN_ID, Kind, PieceModel, Search
from .tokenizer_file import TokenizerFile
from .words import Words, marked_tokens, read_words

_TEXT_END_ID = -1
_SPLIT = b"\xff"  # StringSplit splits at single bytes; this byte does not occur in UTF-8


@dataclass(frozen=True)
class Unigram:
    """A Unigram tokenizer.

    Attributes:
        words: Splits texts into words.
        model: The pieces.
        ids: The token id of each piece.
    """

    words: Words
    model: PieceModel
    ids: tuple[int, ...]

    @property
    def probes(self) -> tuple[str, ...]:
        """Texts that this tokenizer might get wrong."""
        return self.words.probes

    def tokenize(self, nodes: Nodes, texts: ir.Value) -> Tokens:
        """Add nodes that tokenize texts, strings [batch]."""
        joined = nodes.replace(self.words.split(nodes, texts), [(TEXT_END, SPLIT + TEXT_END + SPLIT), (SPLIT, _SPLIT)])
        # Words are tokenized separately, because float32 sums of scores are too inexact for whole texts.
        words = nodes.many(
            "StringSplit", 3, joined, nodes.texts(_SPLIT), nodes.constant(np.array([True])), domain=EXTENSIONS_DOMAIN
        )[1]
        pieces = nodes.pieces(words, self.model, ends=False)
        return nodes.split_at(nodes.op("Gather", nodes.ints(*self.ids), pieces, axis=0), _TEXT_END_ID)


def read_unigram(file: TokenizerFile) -> Unigram:
    """Read a Unigram tokenizer.

    Raises:
        ModelError: Names a feature that is not supported.
    """
    said, refuse = file.said["model"], file.refuse
    unknown = said.get("unk_id")
    if not isinstance(unknown, int) or not 0 <= unknown < len(said["vocab"]):
        raise refuse(f"has a Unigram model with unk_id {unknown!r}, expected the number of a piece")
    words = read_words(file)
    model = PieceModel(Search.UNIGRAM)
    ids = [0] * len(model.pieces)
    ids[UNKNOWN_ID] = unknown
    numbers = {piece: number for number, (piece, _) in enumerate(said["vocab"])}
    if said.get("byte_fallback"):
        missing = next((name for byte in range(256) if (name := f"<0x{byte:02X}>") not in numbers), None)
        if missing is not None:
            raise refuse(f"lacks the piece {missing!r} of a byte")
        model.add_bytes()
        ids += [numbers[f"<0x{byte:02X}>"] for byte in range(256)]
    taken = {content for content, _, _ in model.pieces}
    for number, (piece, score) in enumerate(said["vocab"]):
        if piece.encode() not in taken:
            taken.add(piece.encode())
            model.add(piece, Kind.NORMAL, score)
            ids.append(number)
    for mark, number in zip([TEXT_END, *marked_tokens(words)], [_TEXT_END_ID, *words.added], strict=True):
        model.add(mark, Kind.FOUND)
        ids.append(number)
    return Unigram(words, model, tuple(ids))

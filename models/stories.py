"""Text in and out of the stories15m model: llama2.c's tokenizer and greedy generation with a key/value cache."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import OrtolanError

if TYPE_CHECKING:
    import onnxruntime as ort

BOS = 1
EOS = 2
_FIRST_BYTE_TOKEN = 3
_FIRST_TEXT_TOKEN = _FIRST_BYTE_TOKEN + 256


class TokenizerError(OrtolanError):
    """A tokenizer file that cannot be read."""


class Llama2cTokenizer:
    """The byte-pair tokenizer of llama2.c (its tokenizer.bin): 3 control tokens, 256 byte tokens, then text."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads tokenizer.bin. Raises TokenizerError when it is cut short or too small."""
        data = Path(path).read_bytes()
        self.pieces: list[bytes] = []
        self.scores: list[float] = []
        position = 4  # after the longest piece's length, which only C needs
        while position < len(data):
            if position + 8 > len(data):
                raise TokenizerError(f"{path} ends inside token {len(self.pieces)}; the file is cut short")
            score, length = struct.unpack_from("<fi", data, position)
            position += 8
            if not 0 <= length <= len(data) - position:
                raise TokenizerError(f"{path}: token {len(self.pieces)} has length {length}; not a tokenizer.bin?")
            self.pieces.append(data[position : position + length])
            self.scores.append(score)
            position += length
        if len(self.pieces) < _FIRST_TEXT_TOKEN:
            raise TokenizerError(f"{path} holds {len(self.pieces)} tokens, expected at least {_FIRST_TEXT_TOKEN}")
        # Byte tokens stay out: some files spell them like the character, and the character's own token must win.
        self._ids = {piece: index for index, piece in enumerate(self.pieces) if index >= _FIRST_TEXT_TOKEN}

    def encode(self, text: str) -> list[int]:
        """Token ids with BOS in front, merged greedily by score as llama2.c does."""
        ids: list[int] = []
        # SentencePiece puts a space before the text.
        for character in " " + text if text else "":
            raw = character.encode()
            known = self._ids.get(raw)
            ids += [known] if known is not None else [byte + _FIRST_BYTE_TOKEN for byte in raw]
        while True:
            merges = [
                (index, merged)
                for index, (left, right) in enumerate(pairwise(ids))
                if (merged := self._ids.get(self.pieces[left] + self.pieces[right])) is not None
            ]
            if not merges:
                return [BOS, *ids]
            index, merged = max(merges, key=lambda merge: self.scores[merge[1]])
            ids[index : index + 2] = [merged]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens left out; after BOS, the space that encode put there is left out too.

        Raises IndexError for an id outside the vocabulary.
        """
        raw = b"".join(
            bytes([index - _FIRST_BYTE_TOKEN]) if index < _FIRST_TEXT_TOKEN else self.pieces[index]
            for index in ids
            if index >= _FIRST_BYTE_TOKEN
        )
        text = raw.decode(errors="replace")
        return text.removeprefix(" ") if ids and ids[0] == BOS else text


def generate(session: ort.InferenceSession, prompt: Sequence[int], max_new_tokens: int = 200) -> list[int]:
    """Continues `prompt` with the most likely tokens, until BOS or EOS comes or `max_new_tokens` are made.

    session: a decoder with inputs and outputs as build_llama makes them.
    prompt: at least one token id. Returns the new ids only, without the BOS or EOS.
    """
    past = {
        value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    outputs = ["logits", *(name.replace("past_key_values", "present") for name in past)]
    step = np.array([prompt], np.int64)
    seen = 0
    made: list[int] = []
    while len(made) < max_new_tokens:
        positions = np.arange(seen, seen + step.shape[1], dtype=np.int64)[None, :]
        seen += step.shape[1]
        feeds = {"input_ids": step, "position_ids": positions, "attention_mask": np.ones((1, seen), np.int64)}
        logits, *present = session.run(outputs, feeds | past)
        token = int(logits[0, -1].argmax())
        if token in (BOS, EOS):
            break
        made.append(token)
        past = dict(zip(past, present, strict=True))
        step = np.array([[token]], np.int64)
    return made

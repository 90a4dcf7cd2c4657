"""A tokenizer of letters."""

from __future__ import annotations


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 50 for letter in text]

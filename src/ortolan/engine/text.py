"""Text of an answer while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_INCOMPLETE = "�"  # what decoders write for the bytes of a character that is not complete
_CONTEXT = 6  # tokens of the prompt that an answer is decoded with; decoders look at the token before
_CHARACTER = 4  # a character has at most this many tokens
_MOST_PENDING = 16  # no character has more bytes; tokens beyond are invalid, and waiting for others is futile


class Detokenizer:
    """Incremental decoding of tokens.

    A decoder may change a token's text with its neighbors: a byte of a character, or a space that it strips at the
    beginning. So this decodes a short window twice, without and with the new tokens, and returns the difference. The
    window begins with the tokens of the text before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], special: frozenset[int]) -> None:
        """Create a detokenizer of an answer.

        Args:
            tokenizer: The model's tokenizer.
            prompt: The tokens before the answer.
            special: Tokens without text.
        """
        self._decode = tokenizer.decode
        self._special = special
        self._window: list[int] = []  # tokens that are decoded together
        self._read = 0  # tokens of the window whose text was returned, or belongs to the prompt
        self._before = ""  # their text
        self._begin([token for token in prompt[-_CONTEXT - 2 * _CHARACTER :] if token not in special])

    def push(self, token: int) -> str:
        """Return the text that a token completes."""
        if token in self._special:
            return ""
        window = self._window
        window.append(token)
        text = self._text(window)
        if text.endswith(_INCOMPLETE) and len(window) - self._read <= _MOST_PENDING:
            return ""
        new = self._new(text)
        if not new:
            del window[self._read + _MOST_PENDING :]
            return ""
        del window[: self._read]
        self._read = len(window)
        self._before = self._text(window)
        return new

    def end(self) -> str:
        """Return the text of tokens that did not complete a character."""
        if self._read == len(self._window):
            return ""
        new = self._new(self._text(self._window))
        self._read = len(self._window)
        return new

    def _begin(self, prompt: list[int]) -> None:
        """Take context from the end of a prompt, from the beginning of a character to the end of a complete one.

        Tokens after it begin a character that the answer may complete. Without such a context, the answer has none.
        """
        for end in range(len(prompt), max(len(prompt) - _CHARACTER, 0), -1):
            for start in range(max(end - _CONTEXT, 0), max(end - _CONTEXT - _CHARACTER, -1), -1):
                text = self._text(prompt[start:end])
                if _INCOMPLETE not in text:
                    self._window, self._read, self._before = prompt[start:], end - start, text
                    return

    def _new(self, text: str) -> str:
        # Byte fallback turns a whole run of bytes into U+FFFD if its end is incomplete, and so text that was returned.
        if text.startswith(self._before):
            return text[len(self._before) :]
        return self._text(self._window[self._read :])

    def _text(self, tokens: list[int]) -> str:
        return self._decode(tokens, skip_special_tokens=False) if tokens else ""


class TextStream:
    """Text of an answer, held back as long as a stop string may follow.

    Attributes:
        stopped: Whether a stop string was found. No text follows then.
    """

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Return the text that is known not to belong to a stop string, after a token."""
        new = self._detokenizer.push(token)
        return self._emit(new) if new and self._stop else new

    def end(self) -> str:
        """Return the rest of the text, after the last token."""
        if self.stopped:
            return ""
        new = self._detokenizer.end()
        text = self._emit(new) if new and self._stop else new
        if self.stopped:
            return text
        held, self._held = self._held, ""
        return text + held

    def _emit(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        first = min((at for at in map(text.find, self._stop) if at >= 0), default=-1)
        if first >= 0:
            self.stopped = True
            self._held = ""
            return text[:first]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens."""
    return frozenset(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest beginning of a stop string that a text ends with, short of the whole."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

"""Compile a grammar in a process with limits. `grammar.py` runs this file as a script, without the package.

Reads {"grammar": text, "special_tokens": names} from standard input. Writes what is wrong with the grammar to standard
output, or an empty string. A compiler that exceeds the limits of processor time or memory dies with the process.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any


class _Bytes:
    """A tokenizer whose tokens are single bytes and the special tokens of the model."""

    bos_token_id = None

    def __init__(self, special_tokens: list[str]) -> None:
        self.tokens = [bytes([value]) for value in range(256)]
        self.tokens += [token.encode() for token in (*special_tokens, "<end of text>")]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main(seconds: int, memory_bytes: int, limits: dict[str, Any]) -> None:
    """Compile the grammar on standard input.

    Args:
        seconds: Processor time.
        memory_bytes: Address space.
        limits: Arguments of LLParserLimits.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    given = json.load(sys.stdin.buffer)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(given["special_tokens"])), slices=[])
    matcher = LLMatcher(tokenizer, given["grammar"], log_level=0, limits=LLParserLimits(**limits, verbose_errors=False))
    if not matcher.is_error():
        matcher.compute_bitmask()
    sys.stdout.buffer.write(matcher.get_error().encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), {name: int(value) for name, value in (a.split("=") for a in sys.argv[3:])})

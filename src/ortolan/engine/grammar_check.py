"""Compile a grammar in a process with limits. `grammar.py` runs this file as a script, without the package.

Reads the grammar from standard input and writes what is wrong with it to standard output, or an empty string. A compiler
that exceeds the limits of processor time or memory dies with the process.
"""

from __future__ import annotations

import resource
import sys


class _Bytes:
    """A tokenizer whose tokens are single bytes, and one that ends the text."""

    tokens = tuple(bytes([value]) for value in range(256)) + (b"<end>",)
    special_token_ids = (256,)
    bos_token_id = None
    eos_token_id = 256

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main(seconds: int, memory_bytes: int, limits: dict[str, int]) -> None:
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

    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])
    text = sys.stdin.buffer.read().decode()
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**limits, verbose_errors=False))
    if not matcher.is_error():
        matcher.compute_bitmask()
    sys.stdout.buffer.write(matcher.get_error().encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), {name: int(value) for name, value in (a.split("=") for a in sys.argv[3:])})

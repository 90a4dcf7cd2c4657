"""Structured output: answers that match a JSON schema or a grammar, by llguidance.

A grammar may come from an untrusted client. It is first compiled in a process with limits (`grammar_check.py`), and the
work and memory of each later step are bounded.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, OrtolanError, one_line, wrong_type

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from tokenizers import Tokenizer

MOST_GRAMMAR_BYTES: Final = 1 << 18
_COMPILE_SECONDS = 2  # processor time
_COMPILE_BYTES = 1 << 30
_WALL_SECONDS = 60  # for a busy machine
_LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "max_grammar_size": 200_000,
}
# JSON as Python's json.dumps writes it, which models were trained on. With free whitespace, small models may write
# spaces until max_tokens.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_CACHED_GRAMMARS = 32
_MOST_MESSAGE = 300  # characters
_SCHEMA_ERROR = "failed to compile JSON schema: "
_QUOTED_LINE = re.compile(r"\n\s*\d+ \| ")  # of the grammar, below the reason


def json_expression(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """Return the JSON values of a schema as an expression of a Lark grammar, written as by `json.dumps`.

    Args:
        schema: The schema.
        lenient: Ignore keywords that cannot be enforced. By default, they are errors when the grammar is compiled.

    Raises:
        ArgumentError: The schema is not JSON.
    """
    try:
        return "%json " + json.dumps({**schema, "x-guidance": {**_COMPACT, "lenient": lenient}}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"the JSON schema is not JSON: {one_line(error)}") from error


class GrammarTokenizer:
    """A tokenizer prepared for grammars, with the grammars that were last compiled for it. One serves all requests.

    Attributes:
        vocabulary: The number of logits of the model.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocabulary: int, end_tokens: Collection[int]) -> None:
        """Read the tokens, which takes about 0.2 s for 50,000 of them.

        Args:
            tokenizer: The model's tokenizer.
            vocabulary: The number of logits of the model, at least that of the tokenizer's tokens.
            end_tokens: Tokens that end an answer. They are allowed where the grammar may end.

        Raises:
            ArgumentError: There are no end tokens, or tokens outside the vocabulary.
            OrtolanError: llguidance is missing.
        """
        if not end_tokens:
            raise ArgumentError("end_tokens is empty, expected the tokens that end an answer")
        llguidance = _import_llguidance()
        added = tokenizer.get_added_tokens_decoder().values()
        # All of them: llguidance knows tokens such as <tool_call> by name, whether they are marked as special or not.
        self._special_tokens = sorted({token.content for token in added})
        content = json.loads(tokenizer.to_str())
        content["truncation"] = content["padding"] = None
        try:
            self._tokenizer = llguidance.LLTokenizer(
                json.dumps(content), n_vocab=vocabulary, eos_token=sorted(int(token) for token in end_tokens)
            )
        except ValueError as error:
            raise ArgumentError(f"the tokenizer does not fit {vocabulary} logits: {one_line(error)}") from error
        self.vocabulary = vocabulary
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str, name: str) -> LLMatcher:
        """Return the initial state of a grammar, which belongs to the caller.

        Args:
            grammar: A grammar in llguidance's variant of Lark.
            name: What the grammar is called in errors.

        Raises:
            ArgumentError: The grammar has errors or is too large.
        """
        with self._lock:
            if (found := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return found.deep_copy()
        _check(grammar, self._special_tokens, name)
        llguidance = _import_llguidance()
        matcher: LLMatcher = llguidance.LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # copies share what the first mask builds
        if matcher.is_error():
            raise ArgumentError(f"{name}: {_message(matcher.get_error())}")
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()


class TokenGrammar:
    """A state of a grammar over tokens: the engine's `Grammar`.

    Compiling takes about 0.1 s, or microseconds for a recent grammar of the same `GrammarTokenizer`. A copy takes
    microseconds.
    """

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        """Use one of the class methods instead."""
        self._matcher = matcher
        self._words = words

    @classmethod
    def from_json_schema(cls, schema: str | bool | Mapping[str, Any], tokenizer: GrammarTokenizer) -> TokenGrammar:
        """Return a grammar of the JSON values that match a schema, written as by `json.dumps`: `{"a": [1, 2]}`.

        Properties have the order of the schema. Keywords that cannot be enforced are errors, not ignored.

        Args:
            schema: The schema, or its JSON text. References may only point into the schema.
            tokenizer: The model's tokenizer.

        Raises:
            ArgumentError: The schema is not valid, uses a keyword that is not supported, or is too large.
        """
        if isinstance(schema, str):
            _check_size("the JSON schema", schema)
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ArgumentError(f"the JSON schema is not valid JSON: {one_line(error)}") from error
        if schema is False:
            raise ArgumentError("the JSON schema is false, which no value matches")
        if schema is not True and not isinstance(schema, Mapping):
            raise wrong_type("the JSON schema", schema, "an object or a boolean")
        grammar = f"start: {json_expression({} if schema is True else schema)}"
        _check_size("the JSON schema", grammar)
        return cls._compile(grammar, "the JSON schema", tokenizer)

    @classmethod
    def from_lark(cls, grammar: str, tokenizer: GrammarTokenizer) -> TokenGrammar:
        """Return a grammar in llguidance's variant of Lark, with the start rule `start`.

        Args:
            grammar: Its text. Special tokens are written with their names, such as <|im_end|>, not with their numbers.
            tokenizer: The model's tokenizer.

        Raises:
            ArgumentError: The grammar is not valid or too large.
        """
        _check_text("the grammar", grammar)
        return cls._compile(grammar, "the grammar", tokenizer)

    @classmethod
    def _compile(cls, grammar: str, name: str, tokenizer: GrammarTokenizer) -> TokenGrammar:
        return cls(tokenizer.compile(grammar, name), -(-tokenizer.vocabulary // 32))

    @property
    def finished(self) -> bool:
        """True if the answer is complete, so that nothing may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def mask(self) -> NDArray[np.uint32] | None:
        """Return the allowed tokens, uint32 [ceil(vocabulary / 32)], token t in bit t % 32.

        Raises:
            ArgumentError: The grammar exceeds the limits of one step.
        """
        words = np.zeros(self._words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise ArgumentError(f"the grammar is too complex: {_message(self._matcher.get_error())}")
        return words

    def advance(self, token: int) -> None:
        """Go to the state after a token.

        Raises:
            ArgumentError: The token is not allowed, or the grammar exceeds the limits of one step.
        """
        if not self._matcher.consume_token(token):
            raise ArgumentError(
                f"the grammar cannot continue with token {token}: {_message(self._matcher.get_error())}"
            )

    def copy(self) -> TokenGrammar:
        """Return an independent copy of this state."""
        return TokenGrammar(self._matcher.deep_copy(), self._words)


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise OrtolanError(
            f"structured output needs llguidance ({one_line(error)}); install it with: pip install 'ortolan[serve]'"
        ) from error
    return llguidance


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise wrong_type(name, text, "a str")
    if not text:
        raise ArgumentError(f"{name} is empty")
    _check_size(name, text)


def _check_size(name: str, text: str) -> None:
    # "surrogatepass": json.loads returns lone surrogates, which the check below must not fail on.
    size = len(text.encode(errors="surrogatepass"))
    if size > MOST_GRAMMAR_BYTES:
        raise ArgumentError(f"{name} has {size} bytes, expected at most {MOST_GRAMMAR_BYTES}; simplify it")


def _check(grammar: str, special_tokens: list[str], name: str) -> None:
    """Compile a grammar in another process.

    Raises:
        ArgumentError: The grammar has errors, or the process exceeded a limit.
        OrtolanError: The process failed to start or to import llguidance.
    """
    try:
        grammar.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{name} is not valid Unicode: {one_line(error)}") from error
    data = json.dumps({"grammar": grammar, "special_tokens": special_tokens}).encode()
    limits = [f"{key}={value}" for key, value in _LIMITS.items()]
    script = str(Path(__file__).with_name("grammar_check.py"))
    # -P: otherwise modules of this folder, such as requests.py, would hide installed ones.
    command = [sys.executable, "-P", script, str(_COMPILE_SECONDS), str(_COMPILE_BYTES), *limits]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    too_large = (
        f"{name} takes more than {_COMPILE_SECONDS} s or {_COMPILE_BYTES >> 20} MiB to compile; use fewer and shorter "
        "patterns, smaller counts and a smaller multipleOf"
    )
    try:
        result = subprocess.run(command, input=data, capture_output=True, timeout=_WALL_SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        raise ArgumentError(too_large) from error
    except OSError as error:
        raise OrtolanError(f"cannot start {sys.executable!r} to check a grammar: {one_line(error)}") from error
    if result.returncode < 0 or b"MemoryError" in result.stderr:
        raise ArgumentError(too_large)
    if result.returncode > 0:
        lines = result.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {result.returncode}"]
        raise OrtolanError(f"the process that checks grammars failed: {lines[-1]}")
    if result.stdout:
        raise ArgumentError(f"{name}: {_message(result.stdout.decode(errors='replace'))}")


def _message(error: str) -> str:
    """Return llguidance's message in one line, without its dump of the parser.

    For a JSON schema, return only the reason: the client did not write the grammar around the schema.
    """
    message = error.split("<non-verbose/>")[0]
    _, is_schema, reason = message.partition(_SCHEMA_ERROR)
    if is_schema:
        message = _QUOTED_LINE.split(reason)[0]
    message = " ".join(message.split())
    if message.startswith("NoExtension") or not message:
        return "no text matches it"
    return message if len(message) <= _MOST_MESSAGE else f"{message[:_MOST_MESSAGE]} …"

"""Structured output: what grammars allow, their errors, and their limits."""

from __future__ import annotations

import builtins
import json
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ortolan.engine import GrammarTokenizer, TokenGrammar
from ortolan.engine import grammar as grammar_module
from ortolan.engine.grammar import MOST_GRAMMAR_BYTES
from ortolan.engine.requests import SamplingOptions
from ortolan.engine.rows import RowState
from ortolan.engine.sampling import NativeSampler
from ortolan.errors import ArgumentError, ArgumentTypeError, OrtolanError

from ..sampling import examples

_VOCABULARY = 333  # more than the tokenizer's, and no multiple of 32
_WORDS = ["true", "false", "null", '{"', '":', '",', "ab", "abc", "12", " {", "}}", "é"]


def _make_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer with some longer tokens and the special tokens <end> and <call>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        ((text, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)
        for length in range(2, len(text) + 1):
            if text[:length] not in vocabulary:
                vocabulary[text[:length]] = len(vocabulary)
                merges.append((text[: length - 1], text[length - 1]))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<call>", special=True)])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=5)
    return tokenizer


_BYTES = _make_tokenizer()
_END = _BYTES.token_to_id("<end>")
_CALL = _BYTES.token_to_id("<call>")
_TOKENS = GrammarTokenizer(_BYTES, vocabulary=_VOCABULARY, end_tokens=[_END])
_PLAIN = _make_tokenizer()
_PLAIN.no_truncation()
_PLAIN.no_padding()


def _regex(pattern: str, tokens: GrammarTokenizer = _TOKENS) -> TokenGrammar:
    return TokenGrammar.from_lark(f"start: /{pattern}/", tokens)


def _allowed(state: TokenGrammar) -> set[int]:
    mask = state.mask()
    assert mask is not None and mask.dtype == np.uint32 and mask.shape == (-(-_VOCABULARY // 32),)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def _accepts(start: TokenGrammar, text: str) -> bool:
    """Return whether the grammar allows the tokens of a text, and then the end."""
    state = start.copy()
    for token in _PLAIN.encode(text).ids:
        if state.finished or token not in _allowed(state):
            return False
        state.advance(token)
    return state.finished or _END in _allowed(state)


def _generate(start: TokenGrammar, seed: int, most: int = 400) -> str | None:
    """Return a random text of the grammar, or None if it is longer than `most` tokens."""
    state = start.copy()
    row = RowState(SamplingOptions(logit_bias={_END: 3.0}), (), [], 0, seed)
    # Prefer tokens that close strings, arrays and objects.
    logits = np.zeros((1, _VOCABULARY), np.float32)
    for text in '"]}':
        logits[0, _PLAIN.token_to_id(text)] = 4
    for _ in range(most):
        row.mask = state.mask()
        token = NativeSampler().sample(logits, [row])[0].token
        state.advance(token)
        row.answer.append(token)
        if state.finished:
            tokens = row.answer[:-1] if token == _END else row.answer
            return _PLAIN.decode(tokens, skip_special_tokens=False)
    return None


_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": 3, "maximum": 12},
        "tags": {"type": "array", "items": {"enum": ["ab", "abc", 12, None]}, "maxItems": 3},
        "more": {"$ref": "#/$defs/more"},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
    "$defs": {"more": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"$ref": "#/$defs/more"}}]}},
}


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "ab", "size": 12}',
        '{"name": "", "size": 3, "tags": [], "more": true}',
        '{"name": "é", "size": 7, "tags": ["abc", 12, null]}',
        '{"name": "a", "size": 5, "more": [true, [false, []]]}',
    ],
)
def test_values_that_match_the_schema_are_accepted(text):
    assert _accepts(TokenGrammar.from_json_schema(_SCHEMA, _TOKENS), text)
    assert _accepts(TokenGrammar.from_json_schema(json.dumps(_SCHEMA), _TOKENS), text)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"name": "ab"}',
        '{"name": "abcdef", "size": 12}',
        '{"name": "ab", "size": 13}',
        '{"name": "ab", "size": 5, "tags": ["x"]}',
        '{"name": "ab", "size": 5, "tags": [12, 12, 12, 12]}',
        '{"name": "ab", "size": 5, "other": 1}',
        '{"name": "ab", "size": 5',
        '{"name":"ab","size":5}',
        '{"name": "ab",  "size": 5}',
        '{\n"name": "ab", "size": 5}',
        '[{"name": "ab", "size": 5}]',
        "",
        "text",
    ],
)
def test_other_values_are_refused(text):
    assert not _accepts(TokenGrammar.from_json_schema(_SCHEMA, _TOKENS), text)


@examples(60)
@given(st.integers(0, 2**32))
def test_sampled_answers_match_the_schema(seed):
    text = _generate(TokenGrammar.from_json_schema(_SCHEMA, _TOKENS), seed)
    if text is None:
        return
    value = json.loads(text)
    assert list(value)[:2] == ["name", "size"] and set(value) <= {"name", "size", "tags", "more"}
    assert isinstance(value["name"], str) and len(value["name"]) <= 5
    assert type(value["size"]) is int and 3 <= value["size"] <= 12
    assert all(tag in ("ab", "abc", 12, None) for tag in value.get("tags", []))


def test_most_sampled_answers_end():
    texts = [_generate(TokenGrammar.from_json_schema(_SCHEMA, _TOKENS), seed) for seed in range(20)]
    assert sum(text is not None for text in texts) >= 15


def test_json_objects():
    start = TokenGrammar.from_json_schema({"type": "object"}, _TOKENS)
    assert _accepts(start, '{"a": [1, {"b": null}], "c": "x\\n"}')
    assert _accepts(start, "{}")
    assert not _accepts(start, "[1]")
    assert not _accepts(start, '{"a": 1,}')


@pytest.mark.parametrize("schema", [True, {}, "true"])
def test_schemas_of_any_value(schema):
    start = TokenGrammar.from_json_schema(schema, _TOKENS)
    assert all(_accepts(start, text) for text in ("12", "null", '{"a": [true]}', '"ab"'))
    assert not _accepts(start, "nul")


@pytest.mark.parametrize("more", [{}, {"x-guidance": {"whitespace_flexible": True}}])
def test_json_has_the_spaces_of_json_dumps(more):
    """A schema cannot change that."""
    start = TokenGrammar.from_json_schema({"type": "object", **more}, _TOKENS)
    value = {"a": [1, {"b": "c d"}], "e": None}
    assert _accepts(start, json.dumps(value)) and not _accepts(start, "{ }")
    assert not _accepts(start, json.dumps(value, indent=1))
    assert not _accepts(start, json.dumps(value, separators=(",", ":")))


def test_regular_expressions():
    start = _regex("ab(c|12)*")
    assert _accepts(start, "ab") and _accepts(start, "abc1212c")
    assert not _accepts(start, "abc1") and not _accepts(start, "xab")


def test_lark_grammars():
    start = TokenGrammar.from_lark('start: "a" list\nlist: "[" (NUMBER ("," NUMBER)*)? "]"\nNUMBER: /[0-9]+/', _TOKENS)
    assert _accepts(start, "a[1,22,333]") and _accepts(start, "a[]")
    assert not _accepts(start, "a[1,]")


def test_special_tokens_in_grammars():
    start = TokenGrammar.from_lark('start: <call> %json {"type": "integer"}', _TOKENS)
    assert _allowed(start) == {_CALL}
    start.advance(_CALL)
    assert _accepts(start, "12")


def test_text_never_allows_special_tokens():
    state = _regex(r"(.|\n)*")
    assert _CALL not in _allowed(state)
    assert _END in _allowed(state)
    assert max(_allowed(state)) < _PLAIN.get_vocab_size()


def test_the_end_token_finishes():
    state = _regex("ab*")
    a, b = _PLAIN.token_to_id("a"), _PLAIN.token_to_id("b")
    assert _END not in _allowed(state)
    state.advance(a)
    assert _END in _allowed(state) and not state.finished
    state.advance(b)
    state.advance(_END)
    assert state.finished


def test_grammars_without_a_continuation_finish():
    state = TokenGrammar.from_lark('start: "12"', _TOKENS)
    assert not state.finished
    state.advance(_PLAIN.token_to_id("12"))
    assert state.finished


def test_copies_are_independent():
    start = _regex("ab*")
    first, second = start.copy(), start.copy()
    first.advance(_PLAIN.token_to_id("ab"))
    assert _allowed(second) == _allowed(start) != _allowed(first)
    third = first.copy()
    third.advance(_END)
    assert third.finished and not first.finished


def test_a_token_that_is_not_allowed_is_an_error():
    state = _regex("ab*")
    with pytest.raises(ArgumentError, match=rf"^the grammar cannot continue with token {_CALL}: "):
        state.advance(_CALL)
    assert not state.finished
    # An error in one state does not affect other states of the same grammar.
    assert _accepts(_regex("ab*"), "abb")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strin"}, "strin"),
        ({"type": "object", "properties": 3}, "properties must be an object"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "http://localhost/schema"}, "localhost"),
        ({"$ref": "file:///etc/passwd"}, "passwd"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, r"minimum \(5\) is greater than maximum \(3\)"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "format": "no-format"}, "no-format"),
        (False, "false"),
        ('{"type": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ({"const": float("nan")}, "not JSON"),
        ({"const": object()}, "not JSON"),
        ({"const": "\ud800"}, ""),
        ({"$ref": "#"}, "no text matches it"),
    ],
)
def test_errors_of_schemas_say_what_is_wrong(schema, message):
    with pytest.raises(ArgumentError, match=f"^the JSON schema.*{message}"):
        TokenGrammar.from_json_schema(schema, _TOKENS)


@pytest.mark.parametrize("schema", ["[]", "3", "null", 3, ["type"], None])
def test_schemas_of_other_types_are_errors(schema):
    with pytest.raises(ArgumentTypeError, match=r"the JSON schema is .*, expected an object or a boolean"):
        TokenGrammar.from_json_schema(schema, _TOKENS)


def test_errors_of_other_grammars_say_what_is_wrong():
    with pytest.raises(ArgumentError, match=r"^the grammar: .*unclosed group"):
        _regex("(")
    with pytest.raises(ArgumentError, match=r"^the grammar: .*unknown name: .foo"):
        TokenGrammar.from_lark("start: foo", _TOKENS)
    with pytest.raises(ArgumentError, match=r"^the grammar is empty"):
        TokenGrammar.from_lark("", _TOKENS)
    with pytest.raises(ArgumentTypeError, match=r"^the grammar is an int, expected a str"):
        TokenGrammar.from_lark(3, _TOKENS)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^the grammar: .*special token"):
        TokenGrammar.from_lark("start: <other>", _TOKENS)


_NESTED = {"anyOf": [{"type": "string"}]}
for _ in range(200):
    _NESTED = {"anyOf": [_NESTED, {"type": "string"}]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"allOf": [{"type": "string", "pattern": f".*[a-z]{{{i}}}.*x{i}"} for i in range(2, 30)]},
        {"allOf": [{"type": "integer", "multipleOf": factor} for factor in (99_991, 99_989, 99_971)]},
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(10)]} for i in range(8)]},
        {"type": "string", "pattern": "(.*a.{20000}b)", "maxLength": 30_000},
        {"enum": [f"value{i}" * 10 for i in range(10_000)]},
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        _NESTED,
    ],
    ids=["multiple", "patterns", "multiples", "product", "pattern", "size", "circular", "nested"],
)
def test_schemas_that_exceed_limits_are_errors(schema):
    with pytest.raises(ArgumentError, match=r"^the JSON schema"):
        TokenGrammar.from_json_schema(schema, _TOKENS)


@pytest.mark.parametrize(
    "pattern", ["(((((a{50}){50}){50}){50}){50})b", ".*(.{1,100}|[^a]{2,300}|(x[abc]){3,400}){1,50}z"]
)
def test_expressions_that_exceed_limits_are_errors(pattern):
    def run() -> None:
        state = _regex(pattern)
        for _ in range(3000):
            state.advance(min(_allowed(state) - {_END}))

    with pytest.raises(
        ArgumentError,
        match=r"^the grammar(: | is too complex: | cannot continue).*(lexer|too )",
    ):
        run()


def test_errors_do_not_repeat_a_long_grammar():
    with pytest.raises(ArgumentError, match=r"unclosed|regex") as error:
        _regex("(" + "a" * 10_000)
    assert len(str(error.value)) < 400


def test_large_repetitions_are_cheap():
    schema = {"type": "array", "items": {"type": "string", "maxLength": 10**9}, "minItems": 10**6}
    state = TokenGrammar.from_json_schema(schema, _TOKENS)
    for token in _PLAIN.encode('["ab", "ab"').ids:
        assert token in _allowed(state)
        state.advance(token)


def test_grammars_are_limited_in_size():
    for make in (TokenGrammar.from_lark, TokenGrammar.from_json_schema):
        with pytest.raises(ArgumentError, match=f"has {MOST_GRAMMAR_BYTES + 1} bytes, expected at most"):
            make("é" + "a" * (MOST_GRAMMAR_BYTES - 1), _TOKENS)


def test_recent_grammars_are_not_compiled_again(monkeypatch):
    tokens = GrammarTokenizer(_BYTES, vocabulary=_VOCABULARY, end_tokens=[_END])
    _regex("a", tokens)
    monkeypatch.setattr(grammar_module, "_check", lambda *_: pytest.fail("compiled again"))
    assert _accepts(_regex("a", tokens), "a")
    monkeypatch.undo()
    for index in range(3):
        monkeypatch.setattr(grammar_module, "_CACHED_GRAMMARS", 1)
        _regex(f"b{index}", tokens)
    assert len(tokens._compiled) == 1


def test_tokenizers_that_do_not_fit_are_errors():
    with pytest.raises(ArgumentError, match=r"^end_tokens is empty"):
        GrammarTokenizer(_BYTES, vocabulary=_VOCABULARY, end_tokens=[])
    with pytest.raises(ArgumentError, match=r"^the tokenizer does not fit 100 logits"):
        GrammarTokenizer(_BYTES, vocabulary=100, end_tokens=[_END])
    with pytest.raises(ArgumentError, match=r"^the tokenizer does not fit 333 logits: .*5000"):
        GrammarTokenizer(_BYTES, vocabulary=_VOCABULARY, end_tokens=[5000])


def test_a_missing_llguidance_is_an_error(monkeypatch):
    real = builtins.__import__

    def fail(name: str, *arguments: Any, **others: Any) -> Any:
        if name == "llguidance":
            raise ImportError("No module named 'llguidance'")
        return real(name, *arguments, **others)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(OrtolanError, match=r"needs llguidance .*pip install 'ortolan\[serve\]'"):
        GrammarTokenizer(_BYTES, vocabulary=_VOCABULARY, end_tokens=[_END])


def test_a_check_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    with pytest.raises(OrtolanError, match=r"^cannot start '/does/not/exist' to check a grammar"):
        _regex("not compiled before")

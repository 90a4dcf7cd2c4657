from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from ortolan.engine.text import Detokenizer, TextStream, special_tokens

from ..sampling import examples

TEXTS = [
    "The quick brown fox jumps over the lazy dog, twice;  and then   again.",
    "Grüße aus Köln – 東京で会いましょう。 Привет, мир! 👩‍👩‍👧‍👦🎉🎉 naïve café",
    "def f(x):\n    return x + 1\n\n\tprint('…')\r\n",
]


@cache
def byte_level() -> Tokenizer:
    """Like those of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return with_added_tokens(tokenizer)


@cache
def byte_fallback() -> Tokenizer:
    """Like that of Llama 2: pieces that begin with U+2581 for a space, bytes for what they lack, a space stripped."""
    letters = sorted(set("".join(TEXTS)) - set("東京👩🎉é \n\t\r"))
    words = ["▁", "▁▁", "▁the", "the", "▁fox", "▁x", "▁Köln"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    # Merges are not needed: tests decode tokens that they choose.
    tokenizer = Tokenizer(models.BPE({piece: token for token, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_added_tokens(tokenizer)


@cache
def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return with_added_tokens(tokenizer)


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|user|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback, "metaspace": metaspace}


def stream(tokenizer: Tokenizer, prompt: list[int], answer: list[int], special: frozenset[int]) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, special)
    return "".join([*map(detokenizer.push, answer), detokenizer.end()])


def characters(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text, character by character, with bytes for characters that the vocabulary lacks."""
    found: list[int] = []
    for character in text.replace(" ", "▁"):
        token = tokenizer.token_to_id(character)
        found += [token] if token is not None else [1 + byte for byte in character.encode()]
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", [*TEXTS, "🎉", "é🎉é", "   three", "x  x ", ""])
@pytest.mark.parametrize("begin", ["", "the fox"])
def test_pieces_add_up_to_the_text(name: str, text: str, begin: str) -> None:
    tokenizer = TOKENIZERS[name]()
    encode = (
        (lambda one: characters(tokenizer, one)) if name == "byte fallback" else lambda one: tokenizer.encode(one).ids
    )
    prompt, answer = encode(begin), encode(text)
    whole = tokenizer.decode(prompt + answer)
    assert stream(tokenizer, prompt, answer, special_tokens(tokenizer)) == whole[len(tokenizer.decode(prompt)) :]


@examples(300)
@given(st.data(), st.sampled_from(["byte level", "metaspace"]), st.booleans())
def test_any_tokens(data: st.DataObject, name: str, skip: bool) -> None:
    """Tokens that are no UTF-8 and special tokens too. There is no prompt, since invalid bytes at its end change it."""
    tokenizer = TOKENIZERS[name]()
    token = st.integers(0, tokenizer.get_vocab_size() - 1)
    answer = data.draw(st.lists(token, max_size=40))
    special = special_tokens(tokenizer) if skip else frozenset[int]()
    expected = tokenizer.decode(answer, skip_special_tokens=skip)
    assert stream(tokenizer, [], answer, special) == expected


@examples(200)
@given(st.lists(st.sampled_from("the fox🎉é東▁ xK"), max_size=30), st.integers(0, 30))
def test_any_characters_of_bytes(pieces: list[str], cut: int) -> None:
    tokenizer = byte_fallback()
    tokens = characters(tokenizer, "".join(pieces))
    whole = tokenizer.decode(tokens)
    assert stream(tokenizer, [], tokens, frozenset()) == whole
    prompt, answer = characters(tokenizer, "x" + "".join(pieces[:cut])), characters(tokenizer, "".join(pieces[cut:]))
    assert (
        stream(tokenizer, prompt, answer, frozenset())
        == tokenizer.decode(prompt + answer)[len(tokenizer.decode(prompt)) :]
    )


def test_a_character_that_the_prompt_begins_and_the_answer_completes() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("fox 東").ids
    assert len(tokens) > len(tokenizer.encode("fox ").ids) + 1
    assert stream(tokenizer, tokens[:-1], tokens[-1:], frozenset()) == "東"


@pytest.mark.parametrize("cut", range(5))
@pytest.mark.parametrize("begin", ["", "the fox ", "🎉", "the 🎉🎉🎉🎉"])
def test_bytes_of_a_character_on_both_sides(begin: str, cut: int) -> None:
    tokenizer = byte_fallback()
    tokens = characters(tokenizer, begin + "🎉the")
    at = len(characters(tokenizer, begin)) + cut
    if cut == 4:
        expected = "the"
    elif begin or cut == 0:
        expected = "🎉the"
    else:  # a prompt of nothing but an incomplete character gives no context
        expected = (4 - cut) * "�" + "the"
    assert stream(tokenizer, tokens[:at], tokens[at:], frozenset()) == expected


def test_an_incomplete_character_waits_and_then_ends_as_a_replacement() -> None:
    tokenizer = byte_fallback()
    detokenizer = Detokenizer(tokenizer, [], frozenset())
    party = characters(tokenizer, "🎉")
    assert [detokenizer.push(token) for token in party] == ["", "", "", "🎉"]
    assert detokenizer.push(party[0]) == ""
    assert detokenizer.end() == "�"
    assert detokenizer.end() == ""


def test_invalid_bytes_do_not_wait_forever() -> None:
    tokenizer = byte_level()
    byte = tokenizer.token_to_id(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("東")[0][0][0])
    detokenizer = Detokenizer(tokenizer, [], frozenset())
    pieces = [detokenizer.push(byte) for _ in range(200)]
    assert sum(map(len, pieces)) > 150
    assert "".join([*pieces, detokenizer.end()]) == 200 * "�"


def stop_stream(text: str, stop: tuple[str, ...]) -> tuple[list[str], TextStream]:
    tokenizer = byte_fallback()
    result = TextStream(Detokenizer(tokenizer, characters(tokenizer, "x"), frozenset()), stop)
    return [*map(result.push, characters(tokenizer, text)), result.end()], result


def test_text_is_held_back_while_a_stop_string_may_follow() -> None:
    pieces, result = stop_stream("a thing", ("the",))
    assert pieces == ["a", " ", "", "", "thi", "n", "g", ""]
    assert not result.stopped
    pieces, result = stop_stream("a theory", ("the",))
    assert "".join(pieces) == "a " and result.stopped


def test_text_that_was_held_back_comes_at_the_end() -> None:
    pieces, result = stop_stream("a th", ("the",))
    assert pieces[-1] == "th" and "".join(pieces) == "a th" and not result.stopped


@examples(300)
@given(st.text("ab東 ", max_size=30), st.lists(st.text("ab東 ", min_size=1, max_size=4), max_size=3))
def test_text_ends_at_the_first_stop_string(text: str, stop: list[str]) -> None:
    pieces, result = stop_stream(text, tuple(stop))
    # The stop string that is complete first ends the answer, even if another one begins earlier.
    for length in range(len(text) + 1):
        places = [at for at in (text[:length].find(one) for one in stop) if at >= 0]
        if places:
            assert ("".join(pieces), result.stopped) == (text[: min(places)], True)
            return
    assert ("".join(pieces), result.stopped) == (text, False)

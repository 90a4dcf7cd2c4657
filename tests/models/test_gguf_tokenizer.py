"""Tokenizers of GGUF files."""

import pytest

from ortolan.models.gguf.file import GgufFile
from ortolan.models.gguf.tokenizer import read_gguf_tokenizer, read_tokenizer_facts
from ortolan.models.graph_builder import ModelBuildError
from ortolan.models.tokenizer import load_tokenizer

from .gguf_file import TOKENS, gguf, write

pytest.importorskip("tokenizers")


@pytest.fixture
def tokenizer(tmp_path):
    write(tmp_path / "model.gguf")
    read_gguf_tokenizer(tmp_path / "model.gguf").save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ab", ["ab"]),
        ("ab ab", ["ab", "Ġab"]),
        ("a b", ["a", "Ġ", "b"]),
        ("é", ["Ã©"]),
        ("12", ["1", "2"]),  # digits stay separate, although the vocabulary has the token 12
        ("<|endoftext|>ab\n", ["<|endoftext|>", "ab", "Ċ"]),
    ],
)
def test_text_in_and_out(tokenizer, text, tokens):
    assert tokenizer.encode(text) == [TOKENS.index(token) for token in tokens]
    assert tokenizer.decode(tokenizer.encode(text)) == text.removeprefix("<|endoftext|>")


def test_control_tokens(tokenizer):
    assert tokenizer.start == 0
    assert tokenizer.stop == {0, 1}


# Texts split as llama.cpp does, especially where it differs from other implementations.
@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("gpt-2", "it's 12345!", ["it", "'s", " 12345", "!"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("smollm", "it's 123", ["it", "'s", " ", "1", "2", "3"]),
        ("llama-bpe", "IT'S 12345\n\nx", ["IT", "'S", " ", "123", "45", "\n\n", "x"]),
        ("qwen2", "(ok) 12", ["(ok", ")", " ", "1", "2"]),
        ("tekken", "camelCase /a", ["camel", "Case", " /", "a"]),
        ("refact", "it's 123", ["it", "'s", " ", "1", "2", "3"]),
        ("smaug-bpe", "IT'S 12345\n\nx", ["IT", "'S", " ", "123", "45", "\n\n", "x"]),
        ("dbrx", "(ok) 1234", ["(ok", ")", " ", "123", "4"]),
        ("gpt-4o", "it'S camelCase 1234 //\n/a", ["it'S", " camel", "Case", " ", "123", "4", " //\n/", "a"]),
    ],
)
def test_how_text_is_split(tmp_path, pre, text, parts):
    write(tmp_path / "model.gguf", pre=pre)
    tokenizer = read_gguf_tokenizer(tmp_path / "model.gguf")
    found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in found] == parts


@pytest.mark.parametrize(
    ("pre", "begins"),
    [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False), ("smaug-bpe", False)],
)
def test_what_a_text_begins_with(tmp_path, pre, begins):
    write(tmp_path / "model.gguf", pre=pre)
    ids = read_gguf_tokenizer(tmp_path / "model.gguf").encode("ab").ids
    assert ids == [*([0] if begins else []), TOKENS.index("ab")]
    write(tmp_path / "model.gguf", pre=pre, metadata={"tokenizer.ggml.eos_token_id": 1000})
    with pytest.raises(ModelBuildError, match=r"'tokenizer.ggml.eos_token_id' is 1000, expected one of"):
        read_gguf_tokenizer(tmp_path / "model.gguf")


def test_facts(tmp_path):
    write(tmp_path / "model.gguf", metadata={"tokenizer.ggml.padding_token_id": 1})
    facts = read_tokenizer_facts(GgufFile(tmp_path / "model.gguf"))
    assert (facts.bos, facts.eos, facts.unknown, facts.padding) == (0, 1, None, 1)
    # Two tokens end an answer: eos, and a control token with a known end-of-text name.
    assert facts.ends == (1, 0)
    assert facts.chat_template is not None and "messages" in facts.chat_template


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pre": "bloom"}, "splits text as 'bloom'"),
        ({"model": "bert"}, "tokenizer of kind 'bert'; expected 'gpt2'"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path, arguments, message):
    write(tmp_path / "model.gguf", **arguments)
    with pytest.raises(ModelBuildError, match=message):
        read_gguf_tokenizer(tmp_path / "model.gguf")


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["▁a", "ab", "▁ab", "bc", "abc", "▁abc", "a", "b", "c", "▁", "<|user|>"]


def write_sentence_piece(path, prefix=True):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*PIECES, *WORDS])
    writer.add_token_scores([0.0] * len(PIECES) + [-float(index) for index in range(len(WORDS))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(WORDS) - 1), 4])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("prefix", "text", "pieces"),
    [
        # Merges follow scores: "▁a", then "bc", then both to "▁abc".
        (True, "abc", ["<s>", "▁abc"]),
        (False, "abc", ["<s>", "abc"]),
        (False, " ab", ["<s>", "▁ab"]),
        (True, "é", ["<s>", "▁", "<0xC3>", "<0xA9>"]),
        (False, "c<|user|>b", ["<s>", "c", "<|user|>", "b"]),
    ],
)
def test_sentence_piece(tmp_path, prefix, text, pieces):
    write_sentence_piece(tmp_path / "model.gguf", prefix)
    tokenizer = read_gguf_tokenizer(tmp_path / "model.gguf")
    found = tokenizer.encode(text)
    assert found.tokens == pieces
    assert tokenizer.decode(found.ids) == text

"""llama2.c's tokenizer on a small vocabulary."""

import struct

import numpy as np
import pytest

from ortolan.graph_passes.text.llama2c import BOS, Llama2cTokenizer, TokenizerError

TEXT_PIECES = [" ", "a", "b", "c", "é", "ab", "bc", " a", "abc", " abc"]


@pytest.fixture
def tokenizer_path(tmp_path):
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(bytes([byte]) for byte in range(256))]
    scores = [0.0] * len(pieces)
    pieces += [piece.encode() for piece in TEXT_PIECES]
    # The pair with the best score merges first: "bc" before "ab" before " a".
    scores += [0, 0, 0, 0, 0, -2.0, -1.0, -3.0, -4.0, -5.0]
    records = (struct.pack("<fi", score, len(piece)) + piece for score, piece in zip(scores, pieces, strict=True))
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(struct.pack("<i", 27) + b"".join(records))
    return path


def ids_of(*pieces):
    return [259 + TEXT_PIECES.index(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [("abc", [" abc"]), ("ab", [" ", "ab"]), ("a", [" a"]), ("bcé", [" ", "bc", "é"]), ("", [])],
)
def test_merges_by_score(tokenizer_path, text, pieces):
    tokenizer = Llama2cTokenizer(tokenizer_path)
    assert tokenizer.encode(text) == [BOS, *ids_of(*pieces)]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_falls_back_to_bytes(tokenizer_path):
    tokenizer = Llama2cTokenizer(tokenizer_path)
    assert tokenizer.encode("\nü") == [BOS, *ids_of(" "), 3 + 0x0A, 3 + 0xC3, 3 + 0xBC]
    assert tokenizer.decode(tokenizer.encode("\nü abc\n")) == "\nü abc\n"
    assert tokenizer.decode(ids_of(" abc")) == " abc"


def test_broken_files_are_refused(tokenizer_path):
    whole = tokenizer_path.read_bytes()
    for content, message in [
        (whole[:-1], "has length 4"),
        (whole[:-6], "ends inside token 268"),
        (whole[:44], "holds 3 tokens, expected at least 259"),
        (b"", "holds 0 tokens"),
    ]:
        tokenizer_path.write_bytes(content)
        with pytest.raises(TokenizerError, match=message):
            Llama2cTokenizer(tokenizer_path)


def merge_one_at_a_time(tokenizer, ids):
    """Merge the leftmost pair with the best score until no pair is in the vocabulary, as llama2.c does."""
    pieces, scores = tokenizer.pieces, tokenizer.scores
    known = {piece: index for index, piece in enumerate(pieces) if index >= 259}
    while True:
        pairs = [(i, known.get(pieces[ids[i]] + pieces[ids[i + 1]])) for i in range(len(ids) - 1)]
        pairs = [pair for pair in pairs if pair[1] is not None]
        if not pairs:
            return ids
        index, merged = max(pairs, key=lambda pair: scores[pair[1]])
        ids = [*ids[:index], merged, *ids[index + 2 :]]


def test_long_texts_merge_as_in_llama2c(tokenizer_path):
    tokenizer = Llama2cTokenizer(tokenizer_path)
    text = "".join(np.random.default_rng(0).choice(list("  aabbccé\n"), 400))
    singles = [id for character in " " + text for id in (ids_of(character) if character != "\n" else [3 + 0x0A])]
    expected = merge_one_at_a_time(tokenizer, singles)
    assert tokenizer.encode(text) == [BOS, *expected]
    assert len(expected) < len(singles) - 20

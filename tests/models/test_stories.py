"""llama2.c's tokenizer on a small vocabulary, and greedy generation on a random model."""

import struct

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from ortolan.models import tiny
from ortolan.models.stories import BOS, Llama2cTokenizer, TokenizerError, generate

TEXT_PIECES = [" ", "a", "b", "c", "é", "ab", "bc", " a", "abc", " abc"]


@pytest.fixture
def tokenizer_path(tmp_path):
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(bytes([byte]) for byte in range(256))]
    scores = [0.0] * len(pieces)
    pieces += [piece.encode() for piece in TEXT_PIECES]
    # The best score merges first: "bc" before "ab" before " a".
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


def test_generation_is_greedy_and_uses_the_cache():
    session = ort.InferenceSession(
        ir.to_proto(tiny.tiny_llama()).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    prompt = [1, 20, 30]
    made = generate(session, prompt, max_new_tokens=6)
    config = tiny.TINY_LLAMA
    empty = np.zeros((1, config.num_key_value_heads, 0, config.head_size), np.float32)
    past = {f"past_key_values.{layer}.{part}": empty for layer in range(2) for part in ("key", "value")}
    expected = list(prompt)
    while len(expected) < len(prompt) + 6:
        ids = np.array([expected])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]}
        token = int(session.run(["logits"], feeds | past)[0][0, -1].argmax())
        if token in (1, 2):
            break
        expected.append(token)
    assert made == expected[len(prompt) :]
    assert made

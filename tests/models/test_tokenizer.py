"""Tokens that start a prompt or end a text, as published decoders declare them."""

import json

import pytest

from ortolan.errors import OrtolanError
from ortolan.models.tokenizer import load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import AddedToken, Tokenizer, models, processors  # noqa: E402


def write(folder, vocabulary, special, bos=None, **files):
    """Write a tokenizer.json with one token per letter, and other JSON files.

    bos: token that the post-processor adds at the start.
    """
    ids = {token: index for index, token in enumerate([*vocabulary, "a", "b"])}
    tokenizer = Tokenizer(models.BPE(ids, [], unk_token=None))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if bos is not None:
        single = f"{bos} $A"
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(bos, ids[bos])])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return load_tokenizer(folder / "tokenizer.json")


QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA2 = ["<unk>", "<s>", "</s>"]
GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"]


@pytest.mark.parametrize(
    ("vocabulary", "options", "prefix", "stop"),
    [
        pytest.param(
            QWEN,
            {
                "tokenizer_config": {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>"},
                "generation_config": {"bos_token_id": 0, "eos_token_id": [2, 0]},
            },
            (),
            {0, 2},
            id="qwen",
        ),
        pytest.param(QWEN, {}, (), {0, 2}, id="qwen, the tokenizer alone"),
        pytest.param(
            LLAMA2,
            {
                "tokenizer_config": {
                    "add_bos_token": True,
                    "bos_token": {"content": "<s>", "__type": "AddedToken"},
                    "eos_token": {"content": "</s>"},
                },
                "generation_config": {"bos_token_id": 1, "eos_token_id": 2},
            },
            (1,),
            {2},
            id="llama 2, a flag and no post-processor",
        ),
        pytest.param(LLAMA2, {"bos": "<s>"}, (1,), {2}, id="llama 2, the tokenizer alone"),
        pytest.param(
            LLAMA2,
            {"bos": "<s>", "tokenizer_config": {"add_bos_token": False, "bos_token": "<s>", "eos_token": "</s>"}},
            (),
            {2},
            id="a flag that overrules the post-processor",
        ),
        pytest.param(
            GEMMA,
            {
                "bos": "<bos>",
                "tokenizer_config": {"add_bos_token": True, "bos_token": "<bos>", "eos_token": "<eos>"},
                "generation_config": {"bos_token_id": 2, "eos_token_id": [1, 4], "pad_token_id": 0},
            },
            (2,),
            {1, 4},
            id="gemma",
        ),
        pytest.param(
            GEMMA,
            {"tokenizer_config": {"add_bos_token": True}, "config": {"bos_token_id": 2, "eos_token_id": 1}},
            (2,),
            {1},
            id="a flag, and ids in config.json",
        ),
        pytest.param(
            ["<|endoftext|>"],
            {"tokenizer_config": {"add_bos_token": False, "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}},
            (),
            {0},
            id="gpt-2",
        ),
        pytest.param(
            ["<|endoftext|>"],
            {"genai_config": {"model": {"bos_token_id": 0, "eos_token_id": [0]}}},
            (),
            {0},
            id="a folder of ONNX Runtime GenAI",
        ),
        pytest.param(["<x>", "<y>"], {}, (), {0, 1}, id="control tokens of unknown names"),
        pytest.param(LLAMA2, {"config": {"eos_token_id": 50256}}, (), {2}, id="an id outside of the vocabulary"),
    ],
)
def test_first_and_last_tokens(tmp_path, vocabulary, options, prefix, stop):
    tokenizer = write(tmp_path, vocabulary, vocabulary, **options)
    assert (tokenizer.prefix, tokenizer.stop) == (prefix, stop)
    assert tokenizer.encode("ab") == [len(vocabulary), len(vocabulary) + 1]


@pytest.mark.parametrize(
    ("vocabulary", "options", "start"),
    [
        (QWEN, {}, 0),
        (LLAMA2, {"bos": "<s>"}, 1),
        (GEMMA, {"config": {"bos_token_id": 2}}, 2),
    ],
)
def test_the_start_of_a_text_without_a_prompt(tmp_path, vocabulary, options, start):
    assert write(tmp_path, vocabulary, vocabulary, **options).start == start


def test_no_token_that_ends_a_text(tmp_path):
    with pytest.raises(OrtolanError, match=r"no control token that ends a text.*eos_token_id in generation_config"):
        write(tmp_path, [], [])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert load_tokenizer(tmp_path / "tokenizer.json").stop == load_tokenizer(tmp_path).stop == {1}
    with pytest.raises(OrtolanError, match=r"folder '.*' has no tokenizer\.json"):
        load_tokenizer(tmp_path.parent)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(OrtolanError, match="eos_token_id is '</s>', expected a token's id, or a list of ids"):
        write(tmp_path, LLAMA2, LLAMA2, generation_config={"eos_token_id": "</s>"})
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(OrtolanError, match=r"generation_config\.json' is not a JSON file"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("not JSON")
    with pytest.raises(OrtolanError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")

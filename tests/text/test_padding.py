"""The padding token's id, as files in the model's folder give it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ortolan.graph_passes.text.padding import UnknownPaddingError, read_padding_id

ADDED = [{"id": 0, "content": "[PAD]"}, {"id": 4, "content": "[MASK]"}]
WORDPIECE = {"added_tokens": ADDED, "model": {"vocab": {"[PAD]": 0, "[MASK]": 4, "<pad>": 7}}, "padding": None}

AS_MASK = {"pad_token": "[MASK]", "mask_token": "[MASK]"}


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"pad_token_id": 3}}, 3),
        ({"config.json": {"text_config": {"pad_token_id": 3}}}, 3),
        ({"tokenizer.json": WORDPIECE | {"padding": {"pad_id": 0}}, "config.json": {"pad_token_id": 0}}, 0),
        # PyLate pads queries with the mask token, which never counts as padding.
        ({"tokenizer.json": {"added_tokens": ADDED}, "tokenizer_config.json": AS_MASK}, 0),
        ({"tokenizer.json": WORDPIECE | {"padding": {"pad_id": 4}}, "config.json": {"pad_token_id": 0}}, 0),
        ({"tokenizer.json": WORDPIECE, "tokenizer_config.json": {"pad_token": "[PAD]", "mask_token": "[MASK]"}}, 0),
        ({"tokenizer.json": WORDPIECE, "tokenizer_config.json": {"pad_token": {"content": "<pad>"}}}, 7),
        ({"tokenizer.json": {"model": {"vocab": [["<s>", 0], ["<pad>", 0]]}},
          "special_tokens_map.json": {"pad_token": "<pad>"}}, 1),
        ({"tokenizer_config.json": {"pad_token": "[PAD]", "added_tokens_decoder": {"5": {"content": "[PAD]"}}}}, 5),
    ],
)  # fmt: skip
def test_the_padding_token(tmp_path: Path, files: dict[str, Any], expected: int) -> None:
    assert read_padding_id(write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no file in '.*' names a padding token"),
        ({"config.json": {"pad_token_id": None}}, "no file in '.*' names a padding token"),
        (
            {"config.json": {"pad_token_id": 0}, "tokenizer.json": WORDPIECE | {"padding": {"pad_id": 7}}},
            "disagree on the padding token: 0 in config.json, 7 in tokenizer.json",
        ),
        (
            {"tokenizer.json": {"added_tokens": ADDED[1:]}, "tokenizer_config.json": AS_MASK},
            "token 4 is both the padding token and the mask token",
        ),
        (
            {"config.json": {"pad_token_id": 4}, "special_tokens_map.json": {"mask_token": "[MASK]"}},
            r"gives the id of the mask token '\[MASK\]', which may be 4 as well",
        ),
        ({"config.json": {"pad_token_id": "0"}}, "cannot be read: config.json has pad token id '0'"),
        ({"config.json": "{"}, "cannot be read"),
        ({"tokenizer.json": {"added_tokens": [1]}, "tokenizer_config.json": {"pad_token": "x"}}, "cannot be read"),
    ],
)
def test_no_padding_token(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownPaddingError, match=message):
        read_padding_id(write(tmp_path, files))


def test_a_model_in_memory() -> None:
    with pytest.raises(UnknownPaddingError, match="not read from a file"):
        read_padding_id(None)

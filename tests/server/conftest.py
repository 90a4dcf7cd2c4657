"""Folders that the tests of the commands share. Imports are lazy: the extra serve may be missing."""

from __future__ import annotations

import json

import onnx
import pytest

from ..passes.cached_llama import llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a decoder that has not the form for serving."""
    from .scripted import CHATML, END, make_tokenizer

    folder = tmp_path_factory.mktemp("models") / "small"
    folder.mkdir()
    tokenizer = make_tokenizer()
    onnx.save(llama("gqa", vocab_size=tokenizer.get_vocab_size()), folder / "model.onnx")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHATML + "{# </think> #}", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 20}))
    return folder


@pytest.fixture(scope="module")
def prepared(folder, tmp_path_factory):
    """The folder in the form for serving."""
    from ortolan.server.run import prepare_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTOLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield prepare_model(folder)

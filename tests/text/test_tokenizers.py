"""Tokenizers in the graph give the same ids as `tokenizers`.

Tests cover every kind, single texts, batches, truncation, padding and pairs.
"""

from __future__ import annotations

import itertools
import json
import random
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import ortolan
from ortolan import ModelError, OrtolanError, TextInput
from ortolan.graph_passes.text.sentence_folder import SentenceFolder
from ortolan.graph_passes.text.text_input import PROBES, plan_text_input, tokenizer_model
from ortolan.graph_passes.text.text_plan import TextPlan, read_graph_tokenizer
from ortolan.graph_passes.text.tokenizer_file import read_tokenizer_file
from ortolan.models import tiny

from ..sampling import examples
from .tokenizer_files import KINDS, SPECIALS, byte_level, hard_texts, write
from .wordpiece_file import write_wordpiece

pytest.importorskip("onnxruntime_extensions")

ALL = {**KINDS, "wordpiece": write_wordpiece}


class GraphTokens:
    """A tokenizer.json as a graph, and as the package `tokenizers` reads it."""

    def __init__(self, path: Path, most: int, pairs: bool = False, opset: int = 17) -> None:
        file = read_tokenizer_file(path)
        tokenizer = read_graph_tokenizer(file)
        plan = TextPlan(file, SentenceFolder(), "", pairs, None, False, most, "", "none", tokenizer)
        self.session = ortolan.create_session(ir.to_proto(tokenizer_model(plan, opset)))
        self.tokenizer = file.tokenizer
        self.tokenizer.enable_truncation(most)
        self.pad_id, self.probes = file.pad_id, tokenizer.probes

    def compare(self, texts: list[str], seconds: list[str] | None = None) -> None:
        """Assert that ids, masks and token types equal those of `tokenizers`."""
        feeds = {"text": np.array(texts, object)}
        if seconds is not None:
            feeds["text_pair"] = np.array(seconds, object)
        ids, mask, types = self.session.run(None, feeds)
        both = texts if seconds is None else list(zip(texts, seconds, strict=True))
        for one, want, row, kept, kinds in zip(both, self.tokenizer.encode_batch(both), ids, mask, types, strict=True):
            length = len(want.ids)
            assert (one, row[:length].tolist()) == (one, want.ids)
            assert kept.tolist() == [1] * length + [0] * (len(kept) - length)
            assert kinds.tolist() == want.type_ids + [0] * (len(kept) - length)
            assert (row[length:] == self.pad_id).all()
        assert mask.shape[1] == max(1, mask.sum(axis=1).max(initial=0)) or not len(texts)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {kind: make(folder / f"{kind}.json") for kind, make in ALL.items()}


@pytest.mark.parametrize("kind", ALL)
def test_hard_texts(files, kind):
    tokens = GraphTokens(files[kind], 5000)
    texts = [text for text in [*PROBES, *tokens.probes, *hard_texts(SPECIALS, 400)] if not beyond(text, kind)]
    assert len(texts) > 750
    for start in range(0, len(texts), 50):
        tokens.compare(texts[start : start + 50])
    # Batches with only ASCII texts may use a separate, faster path in the graph.
    rng = random.Random(0)
    parts = [*map(chr, range(1, 128)), *SPECIALS, "the", " cat", "we'll", "'S", " 12345", "  ", "\n\n ", " \t"]
    tokens.compare([text for text in texts if text.isascii()])
    tokens.compare(["".join(rng.choices(parts, k=rng.randrange(14))) for _ in range(400)])


@pytest.mark.parametrize("kind", ALL)
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12), max_size=4)
)
def test_any_texts(files, kind, texts):
    opened = _opened(files[kind])
    opened.compare([text for text in texts if not beyond(text, kind)])


_OPENED: dict[Path, GraphTokens] = {}


def _opened(path: Path) -> GraphTokens:
    if path not in _OPENED:
        _OPENED[path] = GraphTokens(path, 300)
    return _OPENED[path]


def beyond(text: str, kind: str) -> bool:
    """Return whether the text exceeds the limits in docs/embedding.md.

    These are the graph's reserved characters and, if a normalizer composes characters, an accent after another accent
    or after a character that the normalizer changes.
    """
    if kind != "wordpiece" and any("\ufdd0" <= character <= "\ufdd3" for character in text):
        return True
    return kind in ("prefixed", "xlm_roberta", "old_xlm_roberta") and any(
        _extends(behind) and (_extends(before) or unicodedata.normalize("NFKC", before) != before)
        for before, behind in itertools.pairwise(text)
    )


def _extends(character: str) -> bool:
    return unicodedata.category(character)[0] == "M" or character in "\u200d\u0e33"


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("most", [5, 8, 13])
def test_cut_and_padded_pairs(files, kind, most):
    tokens = GraphTokens(files[kind], most, pairs=True)
    texts = ["", "the", "the cat", "the cat sleeps", "we'll see: the cats sleeping " * 3, "日本語 😀" * 5]
    pairs = [(one, other) for one in texts for other in texts]
    tokens.compare([one for one, _ in pairs], [other for _, other in pairs])
    for one, other in pairs[::5]:
        tokens.compare([one], [other])
    tokens.compare([], [])


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("most", [3, 7])
def test_cut_and_padded_texts(files, kind, most):
    tokens = GraphTokens(files[kind], most)
    tokens.compare(["", "the", "the cat sleeps", "unaffable cats sleeping", "日本語 😀" * 5])
    tokens.compare(["the cat"])
    tokens.compare([])


@pytest.mark.parametrize("opset", [13, 18, 21])
def test_opsets(files, opset):
    GraphTokens(files["byte_level"], 9, pairs=True, opset=opset).compare(["the cat", ""], ["日本語 sleeps", "the cats"])


def test_reserved_characters_are_read_as_another(files):
    """A text that contains the graph's reserved characters is read as if it had U+FDD4 instead."""
    tokens = GraphTokens(files["byte_level"], 50)
    texts = ["a\ufdd0b", "\ufdd1", "\ufdd2\ufdd3" * 8, "the cat"]
    ids, mask, _ = tokens.session.run(None, {"text": np.array(texts, object)})
    for row, kept, text in zip(ids, mask, texts, strict=True):
        instead = text.translate(dict.fromkeys(range(0xFDD0, 0xFDD4), "\ufdd4"))
        assert row[kept.astype(bool)].tolist() == tokens.tokenizer.encode(instead).ids


def test_words_that_merges_do_not_lead_to(tmp_path):
    """Llama 3's file has words that no merges produce. With ignore_merges, they are tokens if they are a whole word."""
    path = KINDS["llama3"](tmp_path / "tokenizer.json")
    said = json.loads(path.read_text(encoding="utf-8"))
    said["model"]["ignore_merges"] = True
    for number, word in enumerate(("zzzzz", "Ġzqz", "ĊĊ", "é".encode().decode("latin-1"), "!?!")):
        said["model"]["vocab"].setdefault(word, 5000 + number)
    path.write_text(json.dumps(said), encoding="utf-8")
    tokens = GraphTokens(path, 400)
    whole = ["zzzzz", " zqz", "\n\n", "é", "!?!"]
    assert all(len(tokens.tokenizer.encode(word, add_special_tokens=False).ids) == 1 for word in whole)
    tokens.compare([*whole, "azzzzz zzzzz zqz,zqz zzzzzz", "é éé\n\né !?! !?!?", "".join(whole) * 3, ""])
    rng = random.Random(0)
    tokens.compare(["".join(rng.choices([*whole, "a", " ", "the"], k=6)) for _ in range(200)])


def test_added_tokens_of_spaces_behind_a_normalizer(tmp_path):
    """The files of GPT-NeoX and ModernBERT have such tokens."""
    import tokenizers

    path = KINDS["prefixed"](tmp_path / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_tokens([tokenizers.AddedToken(" " * size, normalized=True) for size in range(2, 9)])
    tokenizer.add_tokens([tokenizers.AddedToken("[MASK]", lstrip=True, rstrip=True, normalized=True)])
    tokenizer.save(str(path))
    tokens = GraphTokens(path, 400)
    rng = random.Random(0)
    parts = [" ", "  ", "   ", "the", "12", "\n", "[MASK]", "é", "e\u0301", "<s>", "<mask>"]
    tokens.compare(["".join(rng.choices(parts, k=rng.randrange(9))) for _ in range(300)])
    tokens.compare([text for text in ("  the   cat    ", "  [MASK]  the", "   12")])


def test_many_added_tokens_and_long_texts(tmp_path):
    import tokenizers

    path = KINDS["byte_level"](tmp_path / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([f"<extra_{number}>" for number in range(300)])
    write(path, tokenizer, truncation=None)
    assert len(json.loads(path.read_text())["added_tokens"]) > 300
    tokens = GraphTokens(path, 60000)
    rng = np.random.default_rng(0)
    parts = [f"<extra_{number}>" for number in range(300)] + ["the cat", "sleeps", "\n"]
    tokens.compare([" ".join(rng.choice(parts, 60)) for _ in range(30)])
    tokens.compare(["the cats " * 5000, "x" * 20000, "é" * 3000])


def refused(path: Path, said: dict[str, Any], match: str) -> None:
    path.write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(ModelError, match=match):
        read_graph_tokenizer(read_tokenizer_file(path))


def test_what_is_not_supported_is_named(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json")
    said = json.loads(path.read_text(encoding="utf-8"))
    model, token = said["model"], said["added_tokens"][-1]

    def pattern(regex: str) -> dict[str, Any]:
        return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}

    refused(path, said | {"pre_tokenizer": pattern(r"(?<!a)b")}, r"splits texts \(Isolated\)")
    refused(path, said | {"pre_tokenizer": {"type": "UnicodeScripts"}}, "pre-tokenizer 'UnicodeScripts'")
    refused(
        path, said | {"normalizer": {"type": "Prepend", "prepend": "a"}, "model": model | {"dropout": 0.5}}, "dropout"
    )
    refused(path, said | {"normalizer": {"type": "ByteLevel"}}, "normalizer 'ByteLevel'")
    replaced = {"type": "Replace", "pattern": {"Regex": "a+?"}, "content": "b"}
    refused(path, said | {"normalizer": replaced}, "normalizer that replaces 'a\\+\\?'")
    refused(
        path,
        said | {"added_tokens": [*said["added_tokens"], token | {"single_word": True}]},
        "with options that are not supported",
    )
    refused(path, said | {"model": model | {"end_of_word_suffix": "</w>"}}, "end_of_word_suffix")
    vocabulary = model["vocab"] | {"zzzzz": max(model["vocab"].values()) + 9}
    whole = {"vocab": vocabulary, "ignore_merges": True}
    refused(path, said | {"pre_tokenizer": None, "model": model | whole | {"byte_fallback": False}}, "neither|ignore")
    refused(path, said | {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "model 'WordLevel'")
    refused(
        path,
        said | {"truncation": {"direction": "Left", "max_length": 5, "strategy": "LongestFirst", "stride": 0}},
        "beginning",
    )
    twice = said["post_processor"] | {"type": "TemplateProcessing", "special_tokens": {}}
    twice["single"] = [{"Sequence": {"id": "A", "type_id": 0}}] * 2
    twice["pair"] = [{"Sequence": {"id": side, "type_id": 0}} for side in "AB"]
    refused(path, said | {"post_processor": twice}, "each of .'A'. once")
    characters = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    refused(
        path, said | {"pre_tokenizer": None, "added_tokens": [], "post_processor": None, "model": characters}, "neither"
    )


@pytest.mark.parametrize("kind", ALL)
def test_padding_is_found_without_the_package(files, tmp_path, kind):
    """tokenizer_config.json names a token of the vocabulary, its first or last, or an added token."""
    said = json.loads(files[kind].read_text(encoding="utf-8")) | {"padding": None}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(said), encoding="utf-8")
    tokenizer = read_tokenizer_file(path).tokenizer
    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=False), key=tokenizer.token_to_id)
    for name in (vocabulary[0], vocabulary[-1], *(one["content"] for one in said["added_tokens"])):
        path.with_name("tokenizer_config.json").write_text(json.dumps({"pad_token": name}), encoding="utf-8")
        file = read_tokenizer_file(path)
        assert file.pad_id == tokenizer.token_to_id(name)
        assert not {"tokenizer", "said"} & vars(file).keys()
    # In another order.
    path.write_text(json.dumps({"model": said["model"], **said}), encoding="utf-8")
    assert read_tokenizer_file(path) == replace(file, content=path.read_text(encoding="utf-8"))
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_type_id": 0}
    for number in (tokenizer.get_vocab_size() + 1, -1, "a"):
        path.write_text(json.dumps(said | {"padding": padding | {"pad_id": number, "pad_token": "x"}}), "utf-8")
        with pytest.raises(ModelError, match="not a token"):
            read_tokenizer_file(path)


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ("{", "not a tokenizer.json"),
        ("[]", "not a tokenizer.json: it has no model"),
        ('{"model": 3}', "not a tokenizer.json: it has no model"),
        ('{"model": {}}', "not well formed"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": [3]}', "not well formed"),
        ('{"model": {"vocab": {"a": 0}}, "post_processor": {"type": "TemplateProcessing"}}', "not well formed"),
    ],
)
def test_files_that_are_refused_before_the_package_reads_them(tmp_path, said, match):
    path = tmp_path / "tokenizer.json"
    path.write_text(said, encoding="utf-8")
    with pytest.raises(ModelError, match=match):
        read_tokenizer_file(path)


def test_files_that_the_package_refuses(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"type": "None", "vocab": {"a": 0}}}', encoding="utf-8")
    file = read_tokenizer_file(path)
    with pytest.raises(ModelError, match=r"not a tokenizer\.json"):
        assert file.tokenizer
    with pytest.raises(ModelError, match=r"not a tokenizer\.json"):
        read_graph_tokenizer(file)


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "xlm_roberta", "wordpiece"])
def test_mutated_files_raise_errors_of_ours(files, tmp_path, kind):
    """Change values, remove keys and cut files.

    A file that is still accepted must give the ids of `tokenizers`, or be refused when compared.
    """
    said = json.loads(files[kind].read_text(encoding="utf-8"))
    said["truncation"] = None
    path = tmp_path / "tokenizer.json"
    rng = random.Random(0)
    model = tiny.tiny_bert(vocab_size=256)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(12 if kind == "wordpiece" else 30):
        mutated = json.loads(json.dumps(said))
        mutate(mutated, rng)
        path.write_text(json.dumps(mutated)[: rng.choice([None, None, None, 500])], encoding="utf-8")
        try:
            plan_text_input(model, TextInput(path, max_tokens=30))
            outcomes["read"] += 1
        except OrtolanError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes


def mutate(said: Any, rng: random.Random) -> None:
    """Change or delete one random value; settings are more likely than entries of the vocabulary."""
    place = said
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        inner = place[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            place = inner
            continue
        if rng.random() < 0.3:
            del place[key]
        else:
            place[key] = rng.choice([None, -1, 10**12, 0.5, "", "x", [], {}, [1], {"type": "Sequence"}, True])
        return


@pytest.mark.network
def test_smollm2(tmp_path):
    from ortolan.models import get_model

    tokens = GraphTokens(get_model("smollm2-135m-instruct").tokenizer, 2000)
    texts = [*PROBES, *tokens.probes, *hard_texts(["<|im_start|>", "<|im_end|>"], 400, seed=1)]
    tokens.compare([text for text in texts if not beyond(text, "smollm2")])

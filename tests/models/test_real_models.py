"""Published models, downloaded from their sources."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import ortolan
from ortolan.cache_folder import default_cache_dir
from ortolan.generate import Decoder, generate
from ortolan.graph_passes.text.tokenizer_file import load_tokenizer as load_wordpieces
from ortolan.models import get_model
from ortolan.models.manifest import find_entry
from ortolan.models.perplexity import sample_texts, score_texts, score_tokens
from ortolan.models.tokenizer import load_tokenizer
from ortolan.text_encoder import TextEncoder

pytestmark = pytest.mark.network


def make_session(path):
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip("safetensors")
    return get_model("all-minilm-l6-v2")


@pytest.mark.parametrize("name", ["all-minilm-l6-v2", "paraphrase-minilm-l3-v2", "all-mpnet-base-v2"])
def test_paraphrases_are_closer_than_strangers(minilm, name):
    if name == "all-mpnet-base-v2" and not (default_cache_dir() / f"{name}-{find_entry(name).digest}").is_dir():
        pytest.skip(f"{name} has 418 MB to download; get_model({name!r}) does it")
    model = get_model(name)
    # Models without a tokenizer file share the vocabulary of uncased BERT.
    encoder = TextEncoder(make_session(model.onnx), model.tokenizer or minilm.tokenizer)
    cat, kitten, shares = encoder.encode(
        ["A cat sleeps on the sofa.", "A kitten is napping on the couch.", "Share prices fell sharply on Monday."]
    )
    assert cat @ kitten > 0.6
    assert abs(cat @ shares) < 0.2


def test_minilm_is_a_valid_model(minilm):
    onnx.checker.check_model(str(minilm.onnx), full_check=True)
    tokens = np.array([[101, 7592, 102]])
    feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
    assert make_session(minilm.onnx).run(None, feeds)[0].shape == (1, 3, 384)


def test_splade_weights_the_words_of_a_text_and_related_ones():
    pytest.importorskip("safetensors")
    files = get_model("splade-tiny")
    encoder = TextEncoder(make_session(files.onnx), files.tokenizer)
    ((terms, _),) = ortolan.embed_sparse(["A kitten is napping on the couch."], encoder, top_k=16)
    tokenizer = load_wordpieces(files.tokenizer)
    assert {"kitten", "couch", "cat", "bed"} <= {tokenizer.id_to_token(int(one)) for one in terms}


@pytest.mark.parametrize("attention", ["standard", "gqa"])
def test_stories15m_tells_a_story(attention):
    files = get_model("stories15m", attention=attention)
    tokenizer = load_tokenizer(files.tokenizer)
    prompt = tokenizer.encode("Once upon a time")
    story = tokenizer.decode(prompt + generate(make_session(files.onnx), prompt, 40, stop=tokenizer.stop))
    assert story.startswith("Once upon a time, there was a little girl named Lily. She loved to play outside")


def test_stories15m_predicts_stories():
    files = get_model("stories15m")
    session = make_session(files.onnx)
    tokenizer = load_tokenizer(files.tokenizer)
    text = "Once upon a time, there was a little dog. He loved to play with his ball. One day, the ball was gone."
    own = score_texts(session, sample_texts(session, tokenizer.start, 512))
    assert score_tokens(session, tokenizer.encode(text)).cross_entropy < 2
    assert 0.8 < own.cross_entropy < 1.6
    assert (
        score_tokens(session, tokenizer.encode("Quarterly revenue fell short of the board's guidance.")).perplexity > 50
    )


@pytest.mark.slow
def test_gemma3_predicts_english(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    folder = default_cache_dir() / f"gemma-3-270m-{find_entry('gemma-3-270m').digest}"
    if not folder.is_dir():
        pytest.skip("gemma-3-270m has 253 MB to download; ortolan.models.fetch.fetch('gemma-3-270m') does it")
    report = ortolan.import_gguf(folder / "gemma-3-270m.Q4_K_M.gguf", tmp_path / "folder")
    assert not [layer for layer in report.layers if layer.new_op is None]
    session, tokenizer = ortolan.create_session(tmp_path / "folder"), load_tokenizer(tmp_path / "folder")
    ids = [*tokenizer.prefix, *tokenizer.encode("The Roman Empire was one of the largest empires in the history of")]
    assert tokenizer.decode(generate(session, ids, 2)) == " the world"
    assert tokenizer.stop == {1, 106}  # <eos>, <end_of_turn>
    # Beyond a window of 512 tokens, only some layers see the beginning of the text.
    text = "Berlin, Madrid, Rome, Paris, Vienna, Athens and Lisbon are capitals of Europe. " * 40
    assert score_tokens(session, [*tokenizer.prefix, *tokenizer.encode(text)], window=1024).perplexity < 1.5


@pytest.fixture(scope="module", params=["standard", "gqa"])
def smollm2(request):
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    files = get_model("smollm2-135m-instruct", attention=request.param)
    return make_session(files.onnx), load_tokenizer(files.tokenizer), 256 if request.param == "gqa" else None


@pytest.mark.slow
def test_smollm2_answers(smollm2):
    session, tokenizer, cache_length = smollm2
    prompt = tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    answer = tokenizer.decode(generate(Decoder(session, cache_length), prompt, 30, stop=tokenizer.stop))
    assert answer == "The capital of France is Paris."


def test_smollm2_predicts_english(smollm2):
    session, tokenizer, _ = smollm2
    text = "The Roman Empire was one of the largest empires in the history of the world. At its height it covered "
    text += "much of Europe, North Africa and the Middle East, and it was ruled by an emperor from the city of Rome."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert score_tokens(session, ids).perplexity < 12
    shuffled = np.random.default_rng(0).permutation(ids).tolist()
    assert score_tokens(session, shuffled).perplexity > 500

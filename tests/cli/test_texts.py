"""ortolan embed and ortolan rerank: results equal the API's; files, pipes, and errors before any work."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import onnx_ir as ir
import pytest

import ortolan
from ortolan import vectors_file
from ortolan.errors import OutputError
from ortolan.models import tiny

from ..text.reranker import write_reranker
from ..text.wordpiece_file import write_wordpiece

pytest.importorskip("tokenizers")

TEXTS = ["the cat", "a b c the cat sleeping", "", "the \r cat 1 2", "unaffable!"]


@pytest.fixture
def encoder(tmp_path):
    """A folder of an embedding model."""
    folder = tmp_path / "encoder"
    folder.mkdir()
    ir.save(tiny.tiny_bert(vocab_size=700), folder / "model.onnx")
    write_wordpiece(folder / "tokenizer.json")
    return folder


@pytest.fixture
def reranker(tmp_path):
    folder = tmp_path / "reranker"
    write_reranker(folder)
    write_wordpiece(folder / "tokenizer.json")
    return folder


@pytest.fixture
def texts_path(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_bytes("\n".join(TEXTS).encode() + b"\n")
    return path


def write_records(path, texts, key="body"):
    path.write_text("".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def test_embed_writes_what_the_api_returns(invoke, encoder, texts_path, tmp_path):
    result = invoke("embed", encoder, texts_path, "-o", tmp_path / "vectors.npy")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'vectors.npy'}: 5 vectors of width 48\n")
    found = np.load(tmp_path / "vectors.npy")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, ortolan.embed(TEXTS, encoder))
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    assert mapped.shape == (5, 48)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_embed_in_windows(invoke, encoder, texts_path, tmp_path, monkeypatch):
    """The output file does not depend on how many texts are processed at once."""
    monkeypatch.setattr("ortolan.embedding._WINDOW_TEXTS", 2)
    assert invoke("embed", encoder, texts_path, "-o", tmp_path / "vectors.npy").exit_code == 0
    np.testing.assert_allclose(np.load(tmp_path / "vectors.npy"), ortolan.embed(TEXTS, encoder), atol=1e-6)


def test_embed_takes_settings(invoke, encoder, texts_path, tmp_path):
    options = ("--pooling", "cls", "--no-normalize", "--max-tokens", "4", "--threads", "1", "--batch-tokens", "9")
    result = invoke("embed", encoder, texts_path, "-o", tmp_path / "vectors.npy", *options, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"output": str(tmp_path / "vectors.npy"), "texts": 5, "width": 48}
    settings = ortolan.TextInput(pooling="cls", normalize=False, max_tokens=4)
    expected = ortolan.embed(TEXTS, encoder, settings=settings, batch_tokens=9)
    np.testing.assert_allclose(np.load(tmp_path / "vectors.npy"), expected, atol=1e-6)


def test_embed_of_a_pipe(encoder, tmp_path):
    command = [sys.executable, "-m", "ortolan.cli", "embed", str(encoder), "-o", "vectors.npy"]
    given = "\n".join(TEXTS).encode() + b"\n"
    done = subprocess.run(command, cwd=tmp_path, input=given, capture_output=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
    np.testing.assert_array_equal(np.load(tmp_path / "vectors.npy"), ortolan.embed(TEXTS, encoder))


def test_embed_of_json_lines_and_windows_files(invoke, encoder, tmp_path):
    path = write_records(tmp_path / "texts.jsonl", TEXTS)
    assert invoke("embed", encoder, path, "--field", "body", "-o", tmp_path / "a.npy").exit_code == 0
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), ortolan.embed(TEXTS, encoder))
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfthe cat\r\n\r\na b c")
    assert invoke("embed", encoder, path, "-o", tmp_path / "a.npy").exit_code == 0
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), ortolan.embed(["the cat", "", "a b c"], encoder))


def test_embed_of_no_texts(invoke, encoder, tmp_path):
    (tmp_path / "none.txt").touch()
    assert invoke("embed", encoder, tmp_path / "none.txt", "-o", tmp_path / "a.npy").exit_code == 0
    assert np.load(tmp_path / "a.npy").shape == (0, 48)


def test_errors_before_work(invoke, encoder, reranker, texts_path, tmp_path, assert_one_line, monkeypatch):
    """A bad line near the end is reported before the first batch runs."""

    def refuse(*_):
        raise AssertionError("a batch has run")

    monkeypatch.setattr("ortolan.text_encoder.TextEncoder.run", refuse)
    out = ("-o", tmp_path / "vectors.npy")
    assert_one_line(invoke("embed", encoder, texts_path, "-o", tmp_path / "vectors.bin"), "must end in .npy")
    assert_one_line(
        invoke("embed", encoder, texts_path, "-o", tmp_path / "no" / "a.npy"), "does not exist; create it first"
    )
    (tmp_path / "folder.npy").mkdir()
    assert_one_line(
        invoke("embed", encoder, texts_path, "-o", tmp_path / "folder.npy"), "is a folder, expected a file name"
    )
    assert_one_line(invoke("embed", encoder, tmp_path / "no.txt", *out), "no.txt", "does not exist")
    assert_one_line(invoke("embed", encoder, tmp_path, *out), "expected a file with one text a line")
    assert_one_line(invoke("embed", tmp_path / "none", texts_path, *out), "none")
    assert_one_line(invoke("embed", reranker, texts_path, *out), "give a model that embeds")
    assert_one_line(invoke("rerank", encoder, texts_path, "--query", "cat"), "give a reranker")
    records = write_records(tmp_path / "texts.jsonl", TEXTS)
    assert_one_line(invoke("embed", encoder, records, *out), "--field")
    assert_one_line(invoke("embed", encoder, records, "--field", "text", *out), "line 1", "'text'", "body, id")
    with records.open("a") as lines:
        lines.write('{"body": 3}\n')
    assert_one_line(
        invoke("embed", encoder, records, "--field", "body", *out), "line 6", "'body' is an int, expected a string"
    )
    for bad in ("[1]", "word", ""):
        records.write_text(bad + "\n")
        assert_one_line(invoke("embed", encoder, records, "--field", "body", *out), "line 1", "expected a JSON object")
    texts_path.write_bytes(b"cat\n\xff\n")
    assert_one_line(invoke("embed", encoder, texts_path, *out), "line 2", "expected UTF-8")
    assert not (tmp_path / "vectors.npy").exists()


def test_a_bad_line_of_a_pipe_leaves_the_old_file(encoder, tmp_path, monkeypatch):
    (tmp_path / "vectors.npy").write_bytes(b"old")
    command = [sys.executable, "-m", "ortolan.cli", "embed", str(encoder), "-", "-o", "vectors.npy"]
    done = subprocess.run(command, cwd=tmp_path, input=b"cat\n\xff\n", capture_output=True, check=False, timeout=300)
    assert done.returncode == 1
    assert b"standard input, line 2: expected UTF-8" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder", "vectors.npy"]
    assert (tmp_path / "vectors.npy").read_bytes() == b"old"


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
def test_an_interrupt_leaves_nothing(encoder, tmp_path):
    command = [sys.executable, "-m", "ortolan.cli", "embed", str(encoder), "-o", "vectors.npy"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        process.stdin.write(b"cat\n")
        process.stdin.flush()
        until = time.monotonic() + 300
        while not any(path.name.startswith(".vectors") for path in tmp_path.iterdir()):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stdout) == (130, b"")
    assert stderr == b"ortolan: interrupted, nothing was written\n"
    assert os.listdir(tmp_path) == ["encoder"]


def test_progress_is_told_within_a_window(encoder):
    told = []
    ortolan.embed(TEXTS, encoder, batch_tokens=1, progress=lambda *call: told.append(call))
    assert told == [("embed texts", done, 5) for done in range(6)]


def test_progress_of_ranking(reranker):
    told = []
    ortolan.rerank("cat", TEXTS, reranker, batch_tokens=1, progress=lambda *call: told.append(call))
    assert told == [("score texts", done, 5) for done in range(1, 6)]


def test_rerank(invoke, reranker, texts_path):
    expected = ortolan.rerank("the cat", TEXTS, reranker)
    result = invoke("rerank", reranker, texts_path, "--query", "the cat", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["results"] == [
        {"index": one.index, "score": pytest.approx(one.score), "text": TEXTS[one.index]} for one in expected
    ]
    result = invoke("rerank", reranker, texts_path, "-q", "the cat", "--top-k", "2")
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["score", "index", "text"]
    assert [row.split()[:2] for row in rows] == [[f"{one.score:.4f}", str(one.index)] for one in expected[:2]]
    plain = invoke("rerank", reranker, texts_path, "-q", "the cat", "--activation", "none", "--json")
    scores = [one["score"] for one in json.loads(plain.stdout)["results"]]
    np.testing.assert_allclose(1 / (1 + np.exp(-np.array(scores))), [one.score for one in expected], atol=1e-6)


def test_vectors_are_written_whatever_the_pieces(tmp_path):
    rng = np.random.default_rng(0)
    pieces = [rng.standard_normal((rows, 7)).astype(np.float32) for rows in (3, 0, 1, 100)]
    path = tmp_path / "a.npy"
    assert vectors_file.write_vectors(path, iter(pieces)) == (104, 7)
    np.testing.assert_array_equal(np.load(path), np.concatenate(pieces))
    buffer = io.BytesIO(path.read_bytes())
    assert np.lib.format.read_magic(buffer) == (1, 0)
    assert np.lib.format.read_array_header_1_0(buffer) == ((104, 7), False, np.dtype("<f4"))
    assert buffer.tell() % 64 == 0


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OutputError, match=r"a\.npy.*No space left"):
        vectors_file.write_vectors(tmp_path / "a.npy", [np.zeros((1, 2), np.float32)])
    assert not list(tmp_path.iterdir())

"""Throughput on one batch of texts of mixed lengths, with and without padding.

python -m ortolan.benchmarks.padding sts-dev.csv wikitext2_valid.txt [--model qwen3-embedding] [--layers 4] [--batch 32]
    [--recipe int8 …] [--threads 1]

The batch takes texts evenly from the files: a text a line, or the sentences of sts-dev.csv. A token is a word or a
punctuation mark. Models have random weights. Only tokens that are not padding count. "CPU" is the fastest run by
processor time, which a busy machine disturbs less than "elapsed".
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from rich.console import Console
from rich.table import Table

from ortolan.graph_passes.measure.timing import interleave, pinned

from ..models.bert import BertConfig, bert_weight_shapes, build_bert
from ..models.llama_config import LlamaConfig, llama_weight_shapes
from ..models.llama_encoder import build_llama_encoder
from ..models.tiny import random_weights
from ..optimize import optimize_onnx
from ..session import create_session
from .result import versions_line
from .variants import read_recipe, session_options

MODELS = ("qwen3-embedding", "bert-base")
MAX_TOKENS = 512
_VOCABULARY = 30522  # small, since the table of words does not change the time
_PAD = 0
_TOKEN = re.compile(r"\w+|[^\w\s]")


def make_model(name: str, layers: int) -> ir.Model:
    """Return a model with random weights and the shape of Qwen3-Embedding-0.6B or BERT-base, with fewer layers."""
    if name == "bert-base":
        bert = BertConfig(vocab_size=_VOCABULARY, num_hidden_layers=layers)
        return build_bert(random_weights(bert_weight_shapes(bert)), bert, name)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        qk_norm=True,
    )
    return build_llama_encoder(random_weights(llama_weight_shapes(config)), config, name, pad_token_id=_PAD)


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file: one a line, or the sentences of sts-dev.csv. Lines without a word are left out."""
    texts: list[str] = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        columns = line.split("\t")
        texts += columns[5:7] if len(columns) > 6 else [line]
    return [text for text in texts if _TOKEN.search(text)]


def choose_lengths(files: Sequence[Sequence[str]], batch: int, seed: int = 0) -> list[int]:
    """Return the tokens of random texts, evenly from all files."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(batch):
        texts = files[number % len(files)]
        found.append(min(MAX_TOKENS, len(_TOKEN.findall(texts[int(rng.integers(len(texts)))]))))
    return found


def make_feeds(inputs: Sequence[str], lengths: Sequence[int], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random tokens of these lengths, int64 [texts, longest], padded behind."""
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.random.default_rng(seed).integers(1000, _VOCABULARY, mask.shape)
    positions = np.broadcast_to(np.arange(mask.shape[1]), mask.shape).copy()
    known = {
        "input_ids": np.where(mask != 0, ids, _PAD),
        "attention_mask": mask,
        "token_type_ids": np.zeros_like(mask),
        "position_ids": positions,
    }
    return {name: known[name] for name in inputs}


class CpuTimes:
    """A call whose processor time is measured, in seconds."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.seconds: list[float] = []

    def __call__(self) -> object:
        """Run the call."""
        start = time.process_time()
        found = self._call()
        self.seconds.append(time.process_time() - start)
        return found


def measure(model: ir.Model, recipes: Sequence[str], lengths: Sequence[int], threads: int, seconds: float) -> Table:
    """Return the table of a model with original and optimized weights, padded and not."""
    inputs = [value.name or "" for value in model.graph.inputs]
    feeds, real = make_feeds(inputs, lengths), sum(lengths)
    with tempfile.TemporaryDirectory() as temporary:
        files = {"ORT fp32, padded": Path(temporary) / "fp32.onnx"}
        ir.save(model, files["ORT fp32, padded"], external_data="fp32.onnx.data")
        for number, text in enumerate(recipes):
            recipe = read_recipe(text).with_options({"verify.seconds": 0.0})
            unpadded = recipe.without_pass("unpad").with_pass("unpad", pad_token_id=_PAD)
            for name, one in ((f"{text}, padded", recipe.without_pass("unpad")), (text, unpadded)):
                files[name] = Path(temporary) / f"{number}-{len(files)}.onnx"
                optimize_onnx(files["ORT fp32, padded"], files[name], recipe=one)
        calls: dict[str, Any] = {}
        for name, path in files.items():
            session = create_session(path, session_options(threads))
            calls[name] = CpuTimes(partial(session.run, None, feeds))
        timings = interleave(calls, seconds=seconds, min_rounds=1)
    cpu = {name: min(call.seconds) for name, call in calls.items()}
    table = Table(title=versions_line(), title_justify="left")
    for column in ("", "elapsed, tokens/s", "CPU, ms", "speedup, elapsed", "speedup, CPU"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    first = next(iter(calls))
    for name, timing in timings.items():
        ratios = timings[first].min_ms / timing.min_ms, cpu[first] / cpu[name]
        table.add_row(
            name, f"{1e3 * real / timing.min_ms:.0f}", f"{1e3 * cpu[name]:.0f}", *(f"{one:.2f}x" for one in ratios)
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, help="files with texts")
    parser.add_argument("--model", default=MODELS[0], choices=MODELS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--recipe", nargs="+", default=["int8"], metavar="[NAME][:KEY=VALUE,…]", help="default: int8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args(arguments)
    lengths = choose_lengths([read_texts(path) for path in given.texts], given.batch)
    console = Console(width=120)
    with pinned(given.threads):
        table = measure(make_model(given.model, given.layers), given.recipe, lengths, given.threads, given.seconds)
    console.print(
        f"{given.model}, {given.layers} layers, {given.batch} texts of {min(lengths)} to {max(lengths)} tokens"
    )
    padded = given.batch * max(lengths)
    console.print(f"{sum(lengths)} tokens, {padded} with padding; {given.threads} threads")
    console.print(table)


if __name__ == "__main__":
    main()

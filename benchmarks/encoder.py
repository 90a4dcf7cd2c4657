"""Whole encoders: latency against ONNX Runtime's fp32 and dynamic int8, and Spearman correlation on STS-B's dev set.

python -m ortolan.benchmarks.encoder [--model all-minilm-l6-v2] [--recipe [NAME][:KEY=VALUE,…] …] [--sparsity 0.8 …]
    [--shape 1x16 …] [--sts sts-dev.csv] [--texts sentences.txt] [--threads 1] [--peer openvino] [--distilled FILE]

The dynamic int8 model is also timed after Ortolan has optimized it, with its weights kept exactly.
"""

from __future__ import annotations

import argparse
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.quantization import quantize_dynamic
from rich.console import Console
from rich.table import Table

from ortolan.graph_passes.measure.timing import interleave, pinned
from ortolan.graph_passes.recipe import Recipe
from ortolan.graph_passes.report.figures import Timing

from ..embedding import spearman_on_sts, token_feeds
from ..errors import RecipeError, VerificationError
from ..models import get_model
from ..models.bert import BertConfig, bert_weight_shapes, build_bert
from ..models.tiny import random_weights
from ..optimize import optimize_onnx
from ..session import create_session
from ..text_encoder import TextEncoder
from .result import versions_line
from .variants import file_megabytes, read_recipes, session_options

PUBLISHED = ("all-minilm-l6-v2", "all-mpnet-base-v2")
MAX_TOKENS = 512  # the longest text of all these models
RANDOM = "bert-base"  # name of a model with the shape of BERT-base and random weights
RECIPES = (":sparsity=0.8,pattern=4x1", ":sparsity=0.8,pattern=4x1,ranges=true")
SHAPES = ((1, 16), (1, 128), (8, 64), (1, 256))  # batch, tokens
FP32, INT8, ADOPTED = "ORT fp32", "ORT int8", "ORT int8, adopted"
# Token ids that are words, not special tokens, in all these models.
_FIRST_WORD, _LAST_WORD = 2000, 30000

# Default calibration texts, for recipes with fixed ranges or with weights fitted to inputs.
SENTENCES = (
    "The ferry leaves the old harbour every morning at a quarter past seven.",
    "She has been working on the same painting since the beginning of spring.",
    "How do I change the password of my account?",
    "Heavy rain is expected in the north, with strong winds along the coast.",
    "The committee rejected the proposal by nine votes to four.",
    "Two children are playing football in the park.",
    "Stocks closed slightly lower on Friday as investors waited for new figures on employment.",
    "Peel the potatoes, cut them into thick slices and boil them in salted water for ten minutes.",
    "A dog runs through the snow with a stick in its mouth.",
    "The museum is closed on Mondays, but the garden stays open all week.",
    "Researchers found that the cells divide more slowly when the temperature falls.",
    "Please send us the signed contract before the end of the month.",
    "He could not remember where he had left his keys.",
    "The train was late again, so we missed the first half of the concert.",
    "What is the difference between a comet and an asteroid?",
    "The new bridge, which took six years to build, shortens the journey by almost an hour.",
    "I ordered the blue one, and they sent me a green one instead!",
    "According to the report, one in five households has no access to the internet.",
    "Turn left at the church and follow the river until you reach the mill.",
    "After the war the family moved to Canada, where his father found work as a carpenter.",
)


@dataclass(frozen=True)
class Encoder:
    """A model to measure; one with random weights has no tokenizer."""

    onnx: Path
    tokenizer: Path | None
    inputs: tuple[str, ...]


def open_model(name: str, folder: Path) -> Encoder:
    """Fetch a published model, or make the random one in `folder`."""
    if name == RANDOM:
        config = BertConfig()
        model = build_bert(random_weights(bert_weight_shapes(config)), config, name)
        path, tokenizer = folder / f"{name}.onnx", None
        ir.save(model, path, external_data=f"{path.name}.data")
    else:
        files = get_model(name)
        path, tokenizer = files.onnx, files.tokenizer
    return Encoder(path, tokenizer, tuple(value.name or "" for value in ir.load(path).graph.inputs))


def word_feeds(inputs: Sequence[str], batch: int, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return feeds of random words without padding: int64 [batch, tokens] each."""
    ids = np.random.default_rng(seed).integers(_FIRST_WORD, _LAST_WORD, (batch, tokens))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    return {name: feeds[name] for name in inputs}


def calibration_feeds(encoder: Encoder, sentences: Sequence[str]) -> list[dict[str, np.ndarray]]:
    """Return one feed per sentence, without padding; without a tokenizer, an equal number of random words."""
    if encoder.tokenizer is None:
        return [word_feeds(encoder.inputs, 1, len(text.split()), seed) for seed, text in enumerate(sentences, start=1)]
    feeds = token_feeds(encoder.tokenizer, sentences)
    return [{name: one[name] for name in encoder.inputs} for one in feeds]


@contextmanager
def silent_root_logger() -> Iterator[None]:
    """Silence ORT's quantizer, which advises preprocessing that has no effect here."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def make_variants(
    encoder: Encoder,
    recipes: Mapping[str, Recipe],
    calibration: Sequence[dict[str, np.ndarray]],
    folder: Path,
    console: Console,
    distilled: Path | None = None,
) -> dict[str, Path]:
    """Return name -> ONNX file, made in `folder`; a recipe whose result fails verification is left out.

    Recipes start from the file `distilled` (the same model with other weights) if it is given.
    """
    variants = {FP32: encoder.onnx, INT8: folder / "ort_int8.onnx"}
    with silent_root_logger():
        quantize_dynamic(encoder.onnx, variants[INT8])
    to_make: list[tuple[str, Path, Recipe | None]] = [(ADOPTED, variants[INT8], None)]
    to_make += [(name, distilled or encoder.onnx, recipe) for name, recipe in recipes.items()]
    for name, source, recipe in to_make:
        path = folder / re.sub(r"[^\w.=%-]", "-", f"{name}.onnx")
        console.print(f"making {path.name}")
        try:
            optimize_onnx(source, path, recipe=recipe, calibration=calibration)
        except VerificationError as error:
            console.print(f"left out: {error}")
        else:
            variants[name] = path
    return variants


def openvino_call(path: Path, threads: int) -> Callable[[dict[str, np.ndarray]], object]:
    """Return a call of a model in OpenVINO, in its default precision on this CPU."""
    from openvino import Core

    options: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
    }
    request = Core().compile_model(str(path), "CPU", options).create_infer_request()
    return lambda feeds: request.infer(feeds)


def ratio_cell(timing: Timing, timings: Mapping[str, Timing]) -> str:
    """Return minimum and median, and the speedups over ONNX Runtime's fp32 and int8, by the minima."""
    fp32, int8 = (timings[name].min_ms / timing.min_ms for name in (FP32, INT8))
    return f"{timing}  {fp32:.2f}x  {int8:.2f}x"


def read_shape(text: str) -> tuple[int, int]:
    """Parse BATCHxTOKENS."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected BATCHxTOKENS such as 1x128, found {text!r}")
    batch, tokens = int(match[1]), int(match[2])
    if tokens > MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r} has {tokens} tokens, expected at most {MAX_TOKENS}")
    return batch, tokens


def read_arguments() -> tuple[argparse.Namespace, dict[str, Recipe], Sequence[str]]:
    """Return the arguments, the recipes, and the sentences to calibrate on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PUBLISHED[0], choices=[*PUBLISHED, RANDOM])
    parser.add_argument(
        "--recipe", nargs="*", default=RECIPES, metavar="[NAME][:KEY=VALUE,…]", help=f"default: {' '.join(RECIPES)}"
    )
    parser.add_argument(
        "--sparsity", type=float, nargs="+", default=[], help="for recipes that prune (default: the recipe's sparsity)"
    )
    shapes = " ".join(f"{batch}x{tokens}" for batch, tokens in SHAPES)
    parser.add_argument("--shape", type=read_shape, nargs="+", default=SHAPES, help=f"BATCHxTOKENS; default: {shapes}")
    parser.add_argument("--sts", type=Path, help="sts-dev.csv: tab-separated, columns 5 to 7 score and two sentences")
    parser.add_argument("--texts", type=Path, help="calibration sentences, one a line; default: 20 built-in sentences")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="per shape")
    parser.add_argument(
        "--distilled", type=Path, help="the result of `ortolan distill` for the model: recipes start from it"
    )
    parser.add_argument("--peer", choices=["openvino"], help="also time this runtime, if it is installed")
    arguments = parser.parse_args()
    for option in ("sts", "texts", "distilled"):
        path = getattr(arguments, option)
        if path and not path.is_file():
            parser.error(f"--{option}: file {str(path)!r} does not exist")
        if path and arguments.model == RANDOM:
            parser.error(f"--{option}: {RANDOM} has random weights and no tokenizer; choose another --model")
    if arguments.peer and find_spec(arguments.peer) is None:
        parser.error(f"--peer: {arguments.peer} is not installed; pip install {arguments.peer}")
    lines = arguments.texts.read_text(encoding="utf-8").splitlines() if arguments.texts else SENTENCES
    sentences = [line.strip() for line in lines if line.strip()]
    if not sentences:
        parser.error(f"--texts: {str(arguments.texts)!r} holds no sentences")
    try:
        return arguments, read_recipes(arguments.recipe, arguments.sparsity), sentences
    except RecipeError as error:
        parser.error(f"--recipe: {error}")


def main() -> None:
    """Run the command."""
    arguments, recipes, sentences = read_arguments()
    console = Console(width=180)
    with tempfile.TemporaryDirectory() as temporary, pinned(arguments.threads):
        folder = Path(temporary)
        encoder = open_model(arguments.model, folder)
        feeds_to_fit = calibration_feeds(encoder, sentences)
        variants = make_variants(encoder, recipes, feeds_to_fit, folder, console, arguments.distilled)
        sessions: dict[str, ort.InferenceSession] = {
            name: create_session(path, session_options(arguments.threads)) for name, path in variants.items()
        }
        run: dict[str, Callable[[dict[str, np.ndarray]], object]] = {
            name: partial(session.run, None) for name, session in sessions.items()
        }
        if arguments.peer:
            run[arguments.peer] = openvino_call(encoder.onnx, arguments.threads)

        title = f"{versions_line()} · {arguments.model} · threads {arguments.threads}"
        caption = "per shape: ms, min / median; speedup over ORT fp32, and over ORT int8"
        table = Table(title=title, title_justify="left", caption=caption)
        for column in ("", "MB", "Spearman", *(f"{batch} x {tokens}" for batch, tokens in arguments.shape)):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        timings = []
        for batch, tokens in arguments.shape:
            feeds = word_feeds(encoder.inputs, batch, tokens)
            calls = {name: partial(call, feeds) for name, call in run.items()}
            timings.append(interleave(calls, seconds=arguments.seconds))
        for name in run:
            size = f"{file_megabytes(variants[name]):.1f}" if name in variants else ""
            spearman = ""
            if arguments.sts and name in sessions and encoder.tokenizer is not None:
                spearman = f"{spearman_on_sts(TextEncoder(sessions[name], encoder.tokenizer), arguments.sts):.4f}"
            table.add_row(name, size, spearman, *(ratio_cell(times[name], times) for times in timings))
    console.print(table)


if __name__ == "__main__":
    main()

"""Whole decoders: prompt and decode speed, perplexity and size, for fp32, 4-bit peers and recipes.

python -m ortolan.benchmarks.decode [--model smollm2-135m-instruct] [--threads 1] [--recipe [NAME]:KEY=VALUE,… …]
    [--variant NAME=PATH …] [--text FILE] [--profile]

A variant is an ONNX file or a model's folder. Other runtimes: python -m tools.peers decoders
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

from ortolan.graph_passes.measure.timing import pinned
from ortolan.graph_passes.recipe import Recipe

from ..errors import OrtolanError, RecipeError, VerificationError
from ..generate import Decoder, read_head_size, shares_cache
from ..models import get_model
from ..models.perplexity import sample_texts, score_tokens
from ..models.tokenizer import load_tokenizer
from ..optimize import optimize_onnx
from ..session import create_session
from .matmul_nbits import make_matmul_nbits
from .result import versions_line
from .variants import file_megabytes, read_recipes, session_options

PEERS = {"MatMulNBits g32": (32, 4), "MatMulNBits g128": (128, 4)}  # block size, accuracy level
# Recipes keep the head in 8 bits; the peers store it in 4 bits like other layers.
WINDOW = 512  # tokens
SAMPLED = 2048  # tokens of a sampled text, used without --text
RECIPES = ("int4", "int4:group_size=128")


@dataclass(frozen=True)
class Speed:
    """Measured seconds: prompt [rounds], decode [rounds, steps]. A step has the same context length in each round."""

    prompt_tokens: int
    prompt: np.ndarray
    decode: np.ndarray

    @property
    def prompt_rates(self) -> tuple[float, float]:
        """Tokens per second of the prompt, by the fastest and by the median round."""
        return self.prompt_tokens / float(self.prompt.min()), self.prompt_tokens / float(np.median(self.prompt))

    @property
    def decode_rates(self) -> tuple[float, float]:
        """Tokens per second over all steps, by each step's fastest and median round.

        An interruption then affects only one step.
        """
        steps = self.decode.shape[1]
        best, median = self.decode.min(axis=0).sum(), np.median(self.decode, axis=0).sum()
        return steps / float(best), steps / float(median)


def measure(
    decoders: Mapping[str, Decoder], prompt: Sequence[int], decode_tokens: int, rounds: int
) -> dict[str, Speed]:
    """Time the prompt and greedy decode steps of all decoders alternately, after a round to warm up."""
    times: dict[str, list[list[float]]] = {name: [] for name in decoders}
    for _ in range(rounds + 1):
        for name, decoder in decoders.items():
            decoder.reset()
            tokens: Sequence[int] = prompt
            stamps = [time.perf_counter()]
            for _ in range(1 + decode_tokens):
                tokens = [int(decoder.step(tokens)[-1].argmax())]
                stamps.append(time.perf_counter())
            times[name].append(np.diff(stamps).tolist())
    speeds = {}
    for name, rows in times.items():
        seconds = np.array(rows[1:])
        speeds[name] = Speed(len(prompt), seconds[:, 0], seconds[:, 1:])
    return speeds


@dataclass(frozen=True)
class ProfileRow:
    """Time of a decode step in the nodes of one operator in modules of one name, such as "gate_proj"."""

    op_type: str
    module: str
    nodes: int
    microseconds: float


def profile_decode(
    open_decoder: Callable[[ort.SessionOptions], Decoder],
    options: ort.SessionOptions,
    prompt: Sequence[int],
    steps: int,
    folder: Path,
) -> tuple[list[ProfileRow], float]:
    """Return the time of a decode step by node, from ONNX Runtime's profiler, and the microseconds of a whole step.

    The profiler takes time between nodes, so its steps are slower.
    """
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "decode")
    decoder = open_decoder(options)
    token = int(decoder.step(prompt)[-1].argmax())
    for _ in range(steps + 1):
        token = int(decoder.step([token])[-1].argmax())
    return read_profile(decoder.session.end_profiling(), skip_runs=2)


def read_profile(path: str | Path, skip_runs: int) -> tuple[list[ProfileRow], float]:
    """Return a typical run from a file of the profiler, after skipping the first runs.

    Returns:
        The sums, by operator and module, of each node's median time, and the median time of a run, in microseconds.

    Raises:
        OrtolanError: The file has too few runs.
    """
    events = json.loads(Path(path).read_text())
    runs = [event for event in events if event["name"] == "model_run"][skip_runs:]
    if not runs:
        raise OrtolanError(f"{path} has no runs after the first {skip_runs}; run the model more often")
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= runs[0]["ts"]:
            durations[event["args"]["op_name"], event["name"].removesuffix("_kernel_time")].append(event["dur"])
    medians: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (op_type, node), found in durations.items():
        parts = node.split("/")
        medians[op_type, parts[-2] if len(parts) > 1 else ""].append(statistics.median(found))
    rows = [ProfileRow(*key, nodes=len(found), microseconds=sum(found)) for key, found in medians.items()]
    return sorted(rows, key=lambda row: -row.microseconds), statistics.median(run["dur"] for run in runs)


def perplexity(path: Path, ids: Sequence[int], window: int = WINDOW) -> float:
    """Return the perplexity of a text, in windows that begin with the last token of the previous window."""
    return score_tokens(create_session(path, session_options(2)), ids, window, window - 1).perplexity


def read_text(arguments: argparse.Namespace, original: Path, console: Console) -> list[int]:
    """Return the tokens to score: of the given text, or sampled from the original model."""
    files = get_model(arguments.model)
    if arguments.text is None or files.tokenizer is None:
        console.print(f"no --text was given: perplexity is measured on {SAMPLED} tokens sampled from the original")
        start = 1 if files.tokenizer is None else load_tokenizer(files.tokenizer).start
        texts = sample_texts(create_session(original, session_options(2)), start, SAMPLED, arguments.window)
        return [token for text in texts for token in text]
    text = arguments.text.read_text(encoding="utf-8")
    tokens = arguments.text_tokens
    return load_tokenizer(files.tokenizer).encode(text[: 16 * tokens])[:tokens]


def open_decoder(path: Path, options: ort.SessionOptions, cache_length: int) -> Decoder:
    """Open a decoder, with a shared cache if the model supports it."""
    session = create_session(path, options)
    return Decoder(session, cache_length if shares_cache(path) else None, read_head_size(path))


def make_variants(
    arguments: argparse.Namespace, recipes: Mapping[str, Recipe], folder: Path, console: Console
) -> dict[str, Path]:
    """Return name -> ONNX file, made in `folder` unless it exists."""
    variants: dict[str, Path] = {}
    for attention in arguments.attention:
        suffix = f" {attention}" if len(arguments.attention) > 1 else ""
        source = get_model(arguments.model, progress=console.print, attention=attention).onnx
        variants[f"fp32{suffix}"] = source
        writers: dict[str, Callable[[Path], object]] = {
            name: partial(make_matmul_nbits, source, block_size=block_size, accuracy_level=level)
            for name, (block_size, level) in PEERS.items()
        }
        writers |= {name: partial(optimize_onnx, source, recipe=recipe) for name, recipe in recipes.items()}
        for name, write in writers.items():
            path = folder / re.sub(r"[^\w.=%-]", "-", f"{source.stem} {name}.onnx")
            if not path.is_file():
                console.print(f"making {path.name}")
                try:
                    write(path)
                except VerificationError as error:
                    console.print(f"left out: {error}")
                    continue
            variants[f"{name}{suffix}"] = path
    return variants | dict(map(read_variant, arguments.variant))


def read_variant(text: str) -> tuple[str, Path]:
    """Parse NAME=PATH; a folder's path means its model.onnx."""
    name, _, path = text.partition("=")
    return name, Path(path) / "model.onnx" if Path(path).is_dir() else Path(path)


def speed_table(
    title: str, speeds: Mapping[str, Speed], variants: Mapping[str, Path], quality: Mapping[str, float], against: str
) -> Table:
    """Return the table of speeds."""
    table = Table(title=title, title_justify="left", caption=f"ratios: to {against}; tokens/s: best / median")
    for column in ("", "MB", "perplexity", "prompt, tokens/s", "ratio", "decode, tokens/s", "ratio"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    base = speeds[against]
    for name, speed in speeds.items():
        cells = []
        for rates, others in (
            (speed.prompt_rates, base.prompt_rates),
            (speed.decode_rates, base.decode_rates),
        ):
            cells += [f"{rates[0]:.1f} / {rates[1]:.1f}", f"{rates[0] / others[0]:.2f}x"]
        table.add_row(name, f"{file_megabytes(variants[name]):.1f}", f"{quality[name]:.2f}", *cells)
    return table


def profile_table(name: str, rows: Sequence[ProfileRow], whole: float) -> Table:
    """Return the table of a profile."""
    table = Table(title=f"{name}: a decode step by node, profiled", title_justify="left")
    for column in ("operator", "module", "nodes", "us", "of step"):
        table.add_column(column, justify="left" if column in ("operator", "module") else "right")
    outside = whole - sum(row.microseconds for row in rows)
    for row in [*rows, ProfileRow("(between the nodes)", "", 0, outside)]:
        if row.microseconds >= 0.002 * whole:
            table.add_row(
                row.op_type, row.module, str(row.nodes), f"{row.microseconds:.0f}", f"{row.microseconds / whole:.1%}"
            )
    table.add_row("step", "", str(sum(row.nodes for row in rows)), f"{whole:.0f}", "")
    return table


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name of a decoder for get_model")
    parser.add_argument(
        "--attention", nargs="+", default=["gqa"], choices=["standard", "gqa"], help="attention of the graph"
    )
    parser.add_argument(
        "--recipe", nargs="*", default=RECIPES, metavar="[NAME][:KEY=VALUE,…]", help=f"default: {' '.join(RECIPES)}"
    )
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.0, 0.5], help="for recipes that prune")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="also time this ONNX file or model folder",
    )
    parser.add_argument(
        "--text", type=Path, help="UTF-8 text to measure perplexity with (default: sampled from the model)"
    )
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of context (256 for stories15m)")
    parser.add_argument("--text-tokens", type=int, default=8192, help="tokens of the text to use")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, help="folder that keeps the files for the next run (default: a temporary one)"
    )
    parser.add_argument("--profile", action="store_true", help="print the time of a decode step by operator")
    arguments = parser.parse_args()
    for variant in arguments.variant:
        if not read_variant(variant)[1].is_file():
            parser.error(f"--variant: expected NAME=PATH of an ONNX file, found {variant!r}")
    if arguments.text and not arguments.text.is_file():
        parser.error(f"--text: file {str(arguments.text)!r} does not exist")
    try:
        recipes = read_recipes(arguments.recipe, arguments.sparsity)
    except RecipeError as error:
        parser.error(f"--recipe: {error}")

    console = Console(width=140)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        variants = make_variants(arguments, recipes, folder, console)
        cache_length = arguments.prompt_tokens + arguments.decode_tokens
        text = read_text(arguments, next(iter(variants.values())), console)
        quality = {name: perplexity(path, text, arguments.window) for name, path in variants.items()}
        with pinned(arguments.threads):
            decoders = {
                name: open_decoder(path, session_options(arguments.threads), cache_length)
                for name, path in variants.items()
            }
            vocabulary = min(decoder.vocabulary for decoder in decoders.values())
            prompt = np.random.default_rng(0).integers(0, vocabulary, arguments.prompt_tokens).tolist()
            speeds = measure(decoders, prompt, arguments.decode_tokens, arguments.rounds)
        title = (
            f"{versions_line()} · {arguments.model} · threads {arguments.threads} · prompt {arguments.prompt_tokens}, "
            f"decode {arguments.decode_tokens} tokens, {arguments.rounds} rounds"
        )
        against = next((name for name in variants if name.startswith("MatMulNBits g32")), next(iter(variants)))
        console.print(speed_table(title, speeds, variants, quality, against))
        if arguments.profile:
            del decoders
            with pinned(arguments.threads):
                for name, path in variants.items():
                    rows, whole = profile_decode(
                        lambda options, p=path: open_decoder(p, options, cache_length),  # type: ignore[misc]
                        session_options(arguments.threads),
                        prompt,
                        arguments.decode_tokens - 1,
                        Path(temporary),
                    )
                    console.print(profile_table(name, rows, whole))


if __name__ == "__main__":
    main()

"""Real models in the tools that Ortolan supports: equality of the answers, and speed.

python -m ortolan.benchmarks.hooks optimum-decoder | optimum-encoder | genai [--folder DIR] [--tokens 64] [--threads 2]

optimum-decoder: SmolLM2-135M, exported by `optimum-cli export onnx` and optimized by `ortolan optimize`, and exported
by `optimum-cli export ortolan`; run by ORTModelForCausalLM.generate. genai: the same model by onnxruntime-genai's
builder and `ortolan optimize`. optimum-encoder: all-MiniLM-L6-v2 by optimum-cli and the pipeline feature-extraction.
Needs the packages of docs/optimum.md or docs/genai.md, and ortolan[decoder,demo]. --folder keeps the files, and
continues from existing ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..models.checkpoint import write_checkpoint
from .encoder import SENTENCES
from .result import versions_line

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n",
)
EXACT = ("--cache", "float32")
INT4 = ("--weights", "int4")
BF16 = ("--weights", "bf16")
INT8 = ("--weights", "int8")
_GENAI_LAYOUT = ("-e", "cpu", "--extra_options")


@dataclass(frozen=True)
class Figures:
    """Results of a model folder. same: fraction of equal tokens, or smallest cosine, compared with the first folder."""

    name: str
    megabytes: float
    same: float
    a_second: float


def run_optimum_decoder(work: Path, tokens: int, threads: int) -> list[Figures]:
    """Compare the original with an exact model by `optimize` and a 4-bit model by `export`."""
    checkpoint = _checkpoint("smollm2-135m-instruct", work)
    task = ("--task", "text-generation-with-past")
    original = _made(work / "onnx", lambda to: _optimum("export", "onnx", "-m", checkpoint, *task, to))
    exact = _made(
        work / "exact", lambda to: _optimum("ortolan", "optimize", "--onnx_model", original, "-o", to, *EXACT)
    )
    int4 = _made(work / "int4", lambda to: _optimum("export", "ortolan", "-m", checkpoint, *task, to, *INT4))
    return _compared(
        {"original": original, "exact": exact, "int4": int4},
        lambda folder: _optimum_generator(folder, threads),
        tokens,
    )


def run_genai(work: Path, tokens: int, threads: int) -> list[Figures]:
    """Compare a float32 and a 4-bit original with their optimized models."""
    checkpoint = _checkpoint("smollm2-135m-instruct", work)
    found = []
    for name, precision, recipe in (("float32", "fp32", EXACT), ("int4", "int4", ())):
        layout = (*_GENAI_LAYOUT, "int4_block_size=32")
        builder = (sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-p", precision)
        original = _made(work / name, lambda to: _run(*builder, "-o", to, "-c", work / "builder", *layout))  # noqa: B023
        optimize = (sys.executable, "-m", "ortolan", "optimize", original, *recipe)
        fast = _made(work / f"{name}-ortolan", lambda to: _run(*optimize, "-o", to))  # noqa: B023
        found += _compared({name: original, fast.name: fast}, lambda folder: _genai_generator(folder, threads), tokens)
    return found


def run_optimum_encoder(work: Path, tokens: int, threads: int) -> list[Figures]:
    """Compare the original with a bf16 model by `optimize` and an int8 model by `export`, in sentences per second.

    tokens: unused.
    """
    checkpoint = _checkpoint("all-minilm-l6-v2", work)
    task = ("--task", "feature-extraction")
    original = _made(work / "onnx", lambda to: _optimum("export", "onnx", "-m", checkpoint, *task, to))
    bf16 = _made(work / "bf16", lambda to: _optimum("ortolan", "optimize", "--onnx_model", original, "-o", to, *BF16))
    int8 = _made(work / "int8", lambda to: _optimum("export", "ortolan", "-m", checkpoint, *task, to, *INT8))
    expected: np.ndarray | None = None
    figures = []
    for name, folder in {"original": original, "bf16": bf16, "int8": int8}.items():
        vectors, seconds = _optimum_vectors(folder, threads)
        expected = vectors if expected is None else expected
        same = float((vectors * expected).sum(axis=1).min())
        figures.append(Figures(name, _megabytes(folder), same, len(vectors) / seconds))
    return figures


RUNS: dict[str, Callable[[Path, int, int], list[Figures]]] = {
    "optimum-decoder": run_optimum_decoder,
    "optimum-encoder": run_optimum_encoder,
    "genai": run_genai,
}


# ---- folders ---------------------------------------------------------------------------------------------------------


def _checkpoint(name: str, work: Path) -> Path:
    return _made(work / "checkpoint", lambda to: write_checkpoint(name, to))


def _made(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return the folder; make it if it is missing. It has a temporary name until it is complete."""
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(unfinished, ignore_errors=True)  # left by an interrupted run
        make(unfinished)
        unfinished.rename(folder)
    return folder


def _optimum(*arguments: object) -> None:
    _run(Path(sys.executable).with_name("optimum-cli"), *arguments)


def _run(*command: object) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}")


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.onnx*")) / 1e6


# ---- decoders --------------------------------------------------------------------------------------------------------

Generator = Callable[[str, int], tuple[list[int], float]]  # prompt, count -> tokens, seconds


def _compared(folders: dict[str, Path], open_folder: Callable[[Path], Generator], tokens: int) -> list[Figures]:
    """Time the models alternately, prompt by prompt, so that a busy machine slows all of them equally."""
    generators = {name: open_folder(folder) for name, folder in folders.items()}
    texts: dict[str, list[list[int]]] = {name: [] for name in folders}
    seconds = dict.fromkeys(folders, 0.0)
    for prompt in PROMPTS:
        for generate in generators.values():
            generate(prompt, 2)  # warm up
        for name, generate in generators.items():
            ids, spent = generate(prompt, tokens)
            texts[name].append(ids)
            seconds[name] += spent
    expected = next(iter(texts.values()))
    return [
        Figures(name, _megabytes(folder), _equal_fraction(texts[name], expected), tokens * len(PROMPTS) / seconds[name])
        for name, folder in folders.items()
    ]


def _equal_fraction(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Return the fraction of tokens before the first difference."""
    same = total = 0
    for one, other in zip(found, expected, strict=True):
        pairs = [a == b for a, b in zip(one, other, strict=True)]
        same += pairs.index(False) if False in pairs else len(pairs)
        total += len(pairs)
    return same / total


def _optimum_generator(folder: Path, threads: int) -> Generator:
    from optimum.onnxruntime import ORTModelForCausalLM
    from transformers import AutoTokenizer

    from ..session import register

    options = register()
    options.intra_op_num_threads = threads
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = ORTModelForCausalLM.from_pretrained(folder, session_options=options)

    def generate(prompt: str, count: int) -> tuple[list[int], float]:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        start = time.perf_counter()
        ids = model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return ids[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - start

    return generate


def _genai_generator(folder: Path, threads: int) -> Generator:
    import onnxruntime_genai

    config = onnxruntime_genai.Config(str(folder))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = onnxruntime_genai.Model(config)
    tokenizer = onnxruntime_genai.Tokenizer(model)

    def generate(prompt: str, count: int) -> tuple[list[int], float]:
        ids = tokenizer.encode(prompt)
        parameters = onnxruntime_genai.GeneratorParams(model)
        length = len(ids) + count
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = onnxruntime_genai.Generator(model, parameters)
        start = time.perf_counter()
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
        spent = time.perf_counter() - start
        return [int(token) for token in generator.get_sequence(0)[len(ids) :]], spent

    return generate


# ---- encoders --------------------------------------------------------------------------------------------------------


def _optimum_vectors(folder: Path, threads: int) -> tuple[np.ndarray, float]:
    """Return normalized sentence vectors (mean of the tokens), and the seconds of the second run."""
    from optimum.onnxruntime import ORTModelForFeatureExtraction
    from transformers import AutoTokenizer, pipeline

    from ..session import register

    options = register()
    options.intra_op_num_threads = threads
    model: Any = ORTModelForFeatureExtraction.from_pretrained(folder, session_options=options)
    extract = pipeline("feature-extraction", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))
    for _ in range(2):
        start = time.perf_counter()
        features = extract(list(SENTENCES))
        seconds = time.perf_counter() - start
    means = np.stack([np.asarray(one[0], np.float32).mean(axis=0) for one in features])
    return means / np.linalg.norm(means, axis=1, keepdims=True), seconds


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hook", choices=RUNS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.folder or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        figures = RUNS[arguments.hook](work, arguments.tokens, arguments.threads)
    if arguments.json:
        print(json.dumps({"versions": versions_line(), "figures": [asdict(one) for one in figures]}))
        return
    unit = "sentences/s" if arguments.hook == "optimum-encoder" else "tokens/s"
    print(f"{'':20} {'MB':>8} {'same':>9} {unit:>12}")
    for one in figures:
        print(f"{one.name:20} {one.megabytes:8.1f} {one.same:9.5f} {one.a_second:12.1f}")
    print(versions_line())


if __name__ == "__main__":
    main()

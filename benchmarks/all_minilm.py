"""all-MiniLM-L6-v2, whole: latency against ONNX Runtime's fp32 and dynamic int8, and Spearman on STS-B's dev set.

python -m ortolan.benchmarks.all_minilm [--sts sts-dev.csv] [--recipe sparse-int8 …] [--sparsity 0.5 …] [--threads 1]
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnxruntime.quantization import quantize_dynamic
from rich.console import Console
from rich.table import Table

from ..models import get_model
from ..models.embed import SentenceEncoder, spearman_on_sts
from ..optimize import optimize_onnx
from ..session import create_session
from .result import versions_line
from .timing import interleave, pinned

SHAPES = ((1, 16), (1, 128), (8, 64), (1, 256))  # batch, tokens
VOCABULARY = 30522


def feeds(batch: int, tokens: int) -> dict[str, np.ndarray]:
    """Random tokens, nothing masked: int64 [batch, tokens] each."""
    ids = np.random.default_rng(0).integers(1000, VOCABULARY, (batch, tokens))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def session_options(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return options


@contextmanager
def silent_root_logger() -> Iterator[None]:
    """ORT's quantizer warns through it that the model could be preprocessed, which gains nothing here."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sts", type=Path, help="sts-dev.csv: tab-separated, columns 5 to 7 score and two sentences")
    parser.add_argument("--recipe", nargs="+", default=["sparse-bf16", "sparse-int8", "sparse-int4"])
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.0, 0.3, 0.5])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="per shape")
    arguments = parser.parse_args()
    if arguments.sts and not arguments.sts.is_file():
        parser.error(f"--sts: file {str(arguments.sts)!r} does not exist")

    console = Console(width=150)
    model = get_model("all-minilm-l6-v2")
    assert model.tokenizer is not None
    with tempfile.TemporaryDirectory() as folder, pinned(arguments.threads):
        sessions = {"ORT fp32": ort.InferenceSession(str(model.onnx), session_options(arguments.threads))}
        sizes: dict[str, int | None] = {"ORT fp32": model.onnx.stat().st_size}
        int8 = Path(folder) / "ort_int8.onnx"
        with silent_root_logger():
            quantize_dynamic(model.onnx, int8)
        sessions["ORT int8"] = ort.InferenceSession(str(int8), session_options(arguments.threads))
        sizes["ORT int8"] = int8.stat().st_size
        for recipe in arguments.recipe:
            for sparsity in arguments.sparsity:
                name = f"{recipe} {sparsity:.0%}"
                path = Path(folder) / f"{name}.onnx"
                report = optimize_onnx(model.onnx, path, recipe=recipe, options={"sparsity": sparsity})
                sessions[name] = create_session(path, session_options(arguments.threads))
                sizes[name] = report.file_size_after

        table = Table(title=f"{versions_line()} · threads {arguments.threads}", title_justify="left")
        table.add_column("")
        table.add_column("size, MB", justify="right")
        table.add_column("Spearman", justify="right")
        for batch, tokens in SHAPES:
            table.add_column(f"{batch} x {tokens}, ms (min / median)", justify="right")
        timings = []
        for batch, tokens in SHAPES:
            inputs = feeds(batch, tokens)
            calls = {name: lambda s=session, i=inputs: s.run(None, i) for name, session in sessions.items()}
            timings.append(interleave(calls, seconds=arguments.seconds))
        for name, session in sessions.items():
            encoder = SentenceEncoder(session, model.tokenizer)
            spearman = f"{spearman_on_sts(encoder, arguments.sts):.4f}" if arguments.sts else ""
            ratios = [f"{t[name]}  {t['ORT fp32'].min_ms / t[name].min_ms:.2f}x" for t in timings]
            table.add_row(name, f"{(sizes[name] or 0) / 1e6:.1f}", spearman, *ratios)
    console.print(table)


if __name__ == "__main__":
    main()

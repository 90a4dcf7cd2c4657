"""Score models pruned by each method.

python -m tools.evaluate_pruning --model all-minilm-l6-v2 --calibration FILE --score sts-dev.csv
python -m tools.evaluate_pruning --model smollm2-135m-instruct --calibration FILE --score FILE
python -m tools.evaluate_pruning --model stories15m

Encoders are scored by Spearman's correlation on a file of sentence pairs in the format of STS-B, decoders by the
cross-entropy of a text. Without files, a decoder is calibrated and scored on texts sampled from itself with two seeds.
All linear layers except the heads are pruned. Each row is printed when its variant is done.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortolan.errors import OrtolanError
from ortolan.graph_passes.options import HEADS
from ortolan.models.perplexity import sample_texts, score_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnxruntime as ort

    from ortolan.models.catalog import ModelFiles
    from ortolan.models.tokenizer import TextTokenizer

_INT4 = {"name": "quantize", "method": "gptq", "bits": 4}
# Maps a variant to its passes after pass normalize. `steps` adds the settings that all variants share.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dense": [],
    "magnitude": [{"name": "prune"}],
    "wanda": [{"name": "prune", "method": "wanda"}],
    "sparsegpt": [{"name": "prune", "method": "sparsegpt"}],
    "sparsegpt+repair": [{"name": "prune", "method": "sparsegpt", "repair": True}],
    "int4": [_INT4],
    "sparsegpt, then int4": [{"name": "prune", "method": "sparsegpt"}, _INT4],
    "sparsegpt+repair, then int4": [{"name": "prune", "method": "sparsegpt", "repair": True}, _INT4],
    "sparsegpt with int8": [{"name": "prune", "method": "sparsegpt", "weight_bits": 8}],
    "sparsegpt with int4": [{"name": "prune", "method": "sparsegpt", "weight_bits": 4, "weight_group_size": 128}],
}
DEFAULT_VARIANTS = ("dense", "magnitude", "wanda", "sparsegpt")
_DECODER = "llama"  # the architecture


def steps(variant: str, sparsity: float, pattern: str) -> list[dict[str, Any]]:
    """Return the passes of a recipe.

    Raises:
        OrtolanError: The variant is unknown.
    """
    if variant not in VARIANTS:
        raise OrtolanError(f"unknown variant {variant!r}; expected {', '.join(VARIANTS)}")
    made = [{"name": "normalize"}]
    for step in VARIANTS[variant]:
        shared: dict[str, Any] = {"exclude": [HEADS]}
        if step["name"] == "prune":
            shared |= {"sparsity": sparsity, "pattern": pattern}
        made.append(step | shared)
    return made


def optimize_variant(
    files: ModelFiles, output: Path, variant: str, sparsity: float, pattern: str, calibration: Any
) -> float | None:
    """Write a variant with standard operators only. Returns the mean error of its layers, if known."""
    from ortolan import Recipe, optimize_onnx

    recipe = Recipe.from_dict({"name": "variant", "pass": steps(variant, sparsity, pattern)})
    tokenizer = files.tokenizer if isinstance(calibration[0], str) else None
    report = optimize_onnx(files.onnx, output, recipe=recipe, calibration=calibration, tokenizer=tokenizer)
    errors = [layer.output_error for layer in report.layers if layer.output_error is not None]
    return float(np.mean(errors)) if errors else None


def drawn_feeds(session: ort.InferenceSession, start: int, tokens: int, window: int) -> list[dict[str, np.ndarray]]:
    """Return calibration feeds sampled from the model with a different seed than the scored texts."""
    texts = sample_texts(session, start, tokens, window, seed=1)
    return [{"input_ids": np.asarray(ids, np.int64)[None]} for ids in texts]


def scorer(
    files: ModelFiles, tokenizer: TextTokenizer, path: Path | None, tokens: int, window: int
) -> tuple[str, Callable[[Path], float]]:
    """Return the name of the score and a function that scores a model file. Encoders need a file of sentence pairs."""
    from ortolan.embedding import spearman_on_sts
    from ortolan.session import create_session
    from ortolan.text_encoder import TextEncoder

    tokenizer_path = files.tokenizer
    assert tokenizer_path is not None
    if files.architecture != _DECODER:
        if path is None:
            raise OrtolanError(f"{files.name} is an encoder: pass --score a file of sentence pairs such as sts-dev.csv")
        pairs = path
        return "Spearman", lambda model: spearman_on_sts(TextEncoder(create_session(model), tokenizer_path), pairs)
    if path is None:
        texts: Sequence[Sequence[int]] = sample_texts(create_session(files.onnx), tokenizer.start, tokens, window)
    else:
        texts = [tokenizer.encode(path.read_text(encoding="utf-8")[: 16 * tokens])[: tokens + 1]]
    return (
        "cross-entropy",
        lambda model: score_texts(create_session(model), texts, window, stride=window - 1).cross_entropy,
    )


def main() -> None:
    """Run the command."""
    from rich.console import Console

    from ortolan.graph_passes.text.texts import read_texts
    from ortolan.models.catalog import get_model
    from ortolan.models.tokenizer import load_tokenizer
    from ortolan.session import create_session

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories15m", help="a model of the catalog")
    parser.add_argument("--calibration", type=Path, help="a UTF-8 file, one text a line")
    parser.add_argument(
        "--texts", type=int, help="texts of the calibration file to use, from its beginning; default: all"
    )
    parser.add_argument("--drawn", type=int, default=8192, help="tokens to sample for calibration without a file")
    parser.add_argument(
        "--score", type=Path, help="sentence pairs in the format of sts-dev.csv, or a text for a decoder"
    )
    parser.add_argument("--tokens", type=int, default=8160, help="tokens to score with a decoder")
    parser.add_argument("--window", type=int, default=256, help="tokens in a window")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--pattern", default="unstructured", help="unstructured, 4x1, or N:M")
    parser.add_argument("--variant", nargs="+", default=DEFAULT_VARIANTS, choices=list(VARIANTS), metavar="NAME")
    arguments = parser.parse_args()
    for name in ("calibration", "score"):
        path = getattr(arguments, name)
        if path is not None and not path.is_file():
            parser.error(f"--{name}: file {str(path)!r} does not exist")
    files = get_model(arguments.model)
    if files.tokenizer is None:
        parser.error(f"--model: {arguments.model} has no tokenizer")
    tokenizer = load_tokenizer(files.tokenizer)
    is_decoder = files.architecture == _DECODER
    calibration: list[Any]
    if arguments.calibration is not None:
        calibration = read_texts(arguments.calibration)[: arguments.texts]
    elif is_decoder:
        session = create_session(files.onnx)
        calibration = drawn_feeds(session, tokenizer.start, arguments.drawn, arguments.window)
    else:
        parser.error(f"--calibration: expected a file of texts, as {arguments.model} is no decoder")
    measure, score = scorer(files, tokenizer, arguments.score, arguments.tokens, arguments.window)
    console = Console(width=120, highlight=False)
    console.print(f"{arguments.model}, {arguments.pattern}, sparsity {arguments.sparsity:.0%}: {measure}")
    dense: float | None = None
    for variant in arguments.variant:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "variant.onnx"
            error = optimize_variant(files, model, variant, arguments.sparsity, arguments.pattern, calibration)
            seconds = time.perf_counter() - start
            value = score(model)
        dense = value if variant == "dense" else dense
        columns = [f"{variant:28s}", f"{value:8.4f}"]
        columns.append(f"{value - dense:+8.4f}" if dense is not None else " " * 8)
        columns.append(f"perplexity {math.exp(value):9.3f}" if is_decoder else "")
        columns.append(f"mean error of layers {error:.4f}" if error is not None else "")
        console.print("  ".join(columns), f"{seconds:5.0f} s", soft_wrap=True)


if __name__ == "__main__":
    main()

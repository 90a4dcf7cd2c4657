"""distill: prune a dense encoder and train it on texts."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortolan.errors import OrtolanError, RecipeError
from ortolan.graph_passes.files.model_file import ModelFile, check_output, load_model, move_into_place, write_model
from ortolan.graph_passes.files.work_folder import work_folder
from ortolan.graph_passes.options import HEADS
from ortolan.graph_passes.text.texts import Tokenizer, find_tokenizer
from ortolan.graph_passes.weights.pruners.masks import Pattern
from ortolan.progress import Progress, no_progress

from .batches import Batches, token_ids
from .report import CurvePoint, DistillReport
from .student import pruned_weights, trained_names, write_back

if TYPE_CHECKING:
    from .training import Training

DISTILLED_KEY = "ortolan.distilled"  # key in the metadata of the written model
_PATTERNS = ("4x1", "unstructured")


def distill(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    texts: Sequence[str],
    tokenizer: Tokenizer | None = None,
    sparsity: float = 0.8,
    pattern: str = "4x1",
    steps: int = 5000,
    batch_tokens: int = 1024,
    max_tokens: int = 64,
    rate: float = 5e-4,
    select: Sequence[str] = ("*",),
    exclude: Sequence[str] = (HEADS,),
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = True,
    evaluate: Callable[[Path], float] | None = None,
    evaluate_every: int | None = None,
    bfloat16: bool | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    tell: Callable[[CurvePoint], None] | None = None,
) -> DistillReport:
    """Prune an encoder step by step while it learns, on texts without labels, to return the original's vectors.

    The output appears when it is complete. An interrupt (Ctrl-C) first writes a checkpoint.

    Args:
        model: An ONNX encoder in float32, as exported; it is not changed.
        output: The file to write: the same graph with other weights; pruned weights are exactly 0.
            `optimize_onnx(…, pattern="4x1")` makes it fast.
        texts: Tens of thousands of sentences that resemble later inputs.
        tokenizer: The path of a tokenizer.json, or an object whose encode(text) returns token ids. Default: the
            tokenizer.json beside the model.
        sparsity: The fraction of zeros in each layer.
        pattern: "4x1", blocks of one input and four outputs, or "unstructured".
        steps: The number of steps.
        batch_tokens: Tokens of a step.
        max_tokens: Longer texts are split into pieces of this many tokens.
        rate: The highest learning rate.
        select: Name patterns of the layers or weights to prune.
        exclude: Name patterns of layers or weights that are not pruned.
        checkpoint: The folder of the training's state. Default: `<output>.checkpoint`. It is written every five
            minutes, after an interrupt, and at the end.
        resume: Continue from a checkpoint, with the same result as an uninterrupted run.
        evaluate: Scores a model file; called for the original, every `evaluate_every` steps, and at the end.
        evaluate_every: Steps between scores. Default: a twentieth of all steps.
        bfloat16: Compute matrix products in bfloat16. Default: if the CPU supports it.
        seed: Seed of the order of texts.
        progress: Called as progress(stage, done, total).
        tell: Called with each point of the learning curve.

    Raises:
        RecipeError: A number is out of range, or the pattern is not supported.
        CalibrationError: There is no usable text, or no tokenizer.
        ModelError: The model is not an encoder, or has an operator that training does not support.
        OutputError: The output or the checkpoint cannot be written, or belongs to another training.
        KeyboardInterrupt: The training was interrupted; the checkpoint is written.
    """
    torch = _import_torch()
    from . import checkpoint as checkpoints
    from .torch_graph import TorchGraph
    from .training import Training

    units = _read_pattern(pattern)
    _check(sparsity=(0, sparsity, 1), steps=(0, steps, None), batch_tokens=(0, batch_tokens, None),
           max_tokens=(3, max_tokens, None), rate=(0, rate, None))  # fmt: skip
    source, target = load_model(model), Path(output)
    check_output(target, source)
    folder = Path(checkpoint) if checkpoint is not None else target.with_name(f"{target.name}.checkpoint")
    weights = pruned_weights(source.model, tuple(select), tuple(exclude), source.name)
    names = trained_names(source.model, weights)
    graph = TorchGraph(source.model, names, source.name)
    ids = token_ids(texts, tokenizer or find_tokenizer(source.path), source.model, max_tokens)
    batches = Batches(ids, batch_tokens, seed)
    original = {key: _stored(source, key) for key in names}
    bfloat16 = bool(torch.cpu._is_avx512_bf16_supported()) if bfloat16 is None else bfloat16
    settings: dict[str, Any] = {"model": _digest(original), "texts": batches.digest, "sparsity": sparsity}
    settings |= {"pattern": pattern, "steps": steps, "rate": rate, "bfloat16": bfloat16}
    settings["layers"] = [weight.name for weight in weights]
    state = (checkpoints.load(folder, settings) if resume else None) or checkpoints.State(settings)
    report = DistillReport(str(source.path), str(target), pattern, steps)
    report.original_score = None if evaluate is None or source.path is None else evaluate(source.path)
    training = Training(
        source.model, graph, weights, original, batches, state,
        pattern=units, target=sparsity, steps=steps, peak=rate, bfloat16=bfloat16,
    )  # fmt: skip
    score, every = partial(_score, source, target.name, training, evaluate), evaluate_every or max(1, steps // 20)
    _train(partial(training.run, folder, every, score, progress=progress or no_progress, tell=tell))
    arrays = training.arrays()
    _write(source, arrays, target, settings | {"tokens": state.tokens})
    report.tokens, report.seconds, report.curve = state.tokens, state.seconds, state.curve
    report.sparsity = {one.linears[0].name: _zero_fraction(arrays[one.name]) for one in weights}
    return report


def _train(run: Callable[..., bool]) -> None:
    """Run the training. Raises KeyboardInterrupt after the checkpoint is written if it was interrupted."""
    with _interruptible() as stopped:
        if not run(stopped=stopped):
            raise KeyboardInterrupt


def _read_pattern(pattern: str) -> Pattern:
    """Return the pattern. Raises RecipeError if it is not supported."""
    units = Pattern.read(pattern)
    if pattern not in _PATTERNS or units is None:
        raise RecipeError(f"pattern is {pattern!r}, expected one of {', '.join(map(repr, _PATTERNS))}")
    return units


def _score(source: ModelFile, name: str, training: Training, evaluate: Callable[[Path], float] | None) -> float | None:
    """Score the current model, in a file of this name."""
    if evaluate is None:
        return None
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / name
        write_back(source.model, training.arrays())
        write_model(source.model, path, lambda done, total: None)
        return evaluate(path)


def _write(source: ModelFile, arrays: Mapping[str, np.ndarray], target: Path, settings: Mapping[str, Any]) -> None:
    """Write the model, with the settings in its metadata."""
    write_back(source.model, arrays)
    source.model.metadata_props[DISTILLED_KEY] = json.dumps(settings)
    with work_folder(target) as work:
        candidate = work / target.name
        write_model(source.model, candidate, lambda done, total: None)
        move_into_place(candidate, target)


def _zero_fraction(array: np.ndarray) -> float:
    return float(1 - np.count_nonzero(array) / array.size)


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise OrtolanError(
            "distillation needs the package 'torch'; install it with: pip install torch tokenizers"
        ) from error
    return torch


def _check(**given: tuple[float, float, float | None]) -> None:
    """Check that each number is above its lower bound and below its upper bound. Raises RecipeError otherwise."""
    for name, (low, number, high) in given.items():
        if not low < number or (high is not None and not number < high):
            between = f"above {low}" if high is None else f"between {low} and {high}"
            raise RecipeError(f"{name} is {number!r}, expected a number {between}")


def _stored(source: ModelFile, name: str) -> np.ndarray:
    stored = source.model.graph.initializers[name].const_value
    assert stored is not None
    return np.array(stored.numpy(), np.float32)


def _digest(arrays: dict[str, np.ndarray]) -> str:
    sha = hashlib.sha256()
    for name, array in arrays.items():
        sha.update(name.encode() + array.tobytes())
    return sha.hexdigest()


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after the first Ctrl-C; the second one interrupts as usual."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: Any) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)

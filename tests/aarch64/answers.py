"""Models optimized on this machine, and its answers, for check_models to run on an emulated Arm CPU.

`python -m tests.aarch64.answers FOLDER` writes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

import ortolan
from ortolan.models import tiny

from ..passes import cached_llama, small_models

LAYERS = ("sparse-int8", "sparse-int4", "sparse-int8-4x1", "int4")
MODELS = ("sparse-bf16", "sparse-int8", "sparse-int8-4x1", "int4", "sparse-encoder")

Arrays = dict[str, np.ndarray]


def made() -> Iterator[tuple[str, Any, Arrays]]:
    """Names, optimized models and inputs."""
    x = np.random.default_rng(0).standard_normal((5, 200)).astype(np.float32)
    for form in LAYERS:
        layer = ir.to_proto(tiny.mlp(widths=(200, 72), forms="matmul_add"))
        yield f"layer {form}", small_models.optimize(layer, recipe=form).model, {"x": x}
    ids = np.random.default_rng(1).integers(0, tiny.TINY_BERT.vocab_size, (3, 20))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    for form in MODELS:
        bert = ir.to_proto(tiny.tiny_bert())
        given = {value.name: feeds[value.name] for value in bert.graph.input}
        yield f"model {form}", small_models.optimize(bert, recipe=form, calibration=[given]).model, given
    decoder, _ = cached_llama.compress(cached_llama.llama("standard"))
    yield "model decoder", decoder, cached_llama.prompt(decoder, seed=3)


def main(folder: Path) -> None:
    """Writes NAME.onnx and NAME.npz, of inputs "in.…" and outputs "out.…", for each model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, model, feeds in made():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
        session = ortolan.create_session(model.SerializeToString())
        outputs = dict(zip((value.name for value in session.get_outputs()), session.run(None, feeds), strict=True))
        arrays = {f"in.{key}": value for key, value in feeds.items()}
        arrays |= {f"out.{key}": value for key, value in outputs.items()}
        np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        print(name, sorted({node.op_type for node in model.graph.node if node.domain == "ai.ortolan"}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

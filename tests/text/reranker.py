"""Small rerankers with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.models import tiny

QWEN3: dict[str, Any] = {"vocab_size": 608, "qk_norm": True, "head_dim": 16}
QWEN3_CONFIG = {"model_type": "qwen3", "pad_token_id": 0, "max_position_embeddings": 256}


def write_reranker(folder: Path, labels: int = 1, vocab_size: int = 700, by_tokens: bool = False) -> None:
    """Write folder/model.onnx: a BERT with a head on the first token.

    by_tokens: the logits have shape [batch, 1, labels].
    """
    model = tiny.tiny_bert(vocab_size=vocab_size)
    tokens = model.graph.outputs[0]
    rng = np.random.default_rng(1)
    tape = ir.tape.Tape()
    index = tape.op("Constant", [], {"value": ir.tensor(np.array([0] if by_tokens else 0))})
    first = tape.op("Gather", [tokens, index], {"axis": 1})
    weight = tape.op("Constant", [], {"value": ir.tensor(rng.normal(size=(48, labels)).astype(np.float32))})
    logits = tape.op("MatMul", [first, weight])
    logits.name, logits.type = "logits", ir.TensorType(ir.DataType.FLOAT)
    logits.shape = ir.Shape(["batch", 1, labels] if by_tokens else ["batch", labels])
    model.graph.extend(tape.nodes)
    model.graph.outputs[:] = [logits]
    folder.mkdir(exist_ok=True)
    ir.save(model, folder / "model.onnx")


def write_judge(folder: Path, output: str = "logits", **config: Any) -> None:
    """Write a decoder that judges pairs, or its conversion for sequence classification."""
    from .tokenizer_files import qwen3  # needs the package tokenizers

    said = {**QWEN3_CONFIG, "architectures": ["Qwen3ForCausalLM"], **config}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    qwen3(folder / "tokenizer.json", ends=False)
    ir.save(tiny.tiny_llama_encoder(output=output, **QWEN3), folder / "model.onnx")

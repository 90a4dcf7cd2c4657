"""A small cross-encoder with random weights."""

from pathlib import Path

import numpy as np
import onnx_ir as ir

from ortolan.models import tiny


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

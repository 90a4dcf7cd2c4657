"""Small random models with an output for each token: folders as PyLate and sentence-transformers save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from safetensors.numpy import save_file

from ortolan.models import tiny

from .wordpiece_file import write_wordpiece

VOCABULARY = 256
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
QUERY, DOCUMENT = "[Q] ", "[D] "
_TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}


def write_json(path: Path, said: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(said), encoding="utf-8")


def write_colbert(folder: Path, encoder: Any = tiny.tiny_bert, in_graph: bool = False, **settings: Any) -> Path:
    """Write a late-interaction model with two linear layers, the second with a residual.

    encoder: makes the encoder. in_graph: the ONNX model contains the layers, and its output has another name.
    """
    tokenizers_file = write_wordpiece(_made(folder) / "tokenizer.json", truncation=None)
    said = json.loads(tokenizers_file.read_text(encoding="utf-8"))
    last = max(said["model"]["vocab"].values())
    said["added_tokens"] += [
        {**said["added_tokens"][0], "id": last + 1 + number, "content": token, "special": False}
        for number, token in enumerate((QUERY, DOCUMENT))
    ]
    write_json(tokenizers_file, said)
    # PyLate pads with the mask token.
    write_json(folder / "tokenizer_config.json", {"pad_token": "[MASK]", "mask_token": "[MASK]", "unk_token": "[UNK]"})
    write_json(folder / "config.json", {"pad_token_id": 0, "vocab_size": VOCABULARY, "model_type": "bert"})
    defaults = {"query_prefix": QUERY, "document_prefix": DOCUMENT, "query_length": 12, "document_length": 20}
    write_json(folder / "config_sentence_transformers.json", {"prompts": {}, **defaults, **settings})
    rng = np.random.default_rng(1)
    model = encoder(vocab_size=VOCABULARY)
    hidden = int(model.graph.outputs[0].shape[2])
    weights = [rng.normal(0, hidden**-0.5, shape).astype(np.float32) for shape in ((hidden, hidden), (16, hidden))]
    if in_graph:
        ir.save(_projected(model, weights), folder / "model.onnx")
        return folder
    modules = [_TRANSFORMER]
    for number, weight in enumerate(weights, start=1):
        place = folder / f"{number}_Dense"
        activation = "torch.nn.modules.linear.Identity"
        size = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False}
        write_json(place / "config.json", size | {"activation_function": activation, "use_residual": number == 1})
        save_file({"linear.weight": weight}, place / "model.safetensors")
        modules.append({"path": place.name, "type": "pylate.models.Dense.Dense"})
    write_json(folder / "modules.json", modules)
    ir.save(model, folder / "model.onnx")
    return folder


def _projected(model: ir.Model, weights: list[np.ndarray]) -> ir.Model:
    """Put the two linear layers of `write_colbert` into the graph."""
    (tokens,) = model.graph.outputs
    tape = ir.tape.Tape()
    first, second = (tape.op("Constant", [], {"value": ir.tensor(one.T.copy())}) for one in weights)
    added = tape.op("Add", [tape.op("MatMul", [tokens, first]), tokens])
    output = tape.op("MatMul", [added, second])
    output.name, output.type = "contextual", tokens.type
    output.shape = ir.Shape(["batch", "tokens", weights[1].shape[0]])
    model.graph.extend(tape.nodes)
    model.graph.outputs[:] = [output]
    return model


def write_splade(folder: Path, pooled: bool = False, modules: bool = True, **pooling: str) -> Path:
    """Write a masked language model whose vocabulary head is the word table.

    pooled: the ONNX model returns weights of terms, [batch, vocabulary], instead of logits.
    """
    write_wordpiece(_made(folder) / "tokenizer.json", truncation=None)
    write_json(folder / "config.json", {"pad_token_id": 0, "vocab_size": VOCABULARY, "model_type": "bert"})
    if modules:
        kind = "sentence_transformers.sparse_encoder.models."
        places = {"MLMTransformer": "", "SpladePooling": "1_SpladePooling"}
        write_json(folder / "modules.json", [{"path": path, "type": kind + name} for name, path in places.items()])
        write_json(folder / "1_SpladePooling" / "config.json", pooling)
    ir.save(masked_language_model(pooled), folder / "model.onnx")
    return folder


def masked_language_model(pooled: bool = False, vocab_size: int = VOCABULARY) -> ir.Model:
    model = tiny.tiny_bert(vocab_size=vocab_size)
    (tokens,) = model.graph.outputs
    hidden = int(tokens.shape[2])
    rng = np.random.default_rng(2)
    tape = ir.tape.Tape()
    head = tape.initializer(ir.tensor(rng.normal(0, 0.3, (hidden, vocab_size)).astype(np.float32), name="head"))
    bias = tape.initializer(ir.tensor(rng.normal(-2, 1, vocab_size).astype(np.float32), name="bias"))
    logits = tape.op("Add", [tape.op("MatMul", [tokens, head]), bias])
    sizes: list[Any] = ["batch", "tokens", vocab_size]
    if pooled:
        logits, sizes = _pooled(tape, model, logits), ["batch", vocab_size]
    logits.name, logits.type, logits.shape = "logits", tokens.type, ir.Shape(sizes)
    model.graph.extend(tape.nodes)
    for value in tape.initializers:
        model.graph.register_initializer(value)
    model.graph.outputs[:] = [logits]
    return model


def _pooled(tape: ir.tape.Tape, model: ir.Model, logits: ir.Value) -> ir.Value:
    """Add the nodes that torch exports for SPLADE."""
    (mask,) = (one for one in model.graph.inputs if one.name == "attention_mask")
    one = tape.op("Constant", [], {"value": ir.tensor(np.float32(1))})
    axis = tape.op("Constant", [], {"value": ir.tensor(np.array([2]))})
    logs = tape.op("Log", [tape.op("Add", [tape.op("Relu", [logits]), one])])
    kept = tape.op("Unsqueeze", [tape.op("Cast", [mask], {"to": ir.DataType.FLOAT}), axis])
    return tape.op("ReduceMax", [tape.op("Mul", [logs, kept])], {"axes": [1], "keepdims": 0})


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder

"""Write the source files of all decoder configurations: a GGUF file, and its weights as ONNX file and checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.errors import OrtolanError
from ortolan.graph_passes.text.llama2c import BOS, EOS, Llama2cTokenizer
from ortolan.models.checkpoint import SMOLLM2_TOKENS, write_llama
from ortolan.models.fetch import fetch
from ortolan.models.gguf import read_model
from ortolan.models.gguf.side_files import genai_config
from ortolan.models.gguf.tokenizer import read_tokenizer_facts
from ortolan.models.graph_builder import lazy_weight
from ortolan.models.llama import build_llama
from ortolan.models.llama2c import read_llama2c

_CONTEXT = "llama.context_length"
_LLAMA2C_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LLAMA2C_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
_LLAMA2C_OTHER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model: str, folder: Path, positions: int) -> Path:
    """Write a model of the catalog as a GGUF file with at least `positions` positions.

    A published GGUF file keeps its weights; a llama2.c model is written in float32.

    Raises:
        OrtolanError: The model is published in neither format.
    """
    import gguf

    source = fetch(model)
    target = folder / f"{model}.gguf"
    if (published := next(source.glob("*.gguf"), None)) is not None:
        shutil.copyfile(published, target)
    elif (checkpoint := next(source.glob("*.bin"), None)) is not None:
        checkpoint = next(path for path in source.glob("*.bin") if path.name != "tokenizer.bin")
        write_llama2c(checkpoint, source / "tokenizer.bin", target)
    else:
        raise OrtolanError(f"{model} is published neither as a GGUF file nor as a llama2.c model; expected a decoder")
    field = gguf.GGUFReader(target, "r+").fields[_CONTEXT]
    value = field.parts[field.data[0]]
    value[0] = max(int(value[0]), positions)
    return target


def write_llama2c(checkpoint: Path, tokenizer: Path, target: Path) -> None:
    """Write a llama2.c model as a GGUF file in float32, with its tokenizer in SentencePiece form."""
    import gguf

    config, weights = read_llama2c(checkpoint)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, Llama2cTokenizer(tokenizer))
    for name, weight in weights.items():
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(weight, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: Llama2cTokenizer) -> None:
    from gguf import TokenType

    texts, types = [], []
    for index, piece in enumerate(tokenizer.pieces):
        if index <= EOS:
            texts.append(("<unk>", "<s>", "</s>")[index])
            types.append(TokenType.CONTROL if index else TokenType.UNKNOWN)
        elif index <= EOS + 256:
            texts.append(f"<0x{index - EOS - 1:02X}>")
            types.append(TokenType.BYTE)
        else:
            texts.append(piece.decode().replace(" ", "\u2581"))
            types.append(TokenType.NORMAL)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(tokenizer.scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(0)


def _gguf_name(name: str) -> str:
    """Return "blk.3.ffn_up.weight" for "model.layers.3.mlp.up_proj.weight"."""
    stem = name.removesuffix(".weight")
    if stem in _LLAMA2C_OTHER:
        return f"{_LLAMA2C_OTHER[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LLAMA2C_LAYER[part]}.weight"


def write_onnx(gguf: Path, target: Path) -> None:
    """Write the GGUF file's weights in float32, as a GroupQueryAttention graph with external data.

    Weights are dequantized one after the other, as they are written, except for q_proj and k_proj whose rows are
    reordered for the rotary embedding.
    """
    source = read_model(gguf)
    weights = {name: lazy_weight(weight.floats, weight.shape) for name, weight in source.weights.items()}
    model = build_llama(weights, source.config, gguf.stem, "gqa")
    ir.save(model, target, external_data=f"{target.name}.data")


def write_genai_folder(gguf: Path, onnx: Path, folder: Path) -> None:
    """Write genai_config.json for the model of the GGUF file beside the ONNX file."""
    model = read_model(gguf)
    config = genai_config(model, read_tokenizer_facts(model.file), onnx.name)
    (folder / "genai_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def write_checkpoint(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's weights in float32 as a transformers folder."""
    folder.mkdir()
    special = SMOLLM2_TOKENS if gguf.stem.startswith("smollm2") else _LLAMA2C_TOKENS
    write_llama(gguf, folder, special)

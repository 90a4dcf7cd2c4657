"""Write a GGUF file with random weights in the shape of a known decoder, to measure speed and memory.

    python -m tools.random_gguf qwen2.5-0.5b FILE.gguf [--type Q4_0]

Speed does not depend on the values of dense weights. Answers are meaningless, and perplexity says nothing. The
architecture is llama whatever the name (Qwen2.5's biases are left out). Tokenizer and chat template are SmolLM2's, with
unused tokens up to the size of the vocabulary. Weights are written as they are drawn, so memory stays small.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from ortolan.models import get_model

_TOKENIZER = "smollm2-135m-instruct"
_SCALE = 0.02  # standard deviation of the weights, about
# Bytes of a block of 32 weights: a float16 scale, for Q4_1 also a float16 minimum, then the integers.
_BLOCKS = {"Q4_0": (gguf.GGMLQuantizationType.Q4_0, 18), "Q4_1": (gguf.GGMLQuantizationType.Q4_1, 20)}
_FILE_TYPES = {"Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0, "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1}
_TABLE = (gguf.GGMLQuantizationType.Q8_0, 34)  # of the embedding and the head
_BLOCK = 32


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool


SHAPES = {
    "qwen2.5-0.5b": Shape(24, 896, 4864, 14, 2, 64, 151936, tied=True),
    "qwen2.5-1.5b": Shape(28, 1536, 8960, 12, 2, 128, 151936, tied=True),
    "qwen3-4b": Shape(36, 2560, 9728, 32, 8, 128, 151936, tied=True),
    "llama-3-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, tied=False),
}


def write_random_gguf(
    shape: Shape, name: str, path: Path, tokenizer: Path, weights: str = "Q4_0", context: int = 8192
) -> None:
    """Write the file.

    Args:
        shape: The sizes.
        name: The name in the file's metadata.
        path: The file.
        tokenizer: A GGUF file with a byte-level BPE tokenizer, which is copied.
        weights: The type of the layers: Q4_0 or Q4_1. Embedding and head are Q8_0.
        context: The limit of the context.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_context_length(context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type(_FILE_TYPES[weights])  # OpenVINO GenAI reads it
    _add_tokenizer(writer, tokenizer, shape.vocabulary)
    tensors = list(_tensors(shape, *_BLOCKS[weights]))
    for tensor, size, kind, row_bytes in tensors:
        dims = [*size[:-1], row_bytes] if row_bytes else size
        count = int(np.prod(dims)) * (1 if row_bytes else 4)
        dtype = np.dtype(np.uint8 if row_bytes else np.float32)
        writer.add_tensor_info(tensor, dims, dtype, count, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for _, size, _, row_bytes in tensors:
        data = _random_blocks(rng, size, row_bytes) if row_bytes else np.ones(size, np.float32)
        writer.write_tensor_data(data)
    writer.close()


def _tensors(
    shape: Shape, kind: gguf.GGMLQuantizationType, block_bytes: int
) -> Iterator[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType | None, int]]:
    """Yield name, shape, type and bytes of a row (0: float32) of each tensor."""
    table, table_bytes = _TABLE

    def matrix(name: str, outputs: int, inputs: int) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        return f"{name}.weight", (outputs, inputs), kind, inputs // _BLOCK * block_bytes

    def vector(name: str) -> tuple[str, tuple[int, ...], None, int]:
        return f"{name}.weight", (shape.hidden,), None, 0

    row_bytes = shape.hidden // _BLOCK * table_bytes
    yield "token_embd.weight", (shape.vocabulary, shape.hidden), table, row_bytes
    for layer in range(shape.layers):
        of = f"blk.{layer}."
        yield vector(f"{of}attn_norm")
        yield matrix(f"{of}attn_q", shape.heads * shape.head_dim, shape.hidden)
        yield matrix(f"{of}attn_k", shape.kv_heads * shape.head_dim, shape.hidden)
        yield matrix(f"{of}attn_v", shape.kv_heads * shape.head_dim, shape.hidden)
        yield matrix(f"{of}attn_output", shape.hidden, shape.heads * shape.head_dim)
        yield vector(f"{of}ffn_norm")
        yield matrix(f"{of}ffn_gate", shape.intermediate, shape.hidden)
        yield matrix(f"{of}ffn_up", shape.intermediate, shape.hidden)
        yield matrix(f"{of}ffn_down", shape.hidden, shape.intermediate)
    yield vector("output_norm")
    if not shape.tied:
        yield "output.weight", (shape.vocabulary, shape.hidden), table, row_bytes


def _random_blocks(rng: np.random.Generator, size: Sequence[int], row_bytes: int) -> np.ndarray:
    """Return random integers with one scale for all blocks, so that weights have a mean of about 0."""
    blocks = size[-1] // _BLOCK
    data = rng.integers(0, 256, (size[0], blocks, row_bytes // blocks), np.uint8)
    is_table = row_bytes // blocks == _TABLE[1]
    scale = np.float16(_SCALE / (74 if is_table else 4.6))  # standard deviation of uniform integers
    data[:, :, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    if row_bytes // blocks == _BLOCKS["Q4_1"][1]:
        data[:, :, 2:4] = np.frombuffer(np.float16(-7.5 * scale).tobytes(), np.uint8)
    return data.reshape(size[0], row_bytes)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Path, vocabulary: int) -> None:
    """Copy a tokenizer, and add unused tokens."""
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tokenizer).fields.items()}
    tokens, types = list(fields["tokenizer.ggml.tokens"]), list(fields["tokenizer.ggml.token_type"])
    missing = vocabulary - len(tokens)
    tokens += [f"<unused{index}>" for index in range(missing)]
    types += [int(gguf.TokenType.UNUSED)] * missing
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(fields["tokenizer.ggml.pre"]))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(fields["tokenizer.ggml.merges"])
    for name in ("bos", "eos"):
        if (token := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", int(token))
    writer.add_add_bos_token(False)
    if "tokenizer.chat_template" in fields:
        writer.add_chat_template(str(fields["tokenizer.chat_template"]))


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", default="Q4_0", choices=_BLOCKS)
    options = parser.parse_args()
    folder = get_model(_TOKENIZER).onnx.parent  # has the GGUF file that the model was made from
    tokenizer = next(folder.glob("*.gguf"))
    write_random_gguf(SHAPES[options.shape], options.shape, options.file, tokenizer, options.type)


if __name__ == "__main__":
    main()

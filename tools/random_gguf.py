"""Write a GGUF file with random weights in the shape of a known decoder, to measure speed and memory.

    python -m tools.random_gguf qwen2.5-0.5b FILE.gguf [--type Q4_0]

Speed does not depend on the values of dense weights. Answers are meaningless, and perplexity says nothing. The
architecture is llama whatever the name (Qwen2.5's biases are left out), or qwen3moe if there are experts. Tokenizer and
chat template are SmolLM2's, with unused tokens up to the size of the vocabulary. Weights are written as they are drawn,
so memory stays small.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from ortolan.models import get_model

_TOKENIZER = "smollm2-135m-instruct"
_SCALE = 0.02  # standard deviation of the weights, about


@dataclass(frozen=True)
class BlockType:
    """A type of weights: blocks of integers, with float16 values at some bytes.

    Attributes:
        inputs: The weights in a block.
        size: The bytes of a block.
        halves: The float16 values by their first byte. With random integers, the weights have a mean of about 0.
    """

    inputs: int
    size: int
    halves: Mapping[int, float]


# The divisors are the standard deviations of the weights of random integers with a scale of 1.
_BLOCKS = {
    "Q4_0": BlockType(32, 18, {0: _SCALE / 4.6}),
    "Q4_1": BlockType(32, 20, {0: _SCALE / 4.6, 2: -7.5 * _SCALE / 4.6}),
    "Q5_0": BlockType(32, 22, {0: _SCALE / 9.2}),
    "Q8_0": BlockType(32, 34, {0: _SCALE / 74}),
    "Q4_K": BlockType(256, 144, {0: _SCALE / 258, 2: 7.5 * _SCALE / 258}),
    "Q6_K": BlockType(256, 210, {208: _SCALE / 1367}),
}
_INSTEAD = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # for rows that are not whole blocks, as llama.cpp's quantizer chooses
TYPES = ("Q4_0", "Q4_1", "Q4_K_M")


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
    experts: int = 0  # of each layer, each with an inner width of `intermediate`
    experts_used: int = 0  # by a token


SHAPES = {
    "qwen2.5-0.5b": Shape(24, 896, 4864, 14, 2, 64, 151936, tied=True),
    "qwen2.5-1.5b": Shape(28, 1536, 8960, 12, 2, 128, 151936, tied=True),
    "qwen3-4b": Shape(36, 2560, 9728, 32, 8, 128, 151936, tied=True),
    "granite-1b-a400m": Shape(24, 1024, 512, 16, 8, 64, 49155, tied=True, experts=32, experts_used=8),
    "qwen3-30b-a3b": Shape(48, 2048, 768, 32, 4, 128, 151936, tied=False, experts=128, experts_used=8),
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
        weights: The type of the layers: Q4_0 or Q4_1, with embedding and head in Q8_0, or the mixture Q4_K_M.
        context: The limit of the context.
    """
    writer = gguf.GGUFWriter(path, "qwen3moe" if shape.experts else "llama")
    writer.add_name(name)
    writer.add_context_length(context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{weights}"])  # OpenVINO GenAI reads it
    _add_tokenizer(writer, tokenizer, shape.vocabulary)
    tensors = list(_tensors(shape, weights))
    for tensor, size, kind in tensors:
        dims = size if kind is None else (*size[:-1], size[-1] // _BLOCKS[kind].inputs * _BLOCKS[kind].size)
        dtype = np.dtype(np.float32 if kind is None else np.uint8)
        raw = None if kind is None else gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(tensor, dims, dtype, int(np.prod(dims)) * dtype.itemsize, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for _, size, kind in tensors:
        writer.write_tensor_data(_floats(rng, size) if kind is None else _random_blocks(rng, size, _BLOCKS[kind]))
    writer.close()


def _tensors(shape: Shape, weights: str) -> Iterator[tuple[str, tuple[int, ...], str | None]]:
    """Yield name, shape and type (None: float32) of each tensor."""
    mixed = weights == "Q4_K_M"

    def matrix(name: str, outputs: int, inputs: int, kind: str) -> tuple[str, tuple[int, ...], str]:
        if inputs % _BLOCKS[kind].inputs:
            kind = _INSTEAD[kind]
        return f"{name}.weight", (outputs, inputs), kind

    def experts(name: str, outputs: int, inputs: int, kind: str) -> tuple[str, tuple[int, ...], str]:
        name, size, kind = matrix(name, outputs, inputs, kind)
        return name, (shape.experts, *size), kind

    def vector(name: str, size: int = shape.hidden) -> tuple[str, tuple[int, ...], None]:
        return f"{name}.weight", (size,), None

    base, table = ("Q4_K", "Q6_K") if mixed else (weights, "Q8_0")
    yield matrix("token_embd", shape.vocabulary, shape.hidden, table)
    for layer in range(shape.layers):
        of = f"blk.{layer}."
        more = "Q6_K" if mixed and _has_more_bits(layer, shape.layers) else base
        yield vector(f"{of}attn_norm")
        yield matrix(f"{of}attn_q", shape.heads * shape.head_dim, shape.hidden, base)
        yield matrix(f"{of}attn_k", shape.kv_heads * shape.head_dim, shape.hidden, base)
        yield matrix(f"{of}attn_v", shape.kv_heads * shape.head_dim, shape.hidden, more)
        yield matrix(f"{of}attn_output", shape.hidden, shape.heads * shape.head_dim, base)
        yield vector(f"{of}ffn_norm")
        if shape.experts:
            yield from (vector(f"{of}attn_{part}_norm", shape.head_dim) for part in "qk")
            yield f"{of}ffn_gate_inp.weight", (shape.experts, shape.hidden), None
        layer_of, end = (experts, "_exps") if shape.experts else (matrix, "")
        yield layer_of(f"{of}ffn_gate{end}", shape.intermediate, shape.hidden, base)
        yield layer_of(f"{of}ffn_up{end}", shape.intermediate, shape.hidden, base)
        yield layer_of(f"{of}ffn_down{end}", shape.hidden, shape.intermediate, more)
    yield vector("output_norm")
    if not shape.tied:
        yield matrix("output", shape.vocabulary, shape.hidden, table)


def _has_more_bits(layer: int, layers: int) -> bool:
    """Return whether Q4_K_M stores values and the last matrix of this layer in Q6_K."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _floats(rng: np.random.Generator, size: Sequence[int]) -> np.ndarray:
    """Return a norm's weight, or the random weights of a router."""
    return np.ones(size, np.float32) if len(size) == 1 else rng.standard_normal(size, np.float32) * np.float32(_SCALE)


def _random_blocks(rng: np.random.Generator, size: Sequence[int], kind: BlockType) -> np.ndarray:
    """Return random integers with the same scales for all blocks."""
    blocks = size[-1] // kind.inputs
    data = rng.integers(0, 256, (*size[:-1], blocks, kind.size), np.uint8)
    for start, value in kind.halves.items():
        data[..., start : start + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    return data.reshape(*size[:-1], -1)


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


def write_shape(name: str, path: Path, weights: str) -> None:
    """Write the file of a shape in SHAPES."""
    folder = get_model(_TOKENIZER).onnx.parent  # has the GGUF file that the model was made from
    write_random_gguf(SHAPES[name], name, path, next(folder.glob("*.gguf")), weights)


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", default="Q4_0", choices=TYPES)
    options = parser.parse_args()
    write_shape(options.shape, options.file, options.type)


if __name__ == "__main__":
    main()

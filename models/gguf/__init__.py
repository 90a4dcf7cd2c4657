"""GGUF files of Llama decoders: configuration, weights and tokenizer."""

from .model import read_gguf, read_model
from .tokenizer import read_gguf_tokenizer

__all__ = ["read_gguf", "read_gguf_tokenizer", "read_model"]

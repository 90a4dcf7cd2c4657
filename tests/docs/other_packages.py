"""Versions of the other packages that documentation pages need."""

from __future__ import annotations

NEEDS: dict[str, dict[str, str | None]] = {  # page -> modules with their oldest version
    "optimum.md": {"optimum.onnxruntime": None},
    "gliner.md": {"gliner": "0.2.29"},
    "genai.md": {"onnxruntime_genai": None, "torch": None, "transformers": None},
    "sentence-transformers.md": {"sentence_transformers": "5.7", "optimum.onnxruntime": None, "fastembed": "0.9"},
    "transformers.md": {"transformers": "5.23", "torch": None},
}

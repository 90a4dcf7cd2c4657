"""What the pages about other packages need."""

from __future__ import annotations

NEEDS: dict[str, dict[str, str | None]] = {  # modules, and the oldest version
    "optimum.md": {"optimum.onnxruntime": None},
    "genai.md": {"onnxruntime_genai": None, "torch": None, "transformers": None},
    "transformers.md": {"transformers": "5.23", "torch": None},
}

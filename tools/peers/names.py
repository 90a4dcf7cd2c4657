"""Names of runtimes, CPUs and works for pages and pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .result import Row

# Maps an engine to the name of its runtime. sentence-transformers runs PyTorch; fastembed and onnxruntime-genai run
# ONNX Runtime.
RUNTIMES: Mapping[str, str] = {
    "ortolan": "Ortolan",
    "ortolan-decoder": "Ortolan",
    "onnxruntime": "ONNX Runtime",
    "onnxruntime-genai": "ONNX Runtime",
    "fastembed": "ONNX Runtime",
    "openvino": "OpenVINO",
    "openvino-genai": "OpenVINO",
    "ctranslate2": "CTranslate2",
    "torch": "PyTorch",
    "sentence-transformers": "PyTorch",
    "infinity": "infinity",
    "embed-anything": "EmbedAnything",
    "llama.cpp": "llama.cpp",
    "ik_llama.cpp": "ik_llama.cpp",
    "mistralrs": "mistral.rs",
    "deepsparse": "DeepSparse",
}
MODELS: Mapping[str, str] = {
    "all-minilm-l6-v2": "all-MiniLM-L6-v2",
    "all-mpnet-base-v2": "all-mpnet-base-v2",
    "smollm2-135m-instruct": "SmolLM2-135M-Instruct",
    "stories15m": "stories15M",
    "qwen2.5-0.5b": "Qwen2.5-0.5B",
    "qwen2.5-1.5b": "Qwen2.5-1.5B",
    "qwen3-4b": "Qwen3-4B",
    "llama-3-8b": "Llama-3.1-8B",
}
# Maps a feature in a name returned by `cpu_name` to its label, the best feature first.
_FEATURES = {"amx": "AMX", "avx512": "AVX-512", "avx2": "AVX2"}


def runtime_of(row: Row) -> str:
    """Return the runtime that the row's engine belongs to."""
    return RUNTIMES.get(row.engine, row.engine)


def form_label(row: Row) -> str:
    """Return a row's format with its runtime's full name: "PyTorch bf16" for "torch bf16"."""
    for short, full in (("ORT ", "ONNX Runtime "), ("torch ", "PyTorch ")):
        if row.name.startswith(short):
            return full + row.name.removeprefix(short)
    return row.name


def cpu_kind(name: str) -> str:
    """Return "AMX", "AVX-512" or "AVX2" for a CPU's name; for another CPU, its feature set."""
    found = re.search(r"\((\w+)\)$", name)
    feature = found[1] if found else ""
    return next((kind for start, kind in _FEATURES.items() if feature.startswith(start)), feature)


def cpu_label(name: str) -> str:
    """Return a CPU's name without trademarks: "Intel Xeon (AMX)"."""
    brand = re.sub(r"\((R|TM)\)| Processor| CPU|\(\w+\)$", "", name)
    return f"{' '.join(brand.split())} ({cpu_kind(name)})"


_WORKS: Mapping[str, str] = {
    "mixed 8-256": "texts of 8 to 256 tokens",
    "mixed 8-256, sorted": "the same, sorted by length",
    "STS-B": "STS-B sentences",
    "decode": "decode",
    "16 requests": "16 requests at once",
    "16 requests, prompts": "prompts of 16 requests at once",
    "16 requests, whole": "16 requests at once, whole answers",
}


def work_label(work: str) -> str:
    """Return a description of the work: "8 texts of 64 tokens" for "8x64"."""
    if match := re.fullmatch(r"(\d+)x(\d+)", work):
        return f"{match[1]} text{'' if match[1] == '1' else 's'} of {match[2]} tokens"
    if match := re.fullmatch(r"(prompt|step at) (\d+)", work):
        return f"{'prompt of' if match[1] == 'prompt' else 'decode after'} {int(match[2]):,} tokens"
    return _WORKS.get(work, work)

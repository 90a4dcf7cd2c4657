"""Benchmarks: each operator and ONNX Runtime timed in the same run (``ortolan bench OP``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from ..progress import Progress, no_progress
from .result import BenchOptions, BenchResult


def _lazy(module: str) -> Callable[[BenchOptions, Progress], BenchResult]:
    def run(options: BenchOptions, progress: Progress = no_progress) -> BenchResult:
        result: BenchResult = import_module(f".{module}", __name__).run(options, progress)
        return result

    return run


# Maps a benchmark's name to run(options, progress).
BENCHMARKS: Mapping[str, Callable[[BenchOptions, Progress], BenchResult]] = {
    "sparse_amx_matmul": _lazy("sparse_amx_matmul"),
    "w4a8_matmul": _lazy("w4a8_matmul"),
    "w8a8_matmul": _lazy("w8a8_matmul"),
    "vnni_spmm": _lazy("vnni_spmm"),
    "moe": _lazy("moe"),
    "lut_post_op": _lazy("lut_post_op"),
    "masked_matmul": _lazy("masked_matmul"),
    "nomad_attention": _lazy("nomad_attention"),
    "auto": _lazy("auto"),
    "zoo": _lazy("zoo"),
}

OF_WHOLE_MODELS = ("auto", "zoo")  # these download models and take long

__all__ = ["BENCHMARKS", "OF_WHOLE_MODELS", "BenchOptions", "BenchResult"]

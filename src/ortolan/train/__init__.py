"""Distillation (extra `train`): prune an encoder while it learns to return the original's vectors.

report = ortolan.train.distill("model.onnx", "sparse.onnx", texts=sentences)
"""

from .distill import distill
from .report import CurvePoint, DistillReport

__all__ = ["CurvePoint", "DistillReport", "distill"]

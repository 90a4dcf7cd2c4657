"""Recovery by distillation (extra `train`): a dense encoder becomes a sparse one that gives the same, taught on texts.

report = ortolan.train.distill("model.onnx", "sparse.onnx", texts=sentences)
"""

from .distill import distill
from .report import CurvePoint, DistillReport

__all__ = ["CurvePoint", "DistillReport", "distill"]

"""A check for weights with NaN or infinity, made before any long work."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortolan.errors import ModelError

from ..files.model_file import tensor_slots
from .evidence import Evidence

_CHUNK = 1 << 20  # number of values checked at once, to bound memory
_WEIGHT_AXES = 2  # scales and zero points are checked with their weights
# Unsigned type of the same size, and mask of the exponent bits. Only NaN and infinity have all exponent bits set.
_EXPONENTS = {
    ir.DataType.FLOAT: (np.uint32, 0x7F800000),
    ir.DataType.FLOAT16: (np.uint16, 0x7C00),
    ir.DataType.BFLOAT16: (np.uint16, 0x7F80),
    ir.DataType.DOUBLE: (np.uint64, 0x7FF0000000000000),
}


def check_weights(evidence: Evidence) -> None:
    """Refuse a model whose answers are all NaN or infinity because its weights hold such values.

    The model runs only if there are such weights. Some are harmless, such as embedding rows of unused tokens.

    Raises:
        ModelError: Its answers are NaN or infinity, or a weight cannot be read.
    """
    found = [
        (tensor.name or "", count, tensor.size)
        for tensor, _ in tensor_slots(evidence.source.model)
        if len(tensor.shape) >= _WEIGHT_AXES and (count := _count_not_finite(tensor))
    ]
    if not found:
        return
    session = evidence.open_original()
    answers = evidence.answers(evidence.feeds_to_judge(1, session), session)
    if any(np.isfinite(answer).any() for one in answers for answer in one if answer is not None):
        return
    name, count, size = found[0]
    others = f"; so do {len(found) - 1} other weights" if found[1:] else ""
    raise ModelError(
        f"weight {name!r} holds NaN or infinity ({count} of {size} values){others}; all answers of "
        f"{evidence.source.name} are NaN or infinity; export the model again from finite weights"
    )


def _count_not_finite(tensor: ir.TensorProtocol) -> int:
    if tensor.dtype not in _EXPONENTS:
        return 0
    kind, mask = _EXPONENTS[tensor.dtype]
    try:
        values = tensor.numpy()
    except ValueError as error:  # the stored bytes do not fit the shape
        raise ModelError(
            f"weight {tensor.name!r} of shape {list(tensor.shape)} cannot be read: {error}; download or export "
            "the model again"
        ) from error
    bits = np.ascontiguousarray(values).reshape(-1).view(kind)
    chunks = (bits[start : start + _CHUNK] for start in range(0, len(bits), _CHUNK))
    return sum(int(np.count_nonzero((chunk & kind(mask)) == mask)) for chunk in chunks)

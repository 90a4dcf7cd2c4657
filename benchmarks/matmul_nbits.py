"""ONNX Runtime's MatMulNBits, for comparison with 4-bit and 8-bit layers."""

from __future__ import annotations

import logging
import os
from pathlib import Path


def make_matmul_nbits(
    model_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    block_size: int,
    accuracy_level: int,
    *,
    bits: int = 4,
    symmetric: bool = True,
) -> None:
    """Round every MatMul with constant weights to 4 or 8 bits (to nearest) with ONNX Runtime's quantizer.

    Weights of the new model are written to `<out_path>.data`. accuracy_level: 0 computes in fp32, 4 with activations
    rounded to int8. symmetric: Use no zero points.
    """
    import onnx
    from onnxruntime.quantization import matmul_nbits_quantizer

    logging.getLogger(matmul_nbits_quantizer.__name__).setLevel(logging.WARNING)  # it logs every node
    out_path = Path(out_path)
    quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(
        onnx.load(os.fspath(model_path)),
        bits=bits,
        block_size=block_size,
        is_symmetric=symmetric,
        accuracy_level=accuracy_level,
    )
    quantizer.process()
    data = out_path.with_name(f"{out_path.name}.data")
    data.unlink(missing_ok=True)  # the writer appends
    quantizer.model.save_model_to_file(str(out_path), use_external_data_format=True)

"""Weights in huge pages, for decoders, which read all weights for each token.

A hardware prefetcher stops at the end of a page, and the address of each page must be translated.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from ortolan.graph_passes.measure.machine import free_memory
from ortolan.graph_passes.names import ORTOLAN_DOMAIN

from .progress import logger

if TYPE_CHECKING:
    import onnxruntime

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Weights get at most 1 / this of the free memory. Larger ones stay mapped, so that the system can drop their pages.
_SHARE_OF_FREE_MEMORY = 2
_ALIGNMENT = 64
_READ_BYTES = 1 << 26  # of a call; Python handles Ctrl-C between calls
_TYPES = (
    *(ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.INT32),
    *(ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT),
)


def has_huge_pages() -> bool:
    """Return whether this system gives huge pages to a program that asks for them."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def use_huge_pages(model: ir.Model, options: onnxruntime.SessionOptions) -> list[Any]:
    """Read the weights of Ortolan's operators that are in other files, for the next session with these options.

    The options stay as they are, and the log says why, if the weights exceed half of the free memory, or cannot be
    read. ONNX Runtime then maps the files, or says what is wrong with them.

    Args:
        model: The model; its external tensors have been checked (load_model).
        options: The options of the session, which get the weights.

    Returns:
        The memory of the weights. ONNX Runtime keeps pointers to it, so it must live as long as the session.
    """
    import onnxruntime

    tensors = sorted(_weights(model), key=lambda tensor: (str(tensor.path), tensor.offset or 0))
    starts = np.cumsum([0, *(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)])
    if not tensors:
        return []
    free = free_memory()
    if starts[-1] > free // _SHARE_OF_FREE_MEMORY:
        logger.info("weights stay mapped: they have %.2f GB, and %.2f GB are free", starts[-1] / 1e9, free / 1e9)
        return []
    try:
        memory = mmap.mmap(-1, int(starts[-1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        parts = [whole[start : start + tensor.nbytes] for tensor, start in zip(tensors, starts[:-1], strict=True)]
        for file, ours in groupby(zip(tensors, parts, strict=True), key=lambda pair: Path(pair[0].path)):
            _read(file, list(ours))
    except (OSError, EOFError) as error:
        logger.info("weights stay mapped: %s", error)
        return []
    held: list[Any] = [memory]
    for tensor, part in zip(tensors, parts, strict=True):
        data = part.view(f"u{tensor.dtype.itemsize:.0f}").reshape(tensor.shape.numpy())
        value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(data, tensor.dtype.value)
        options.add_initializer(tensor.name, value)
        held.append(value)
    return held


def _weights(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yield the external tensors that only Ortolan's operators read.

    The options replace initializers by their name, also in subgraphs, and after ONNX Runtime's optimizers have changed
    the inputs of standard operators in place.
    """
    inner = {name for graph in model.graphs() if graph is not model.graph for name in graph.initializers}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) or name in inner or value.is_graph_output():
            continue
        readers = [use.node for use in value.uses()]
        ours = readers and all(node.domain == ORTOLAN_DOMAIN and node.graph is model.graph for node in readers)
        if ours and tensor.dtype in _TYPES and tensor.nbytes > 0 and tensor.name == name:
            yield tensor


def _read(file: Path, parts: Sequence[tuple[ir.ExternalTensor, np.ndarray]]) -> None:
    """Read tensors of a file; EOFError if it is too short."""
    with file.open("rb", buffering=0) as source:
        for tensor, part in parts:
            source.seek(tensor.offset or 0)
            done = 0
            while done < tensor.nbytes:
                count = source.readinto(part[done : done + _READ_BYTES].data)
                if not count:
                    raise EOFError(file)
                done += count

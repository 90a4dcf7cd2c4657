"""Native core of Ortolan: packers, kernels for tests and benchmarks, CPU information."""

from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

class CpuInfo(TypedDict):
    name: str
    isa: str
    detected_isa: str
    isa_problem: str

class KernelInfo(TypedDict):
    name: str
    isa: str
    runs_here: bool

def cpu_info() -> CpuInfo:
    """The CPU's name, the ISA tier in use, the one detected, and what is wrong with ORTOLAN_ISA ("" if nothing)."""

def pack_bitmap(w: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.int64]]:
    """Round w [k, n] to bf16 and pack it: masks [panels, tiles, 64], values (bf16 bits), offsets [panels + 1].

    Raises ValueError unless w is a matrix of 1 to 2^28 rows and columns.
    """

def unpack_bitmap(
    masks: NDArray[np.uint8], values: NDArray[np.uint16], offsets: NDArray[np.int64], k: int, n: int
) -> NDArray[np.float32]:
    """The dense [k, n] matrix. Raises ValueError if the tensors are malformed."""

def sparse_amx_matmul_kernels() -> list[KernelInfo]:
    """The rows of the room's kernel table, best first."""

def sparse_amx_matmul(
    x: NDArray[Any],
    masks: NDArray[np.uint8],
    values: NDArray[np.uint16],
    offsets: NDArray[np.int64],
    k: int,
    n: int,
    bias: NDArray[Any] | None = None,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """y [m, n] = bf16(x) [m, k] @ W + bias on one thread, by the named kernel or the best one.

    Raises ValueError for malformed tensors, wrong shapes and kernels that this CPU cannot run.
    """

def stream_read(buffer: NDArray[np.uint8], threads: int = 1, prefetch_bytes: int = 4096) -> int:
    """Read the buffer once, an equal part a thread, and return a checksum: the memory's rate."""

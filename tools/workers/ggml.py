"""Matrix products in ggml, through the C interface of llama-cpp-python's libraries.

layers.py loads this file, in an interpreter that has llama-cpp-python but not Ortolan.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

TYPES: Mapping[str, int] = {"Q4_0": 2, "Q8_0": 8, "Q4_K": 12}  # enum ggml_type
_F32 = 0
_FOR_WEIGHTS = 1  # enum ggml_backend_buffer_usage
_ALIGNMENT = 64


class _InitParams(ctypes.Structure):  # struct ggml_init_params
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


_POINTER, _INT, _LONG, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
# Maps a function to its result type, followed by its argument types.
_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "ggml_init": (_POINTER, _InitParams),
    "ggml_free": (None, _POINTER),
    "ggml_tensor_overhead": (_SIZE,),
    "ggml_graph_overhead_custom": (_SIZE, _SIZE, ctypes.c_bool),
    "ggml_row_size": (_SIZE, _INT, _LONG),
    "ggml_quantize_chunk": (_SIZE, _INT, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER),
    "ggml_new_tensor_2d": (_POINTER, _POINTER, _INT, _LONG, _LONG),
    "ggml_mul_mat": (_POINTER, _POINTER, _POINTER, _POINTER),
    "ggml_new_graph_custom": (_POINTER, _POINTER, _SIZE, ctypes.c_bool),
    "ggml_build_forward_expand": (None, _POINTER, _POINTER),
    "ggml_backend_cpu_reg": (_POINTER,),
    "ggml_backend_cpu_init": (_POINTER,),
    "ggml_backend_cpu_set_n_threads": (None, _POINTER, _INT),
    "ggml_backend_cpu_buffer_type": (_POINTER,),
    "ggml_backend_reg_dev_get": (_POINTER, _POINTER, _SIZE),
    "ggml_backend_reg_get_proc_address": (_POINTER, _POINTER, ctypes.c_char_p),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, _POINTER, _POINTER),
    "ggml_backend_buft_name": (ctypes.c_char_p, _POINTER),
    "ggml_backend_buft_alloc_buffer": (_POINTER, _POINTER, _SIZE),
    "ggml_backend_buffer_get_base": (_POINTER, _POINTER),
    "ggml_backend_buffer_set_usage": (None, _POINTER, _INT),
    "ggml_backend_buffer_free": (None, _POINTER),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_POINTER, _POINTER, _POINTER),
    "ggml_backend_tensor_alloc": (_INT, _POINTER, _POINTER, _POINTER),
    "ggml_backend_tensor_set": (None, _POINTER, _POINTER, _SIZE, _SIZE),
    "ggml_backend_graph_compute": (_INT, _POINTER, _POINTER),
}


def load() -> SimpleNamespace:
    """Return ggml's functions by name."""
    # Importing llama_cpp loads the same library and its dependencies.
    folder = Path(importlib.import_module("llama_cpp").__file__ or "").parent / "lib"
    library = ctypes.CDLL(str(folder / f"libggml-cpu.{'dylib' if sys.platform == 'darwin' else 'so'}"))
    functions = {}
    for name, (result, *arguments) in _FUNCTIONS.items():
        functions[name] = getattr(library, name)
        functions[name].restype, functions[name].argtypes = result, arguments
    return SimpleNamespace(**functions)


def quantize(form: str, w: np.ndarray) -> np.ndarray:
    """Return w, float32 [n, k], in a ggml format: uint8 [n, bytes per row]."""
    c, (n, k) = load(), w.shape
    rows = np.empty((n, c.ggml_row_size(TYPES[form], k)), np.uint8)
    c.ggml_quantize_chunk(TYPES[form], w.ctypes.data, rows.ctypes.data, 0, n, k, None)
    return rows


def memory_for(form: str, k: int, n: int) -> str:
    """Return the name of the buffer type that `Products` uses for such weights."""
    c = load()
    return str(c.ggml_backend_buft_name(_kind_of_memory(c, TYPES[form], k, n)).decode())


class Products:
    """y = x W for several copies of W, in the buffer type that llama.cpp would choose."""

    def __init__(self, form: str, k: int, rows: np.ndarray, copies: int, threads: int) -> None:
        """Allocate the copies. `rows` is the result of `quantize`."""
        self._c, self._k, self._n = load(), k, len(rows)
        self._backend = self._c.ggml_backend_cpu_init()
        self._c.ggml_backend_cpu_set_n_threads(self._backend, threads)
        context = _context(self._c, copies)
        self._weights = [self._c.ggml_new_tensor_2d(context, TYPES[form], k, self._n) for _ in range(copies)]
        memory = _kind_of_memory(self._c, TYPES[form], k, self._n)
        buffer = self._c.ggml_backend_alloc_ctx_tensors_from_buft(context, memory)
        if not buffer:
            raise MemoryError(f"ggml cannot allocate {copies} times {rows.nbytes} bytes")
        self._c.ggml_backend_buffer_set_usage(buffer, _FOR_WEIGHTS)
        for tensor in self._weights:
            self._c.ggml_backend_tensor_set(tensor, rows.ctypes.data, 0, rows.nbytes)
        self._given: tuple[int, int] | None = None

    def bind(self, x: np.ndarray) -> tuple[int, np.ndarray]:
        """Make a graph of all products of x [rows, k], replacing the previous graph.

        Returns the graph, and y [rows, n], which all products write.
        """
        c, rows = self._c, len(x)
        if self._given is not None:
            buffer, context = self._given
            c.ggml_backend_buffer_free(buffer)
            c.ggml_free(context)
        count = len(self._weights)
        context = _context(c, count + 1, c.ggml_graph_overhead_custom(2 * count, False))
        offset_of_y = -(-4 * rows * self._k // _ALIGNMENT) * _ALIGNMENT
        buffer = c.ggml_backend_buft_alloc_buffer(
            c.ggml_backend_cpu_buffer_type(), offset_of_y + 4 * rows * self._n + _ALIGNMENT
        )
        base = c.ggml_backend_buffer_get_base(buffer)
        given = c.ggml_new_tensor_2d(context, _F32, self._k, rows)
        c.ggml_backend_tensor_alloc(buffer, given, base)
        values = np.ascontiguousarray(x, np.float32)
        c.ggml_backend_tensor_set(given, values.ctypes.data, 0, values.nbytes)
        graph = c.ggml_new_graph_custom(context, 2 * count, False)
        for weight in self._weights:
            product = c.ggml_mul_mat(context, weight, given)
            c.ggml_backend_tensor_alloc(buffer, product, base + offset_of_y)
            c.ggml_build_forward_expand(graph, product)
        self._given = buffer, context
        y = np.ctypeslib.as_array((ctypes.c_float * (rows * self._n)).from_address(base + offset_of_y))
        return graph, y.reshape(rows, self._n)

    def compute(self, graph: int) -> None:
        """Run a graph."""
        status = self._c.ggml_backend_graph_compute(self._backend, graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute failed with status {status}")


def _context(c: SimpleNamespace, tensors: int, more: int = 0) -> int:
    """Return a context for tensor descriptions; the tensors' data is allocated elsewhere."""
    return int(c.ggml_init(_InitParams(tensors * c.ggml_tensor_overhead() + more, None, True)))


def _kind_of_memory(c: SimpleNamespace, kind: int, k: int, n: int) -> int:
    """Return the buffer type that llama.cpp would choose.

    It is the CPU's first extra buffer type (these repack weights) that supports the product, else the plain buffer
    type.
    """
    registry = c.ggml_backend_cpu_reg()
    device = c.ggml_backend_reg_dev_get(registry, 0)
    found = c.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    # A null-terminated array.
    extra = ctypes.CFUNCTYPE(ctypes.POINTER(_POINTER), _POINTER)(found)(device) if found else []
    for memory in extra:
        if not memory:
            break
        contexts = [_context(c, 1), _context(c, 2)]
        weight = c.ggml_new_tensor_2d(contexts[0], kind, k, n)
        buffer = c.ggml_backend_alloc_ctx_tensors_from_buft(contexts[0], memory)
        product = c.ggml_mul_mat(contexts[1], weight, c.ggml_new_tensor_2d(contexts[1], _F32, k, 1))
        takes = bool(buffer) and c.ggml_backend_dev_supports_op(device, product)
        if buffer:
            c.ggml_backend_buffer_free(buffer)
        for context in contexts:
            c.ggml_free(context)
        if takes:
            return int(memory)
    return int(c.ggml_backend_cpu_buffer_type())

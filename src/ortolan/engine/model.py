"""A decoder in the form for serving, as the engine's model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from onnx import TensorProto

from ortolan.graph_passes.files.model_file import load_model, model_in
from ortolan.graph_passes.find.head import LOGITS
from ortolan.graph_passes.measure.machine import usable_memory
from ortolan.graph_passes.names import CONTEXT_KEY, SERVING_KEY
from ortolan.graph_passes.serve.form import POOL, check_form_version, is_serving_form
from ortolan.graph_passes.serve.int8_cache import use_int8_cache

from ..errors import ArgumentError, ModelError
from ..huge_pages import has_huge_pages, use_huge_pages
from ..session import FOLDER_OF_DATA, create_session, new_options
from .step import BLOCK_TOKENS, Step

if TYPE_CHECKING:
    import onnxruntime
    from onnx import ModelProto

_SHARE_OF_MEMORY = 4  # pools get 1 / this of the memory by default
_MOST_SEQUENCES = 64  # whose contexts the pools hold at most by default
_TYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}  # of the inputs that a step gives
# NumPy and ONNX types of pools, and of their scales.
_POOL_TYPES = {
    "tensor(bfloat16)": (np.uint16, TensorProto.BFLOAT16),
    "tensor(int8)": (np.int8, TensorProto.INT8),
    "tensor(float)": (np.float32, TensorProto.FLOAT),
}
CacheType = Literal["bfloat16", "int8"]


class PagedModel:
    """An ONNX Runtime session of a decoder in the form for serving, and its pools of keys and values.

    `run` computes one step. The pools are written in place.

    Attributes:
        vocabulary: The number of token ids.
        context: The most tokens of a sequence.
        limit: The model's own limit of the context; None: it has none.
        blocks: The number of blocks in each pool.
        block_bytes: The bytes of one block in all pools together.
        cache_type: The type of keys and values.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        context: int | None = None,
        cache_bytes: int | None = None,
        blocks: int | None = None,
        weights: Sequence[Any] = (),
    ) -> None:
        """Allocate the pools. Their memory is used only when blocks are written for the first time.

        Args:
            session: A session of a model that `optimize_onnx(serve=True)` or `import_gguf(serve=True)` wrote.
            context: The most tokens of a sequence. Default: the model's limit, or else the tokens of the pools.
            cache_bytes: The size of all pools together. Default: a quarter of the memory of the machine, or of the
                process's cgroup if that is less, but not more than the context of 64 sequences.
            blocks: The number of blocks of the pools, instead of their size.
            weights: Memory that the session points to, to be kept as long as it.

        Raises:
            ModelError: The session has not the form for serving, or another version of it.
            ArgumentError: `context` exceeds the model's limit, or `cache_bytes` is too small for one sequence.
        """
        import onnxruntime

        metadata = session.get_modelmeta().custom_metadata_map
        if SERVING_KEY not in metadata:
            inputs = ", ".join(value.name for value in session.get_inputs()[:6])
            raise ModelError(
                f"the model has inputs {inputs}, expected the form for serving; make it with "
                "optimize_onnx(model, output, serve=True) or `ortolan import --serve`"
            )
        check_form_version(metadata[SERVING_KEY])
        pools = [value for value in session.get_inputs() if value.name.startswith(POOL)]
        shapes = {value.name: value.shape[1:] for value in pools}
        vocabulary: list[int] = next((out.shape[-1:] for out in session.get_outputs() if out.name == LOGITS), [])
        said = metadata.get(CONTEXT_KEY, "1")
        if unknown := [value for value in pools if value.type not in _POOL_TYPES]:
            raise ModelError(
                f"{unknown[0].name} is a {unknown[0].type}, expected one of {', '.join(_POOL_TYPES)}; make it again"
            )
        sizes = [*vocabulary, *(size for shape in shapes.values() for size in shape)]
        if not (shapes and vocabulary and all(type(one) is int and one > 0 for one in sizes)):
            raise ModelError(
                f"the model has the pools {shapes} and the output logits with the vocabulary {vocabulary}, expected "
                "pools and a vocabulary of fixed sizes; make it again"
            )
        if not (said.isascii() and said.isdecimal() and len(said) < 10 and int(said) > 0):
            raise ModelError(f"the model's {CONTEXT_KEY} is {said!r}, expected a number of tokens; make it again")
        self._session = session
        self._weights = weights
        self._types = {value.name: _TYPES[value.type] for value in session.get_inputs() if value.type in _TYPES}
        self.vocabulary: int = vocabulary[0]
        types = {value.name: _POOL_TYPES[value.type] for value in pools}
        self.block_bytes = sum(
            int(np.prod(shape)) * np.dtype(types[name][0]).itemsize for name, shape in shapes.items()
        )
        is_int8 = any(value.type == "tensor(int8)" for value in pools)
        self.cache_type: CacheType = "int8" if is_int8 else "bfloat16"
        self.limit = limit = int(metadata[CONTEXT_KEY]) if CONTEXT_KEY in metadata else None
        if context is not None and limit is not None and not 1 <= context <= limit:
            raise ArgumentError(f"context is {context}, expected 1 to the model's {limit} tokens")
        wanted = context or limit
        if blocks is not None:
            cache_bytes = blocks * self.block_bytes
        elif cache_bytes is None:
            cache_bytes = usable_memory() // _SHARE_OF_MEMORY
            if wanted is not None:
                cache_bytes = min(cache_bytes, _MOST_SEQUENCES * _blocks(wanted) * self.block_bytes)
        self.blocks = cache_bytes // self.block_bytes
        if self.blocks < 1 or (context is not None and self.blocks < _blocks(context)):
            needed = _blocks(context or 1) * self.block_bytes
            raise ArgumentError(
                f"the cache has {cache_bytes:,} bytes, but a sequence of {context or 1} tokens needs {needed:,} bytes; "
                "give more cache memory (--cache-memory, cache_bytes) or a shorter context"
            )
        self.context = min(wanted or self.blocks * BLOCK_TOKENS, self.blocks * BLOCK_TOKENS)
        self._binding: Any = self._session.io_binding()
        for name, shape in shapes.items():
            dtype, element_type = types[name]
            pool = np.zeros([self.blocks, *shape], dtype)
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(pool, element_type)
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(f"new_{name}", value)

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        threads: int | None = None,
        context: int | None = None,
        cache_bytes: int | None = None,
        cache_type: CacheType = "bfloat16",
        blocks: int | None = None,
        share_weights: bool = False,
    ) -> PagedModel:
        """Open the model of a folder, or a model file.

        Args:
            folder: The folder or file.
            threads: Threads of ONNX Runtime. Default: one for each core.
            context: As for the constructor.
            cache_bytes: As for the constructor.
            cache_type: The type of keys and values in the KV cache. int8 has a scale for each token and head, and takes
                about half the memory.
            blocks: As for the constructor.
            share_weights: Map the files of the weights, so that processes share this memory. By default, weights of
                at most half of the free memory are read into huge pages, where decoding is faster, if Linux has them.

        Raises:
            SessionError: The model cannot be opened.
            ModelError: It has not the form for serving, or cannot be read to change its cache type.
            ArgumentError: As for the constructor, or the cache type is unknown.
        """
        check_cache_type(cache_type)
        options = new_options()
        if threads is not None:
            options.intra_op_num_threads = threads
        # Threads spin within a step, where the next layer follows at once, but not while the engine waits for requests.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        path = Path(folder)
        file = model_in(path) if path.is_dir() else path
        weights = [] if share_weights else _in_huge_pages(file, options)
        model = _with_int8_cache(file, options) if cache_type == "int8" else file
        return cls(create_session(model, options), context, cache_bytes, blocks, weights)

    def run(self, step: Step) -> np.ndarray:
        """Append the tokens of a step to the pools, and return the logits float32 [rows, vocabulary]."""
        logits = np.empty((len(step.logit_rows), self.vocabulary), np.float32)
        # The binding refers to the memory of the arrays, which live until the run ends.
        arrays = {name: getattr(step, name).astype(dtype, copy=False) for name, dtype in self._types.items()}
        for name, array in arrays.items():
            self._binding.bind_cpu_input(name, array)
        self._binding.bind_output(LOGITS, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(self._binding)
        return logits


def check_cache_type(cache_type: str) -> None:
    """Check the name of a type of keys and values.

    Raises:
        ArgumentError: It is unknown.
    """
    if cache_type not in get_args(CacheType):
        raise ArgumentError(f"cache_type is {cache_type!r}, expected one of {', '.join(get_args(CacheType))}")


def _in_huge_pages(file: Path, options: onnxruntime.SessionOptions) -> list[Any]:
    """Return the memory of the weights, see `use_huge_pages`; empty if they stay mapped."""
    if not has_huge_pages():
        return []
    try:
        model = load_model(file).model
        return use_huge_pages(model, options) if is_serving_form(model) else []
    except ModelError:  # ONNX Runtime opens the file all the same, or says what is wrong
        return []


def _with_int8_cache(file: Path, options: onnxruntime.SessionOptions) -> ModelProto:
    """Return the model with int8 pools. Weights in other files stay there; `options` get their folder."""
    import onnx_ir as ir

    source = load_model(file)
    use_int8_cache(source.model, str(file))
    options.add_session_config_entry(FOLDER_OF_DATA, str(source.external_root or file.parent))
    return ir.to_proto(source.model)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)

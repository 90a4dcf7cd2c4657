"""Reads a GGUF file with the package gguf. Tensors stay mapped."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import OrtolanError
from ..graph_builder import ModelBuildError, Shape
from .header import check_header

if TYPE_CHECKING:
    from gguf import GGUFReader

# Number of elements that are dequantized at once: gguf holds small arrays of all results before it joins them.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class StoredWeight:
    """Rows of a tensor in the file, [out, in], [n] or [experts, out, in], perhaps reordered. Data are read when needed.

    Attributes:
        name: The tensor's name in the file.
        kind: The tensor's GGUF type, such as "Q4_1".
        shape: The weight's shape.
        data: The mapped data, one row per row of the tensor.
        order: Indices of the tensor's rows. None means all rows in order.
    """

    name: str
    kind: str
    shape: Shape
    data: np.ndarray
    order: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file."""
        return self.data.nbytes // max(1, len(self.data)) * self.shape[0]

    def rows(self, start: int, stop: int) -> StoredWeight:
        """Return the rows from start to before stop."""
        return self.reordered(np.arange(start, stop))

    def reordered(self, order: np.ndarray) -> StoredWeight:
        """Return the rows with these indices."""
        order = order if self.order is None else self.order[order]
        return StoredWeight(self.name, self.kind, (len(order), *self.shape[1:]), self.data, order)

    def expert(self, index: int) -> StoredWeight:
        """Return the weight [out, in] of one expert."""
        return StoredWeight(f"{self.name}.{index}", self.kind, self.shape[1:], self.stored()[index])

    def stored(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows in the stored form: bytes of blocks, or plain values."""
        return self.data[start:stop] if self.order is None else self.data[self.order[start:stop]]

    def floats(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows dequantized to float32.

        Raises:
            ModelBuildError: gguf cannot read the type.
        """
        stop = self.shape[0] if stop is None else stop
        if len(self.shape) == 1:  # data may be bytes, which indices of values do not fit
            whole = self._dequantized(self.data)
            return (whole if self.order is None else whole[self.order])[start:stop]
        found = np.empty((stop - start, *self.shape[1:]), np.float32)
        for begin in range(start, stop, self.rows_at_once):
            end = min(stop, begin + self.rows_at_once)
            found[begin - start : end - start] = self._dequantized(self.stored(begin, end))
        return found

    def _dequantized(self, stored: np.ndarray) -> np.ndarray:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            with np.errstate(all="ignore"):  # callers check for NaN and infinity
                found = dequantize(stored, GGMLQuantizationType[self.kind])
        except NotImplementedError:
            raise ModelBuildError(
                f"tensor {self.name!r} is of type {self.kind}, which the package gguf cannot dequantize; give a file "
                "of another quantization, such as Q4_K_M or Q8_0"
            ) from None
        return np.asarray(found, np.float32)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self.floats().astype(dtype or np.float32, copy=False)

    @property
    def rows_at_once(self) -> int:
        """Number of rows to dequantize at a time."""
        return max(1, _CHUNK // max(1, math.prod(self.shape[1:])))


class GgufFile:
    """A GGUF file.

    Attributes:
        path: Its path.
        metadata: All metadata entries except arrays.
        weights: The weights by their names in the file.
    """

    def __init__(
        self, path: str | os.PathLike[str], check_architecture: Callable[[Path, str], None] | None = None
    ) -> None:
        """Open a file.

        Args:
            path: The file.
            check_architecture: Called with the path and general.architecture before the slow package gguf reads the
                file.

        Raises:
            OrtolanError: The package gguf is missing.
            ModelBuildError: The file is not a GGUF file, or it is damaged.
        """
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise OrtolanError(
                "reading this model needs the package 'gguf'; install it with: pip install gguf tokenizers"
            ) from error
        self.path = Path(path)
        check_header(self.path, check_architecture)
        try:
            self._reader: GGUFReader = GGUFReader(self.path)
            fields = self._reader.fields.items()
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in fields if len(field.types) == 1}
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise ModelBuildError(f"{str(self.path)!r} cannot be read as a GGUF file: {error}") from error
        self.weights: Mapping[str, StoredWeight] = {
            tensor.name: StoredWeight(
                tensor.name,
                tensor.tensor_type.name,
                tuple(int(side) for side in reversed(tensor.shape.tolist())),
                tensor.data,
            )
            for tensor in self._reader.tensors
        }

    def has(self, key: str) -> bool:
        """Return whether the metadata has this key, including arrays."""
        return key in self._reader.fields

    def array(self, key: str) -> Sequence[Any]:
        """Return an array of the metadata.

        Raises:
            ModelBuildError: The key is missing, or its value is not an array.
        """
        if key not in self._reader.fields:
            raise ModelBuildError(f"{self.path} has no metadata {key!r}; is it a GGUF file of a language model?")
        try:
            found = self._reader.fields[key].contents()
        except (ValueError, IndexError) as error:
            raise ModelBuildError(f"{self.path}: metadata {key!r} cannot be read: {error}") from error
        if not isinstance(found, list):
            raise ModelBuildError(f"{self.path}: metadata {key!r} is {found!r}, expected an array")
        return found

    def integer(self, key: str, default: int | None = None, maximum: int = 1 << 24) -> int:
        """Return an integer of the metadata, which must be from 1 to maximum.

        Raises:
            ModelBuildError: The key is missing, or its value is not such an integer.
        """
        found = self._get(key, default)
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= maximum:
            raise ModelBuildError(
                f"{self.path}: metadata {key!r} is {found!r}, expected an integer from 1 to {maximum}"
            )
        return found

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a float of the metadata, which must be positive and finite.

        Raises:
            ModelBuildError: The key is missing, or its value is not such a float.
        """
        found = self._get(key, default)
        if not isinstance(found, int | float) or not 0 < found < float("inf"):
            raise ModelBuildError(f"{self.path}: metadata {key!r} is {found!r}, expected a positive number")
        return found

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string of the metadata.

        Raises:
            ModelBuildError: The key is missing, or its value is not a string.
        """
        found = self._get(key, default)
        if not isinstance(found, str):
            raise ModelBuildError(f"{self.path}: metadata {key!r} is {found!r}, expected a string")
        return found

    def _get(self, key: str, default: Any) -> Any:
        if key in self.metadata:
            return self.metadata[key]
        if self.has(key):
            raise ModelBuildError(f"{self.path}: metadata {key!r} is an array, expected one value for all layers")
        if default is None:
            raise ModelBuildError(f"{self.path} has no metadata {key!r}; is it a GGUF file of a Llama model?")
        return default

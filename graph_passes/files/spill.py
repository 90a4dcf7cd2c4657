"""A temporary file for finished tensors, so that a model with many layers needs little memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx_ir as ir

from ortolan.errors import OutputError

_ALIGNMENT = 64


class TensorSpill:
    """A file of tensors. The tensors are valid until the file is closed and its folder is removed."""

    def __init__(self, folder: Path, name: str = "packed.bin") -> None:
        self._folder = folder
        self._name = name
        try:
            self._file = open(folder / name, "wb")  # noqa: SIM115  closed by close()
        except OSError as error:
            raise OutputError(f"cannot write {str(folder / name)!r}: {error.strerror}") from error

    def add(self, name: str, array: np.ndarray, dtype: ir.DataType) -> ir.ExternalTensor:
        """Write the bytes of `array` and return a tensor of type `dtype` (bf16 values are passed as uint16)."""
        try:
            self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
            offset = self._file.tell()
            self._file.write(np.ascontiguousarray(array).data)
            self._file.flush()
        except OSError as error:
            raise OutputError(f"cannot write {str(self._folder / self._name)!r}: {error.strerror}") from error
        return ir.ExternalTensor(
            self._name, offset, array.nbytes, dtype, shape=ir.Shape(array.shape), name=name, base_dir=str(self._folder)
        )

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # close fails if the disk is full, which add() has already reported
            self._file.close()

    def __enter__(self) -> TensorSpill:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""llama.cpp as a peer, where the package llama-cpp-python is installed: GGUF files in the place of ONNX models.

python -m ortolan.benchmarks.llama_cpp MODEL.gguf FOLDER Q4_0 Q4_K_M …    writes the file in these formats
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import OrtolanError

AVAILABLE = importlib.util.find_spec("llama_cpp") is not None
_BATCH = 512  # tokens that llama.cpp takes at once, unless told


class LlamaCpp:
    """One sequence being decoded by llama.cpp, with the methods of ortolan.generate.Decoder that benchmarks use."""

    def __init__(self, path: Path, threads: int, length: int, all_logits: bool = False) -> None:
        """length: of the context. all_logits: step() gives those of all tokens, else of the last one alone.

        Raises OrtolanError where the package is missing, or the file is none that it reads.
        """
        if not AVAILABLE:
            raise OrtolanError(f"{path} needs llama.cpp; install it with: pip install llama-cpp-python")
        from llama_cpp import Llama

        try:
            self._model = Llama(
                str(path),
                n_ctx=length,
                n_batch=_BATCH,
                n_threads=threads,
                n_threads_batch=threads,
                logits_all=all_logits,
                verbose=False,
            )
        except ValueError as error:
            raise OrtolanError(f"llama.cpp cannot read {path}: {error}") from None
        self._all_logits = all_logits
        self.vocabulary: int = self._model.n_vocab()

    def reset(self) -> None:
        """Empties the cache."""
        self._model.reset()  # type: ignore[no-untyped-call,unused-ignore]

    def step(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Appends tokens. Returns the logits [tokens, vocabulary], or [1, vocabulary] of the last token."""
        tokens = np.asarray(ids, np.int64).tolist()
        begin = self._model.n_tokens
        self._model.eval(tokens)
        if self._all_logits:
            return np.array(self._model.scores[begin : begin + len(tokens)])
        pointer = self._model._ctx.get_logits_ith(-1)
        return np.ctypeslib.as_array(pointer, (1, self.vocabulary)).copy()


def requantize(source: Path, target: Path, format_name: str) -> None:
    """Writes a GGUF file in another format of llama.cpp's, such as "Q4_K_M", as its own tool does.

    Raises OrtolanError for an unknown format, or where llama.cpp fails.
    """
    import llama_cpp

    number = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{format_name}", None)
    if number is None:
        raise OrtolanError(f"unknown format {format_name!r} of llama.cpp, expected one such as 'Q4_0' or 'Q4_K_M'")
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize = number, True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), parameters) != 0:
        raise OrtolanError(f"llama.cpp could not write {target} from {source}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("formats", nargs="+")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.formats:
        target = arguments.folder / f"{name}.gguf"
        requantize(arguments.source, target, name)
        print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

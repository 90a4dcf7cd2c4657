"""Makes the form for serving of a decoder that was optimized, and compares both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortolan.errors import VerificationError, one_line
from ortolan.progress import Stage

from ..find.head import LOGITS
from ..measure.feeds import Feeds, read_calibration
from ..measure.sessions import open_quietly, run_session
from ..operators.paged_attention_function import BLOCK_TOKENS
from ..passes.context import PassContext
from .form import POOL, to_serving_form

_MIN_COSINE = 0.99  # of the logits, averaged over tokens; pools round keys and values to bfloat16
_MOST_TOKENS = 64


def make_serving_form(context: PassContext, ids: np.ndarray, embed_limit: int | None = None) -> None:
    """Change the decoder that a run has written into its form for serving, compare both, and write it.

    Args:
        context: The context of the run. Its candidate is replaced.
        ids: Tokens [tokens] for the comparison.
        embed_limit: As for `write_model`.

    Raises:
        ModelError: The model has no form for serving.
        VerificationError: The logits differ too much.
    """
    model = context.source.model
    context.progress(Stage.SERVE, 0, 1)
    (feeds,) = read_calibration({"input_ids": ids[None, :_MOST_TOKENS]}, model)
    # Refuses first, because a recipe that changed nothing has written no candidate.
    to_serving_form(model, context.source.name)
    decoder = open_quietly(context.candidate, library=True)
    context.write_again(embed_limit)
    for note in _compare(context.candidate, decoder, feeds):
        context.note(note)
    context.progress(Stage.SERVE, 1, 1)


def _compare(path: Path, decoder: Any, feeds: Feeds) -> list[str]:
    """Compare the logits of a text, computed whole and in two calls that also have another sequence; return notes."""
    names = [output.name for output in decoder.get_outputs()]
    expected = run_session(decoder, feeds, "the optimized model", VerificationError)[names.index(LOGITS)]
    assert expected is not None
    ids = np.asarray(feeds["input_ids"])[0]
    whole = _Pools(path, 2 * len(ids)).run([(ids, 0, 0)])
    norms = np.linalg.norm(expected[0], axis=-1) * np.linalg.norm(whole, axis=-1)
    cosine = float(np.mean((expected[0] * whole).sum(-1) / norms))
    if not cosine >= _MIN_COSINE:
        raise VerificationError(
            f"the form for serving gives other logits than the optimized model: cosine {cosine:.4f}, expected at least "
            f"{_MIN_COSINE}; nothing was saved; please report this"
        )
    pools, cut, other = _Pools(path, 2 * len(ids)), len(ids) // 3, ids[::-1]
    begin = pools.run([(ids[:cut], 0, 0), (other, 0, 1)])[:cut]
    end = pools.run([(other[:1], len(other), 1), (ids[cut:], cut, 0)])[1:]
    notes = [f"form for serving: logits have cosine {cosine:.5f} to those of the optimized model"]
    if not np.array_equal(np.concatenate([begin, end]), whole):
        notes.append(
            "the last bits of an answer depend on the other requests of a call, because ONNX Runtime computes some "
            "layers of this model; option -v lists the layers that were not replaced"
        )
    return notes


class _Pools:
    """A session of the form for serving and its pools. Each of two sequences has its own half of the blocks."""

    def __init__(self, path: Path, tokens: int) -> None:
        import onnxruntime
        from onnx import TensorProto

        def empty(shape: Sequence[int]) -> Any:
            zeros = np.zeros([2 * self._columns, *shape], np.uint16)
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(zeros, TensorProto.BFLOAT16)

        self._session = open_quietly(path, library=True)
        self._columns = tokens // BLOCK_TOKENS + 1
        inputs = self._session.get_inputs()
        self._types = {one.name: np.int32 if one.type == "tensor(int32)" else np.int64 for one in inputs}
        self._pools = {one.name: empty(one.shape[1:]) for one in inputs if one.name.startswith(POOL)}

    def run(self, chunks: Sequence[tuple[np.ndarray, int, int]]) -> np.ndarray:
        """Return the logits of chunks (token ids, past tokens, sequence), and append the tokens to the pools."""
        import onnxruntime

        ids = np.concatenate([chunk for chunk, _, _ in chunks])
        feeds = {
            "input_ids": ids,
            "position_ids": np.concatenate([past + np.arange(len(chunk)) for chunk, past, _ in chunks]),
            "sequence_starts": np.cumsum([0, *(len(chunk) for chunk, _, _ in chunks)]),
            "past_lengths": np.array([past for _, past, _ in chunks]),
            "block_table": np.stack([np.arange(self._columns) + at * self._columns for _, _, at in chunks]),
            "logit_rows": np.arange(len(ids)),
        }
        arrays = {name: np.ascontiguousarray(value, self._types[name]) for name, value in feeds.items()}
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
        names = [LOGITS, *(f"new_{name}" for name in self._pools)]
        try:
            logits, *pools = self._session.run_with_ort_values(names, values | self._pools)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise VerificationError(
                f"the form for serving does not run: {one_line(error)}; nothing was saved"
            ) from error
        self._pools = dict(zip(self._pools, pools, strict=True))
        return np.asarray(logits.numpy())

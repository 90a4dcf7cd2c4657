"""Makes the form for serving of a decoder that was optimized, and compares both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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

# Limits of 1 - cosine of the logits, averaged over tokens. Pools round keys and values to bfloat16. Deep models amplify
# that, so a larger difference is accepted if rounding the cache of the optimized model has a similar effect.
_MOST_DIFFERENCE, _OF_ROUNDING, _LIMIT = 0.01, 4.0, 0.1
_MOST_TOKENS, _CALLS = 64, 4
_IDS, _MASK, _POSITIONS = "input_ids", "attention_mask", "position_ids"
_PAST, _PRESENT = "past_key_values.", "present."


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
    cosine, most = _cosine(expected[0], whole), _MOST_DIFFERENCE
    if not 1 - cosine <= most:
        most = max(most, min(_LIMIT, _OF_ROUNDING * _effect_of_rounding(decoder, feeds, expected[0])))
    if not 1 - cosine <= most:
        raise VerificationError(
            f"the form for serving gives other logits than the optimized model: cosine {cosine:.4f}, expected at least "
            f"{1 - most:.4f}; nothing was saved; please report this"
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


def _cosine(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the mean cosine of the logits [tokens, vocabulary]."""
    norms = np.linalg.norm(expected, axis=-1) * np.linalg.norm(found, axis=-1)
    return float(np.mean((expected * found).sum(-1) / norms))


def _effect_of_rounding(decoder: Any, feeds: Feeds, expected: np.ndarray) -> float:
    """Return 1 - cosine of the decoder's logits if its cache is rounded to bfloat16 between calls.

    Values are rounded up or down at random. Attention with bf16 products rounds to the nearest value itself, so
    rounding the cache to the nearest value would change nothing there.

    Args:
        decoder: A session. With inputs besides tokens, mask, positions and cache, the effect is unknown: 0.
        feeds: A text for one call, with an empty cache.
        expected: The logits of this call [tokens, vocabulary].
    """
    if any(name not in (_IDS, _MASK, _POSITIONS) and not name.startswith(_PAST) for name in feeds):
        return 0.0
    names = [output.name for output in decoder.get_outputs()]
    given, found = dict(feeds), []
    ends = np.linspace(0, len(expected), min(_CALLS, len(expected)) + 1).astype(int).tolist()
    draw = np.random.default_rng(0)
    for begin, end in pairwise(ends):
        # attention_mask also covers past tokens.
        parts = {_IDS: slice(begin, end), _POSITIONS: slice(begin, end), _MASK: slice(end)}
        given |= {name: np.asarray(feeds[name])[..., part] for name, part in parts.items() if name in feeds}
        outputs = dict(zip(names, run_session(decoder, given, "the optimized model", VerificationError), strict=True))
        if outputs[LOGITS] is None:
            return 0.0
        found.append(outputs[LOGITS][0])
        for name, value in outputs.items():
            past = name.replace(_PRESENT, _PAST, 1)
            if past in feeds and value is not None:
                given[past] = _rounded_at_random(value, draw)
    effect = 1 - _cosine(expected, np.concatenate(found))
    return effect if np.isfinite(effect) else 0.0


def _rounded_at_random(values: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return finite values rounded to a neighbour in bfloat16, the closer one with the higher probability."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + draw.integers(0, 1 << 16, values.shape, np.uint32)) & np.uint32(0xFFFF0000)
    found: np.ndarray = rounded.view(np.float32).astype(values.dtype)
    return found


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

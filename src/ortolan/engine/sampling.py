"""Sampling of tokens in native code (src/sampling.h)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..errors import ArgumentError, OrtolanError
from .rows import RowState, Sampled

_SEED_BITS = (1 << 64) - 1


class NativeSampler:
    """The engine's `TokenSampler`: all rows of a step in one native call, which releases the GIL.

    A token depends only on the logits of its row and on the sequence: its options, prompt, answer, grammar, seed and
    index. Seed, length of the answer and index select a value of a counter-based random generator (Philox4x32-10).
    Batch, preemption, compiler and CPU make no difference.

    Logit bias, grammar, repetition penalty, presence and frequency penalties, temperature, top_k, top_p and min_p apply
    in this order. Equal logits are ordered by token id. Logprobs are those of the model's logits, before all options.
    """

    def sample(self, logits: NDArray[np.float32], rows: Sequence[RowState]) -> list[Sampled]:
        """Draw a token for each row.

        Args:
            logits: float32 [rows, vocabulary]. They are not changed.
            rows: The sequences of the rows.

        Raises:
            ArgumentError: `logits` or a mask has another type or shape, or an option is out of range.
            OrtolanError: A row has NaN or infinite logits, or its grammar allows no token.
        """
        if logits.dtype != np.float32 or logits.ndim != 2 or logits.shape[0] != len(rows):
            raise ArgumentError(
                f"logits are {logits.dtype} {list(logits.shape)}, expected float32 [{len(rows)} rows, vocabulary]"
            )
        masks = [row.mask for row in rows]
        for index, mask in enumerate(masks):
            if mask is not None and (mask.dtype != np.uint32 or mask.ndim != 1):
                raise ArgumentError(
                    f"the mask of row {index} is {mask.dtype} {list(mask.shape)}, expected uint32 [words of 32 tokens]"
                )
        try:
            native = [_native_row(row) for row in rows]
            results = _native.sample_rows(np.ascontiguousarray(logits), native, masks)
        except ValueError as error:
            raise ArgumentError(str(error)) from error
        return [_to_sampled(result) for result in results]


def _native_row(row: RowState) -> _native.SamplingRow:
    """Return the row's native state, which counts the tokens of the answer."""
    native = row.cache
    if not isinstance(native, _native.SamplingRow) or native.generated > len(row.answer):
        options = row.options
        native = row.cache = _native.SamplingRow(
            temperature=options.temperature,
            top_k=min(options.top_k, _native.MOST_SAMPLED_TOKENS),
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            seed=row.seed & _SEED_BITS,
            choice=row.index,
            logprobs=-1 if options.logprobs is None else min(options.logprobs, _native.MOST_SAMPLED_TOKENS),
            prompt=row.prompt if options.repetition_penalty != 1 else (),
            bias_tokens=list(options.logit_bias),
            bias_values=list(options.logit_bias.values()),
        )
    for token in row.answer[native.generated :]:
        native.append(token)
    return native


def _to_sampled(result: int | tuple[int, float, list[int], list[float]] | str) -> Sampled:
    if isinstance(result, str):
        raise OrtolanError(result)
    if isinstance(result, int):
        return Sampled(result)
    token, logprob, best, logprobs = result
    return Sampled(token, logprob, tuple(zip(best, logprobs, strict=True)))

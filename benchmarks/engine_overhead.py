"""Time that the engine of continuous batching spends per step beside the model and the sampler.

python -m ortolan.benchmarks.engine_overhead [--tokens 200] [--rounds 3] [--text] [--json]

The model and the sampler do nothing, and each prompt has 256 tokens. Prints the median time of a step in which all
sequences decode, for 1 to 256 sequences, and the limit that the engine should keep: 0.3 ms, and 20 us for each
sequence. --text decodes tokens to text, with a byte-level tokenizer, and searches stop strings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..engine import Engine, Request, RowState, Sampled, SamplingOptions, Step
from .result import versions_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SEQUENCES = (1, 4, 16, 64, 256)
_PROMPT = 256
_STEP_MS, _SEQUENCE_MS = 0.3, 0.02


class _NullModel:
    """A model that returns zeros, and notes when it is called."""

    vocabulary = 256
    context = 4096

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.calls: list[tuple[float, int, int]] = []  # time, tokens and rows
        self._logits = np.zeros((256, self.vocabulary), np.float32)

    def run(self, step: Step) -> NDArray[np.float32]:
        self.calls.append((time.perf_counter(), len(step.input_ids), len(step.logit_rows)))
        return self._logits[: len(step.logit_rows)]


class _NullSampler:
    def sample(self, logits: NDArray[np.float32], rows: Sequence[RowState]) -> list[Sampled]:
        return [Sampled(len(row.answer) % 64 + 32) for row in rows]


def _tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def measure(sequences: int, tokens: int, text: bool) -> float:
    """Return the median milliseconds of a step in which a number of sequences decode."""
    model = _NullModel(sequences * (_PROMPT + tokens + 32) // 16)
    with Engine(
        model,
        tokenizer=_tokenizer() if text else None,
        sampler=_NullSampler(),
        max_sequences=sequences,
        max_step_tokens=max(sequences, 512),
    ) as engine:
        streams = []
        for index in range(sequences):
            prompt = (index, *range(_PROMPT - 1))
            stop = ("a stop string", "\n\n") if text else ()
            streams.append(engine.submit(Request(prompt, tokens, SamplingOptions(temperature=0), stop)))
        for stream in streams:
            for _ in stream:
                pass
    times = [
        after - before
        for (before, count, rows), (after, *_) in zip(model.calls[:-1], model.calls[1:], strict=True)
        if count == rows == sequences
    ]
    return statistics.median(times) * 1000


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", action="store_true", help="decode tokens to text")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {
        sequences: min(measure(sequences, options.tokens, options.text) for _ in range(options.rounds))
        for sequences in _SEQUENCES
    }
    if options.json:
        print(json.dumps({"milliseconds_per_step": found}))
        return
    print(versions_line())
    print("sequences  ms per step  limit")
    for sequences, milliseconds in found.items():
        print(f"{sequences:>9}  {milliseconds:>11.3f}  {_STEP_MS + sequences * _SEQUENCE_MS:.2f}")


if __name__ == "__main__":
    main()

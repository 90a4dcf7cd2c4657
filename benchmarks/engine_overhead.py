"""Time that the engine of continuous batching spends per step beside the model, and time to draw a token.

python -m ortolan.benchmarks.engine_overhead [--tokens 200] [--rounds 3] [--text] [--json]

The model and the sampler do nothing, and each prompt has 256 tokens. Prints the median time of a step in which all
sequences decode, for 1 to 256 sequences, and the limit that the engine should keep: 0.3 ms, and 20 us for each
sequence. Steps with drafts are not counted. --text decodes tokens to text, with a byte-level tokenizer, and searches
stop strings.

Then prints the median time in which the engine's sampler draws a token from a row of logits, which are normally
distributed with standard deviation 4, on one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..engine import Engine, Request, RowState, Sampled, SamplingOptions, Step
from ..engine.sampling import NativeSampler
from .result import versions_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SEQUENCES = (1, 4, 16, 64, 256)
_PROMPT = 256
_FEWEST_TOKENS = 3  # all sequences decode together from the third step at the latest; timing it needs a fourth
_STEP_MS, _SEQUENCE_MS = 0.3, 0.02
_VOCABULARIES = (49_152, 151_936)  # of SmolLM2 and Qwen3
_DRAWS = 200
_SAMPLED = {
    "greedy": SamplingOptions(temperature=0),
    "temperature 0.8": SamplingOptions(temperature=0.8),
    "top_k 40": SamplingOptions(temperature=0.8, top_k=40),
    "top_p 0.95": SamplingOptions(temperature=0.8, top_p=0.95),
    "min_p 0.05": SamplingOptions(temperature=0.8, min_p=0.05),
    "greedy, 5 logprobs": SamplingOptions(temperature=0, logprobs=5),
}


class _NullModel:
    """A model that returns zeros, and notes when it is called. The first call waits for `all_submitted`."""

    vocabulary = 256
    context = 4096

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.calls: list[tuple[float, int, int]] = []  # time, tokens and rows
        self.all_submitted = threading.Event()
        self._logits = np.zeros((256, self.vocabulary), np.float32)

    def run(self, step: Step) -> NDArray[np.float32]:
        self.all_submitted.wait()
        self.calls.append((time.perf_counter(), len(step.input_ids), len(step.logit_rows)))
        return self._logits[: len(step.logit_rows)]


class _NullSampler:
    """Draws tokens that repeat after 128, so that the first steps have no drafts."""

    def sample(self, logits: NDArray[np.float32], rows: Sequence[RowState]) -> list[Sampled]:
        return [Sampled((len(row.answer) + 1) * (len(row.answer) + 2) // 2 % 64 + 32) for row in rows]


def _tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _request(index: int, tokens: int, text: bool) -> Request:
    stop = ("a stop string", "\n\n") if text else ()
    return Request((index, *range(_PROMPT - 1)), tokens, SamplingOptions(temperature=0), stop)


def measure(sequences: int, tokens: int, text: bool) -> float:
    """Return the median milliseconds of a step in which a number of sequences decode."""
    model = _NullModel(sequences * (_PROMPT + tokens + 32) // 16)
    with Engine(
        model,
        tokenizer=_tokenizer() if text else None,
        sampler=_NullSampler(),
        max_sequences=sequences,
        max_step_tokens=sequences * _PROMPT,  # all prompts in two steps, so that all sequences decode together
    ) as engine:
        try:
            streams = [engine.submit(_request(index, tokens, text)) for index in range(sequences)]
        finally:
            model.all_submitted.set()
        for stream in streams:
            for _ in stream:
                pass
    times = [
        after - before
        for (before, count, rows), (after, *_) in zip(model.calls[:-1], model.calls[1:], strict=True)
        if count == rows == sequences
    ]
    return statistics.median(times) * 1000


def measure_sampling(options: SamplingOptions, vocabulary: int) -> float:
    """Return the median microseconds in which a token is drawn from a row of logits."""
    logits = np.random.default_rng(0).normal(0, 4, [1, vocabulary]).astype(np.float32)
    sampler, row, times = NativeSampler(), RowState(options, (), [], 0, 0), []
    for _ in range(_DRAWS):
        begin = time.perf_counter()
        (sampled,) = sampler.sample(logits, [row])
        times.append(time.perf_counter() - begin)
        row.answer.append(sampled.token)  # the next draw takes another random value
    return statistics.median(times) * 1e6


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200, help=f"tokens of each answer, at least {_FEWEST_TOKENS}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", action="store_true", help="decode tokens to text")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.tokens < _FEWEST_TOKENS:
        parser.error(f"--tokens is {options.tokens}, expected at least {_FEWEST_TOKENS}")
    found = {
        sequences: min(measure(sequences, options.tokens, options.text) for _ in range(options.rounds))
        for sequences in _SEQUENCES
    }
    drawn = {
        name: {size: min(measure_sampling(one, size) for _ in range(options.rounds)) for size in _VOCABULARIES}
        for name, one in _SAMPLED.items()
    }
    if options.json:
        print(json.dumps({"milliseconds_per_step": found, "microseconds_per_token": drawn}))
        return
    print(versions_line())
    print("sequences  ms per step  limit")
    for sequences, milliseconds in found.items():
        print(f"{sequences:>9}  {milliseconds:>11.3f}  {_STEP_MS + sequences * _SEQUENCE_MS:.2f}")
    print("\nus to draw a token from", *(f"{size:>8}" for size in _VOCABULARIES), "logits")
    for name, microseconds in drawn.items():
        print(f"{name:<23}", *(f"{one:>8.1f}" for one in microseconds.values()))


if __name__ == "__main__":
    main()

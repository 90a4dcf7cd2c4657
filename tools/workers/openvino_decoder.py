"""Decoders in OpenVINO GenAI's continuous batching (openvino-genai). The model is a GGUF file."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .decoder_engine import DecoderEngine, Part, any_ids
    from .engine import Made, megabytes
else:
    from decoder_engine import DecoderEngine, Part, any_ids
    from engine import Made, megabytes

_BLOCK_TOKENS = 32  # of OpenVINO's caches on CPUs


class OpenVinoGenAi(DecoderEngine):
    """ContinuousBatchingPipeline (openvino-genai), which reads GGUF files. Its steps are run by `_step`."""

    packages = ("openvino-genai", "openvino")
    modules = ("openvino", "openvino_genai")
    _LONGEST = 4096  # tokens of a context to decode after

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Describe the file. No options."""
        if options:
            raise ValueError(f"unknown options {', '.join(options)}; OpenVINO GenAI takes the file as it is")
        call = f"ContinuousBatchingPipeline({model.name!r}, SchedulerConfig(), 'CPU'); add_request(ids), step()"
        return Made({"model": str(model)}, call, megabytes(model))

    def __init__(self, threads: int, model: str) -> None:
        self._threads, self._path = threads, model
        self._api = importlib.import_module("openvino_genai")
        self._tensor = importlib.import_module("openvino").Tensor
        self._requests = 0
        self._open([_BLOCK_TOKENS])

    def _open(self, lengths: Sequence[int], prefix_cache: bool = False) -> None:
        """Open the pipeline with a cache for sequences of these lengths.

        prefix_cache: Whether requests share equal beginnings.
        """
        settings = self._api.SchedulerConfig()
        settings.num_kv_blocks = sum(-(-length // _BLOCK_TOKENS) + 1 for length in lengths)
        settings.enable_prefix_caching = prefix_cache
        self._pipeline: Any = None  # frees the memory of the previous one
        properties = {"INFERENCE_NUM_THREADS": self._threads}
        self._pipeline = self._api.ContinuousBatchingPipeline(self._path, settings, "CPU", properties)

    def _add(self, ids: Sequence[int], tokens: int, echo: bool = False) -> Any:
        """Add a request for exactly `tokens` greedy tokens. `echo`: also return log probabilities of the prompt."""
        wanted = self._api.GenerationConfig()
        wanted.max_new_tokens = wanted.min_new_tokens = tokens
        wanted.ignore_eos, wanted.do_sample = True, False
        if echo:
            wanted.echo, wanted.logprobs = True, 1
        self._requests += 1
        return self._pipeline.add_request(self._requests, self._tensor(np.array([ids], np.int64)), wanted)

    def _step(self, handles: Sequence[Any]) -> list[list[int]]:
        """Run a step; return the new tokens of each request."""
        self._pipeline.step()
        return [
            [token for one in handle.read().values() for token in one.generated_ids] if handle.can_read() else []
            for handle in handles
        ]

    def prepare(self, work: Mapping[str, Any]) -> list[Part]:
        """Return the parts of the work. A prefix cache refills long contexts."""
        self._keeps_prefixes = work["kind"] == "step"
        return super().prepare(work)

    def make_room(self, tokens: int) -> None:
        """Open the pipeline with a cache for one sequence."""
        self._open([tokens + 1], self._keeps_prefixes)

    def rewind(self, tokens: int) -> None:
        """Do nothing: each request starts anew."""

    def fill(self, tokens: int) -> None:
        """Compute the context; later requests find it in the prefix cache."""
        if tokens > self._LONGEST:
            raise ValueError(f"a prompt of {tokens} tokens takes minutes; expected at most {self._LONGEST}")
        self.feed(any_ids(tokens))

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Run a prompt and return the token that follows: the pipeline gives no logits."""
        handle = self._add(ids, 1)
        tokens: list[int] = []
        while not tokens:
            (tokens,) = self._step([handle])
        return np.array(tokens)

    def feed_all(self, ids: Sequence[int]) -> np.ndarray:
        """Refuse: the pipeline gives no logits."""
        raise ValueError("OpenVINO GenAI gives no logits; score texts by log probabilities")

    def _surprise(self, part: Part) -> tuple[float, int]:
        handle = self._add(part.ids, 1, echo=True)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        (output,) = handle.read_all()
        found = output.generated_log_probs[1 : len(part.ids)]
        if list(output.generated_ids[: len(part.ids)]) != list(part.ids) or len(found) != len(part.ids) - 1:
            raise ValueError(f"{len(found)} log probabilities of the prompt, expected {len(part.ids) - 1}")
        return -float(np.sum(found)), len(found)

    def set_up(self, part: Part) -> None:
        """Run the prompt before decoding."""
        if part.steps:
            self._handle = self._add(part.ids or any_ids(part.context), part.steps + 1)
            while not self._step([self._handle])[0]:
                pass

    def run(self, part: Part) -> np.ndarray:
        """Run the prompt, decode the steps or score the ids."""
        if not part.steps:
            return super().run(part)
        tokens: list[int] = []
        while len(tokens) < part.steps:
            tokens += self._step([self._handle])[0]
        return np.array([tokens[-1:]])

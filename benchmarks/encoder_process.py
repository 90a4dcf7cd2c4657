"""A text encoder in a process of its own, of whatever runtime (workers/encoders.py), as benchmarks see it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ortolan.graph_passes.measure.feeds import Feeds

from .workers.process import Worker, cpus_to_use

_SCRIPT = Path(__file__).with_name("workers") / "encoders.py"


@dataclass(frozen=True)
class EncoderSpec:
    """engine: one of workers/encoders.py, in the environment of interpreter `python`. model: what it is loaded from.

    exact: it computes in fp32, so its vectors must be the original's.
    """

    engine: str
    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    exact: bool = False


class EncoderProcess(Worker):
    """Takes texts as feeds without padding, or batches of them, padded behind the texts."""

    def __init__(self, spec: EncoderSpec, threads: int, folder: Path, script: Path = _SCRIPT) -> None:
        """folder: new or empty, for the files that pass between the processes."""
        # Libraries read the first one when they are loaded; a tokenizer's threads are nobody's business here.
        environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        settings = {"threads": threads, "cpus": cpus_to_use(threads)}
        super().__init__(script, settings, python=spec.python, environment=environment)
        self._spec, self._folder = spec, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.versions: dict[str, str] = {}
        self.call, self.megabytes = "", 0.0

    def load(self) -> None:
        """Raises WorkerError."""
        spec, made = self._spec, tempfile.mkdtemp(dir=self._folder)
        answer = self.ask("load", engine=spec.engine, model=str(spec.model), folder=made, **spec.options)
        self.versions, self.call, self.megabytes = answer["versions"], answer["call"], answer["megabytes"]

    def give(self, batches: Sequence[Feeds]) -> None:
        """What is timed next. Raises WorkerError."""
        self.ask("give", batches=str(write_batches(batches, self._folder / "batches.npz")))

    def time(self, passes: int, warm_up: float) -> list[float]:
        """Seconds of each pass over what was given, behind so many that are not timed. Raises WorkerError."""
        return list(map(float, self.ask("time", passes=passes, warm_up=warm_up)["seconds"]))

    def vectors(self, batches: Sequence[Feeds]) -> np.ndarray:
        """float32 [texts, width], of length 1. What was given before is forgotten. Raises WorkerError."""
        self.give(batches)
        path = self._folder / "vectors.npy"
        self.ask("vectors", answer=str(path))
        return np.asarray(np.load(path))


def write_batches(batches: Sequence[Feeds], path: Path) -> Path:
    """As workers/encoders.py reads them; token types are zero where the feeds have none."""
    arrays: dict[str, Any] = {}
    for number, feeds in enumerate(batches):
        ids = feeds["input_ids"]
        arrays[f"ids_{number}"] = ids
        arrays[f"mask_{number}"] = feeds["attention_mask"]
        arrays[f"types_{number}"] = feeds.get("token_type_ids", np.zeros_like(ids))
    np.savez(path, **arrays)
    return path

"""What workers have in common: a form of a model in a runtime, made once, opened by another process, given work, timed.

This file is loaded by the scripts beside it, in interpreters (3.11 or later) that have numpy and no Ortolan.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np


@dataclass(frozen=True)
class Made:
    """What Engine.make has made. opened: what the class is called with to open it, of JSON's types. call: how it was
    made and is opened, as a reader would write it. megabytes: on disk, of all that opening reads."""

    opened: Mapping[str, Any]
    call: str
    megabytes: float


class Engine(ABC):
    """A model in a runtime. packages: whose versions matter. modules: imported before the time of opening is taken.
    environment: variables that are set before."""

    packages: ClassVar[tuple[str, ...]]
    modules: ClassVar[tuple[str, ...]] = ()
    environment: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @classmethod
    @abstractmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Converts the model into a folder, which is empty. Raises ValueError for what it cannot be."""

    @abstractmethod
    def __init__(self, threads: int, **opened: Any) -> None: ...

    @abstractmethod
    def prepare(self, work: Mapping[str, Any]) -> list[Any]:
        """The parts of a pass; not timed. Raises ValueError for what this engine cannot be given."""

    def get_ready(self, parts: list[Any]) -> None:  # noqa: B027
        """Compiles for the parts of a pass, where that hangs on their shapes; not timed. Not called at opening, so that
        the time to the first answer has its compilation."""

    def set_up(self, part: Any) -> None:  # noqa: B027
        """Brings it to where the time of a part begins; not timed."""

    @abstractmethod
    def run(self, part: Any) -> np.ndarray:
        """Its answer: an array, with one row at least."""


class EngineWorker:
    """An engine and the work that it is given: the base of the class Worker in a script."""

    engines: ClassVar[Mapping[str, type[Engine]]]

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._engine: Engine | None = None
        self._parts: list[Any] = []
        self.actions: Mapping[str, Callable[..., dict[str, Any]]] = {
            "make": self.make,
            "open": self.open,
            "give": self.give,
            "time": self.time,
            "answer": self.answer,
        }

    def make(self, engine: str, model: str, folder: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Answers what Made has, and "versions" (package -> version). folder: empty."""
        kind = self._kind(engine)
        made = kind.make(Path(model), Path(folder), self._threads, **options)
        versions = dict(_versions(kind.packages))
        return {"opened": made.opened, "call": made.call, "megabytes": made.megabytes, "versions": versions}

    def open(self, engine: str, opened: Mapping[str, Any], work: Mapping[str, Any]) -> dict[str, Any]:
        """Opens what was made. Answers "seconds", from there to the answer to the work's first part, with libraries
        imported before, and "peak_megabytes" of this process till then; null where the system does not tell."""
        kind = self._kind(engine)
        self._engine, self._parts = None, []
        os.environ.update(kind.environment)
        for module in kind.modules:
            importlib.import_module(module)
        start = time.perf_counter()
        self._engine = kind(self._threads, **opened)
        seconds = time.perf_counter() - start
        self._parts = self._engine.prepare(work)
        self._engine.set_up(self._parts[0])
        start = time.perf_counter()
        self._engine.run(self._parts[0])
        return {"seconds": seconds + time.perf_counter() - start, "peak_megabytes": _peak_megabytes()}

    def give(self, work: Mapping[str, Any]) -> dict[str, Any]:
        """Takes work in place of the last one."""
        self._parts = []
        self._parts = self._opened().prepare(work)
        self._opened().get_ready(self._parts)
        return {"parts": len(self._parts)}

    def time(self, passes: int, warm_up: float) -> dict[str, Any]:
        """Runs parts untimed for warm_up seconds, one at least, then all of them so many times.

        Answers "seconds" of each pass.
        """
        engine = self._opened()
        until, warm = time.perf_counter() + warm_up, 0
        while warm == 0 or time.perf_counter() < until:
            part = self._parts[warm % len(self._parts)]
            engine.set_up(part)
            engine.run(part)
            warm += 1
        seconds = []
        for _ in range(passes):
            spent = 0.0
            for part in self._parts:
                engine.set_up(part)
                start = time.perf_counter()
                engine.run(part)
                spent += time.perf_counter() - start
            seconds.append(spent)
        return {"seconds": seconds}

    def answer(self, path: str) -> dict[str, Any]:
        """Writes the answers to all parts, one below the other, to a file: .npy, float32."""
        engine = self._opened()
        answers = []
        for part in self._parts:
            engine.set_up(part)
            answers.append(engine.run(part))
        np.save(path, np.concatenate(answers).astype(np.float32))
        return {}

    def _kind(self, engine: str) -> type[Engine]:
        if engine not in self.engines:
            raise ValueError(f"no engine {engine!r}; these are known: {', '.join(self.engines)}")
        return self.engines[engine]

    def _opened(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("open a model first")
        return self._engine


def ort_options(options: Any, threads: int) -> Any:
    """Session options of ONNX Runtime, the same for all that run in it."""
    options.intra_op_num_threads = threads
    # The threads of one side must not spin while another one is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def megabytes(*paths: Path) -> float:
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def with_data(model: Path) -> list[Path]:
    """An ONNX file, and that of its weights where they lie beside it."""
    return [path for path in (model, model.with_name(f"{model.name}.data")) if path.is_file()]


def _versions(packages: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in packages:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:  # of a source tree
            yield name, "of a source tree"


def _peak_megabytes() -> float | None:
    """What this program has held at most. Not by getrusage: that counts its parent as well, as it was before exec."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024 / 1e6

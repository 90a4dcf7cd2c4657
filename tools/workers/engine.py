"""Base classes of the worker scripts.

An engine converts a model once. Another process then opens the model, receives work and is timed. The scripts beside
this file load it, in interpreters (3.11 or later) that have numpy but not Ortolan.
"""

from __future__ import annotations

import contextlib
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
    """A converted model.

    Attributes:
        opened: The engine's arguments for opening it, JSON types.
        call: The calls that make and open it, shown to readers.
        megabytes: Size on disk of all files that opening reads.
    """

    opened: Mapping[str, Any]
    call: str
    megabytes: float


class Engine(ABC):
    """A model in a runtime.

    Attributes:
        packages: Packages whose versions are recorded.
        modules: Modules to import before the load time is measured.
        environment: Environment variables to set before these imports.
    """

    packages: ClassVar[tuple[str, ...]]
    modules: ClassVar[tuple[str, ...]] = ()
    environment: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @classmethod
    @abstractmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Convert the model into an empty folder.

        Raises:
            ValueError: The engine cannot convert this model.
        """

    @abstractmethod
    def __init__(self, threads: int, **opened: Any) -> None: ...

    @abstractmethod
    def prepare(self, work: Mapping[str, Any]) -> list[Any]:
        """Return the parts of a pass over the work; not timed.

        Raises:
            ValueError: The engine cannot do this work.
        """

    def get_ready(self, parts: list[Any]) -> None:  # noqa: B027
        """Compile for the shapes of the parts; not timed.

        Opening does not call it, so the load time includes compilation.
        """

    def set_up(self, part: Any) -> None:  # noqa: B027
        """Bring the engine to the state before a part, such as a cache with the prompt; not timed."""

    @abstractmethod
    def run(self, part: Any) -> np.ndarray:
        """Return the answer to a part: an array of at least one row."""


class EngineWorker:
    """An engine and its work; the base of the class Worker in each script."""

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
        """Convert a model into an empty folder. Replies with the fields of `Made`, and the "versions" of packages."""
        kind = self._kind(engine)
        made = kind.make(Path(model), Path(folder), self._threads, **options)
        versions = dict(_versions(kind.packages))
        return {"opened": made.opened, "call": made.call, "megabytes": made.megabytes, "versions": versions}

    def open(self, engine: str, opened: Mapping[str, Any], work: Mapping[str, Any]) -> dict[str, Any]:
        """Open a converted model.

        Replies with "seconds", from opening to the answer to the work's first part, without the import of modules, and
        "peak_megabytes" of this process until then (null if unknown).
        """
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
        return {"seconds": seconds + time.perf_counter() - start, "peak_megabytes": peak_megabytes()}

    def give(self, work: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the work."""
        self._parts = []
        self._parts = self._opened().prepare(work)
        self._opened().get_ready(self._parts)
        return {"parts": len(self._parts)}

    def time(self, passes: int, warm_up: float) -> dict[str, Any]:
        """Time passes over all parts, after running parts for `warm_up` seconds, at least one.

        Replies with "seconds" of each pass.
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
        """Write the answers to all parts, stacked, to an .npy file in float32."""
        engine = self._opened()
        answers = []
        for part in self._parts:
            engine.set_up(part)
            answers.append(engine.run(part))
        np.save(path, np.concatenate(answers).astype(np.float32))
        return {}

    def _kind(self, engine: str) -> type[Engine]:
        if engine not in self.engines:
            raise ValueError(f"unknown engine {engine!r}; expected {', '.join(self.engines)}")
        return self.engines[engine]

    def _opened(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("open a model first")
        return self._engine


def ort_options(options: Any, threads: int) -> Any:
    """Set the ONNX Runtime session options that all engines share, and return them."""
    options.intra_op_num_threads = threads
    # Idle threads must not spin while another process is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def arguments(given: Mapping[str, Any]) -> str:
    """Return arguments as they are written in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def megabytes(*paths: Path) -> float:
    """Return the size of the files in MB."""
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def with_data(model: Path) -> list[Path]:
    """Return an ONNX file, followed by its external data file if one exists."""
    return [path for path in (model, model.with_name(f"{model.name}.data")) if path.is_file()]


def _versions(packages: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in packages:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a source tree
            yield name, "source tree"


def forget_peak() -> None:
    """Let `peak_megabytes` begin with the present memory. Without effect where the system does not count."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_megabytes() -> float | None:
    """Return the peak memory of this program. getrusage would include the memory of the parent process before exec."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024 / 1e6

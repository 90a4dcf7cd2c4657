"""The client of worker.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..workers.process import Worker

_SCRIPT = Path(__file__).with_name("worker.py")


class WorkerProcess(Worker):
    """A worker that uses one library."""

    def __init__(self, library: Path, cpus: Sequence[int], threads: int, isa: str | None = None) -> None:
        """Prepare a process pinned to these CPUs. isa: its ORTOLAN_ISA; None: the value in this process."""
        settings = {"library": str(library), "cpus": list(cpus), "threads": threads}
        super().__init__(_SCRIPT, settings, environment={} if isa is None else {"ORTOLAN_ISA": isa})
        self._model: Path | None = None

    def open(self, model: Path) -> None:
        """Open the model unless it is open.

        Raises:
            WorkerError: The model cannot be opened.
        """
        if self._process is None or self._model != model:
            self.ask("open", model=str(model))
            self._model = model

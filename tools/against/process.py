"""A worker (worker.py) as the comparison sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..workers.process import Worker

_SCRIPT = Path(__file__).with_name("worker.py")


class WorkerProcess(Worker):
    """Of one library."""

    def __init__(self, library: Path, cpus: Sequence[int], threads: int, isa: str | None = None) -> None:
        """cpus: it runs on these alone. isa: ORTOLAN_ISA of the process; None: as it is here."""
        settings = {"library": str(library), "cpus": list(cpus), "threads": threads}
        super().__init__(_SCRIPT, settings, environment={} if isa is None else {"ORTOLAN_ISA": isa})
        self._model: Path | None = None

    def open(self, model: Path) -> None:
        """Unless it is open already. Raises WorkerError."""
        if self._process is None or self._model != model:
            self.ask("open", model=str(model))
            self._model = model

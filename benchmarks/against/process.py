"""A worker (worker.py) as the comparison sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ...errors import OrtolanError

_SCRIPT = Path(__file__).with_name("worker.py")


class WorkerError(OrtolanError):
    """A side cannot do what it is asked: it refuses a model, or its process is gone."""


class WorkerProcess:
    """Started when it is first asked, and again after restart() or when it is gone."""

    def __init__(self, library: Path, cpus: Sequence[int], threads: int, isa: str | None = None) -> None:
        """cpus: it runs on these alone. isa: ORTOLAN_ISA of the process; None: as it is here."""
        self._settings = {"library": str(library), "cpus": list(cpus), "threads": threads}
        self._environment = os.environ | ({} if isa is None else {"ORTOLAN_ISA": isa})
        self._process: subprocess.Popen[str] | None = None
        self._messages: IO[str] | None = None
        self._model: Path | None = None

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.restart()

    def open(self, model: Path) -> None:
        """Unless it is open already. Raises WorkerError."""
        if self._process is None or self._model != model:
            self.ask("open", model=str(model))
            self._model = model

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Raises WorkerError with what went wrong."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            print(json.dumps({"do": do, **arguments}), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(self._why_gone(process))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def restart(self) -> None:
        """Ends the process; the next question starts another one, whose memory lies elsewhere."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        if self._messages is not None:
            self._messages.close()
            self._messages = None

    def _start(self) -> subprocess.Popen[str]:
        self.restart()
        self._messages = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            # -P: the modules beside the script are not for it.
            [sys.executable, "-P", str(_SCRIPT), json.dumps(self._settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            text=True,
            env=self._environment,
            process_group=0,  # an interrupt from the keyboard is for the comparison alone, which ends its workers
        )
        return self._process

    def _why_gone(self, process: subprocess.Popen[str]) -> str:
        status = process.wait()
        assert self._messages is not None
        self._messages.seek(0)
        last = self._messages.read().strip().splitlines()[-1:]
        self.restart()
        return f"the process ended with status {status}{': ' if last else ''}{''.join(last)}"


def cpus_to_use(threads: int) -> list[int]:
    """So many of the CPUs that this process may use, on as many cores as there are; [] where the system cannot pin."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cpus = sorted(os.sched_getaffinity(0))
    cores: dict[str, int] = {}
    for cpu in cpus:
        cores.setdefault(_core(cpu), cpu)
    firsts = list(cores.values())
    return (firsts + [cpu for cpu in cpus if cpu not in firsts])[:threads]


def _core(cpu: int) -> str:
    """What the CPUs of one core have in common."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)

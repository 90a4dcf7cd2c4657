"""The client of a worker process (serve.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from ortolan.errors import OrtolanError

_SERVE = Path(__file__).with_name("serve.py")


class WorkerError(OrtolanError):
    """A worker refuses a request, for example a model, or its process has ended."""


class Worker:
    """A worker process.

    The first request starts it; after `restart`, or after the process has ended, the next request starts a new one.
    """

    def __init__(
        self,
        script: Path,
        settings: Mapping[str, Any],
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the command; start nothing.

        Args:
            script: File with a class Worker.
            settings: Arguments of that class, and "cpus", the CPUs that the process is pinned to.
            python: The interpreter.
            environment: Variables to add to those of this process.
        """
        # With -P, modules beside serve.py cannot hide packages of the same name.
        self._command = [python, "-P", str(_SERVE), str(script), json.dumps(dict(settings))]
        self._environment = os.environ | dict(environment or {})
        self._process: subprocess.Popen[str] | None = None
        self._messages: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restart()

    @property
    def pid(self) -> int:
        """The process, which is started if necessary."""
        return (self._process or self._start()).pid

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            WorkerError: The worker refuses the request, or its process has ended.
        """
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
        """End the process. The next request starts a new one, whose memory is at other addresses."""
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
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._messages,
                text=True,
                env=self._environment,
                process_group=0,  # Ctrl-C reaches only the benchmark, which ends its workers
            )
        except OSError as error:
            raise WorkerError(
                f"cannot start {self._command[0]}: {error.strerror}; expected a Python interpreter"
            ) from None
        return self._process

    def _why_gone(self, process: subprocess.Popen[str]) -> str:
        status = process.wait()
        assert self._messages is not None
        self._messages.seek(0)
        last = self._messages.read().strip().splitlines()[-1:]
        self.restart()
        return f"the process ended with status {status}{': ' if last else ''}{''.join(last)}"


def cpus_to_use(threads: int) -> list[int]:
    """Return `threads` CPUs, on distinct cores as far as possible; [] if the system cannot pin."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cpus = sorted(os.sched_getaffinity(0))
    cores: dict[str, int] = {}
    for cpu in cpus:
        cores.setdefault(_core(cpu), cpu)
    firsts = list(cores.values())
    return (firsts + [cpu for cpu in cpus if cpu not in firsts])[:threads]


def _core(cpu: int) -> str:
    """Return a name that the CPUs of one core share."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)

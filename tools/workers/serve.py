"""The server of a worker: reads requests from stdin and writes answers to stdout, one line of JSON each.

    python -P serve.py SCRIPT '{"cpus": [0], …}'

SCRIPT has a class Worker, made with the second argument as keyword arguments; its mapping `actions` has a function for
each request.
{"do": "open", "model": PATH} calls the action "open" with model=PATH and replies with the dict that it returns, or with
{"error": TEXT} if it raises. The process ends with stdin. It is pinned to the CPUs before SCRIPT is loaded, because
libraries count the CPUs then.

Interpreters (3.11 or later) without Ortolan run this file as a script; it is not imported from a package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Actions = Mapping[str, Callable[..., "dict[str, Any]"]]


def open_worker(script: str, settings: dict[str, Any]) -> Actions:
    """Return the actions of the class Worker in a file. `settings` has its arguments, and "cpus"."""
    cpus = settings.pop("cpus", [])
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    # Scripts import engine.py and ggml.py from their folder. This folder is last, so that installed packages take
    # precedence.
    sys.path.append(os.path.dirname(script))
    spec = importlib.util.spec_from_file_location("worker_script", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look modules up there
    spec.loader.exec_module(module)
    actions: Actions = module.Worker(**settings).actions
    return actions


def answer(actions: Actions, line: str) -> dict[str, Any]:
    """Run the request in a line and return its answer."""
    try:
        request: dict[str, Any] = json.loads(line)
        do = request.pop("do", None)
        if do not in actions:
            raise ValueError(f"unknown request {do!r}; expected {', '.join(actions)}")
        return actions[do](**request)
    except Exception as error:  # libraries raise anything
        return {"error": " ".join(str(error).split()) or type(error).__name__}


def main() -> None:
    """Pin the process, load the script and serve requests."""
    # Redirect stdout to stderr, so that the output of libraries does not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    actions = open_worker(sys.argv[1], json.loads(sys.argv[2]))
    for line in sys.stdin:
        print(json.dumps(answer(actions, line)), file=answers, flush=True)


if __name__ == "__main__":
    main()

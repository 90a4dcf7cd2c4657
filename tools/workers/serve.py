"""The side of a worker that answers: lines of JSON on stdin, a line on stdout for each.

    python -P serve.py SCRIPT '{"cpus": [0], …}'

SCRIPT is a file with a class Worker, made with the second argument's names; its methods `actions` are what can be asked
for: {"do": "open", "model": PATH} calls the action "open" with model=PATH, and answers with the dict that it returns,
or {"error": TEXT} if it raises. The process ends with stdin. It runs on the CPUs named, where the system can pin; they
are set before SCRIPT is loaded, for libraries count them then.

This file is run by itself, never imported from a package, by interpreters (3.11 or later) that have no Ortolan.
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
    """The actions of the class Worker in a file. Settings: cpus, and what it is made with."""
    cpus = settings.pop("cpus", [])
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    # Last: of names that something installed has as well, that is meant. Scripts want engine.py and ggml.py from there.
    sys.path.append(os.path.dirname(script))
    spec = importlib.util.spec_from_file_location("worker_script", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    actions: Actions = module.Worker(**settings).actions
    return actions


def answer(actions: Actions, line: str) -> dict[str, Any]:
    try:
        request: dict[str, Any] = json.loads(line)
        do = request.pop("do", None)
        if do not in actions:
            raise ValueError(f"cannot do {do!r}; these are known: {', '.join(actions)}")
        return actions[do](**request)
    except Exception as error:  # what libraries raise has no common base but Exception
        return {"error": " ".join(str(error).split()) or type(error).__name__}


def main() -> None:
    # Whatever prints, a library for one, must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    actions = open_worker(sys.argv[1], json.loads(sys.argv[2]))
    for line in sys.stdin:
        print(json.dumps(answer(actions, line)), file=answers, flush=True)


if __name__ == "__main__":
    main()

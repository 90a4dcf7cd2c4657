"""The worker of a comparison: runs and times models in ONNX Runtime with one revision's library.

This file is run as a script, not imported from a package. It uses only onnxruntime, numpy and the path of a library, so
it serves any revision.

    python -P ../workers/serve.py worker.py '{"library": PATH, "cpus": [0], "threads": 1}'
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort


class Worker:
    """A session and the inputs of its next run."""

    def __init__(self, library: str, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._session: Any = None
        self._call: Callable[[], None] | None = None
        self.actions: Mapping[str, Callable[..., dict[str, Any]]] = {
            "open": self.open,
            "feed": self.feed,
            "time": self.time,
        }

    def open(self, model: str) -> dict[str, Any]:
        """Open a model in place of the previous one."""
        self._call = self._session = None
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        # Idle threads must not spin while the other library is timed.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.register_custom_ops_library(self._library)
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return {}

    def feed(
        self, feeds: str, answer: str, copies: int, of_each_copy: Sequence[str], in_place: Mapping[str, str]
    ) -> dict[str, Any]:
        """Bind the inputs, run once and write the first output to `answer`. Replies with the seconds of a run.

        Args:
            feeds: An .npz file.
            answer: Path of the output.
            copies: Layers in the model.
            of_each_copy: Inputs that are separate for each copy: "name" is name0, name1, …, each in its own memory.
            in_place: Maps an output to the input whose memory it overwrites.
        """
        self._call = None
        binding = self._session.io_binding()
        values: dict[str, Any] = {}
        with np.load(feeds) as arrays:
            for name in arrays.files:
                array = np.ascontiguousarray(arrays[name])
                names = [f"{name}{i}" for i in range(copies)] if name in of_each_copy else [name]
                for one in names:
                    values[one] = _copied(array)
                    binding.bind_ortvalue_input(one, values[one])
        outputs = [output.name for output in self._session.get_outputs()]
        for name in outputs:
            if name in in_place:
                binding.bind_ortvalue_output(name, values[in_place[name]])
            else:
                binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        given = dict(zip(outputs, binding.get_outputs(), strict=True))
        np.save(answer, given[outputs[0]].numpy())
        _bind_outputs(binding, given, in_place, shared=copies > 1)

        def call(_keep: object = values) -> None:
            self._session.run_with_iobinding(binding)

        call()
        start = time.perf_counter()
        call()
        self._call = call
        return {"seconds": time.perf_counter() - start}

    def time(self, count: int, together: int, cpu_time: bool, warm_up: float) -> dict[str, Any]:
        """Run for `warm_up` seconds, at least once, then measure `count` times. Replies with the milliseconds of a run.

        A measurement has `together` runs. cpu_time: use this thread's CPU time instead of wall time.
        """
        call = self._call
        if call is None:
            raise RuntimeError("no model to time: call `open` and `feed` first")
        until = time.perf_counter() + warm_up
        call()
        while time.perf_counter() < until:
            call()
        clock = time.thread_time if cpu_time else time.perf_counter
        times = []
        for _ in range(count):
            start = clock()
            for _ in range(together):
                call()
            times.append((clock() - start) * 1e3 / together)
        return {"times": times}


def _copied(array: np.ndarray) -> Any:
    """Return the array in memory of ONNX Runtime, aligned as in a model."""
    if array.size == 0:
        return ort.OrtValue.ortvalue_from_numpy(array)
    value = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type)
    value.update_inplace(array)
    return value


def _bind_outputs(binding: Any, given: Mapping[str, Any], in_place: Mapping[str, str], shared: bool) -> None:
    """Bind outputs to existing memory, because new memory costs page faults.

    With `shared`, outputs of the same type and shape share memory, as activations do in a whole model.
    """
    memory: dict[tuple[str, tuple[int, ...]], Any] = {}
    for name, value in given.items():
        if name in in_place:
            continue
        key = (value.data_type(), tuple(value.shape()))
        if not shared or key not in memory:
            memory[key] = value
        binding.bind_ortvalue_output(name, memory[key])

"""Attention of recent decoders' layers on the execution provider, compared with ONNX Runtime's GroupQueryAttention.

python -m ortolan.benchmarks.provider_attention [--layer "Gemma 3" …] [--threads 1] [--seconds 2]

Each layer computes a prompt of 512 tokens, and one token behind 1,000 in caches that are past and present at once.
Times are CPU time of the process in user mode, which other processes disturb least. "norms": the time that normalizing
each head of queries and keys adds, as nodes that both ways leave to ONNX Runtime.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from ortolan.graph_passes.measure.timing import pinned

from ..provider import options_with
from .result import versions_line
from .variants import session_options

PROMPT, PAST = 512, 1000
_DOMAIN = "com.microsoft"


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer's attention. window 0: none. norms: queries and keys of each head are normalized."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    norms: bool = False

    def model(self) -> onnx.ModelProto:
        """Return a model of GroupQueryAttention and, with norms, SimplifiedLayerNormalization before it."""
        nodes, names = [], ["query", "key", "value"]
        constants = dict(zip(("cos", "sin"), _tables(self.head_dim), strict=True))
        if self.norms:
            constants |= {"weight": np.ones(self.head_dim, np.float32), "flat": np.array([0, 0, -1])}
            constants["split"] = np.array([0, 0, -1, self.head_dim])
            for name in ("query", "key"):
                nodes += [
                    helper.make_node("Reshape", [name, "split"], [f"{name}/heads"]),
                    helper.make_node("SimplifiedLayerNormalization", [f"{name}/heads", "weight"], [f"{name}/normed"]),
                    helper.make_node("Reshape", [f"{name}/normed", "flat"], [f"{name}/flat"]),
                ]
            names = ["query/flat", "key/flat", "value"]
        names += ["past_key", "past_value", "lengths", "total", "cos", "sin"]
        if self.sinks:
            constants["sinks"] = np.linspace(-1, 1, self.heads, dtype=np.float32)
            names += ["", "", "sinks"]
        attributes: dict[str, Any] = {"local_window_size": self.window} if self.window else {}
        outputs = ["y", "present_key", "present_value"]
        nodes.append(
            helper.make_node(
                "GroupQueryAttention", names, outputs, domain=_DOMAIN, num_heads=self.heads, kv_num_heads=self.kv_heads,
                do_rotary=1, softcap=self.softcap, **attributes,
            )
        )  # fmt: skip
        floats = {"query": self.heads * self.head_dim}
        floats |= dict.fromkeys(("key", "value"), self.kv_heads * self.head_dim)
        cache: list[int | str] = [1, self.kv_heads, "past", self.head_dim]
        inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "rows", n]) for name, n in floats.items()]
        inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, cache) for name in ("past_key", "past_value")]
        inputs += [helper.make_tensor_value_info("lengths", TensorProto.INT32, [1])]
        inputs += [helper.make_tensor_value_info("total", TensorProto.INT32, [])]
        graph = helper.make_graph(
            nodes,
            "layer",
            inputs,
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            [numpy_helper.from_array(array, name) for name, array in constants.items()],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(_DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)

    def call(self, session: ort.InferenceSession, rows: int, past: int) -> tuple[Callable[[], object], ort.IOBinding]:
        """Return a call that appends to its caches in place, and its binding, which has the answer as output 0."""
        rng, room = np.random.default_rng(0), past + rows
        values = {
            name: rng.standard_normal((1, rows, heads * self.head_dim), np.float32)
            for name, heads in (("query", self.heads), ("key", self.kv_heads), ("value", self.kv_heads))
        }
        values |= {"lengths": np.array([room - 1], np.int32), "total": np.array(room, np.int32)}
        binding = session.io_binding()
        for name, array in values.items():
            binding.bind_cpu_input(name, array)
        for name in ("key", "value"):
            cache = rng.standard_normal((1, self.kv_heads, room, self.head_dim), np.float32)
            shared = ort.OrtValue.ortvalue_from_numpy(cache)
            binding.bind_ortvalue_input(f"past_{name}", shared)
            binding.bind_ortvalue_output(f"present_{name}", shared)
        binding.bind_output("y")

        def call(_keep: object = values) -> None:
            session.run_with_iobinding(binding)

        return call, binding


LAYERS = {
    "Gemma 3": Layer(4, 1, 256, window=512),
    "Gemma 2": Layer(8, 4, 256, window=4096, softcap=50.0),
    "gpt-oss": Layer(64, 8, 64, window=128, sinks=True),
    "Qwen3": Layer(16, 8, 128),
}


def _tables(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(PAST + PROMPT)[:, None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def user_ms(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the median user CPU time of each call in ms, measured in turns of about 20 ms."""
    counts = {}
    for name, call in calls.items():
        call()
        once = _user(call, 3) / 3
        counts[name] = max(1, round(0.02 / max(once, 1e-6)))
    turns = max(5, round(seconds / 0.02 / len(calls)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(_user(call, counts[name]) / counts[name])
    return {name: 1e3 * median(found) for name, found in times.items()}


def _user(call: Callable[[], object], count: int) -> float:
    began = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    for _ in range(count):
        call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime - began


def _session(layer: Layer, provider: bool, threads: int) -> ort.InferenceSession:
    model = layer.model().SerializeToString()
    if not provider:
        return ort.InferenceSession(model, session_options(threads), providers=["CPUExecutionProvider"])
    options = options_with({"claims": "all"})
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(model, options)


def measure(name: str, layer: Layer, threads: int, seconds: float) -> Table:
    """Measure a layer and return its table."""
    table = Table(title=f"{name}: ms of user CPU time")
    for column in ("", "ONNX Runtime", "provider", "speedup", "norms", "largest difference"):
        table.add_column(column)
    ways = {"plain": (layer, False), "provider": (layer, True), "norms": (replace(layer, norms=True), True)}
    with pinned(threads):
        sessions = {way: _session(one, is_provider, threads) for way, (one, is_provider) in ways.items()}
        for rows, past in ((PROMPT, 0), (1, PAST)):
            calls, bindings = {}, {}
            for way, session in sessions.items():
                calls[way], bindings[way] = ways[way][0].call(session, rows, past)
            times = user_ms(calls, seconds)
            answers = [bindings[way].copy_outputs_to_cpu()[-1] for way in ("plain", "provider")]
            table.add_row(
                f"{rows} behind {past}",
                f"{times['plain']:.4g}",
                f"{times['provider']:.4g}",
                f"{times['plain'] / times['provider']:.2f}x",
                f"{times['norms'] - times['provider']:.2g}",
                f"{float(np.abs(answers[0] - answers[1]).max()):.1e}",
            )
    return table


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", nargs="+", choices=LAYERS, default=LAYERS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="per row")
    arguments = parser.parse_args()
    console = Console()
    console.print(versions_line())
    for name in arguments.layer:
        console.print(measure(name, LAYERS[name], arguments.threads, arguments.seconds))


if __name__ == "__main__":
    main()

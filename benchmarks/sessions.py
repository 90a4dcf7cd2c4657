"""Memory of many sessions on one optimized model whose weights are in a memory-mapped file.

python -m ortolan.benchmarks.sessions [--megabytes 1000] [--sessions 10] [--recipe [NAME]:KEY=VALUE,…] [--model FILE]

Without --model, a chain of MLPs, 1024 wide, with random weights is made; --megabytes is its size. Memory is the
proportional set size (Pss): the resident size (Rss) would count a page of the file once per session, although all
sessions share it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
from rich.console import Console
from rich.table import Table

from ortolan.graph_passes.files.model_file import load_model, write_model

from ..models.tiny import mlp
from ..optimize import optimize_onnx
from ..session import create_session
from .result import versions_line
from .variants import file_megabytes, read_recipe, session_options

WIDTH, INNER = 1024, 4096
ROWS = 64  # rows of input per session
_FIELDS = ("Pss", "Rss", "Anonymous")


def make_model(folder: Path, megabytes: float, recipe: str) -> Path:
    """Optimize an MLP, and repeat it with separate weights in the file."""
    ir.save(mlp((WIDTH, INNER, WIDTH), "matmul_add"), folder / "mlp.onnx")
    optimize_onnx(folder / "mlp.onnx", folder / "one.onnx", recipe=read_recipe(recipe), portable=False)
    one = load_model(folder / "one.onnx").model
    copies = max(1, round(megabytes / file_megabytes(folder / "one.onnx")))
    path = folder / "model.onnx"
    write_model(_repeat(one, copies), path, lambda done, total: None)
    return path


def _repeat(model: ir.Model, copies: int) -> ir.Model:
    """Chain copies of a graph with one input and one output."""
    graph = model.graph
    (given,), (made,) = graph.inputs, graph.outputs
    current = ir.Value(name=given.name, type=given.type, shape=given.shape)
    inputs, nodes, initializers = [current], [], []
    for copy in range(copies):
        values: dict[ir.Value, ir.Value] = {given: current}
        for value in graph.initializers.values():
            assert value.const_value is not None
            name = f"{value.name}.{copy}"
            tensor = ir.Tensor(np.array(value.const_value.numpy()), dtype=value.const_value.dtype, name=name)
            values[value] = ir.Value(name=name, type=value.type, shape=value.shape, const_value=tensor)
            initializers.append(values[value])
        for node in graph:
            new = ir.Node(
                node.domain,
                node.op_type,
                [None if value is None else values[value] for value in node.inputs],
                list(node.attributes.values()),
                num_outputs=len(node.outputs),
                name=f"{node.name}.{copy}",
            )
            for old, value in zip(node.outputs, new.outputs, strict=True):
                value.name = f"{old.name}.{copy}"
                values[old] = value
            nodes.append(new)
        current = values[made]
    current.name, current.type, current.shape = made.name, made.type, made.shape
    repeated = ir.Graph(
        inputs, [current], nodes=nodes, initializers=initializers, opset_imports=graph.opset_imports, name="chain"
    )
    return ir.Model(repeated, ir_version=model.ir_version)


def measure(path: Path, sessions: int) -> list[dict[str, float]]:
    """Return the memory of this process in MB, before and after each session was made and run once."""
    import gc

    kept, found = [], [_memory()]
    rng = np.random.default_rng(0)
    for _ in range(sessions):
        session = create_session(path, session_options(1))
        feeds = {
            value.name: rng.standard_normal(
                [size if isinstance(size, int) else ROWS for size in value.shape], np.float32
            )
            for value in session.get_inputs()
        }
        session.run(None, feeds)
        kept.append(session)
        gc.collect()
        found.append(_memory())
    return found


def _memory() -> dict[str, float]:
    """Return memory in MB, by the names of Linux."""
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    sizes = {parts[0].rstrip(":"): int(parts[1]) * 1024 / 1e6 for parts in lines}
    return {name: round(sizes[name], 1) for name in _FIELDS}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--recipe", default=":weights=bf16,sparsity=0.5")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # used in the process that measures
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.model, arguments.sessions)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        path = arguments.model or make_model(Path(temporary), arguments.megabytes, arguments.recipe)
        size = file_megabytes(path)
        command = [sys.executable, "-m", "ortolan.benchmarks.sessions", "--measure", "--model", str(path)]
        command += ["--sessions", str(arguments.sessions)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    growth = {name: round((found[-1][name] - found[1][name]) / size, 4) for name in _FIELDS}
    if arguments.json:
        print(json.dumps({"versions": versions_line(), "model_mb": size, "memory_mb": found, "growth": growth}))
        return
    table = Table(title=f"{versions_line()} · model {size:.0f} MB", title_justify="left")
    for column in ("sessions", *(f"{name}, MB" for name in _FIELDS)):
        table.add_column(column, justify="right")
    for number, row in enumerate(found):
        table.add_row(str(number), *(f"{row[name]:.1f}" for name in _FIELDS))
    table.add_row("growth from 1", *(f"{growth[name]:.1%} of the model" for name in _FIELDS))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

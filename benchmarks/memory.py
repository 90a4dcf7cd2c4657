"""Peak memory of optimizing a large model, a Llama with random weights, for each recipe.

python -m ortolan.benchmarks.memory [--gigabytes 2] [--recipe int8 int4:method=gptq …] [--folder FOLDER]

Memory is sampled every 20 ms. "anonymous" is memory that the process allocated. "with mapped files" adds pages of the
model's files that are in memory, which the system can reclaim.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

RECIPES = (":sparsity=0.5", "int4", "int4:method=gptq", ":weights=int4,sparsity=0.5,method=sparsegpt")
_HIDDEN, _INTERMEDIATE, _VOCABULARY = 1024, 2816, 8192
_LAYER_BYTES = 4 * (2 * _HIDDEN * _HIDDEN + 2 * _HIDDEN * _HIDDEN // 4 + 3 * _HIDDEN * _INTERMEDIATE)
_TOKENS = 256
_MEGABYTE = 1e6
_INTERVAL = 0.02  # seconds between samples


def write_model(path: Path, gigabytes: float) -> int:
    """Write a Llama with weights of about this size in an external file, and return its number of layers."""
    import onnx_ir as ir

    from ..models.tiny import tiny_llama

    layers = max(1, round(gigabytes * 1e9 / _LAYER_BYTES))
    model = tiny_llama(
        hidden_size=_HIDDEN,
        intermediate_size=_INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=_VOCABULARY,
    )
    ir.save(model, path, external_data=f"{path.name}.data")
    return layers


def optimize(model: Path, output: Path, recipe: str) -> None:
    """Run in the child process: optimize with four feeds of random tokens."""
    from .. import optimize_onnx
    from .variants import read_recipe

    rng = np.random.default_rng(0)
    feeds = [{"input_ids": rng.integers(0, _VOCABULARY, (1, _TOKENS))} for _ in range(4)]
    optimize_onnx(model, output, recipe=read_recipe(recipe), calibration=feeds)


def memory_of(pid: int) -> tuple[float, float]:
    """Return the memory of a process in MB, without and with mapped files.

    Raises:
        OSError: The process has ended.
    """
    kilobytes = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "VmRSS"):
            kilobytes[name] = int(value.split()[0])
    if len(kilobytes) != 2:
        raise ProcessLookupError(pid)
    return kilobytes["RssAnon"] * 1024 / _MEGABYTE, kilobytes["VmRSS"] * 1024 / _MEGABYTE


class PeakMemory:
    """The peak memory of another process in MB while the context is open; 0 where the system does not tell it.

    Attributes:
        anonymous: Memory that the process allocated.
        resident: With pages of files that are in memory.
    """

    def __init__(self, pid: int) -> None:
        self.anonymous = self.resident = 0.0
        self._pid = pid
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _sample(self) -> None:
        with suppress(OSError):  # the process has ended
            while True:
                anonymous, resident = memory_of(self._pid)
                self.anonymous, self.resident = max(self.anonymous, anonymous), max(self.resident, resident)
                if self._closed.wait(_INTERVAL):
                    return


def measure(model: Path, output: Path, recipe: str) -> dict[str, Any]:
    """Optimize in a child process.

    Raises:
        CalledProcessError: The optimization failed.
    """
    code = (
        "import sys; from pathlib import Path; from ortolan.benchmarks.memory import optimize; "
        "optimize(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])"
    )
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", code, model, output, recipe])
    try:
        with PeakMemory(child.pid) as peak:
            child.wait()
    finally:
        child.kill()
        child.wait()
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, recipe)
    return {
        "recipe": recipe,
        "anonymous_mb": round(peak.anonymous),
        "resident_mb": round(peak.resident),
        "seconds": round(time.perf_counter() - start),
    }


def main() -> None:
    """Run the command."""
    from rich.console import Console
    from rich.table import Table

    from .result import versions_line

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--recipe", nargs="+", default=RECIPES)
    parser.add_argument("--folder", type=Path, help="folder for the models (default: a temporary one)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    console = Console(width=100, stderr=arguments.json)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        model = Path(folder) / "large.onnx"
        with console.status("building the model"):
            layers = write_model(model, arguments.gigabytes)
        found = []
        with suppress(KeyboardInterrupt):  # the results so far are shown
            for recipe in arguments.recipe:
                with console.status(recipe):
                    found.append(measure(model, Path(folder) / "optimized.onnx", recipe))
        size = sum(path.stat().st_size for path in Path(folder).glob("large.onnx*")) / 1e9
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    table = Table(
        title=f"a model of {size:.2f} GB, {layers} layers: peak memory while optimizing", title_justify="left"
    )
    for column in ("recipe", "anonymous, MB", "with mapped files, MB", "seconds"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for one in found:
        table.add_row(one["recipe"], str(one["anonymous_mb"]), str(one["resident_mb"]), str(one["seconds"]))
    console.print(table)
    console.print(versions_line())


if __name__ == "__main__":
    main()

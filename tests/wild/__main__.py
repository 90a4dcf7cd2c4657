"""Try published models: python -m tests.wild FOLDER... [--packages].

Tries every .onnx and .gguf file below the folders and, with --packages, the models that manifest.toml pins. Each model
is optimized with the defaults, to int8 and to int4, and runs on the execution provider. Every run is a process with
limits of memory and time.

The table shows the outcome, the speed, the agreement with the original on feeds that the optimizer did not use, and the
peak of anonymous memory beside its limit: 3 times the size of the model plus 500 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .packages import packaged_models
from .work import WAYS

_SAMPLE_SECONDS = 0.02


@dataclass
class Ended:
    """Exit status of a process, and its peak anonymous memory in bytes."""

    found: dict[str, Any]
    peak: int
    seconds: float


def run_limited(arguments: Sequence[str], memory: int, seconds: float) -> Ended:
    """Run a step in a separate process, and kill it if it exceeds a limit."""
    command = [sys.executable, "-P", "-m", "tests.wild.work", *arguments]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(root)])}
    begin, peak, why = time.monotonic(), 0, ""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment, start_new_session=True)
        while process.poll() is None:
            peak = max(peak, _anonymous_bytes(process.pid))
            if peak > memory:
                why = f"more than {memory / 1e9:.1f} GB of memory"
            elif time.monotonic() - begin > seconds:
                why = f"more than {seconds:g} s"
            if why:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            time.sleep(_SAMPLE_SECONDS)
        out.seek(0)
        errors.seek(0)
        lines = out.read().strip().splitlines()
        last = errors.read().strip().splitlines()[-1:]
    seconds = time.monotonic() - begin
    if why:
        return Ended({"outcome": "STOPPED", "detail": why}, peak, seconds)
    if process.returncode:
        detail = f"exit status {process.returncode}: {last[0] if last else ''}"
        return Ended({"outcome": "CRASHED", "detail": detail}, peak, seconds)
    return Ended(json.loads(lines[-1]), peak, seconds)


def _anonymous_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:  # the process has just ended
        pass
    return 0


def size_of(model: Path) -> int:
    """Return the size of a model and its data files in bytes."""
    if model.suffix != ".onnx":
        return model.stat().st_size
    from ortolan import OrtolanError
    from ortolan.graph_passes.files.model_file import load_model

    try:
        return load_model(model).size
    except OrtolanError:
        return model.stat().st_size


def try_model(model: Path, way: str, memory: int, seconds: float) -> dict[str, Any]:
    """Return one row of the table."""
    size = size_of(model)
    row: dict[str, Any] = {"model": model.name, "way": way, "size": size}
    with tempfile.TemporaryDirectory(prefix="ortolan-wild-") as folder:
        made: Path = model
        if way == "provider":
            row["outcome"], row["detail"] = "ran", ""
        else:
            ended = run_limited(["make", way, str(model), folder], memory, seconds)
            row |= ended.found | {"peak": ended.peak, "seconds": ended.seconds}
            if "file" not in ended.found:
                return row
            made = Path(ended.found["file"])
        if way == "provider" and model.suffix == ".gguf":
            return row | {"outcome": "-", "detail": "a GGUF file"}
        ended = run_limited(["compare", way, str(model), str(made)], max(memory, 8 * size), seconds)
        if "outcome" in ended.found:
            return row | {
                "outcome": f"{row['outcome']}, then {ended.found['outcome']}",
                "detail": ended.found["detail"],
            }
        return row | ended.found


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    heads = ("model", "MB", "way", "outcome", "speed", "cosine", "peak MB", "bound MB", "s")
    table = [heads]
    for row in rows:
        bound = 3 * row["size"] + 500e6
        speed = f"{row['before_ms'] / row['after_ms']:.2f}x" if "after_ms" in row else ""
        cosine = f"{row['cosine']:.4f}" if row.get("cosine") is not None else ""
        peak = f"{row['peak'] / 1e6:.0f}{' !' if row['peak'] > bound else ''}" if "peak" in row else ""
        seconds = f"{row['seconds']:.0f}" if "seconds" in row else ""
        cells = (row["model"][:40], f"{row['size'] / 1e6:.0f}", row["way"], row["outcome"], speed, cosine, peak)
        table.append((*cells, f"{bound / 1e6:.0f}" if peak else "", seconds))
    widths = [max(len(line[column]) for line in table) for column in range(len(heads))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for row in rows:
        if row.get("detail"):
            print(f"{row['model']}, {row['way']}: {row['detail']}")


def find_models(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        if folder.is_file():
            yield folder
        yield from sorted(path for path in folder.rglob("*") if path.suffix in (".onnx", ".gguf") and path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wild", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="folders of models, or model files")
    parser.add_argument("--packages", action="store_true", help="also try the ten pinned models of packages")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="default: all")
    parser.add_argument("--memory", type=float, default=6.0, metavar="GB", help="limit of each process (6)")
    parser.add_argument("--seconds", type=float, default=900.0, help="limit of each process (900)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    models = [*find_models(options.folders), *(packaged_models(print) if options.packages else ())]
    if not models:
        parser.error("no .onnx or .gguf file was found; give folders that hold some, or --packages")
    rows = []
    for model in models:
        for way in options.ways:
            row = try_model(model, way, int(options.memory * 1e9), options.seconds)
            rows.append(row)
            print(f"{model.name}, {way}: {row['outcome']}", file=sys.stderr, flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(rows, indent=1))
    print_table(rows)
    wrong = [row for row in rows if any(word.isupper() and len(word) > 1 for word in row["outcome"].split())]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

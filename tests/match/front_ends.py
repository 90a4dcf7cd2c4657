"""Compare what the rules for attention find through both front ends: ONNX Runtime's graph and onnx-ir's.

    python -m tests.match.front_ends --graphs 2000 --seed 1
    python -m tests.match.front_ends model.onnx …

Without files, models are mutated attention graphs, each with its own seed, counted from --seed, until --graphs of them
have been accepted by ONNX Runtime. `ortolan` must be importable.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort

from ortolan.errors import ModelError
from ortolan.graph_passes.find.constants import constant_tensor
from ortolan.graph_passes.find.dimensions import Dimensions
from ortolan.provider import CLAIMS_FILE, options_with

from .mutations import mutated

logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns of models that ONNX Runtime refuses


def provider_texts(model: onnx.ModelProto | str) -> list[str] | None:
    """Return the lines of the provider's rules for attention; None if ONNX Runtime refuses the model."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "claims.jsonl"
        options = options_with({CLAIMS_FILE: str(file)})
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        try:
            ort.InferenceSession(model if isinstance(model, str) else model.SerializeToString(), options)
        except Exception:  # ONNX Runtime's exceptions have no common base but Exception
            return None
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        # The provider sees a graph again after functions are inlined.
        return sorted({line["attention"] for line in lines if "attention" in line})


def onnx_ir_texts(model: onnx.ModelProto | str) -> list[str]:
    """Return the same lines for onnx-ir's graph."""
    loaded = ir.load(model) if isinstance(model, str) else ir.from_proto(model)
    return sorted({text for graph in loaded.graphs() for text in Dimensions(graph).native.attention_texts()})


def folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with initializers instead of values that are computed from constants.

    ONNX Runtime's own optimizations, which are disabled here, do the same.
    """
    loaded = ir.from_proto(model)
    for graph in loaded.graphs():
        for node in tuple(graph):
            values = [value for value in node.outputs if value.name]
            tensors = [tensor for value in values if (tensor := constant_tensor(value)) is not None]
            if node.op_type == "Constant" or not tensors or len(tensors) < len(values):
                continue
            for value, tensor in zip(values, tensors, strict=True):
                kept = ir.val(value.name, const_value=ir.tensor(tensor.numpy(), name=value.name))
                value.replace_all_uses_with(kept, replace_graph_outputs=True)
                graph.register_initializer(kept)
            graph.remove(node)
    return ir.to_proto(loaded)


def differences(model: onnx.ModelProto | str) -> list[str] | None:
    """Return the lines that only one front end gives; None if ONNX Runtime or onnx-ir refuses the model."""
    ours = provider_texts(model)
    if ours is None:
        return None
    try:
        if isinstance(model, onnx.ModelProto):
            model = folded(model)
            ours = provider_texts(model)
        others = onnx_ir_texts(model)
    except ModelError:  # a constant that cannot be computed
        return None
    if ours is None:
        return None
    # A reason names the first other reader of a value; the order of nodes differs.
    found = {
        name: {re.sub(" is also used by .*", " is also used", text) for text in texts}
        for name, texts in (("provider", ours), ("onnx-ir", others))
    }
    return [
        f"{name}: {text}"
        for name, other in (("onnx-ir", "provider"), ("provider", "onnx-ir"))
        for text in sorted(found[name] - found[other])
    ]


def compare(seeds: Iterable[int], graphs: int, folder: Path | None = None) -> tuple[Counter[str], list[str]]:
    """Compare mutated models until `graphs` of them are loaded; return counts and a text for each difference."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for seed in seeds:
        if counts["compared"] == graphs:
            break
        model, done = mutated(seed)
        found = differences(model)
        counts["refused" if found is None else "compared"] += 1
        if found:
            wrong.append("\n  ".join([f"seed {seed}: {', '.join(done)}", *found]))
            if folder is not None:
                onnx.save(model, folder / f"{seed}.onnx")
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for mutated models whose results differ")
    parser.add_argument("files", nargs="*")
    given = parser.parse_args()
    if given.files:
        counts: Counter[str] = Counter()
        wrong = []
        for file in given.files:
            found = differences(file)
            counts["refused" if found is None else "compared"] += 1
            if found:
                wrong.append("\n  ".join([file, *found]))
    else:
        counts, wrong = compare(range(given.seed, given.seed + 20 * given.graphs), given.graphs, given.keep)
    print(*wrong, sep="\n")
    print(f"{len(wrong)} differences;", ", ".join(f"{count} {name}" for name, count in counts.items()))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())

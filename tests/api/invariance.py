"""Checks that the result for a text does not depend on its batch, on random cases from hypothesis.

python -m tests.api.invariance [--cases 10000]

A case is an encoder, a weight format, pass unpad or not, reproducible or not, texts and their order, extra padding, and
threads. The result of each text alone, on one thread, must have the same bytes as in the batch. Each instruction set of
the CPU runs a part of the cases in a separate process.

Finally, models with integer weights and reproducible="everywhere" must give the same bytes for the same texts on all
instruction sets. The fastest order of sums and bf16 weights do not guarantee this; for them, the groups of instruction
sets with equal bytes are printed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ortolan
from ortolan import Recipe, _native
from ortolan.graph_passes.text.nodes import Nodes
from ortolan.graph_passes.text.pooling import normalize, pool
from ortolan.models import tiny


def pooled(model: ir.Model) -> ir.Model:
    """Add a mean over tokens, as in sentence encoders."""
    graph = model.graph
    nodes = Nodes(graph.opset_imports[""])
    mask = next(value for value in graph.inputs if value.name == "attention_mask")
    (tokens,) = graph.outputs
    vectors = normalize(nodes, pool(nodes, tokens, mask, "mean"))
    vectors.name, vectors.type, vectors.shape = "vectors", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", None])
    graph.extend(nodes.nodes)
    graph.outputs[:] = [vectors]
    return model


ENCODERS = {
    "bert": lambda: tiny.tiny_bert(),
    "bert of 192": lambda: tiny.tiny_bert(hidden_size=192, num_attention_heads=6, intermediate_size=768),
    "bert, pooled": lambda: pooled(tiny.tiny_bert()),
    "mpnet": lambda: tiny.tiny_mpnet(),
    "modernbert": lambda: tiny.tiny_modernbert(),
}
WEIGHTS = ("int8", "int4", "bf16")
EVERYWHERE = {"reproducible": "everywhere"}
# Formats to compare between instruction sets. Reproducible formats must agree; others are only reported.
FORMS: dict[str, dict[str, Any]] = {
    "int8": {"weights": "int8", **EVERYWHERE},
    "int8 in 4x1 blocks": {"weights": "int8", "sparsity": 0.5, "pattern": "4x1", **EVERYWHERE},
    "int4": {"weights": "int4", **EVERYWHERE},
    "int4 in groups of 32": {"weights": "int4", "group_size": 32, **EVERYWHERE},
    "int4 in groups of 64": {"weights": "int4", "group_size": 64, **EVERYWHERE},  # with float scales
    "int5": {"weights": "int5", **EVERYWHERE},
    "int6": {"weights": "int6", **EVERYWHERE},
    "int8 in the fastest order": {"weights": "int8"},
    "bf16 in the fastest order": {"weights": "bf16"},
}
LENGTHS = (1, 2, 4, 17, 60, 129, 200)
LONG = {"max_position_embeddings": 208}
LONG_ENCODERS = {
    "bert": lambda: tiny.tiny_bert(**LONG),
    "bert of 192": lambda: tiny.tiny_bert(hidden_size=192, num_attention_heads=6, intermediate_size=768, **LONG),
    "bert of 54": lambda: tiny.tiny_bert(hidden_size=54, num_attention_heads=6, intermediate_size=100, **LONG),
    "mpnet": lambda: tiny.tiny_mpnet(**LONG),
}
THREADS = (1, 2, 3)


@cache
def model(encoder: str, weights: str, unpad: bool, reproducible: bool) -> bytes:
    recipe = Recipe.of(weights=weights).reproducing("everywhere" if reproducible else None)
    report = ortolan.optimize_onnx(
        ir.to_proto(ENCODERS[encoder]()),
        recipe=recipe if unpad else recipe.without_pass("unpad"),
        options={"verify.seconds": 0.0, "may_grow": True} | ({"unpad.pad_token_id": 1} if unpad else {}),
    )
    assert report.model is not None
    assert ("PackTokens" in {node.op_type for node in report.model.graph.node}) == unpad, report.notes
    return report.model.SerializeToString()


@cache
def session(encoder: str, weights: str, unpad: bool, reproducible: bool, threads: int) -> ort.InferenceSession:
    return new_session(model(encoder, weights, unpad, reproducible), threads)


def new_session(model: bytes, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    return ortolan.create_session(model, options)


def feeds(session: ort.InferenceSession, texts: list[np.ndarray], padding: int) -> dict[str, np.ndarray]:
    shape = len(texts), max(map(len, texts)) + padding
    ids, mask = np.ones(shape, np.int64), np.zeros(shape, np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {value.name: given[value.name] for value in session.get_inputs()}


def check(
    encoder: str,
    weights: str,
    unpad: bool,
    reproducible: bool,
    threads: int,
    lengths: list[int],
    padding: int,
    order: int,
    seed: int,
) -> None:
    reproducible = reproducible and weights != "bf16"  # bf16 layers refuse the option
    rng = np.random.default_rng(seed)
    texts = [rng.integers(2, 90, length) for length in lengths]
    texts = [texts[index] for index in np.random.default_rng(order).permutation(len(texts))]
    together = session(encoder, weights, unpad, reproducible, threads)
    alone = session(encoder, weights, unpad, reproducible, 1)
    (found,) = together.run(None, feeds(together, texts, padding))
    for rows, text in zip(found, texts, strict=True):
        (expected,) = alone.run(None, feeds(alone, [text], 0))
        same = rows[: len(text)] if rows.ndim == 2 else rows
        assert expected.tobytes() == same.tobytes(), f"{encoder}, {weights}, unpad {unpad}: {len(text)} tokens differ"


def run_cases(cases: int) -> None:
    # The encoders have 64 positions, so texts stay below that.
    lengths = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=8)
    test = given(
        st.sampled_from(sorted(ENCODERS)),
        st.sampled_from(WEIGHTS),
        st.booleans(),
        st.booleans(),
        st.sampled_from(THREADS),
        lengths,
        st.integers(0, 20),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
    )(check)
    settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))(test)()


def digests(models: Path | None) -> dict[str, str]:
    """Return digests of the results for fixed texts, by encoder, format and use of pass unpad.

    Missing models are written to the folder `models`.
    """
    found = {}
    for encoder, form, unpad in itertools.product(LONG_ENCODERS, FORMS, (True, False)):
        name = f"{encoder}, {form}, {'without' if unpad else 'with'} padding"
        one = new_session(long_model(encoder, form, unpad, models and models / f"{name}.onnx"), 1)
        texts = [np.random.default_rng(length).integers(2, 90, length) for length in LENGTHS]
        (y,) = one.run(None, feeds(one, texts, 0))
        found[name] = hashlib.sha256(y.tobytes()).hexdigest()[:12]
    return found


def long_model(encoder: str, form: str, unpad: bool, path: Path | None) -> bytes:
    if path is not None and path.exists():
        return path.read_bytes()
    target = {name: value for name, value in FORMS[form].items() if name != "reproducible"}
    recipe = Recipe.of(**target).reproducing(FORMS[form].get("reproducible"))
    report = ortolan.optimize_onnx(
        ir.to_proto(LONG_ENCODERS[encoder]()),
        recipe=recipe if unpad else recipe.without_pass("unpad"),
        options={"verify.seconds": 0.0, "may_grow": True} | ({"unpad.pad_token_id": 1} if unpad else {}),
    )
    assert report.model is not None
    made = report.model.SerializeToString()
    if path is not None:
        path.write_bytes(made)
    return made


def sets_that_agree(digests_of: dict[str, dict[str, str]]) -> dict[str, list[list[str]]]:
    """Return groups of instruction sets with equal bytes, by encoder and format.

    Raises:
        AssertionError: A reproducible format has more than one group.
    """
    agree = {}
    for name in next(iter(digests_of.values())):
        groups: dict[str, list[str]] = {}
        for isa, found in digests_of.items():
            groups.setdefault(found[name], []).append(isa)
        agree[name] = list(groups.values())
        assert "fastest order" in name or len(groups) == 1, f"{name}: the bytes differ between {agree[name]}"
    return agree


def run_isa(isa: str, cases: int, models: Path | None = None) -> str:
    """Run cases in a separate process, because ORTOLAN_ISA is read only once.

    Without cases, return digests of the models.

    Raises:
        AssertionError: Results differ.
    """
    root = Path(__file__).parents[2]
    script = f"import sys; sys.path.append({str(root)!r}); from tests.api import invariance; invariance.main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "--cases", str(cases), "--here"] + (["--models", str(models)] if models else []),
        env={**os.environ, "ORTOLAN_ISA": isa},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{isa}: {done.stderr}"
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--here", action="store_true", help="use only the instruction set of this process")
    parser.add_argument("--models", type=Path, help="with --here and no cases: a folder of optimized models")
    arguments = parser.parse_args()
    if arguments.here:
        if arguments.cases:
            run_cases(arguments.cases)
        else:
            print(json.dumps(digests(arguments.models)))
        return
    isas = _native.cpu_info()["detected_features"]
    found = {}
    for isa in isas:
        cases = -(-arguments.cases // len(isas))
        run_isa(isa, cases)
        found[isa] = json.loads(run_isa(isa, 0))
        print(f"{isa}: {cases} cases, no text's bytes depend on the others", flush=True)
    for name, groups in sets_that_agree(found).items():
        print(f"{name}: the same bytes with {'; '.join(', '.join(group) for group in groups)}")


if __name__ == "__main__":
    main()

"""Sessions with reproducible="everywhere": bits of the optimized file with that option, on every instruction set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import ortolan
from ortolan import _native

from ..ops.isa_process import run_with_isa
from ..ops.single_node import assert_same_bits
from ..passes.attention_graphs import S, feeds
from ..passes.small_models import run
from .sessions import needs_provider, provider_session
from .test_attention import TAKEN, built, four_bits, optimized

pytestmark = needs_provider

EVERYWHERE = {"ep__ortolanexecutionprovider__reproducible": "everywhere"}
ROWS = (1, 3, S, 70)


def model() -> onnx.ModelProto:
    return four_bits(built(TAKEN["usual"]))


def outputs(session: ort.InferenceSession, given: onnx.ModelProto) -> list[np.ndarray]:
    return [session.run(None, feeds(given, rows))[0] for rows in ROWS]


def test_bits_are_those_of_the_reproducible_file() -> None:
    given = model()
    expected = optimized(given, reproducible="everywhere")
    for rows, y in zip(ROWS, outputs(provider_session(given, **EVERYWHERE), given), strict=True):
        assert_same_bits(y, run(expected, feeds(given, rows), library=True)[0])


@pytest.mark.parametrize("when", ["compiled", "opened"])
def test_compiled_models(when: str, tmp_path: Path) -> None:
    """The option may be given when a model is compiled or when it is opened."""
    given, path = model(), tmp_path / "model_ctx.onnx"
    entries = {"ep__context_enable": "1", "ep__context_file_path": str(path)}
    provider_session(given, **entries, **(EVERYWHERE if when == "compiled" else {}))
    compiled = provider_session(str(path), **(EVERYWHERE if when == "opened" else {}))
    expected = outputs(provider_session(given, **EVERYWHERE), given)
    for y, wanted in zip(outputs(compiled, given), expected, strict=True):
        assert_same_bits(y, wanted)


def test_compiled_bf16_layers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model_ctx.onnx"
    entries = {"ep__context_enable": "1", "ep__context_file_path": str(path)}
    provider_session(built(TAKEN["usual"]), ep__ortolanexecutionprovider__precision="bf16", **entries)
    provider_session(str(path))
    with pytest.raises(Exception, match="stores bf16 weights, whose products depend on the CPU; expected int8"):
        provider_session(str(path), **EVERYWHERE)


ONE_ISA = """
import hashlib
from tests.provider import test_reproducible as test
given = test.model()
for y in test.outputs(test.provider_session(given, **test.EVERYWHERE), given):
    print(hashlib.sha256(y.tobytes()).hexdigest())
"""


def test_every_instruction_set_gives_the_same_bytes() -> None:
    done = {isa: run_with_isa(isa, ONE_ISA) for isa in _native.cpu_info()["detected_features"]}
    assert all(one.returncode == 0 for one in done.values()), {isa: one.stderr for isa, one in done.items()}
    found = {isa: one.stdout for isa, one in done.items()}
    assert len(set(found.values())) == 1 and next(iter(found.values())), found


def test_all_supported_nodes_are_claimed() -> None:
    """Otherwise the claims would depend on the CPU and its kept times."""
    options = ortolan.session_options(claims="faster", reproducible="everywhere")
    assert options.get_session_config_entry("ep.ortolanexecutionprovider.reproducible") == "everywhere"
    with_all = provider_session(model(), claims="all")
    with_option = provider_session(model(), claims="faster", **EVERYWHERE)
    claims = [
        sorted(node.name for part in session.get_provider_graph_assignment_info() for node in part.get_nodes())
        for session in (with_all, with_option)
    ]
    assert claims[0] == claims[1]


def test_wrong_values() -> None:
    with pytest.raises(Exception, match="option reproducible is 'here', expected 'everywhere' or no value"):
        provider_session(model(), ep__ortolanexecutionprovider__reproducible="here")
    with pytest.raises(Exception, match="reproducible is 'everywhere' with precision 'bf16', whose sums depend on the"):
        provider_session(model(), ep__ortolanexecutionprovider__precision="bf16", **EVERYWHERE)
    wrong: Any = "here"
    with pytest.raises(ortolan.ArgumentError, match="reproducible is 'here', expected 'everywhere', or None"):
        ortolan.session_options(reproducible=wrong)
    with pytest.raises(ortolan.ArgumentError, match="precision is 'bf16', whose sums depend on the CPU"):
        ortolan.session_options(precision="bf16", reproducible="everywhere")

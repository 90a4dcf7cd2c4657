"""The options of OptimizeOptions in all tools that accept them, and errors for bad arguments."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

import ortolan
from ortolan import ArgumentError, ArgumentTypeError, OptimizeOptions, OrtolanError, cli
from ortolan.graph_passes.names import FORMAT_OPTIONS, SCORE_ACTIVATIONS
from ortolan.graph_passes.recipe import Recipe
from ortolan.graph_passes.text import text_plan
from ortolan.optimize_options import OptimizeArguments, flag_of, from_command_line, options_of, rows
from ortolan.optimum import OrtolanOptimizer
from ortolan.text_encoder import TextEncoder

NAMES = [option.name for option in fields(OptimizeOptions)]


def arguments(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_type_checkers_see_the_same_options() -> None:
    assert {option.name: option.type for option in fields(OptimizeOptions)} == {
        name: hint.__forward_arg__ for name, hint in OptimizeArguments.__annotations__.items()
    }


def test_help_shows_all_options() -> None:
    assert arguments(ortolan.optimize_onnx) == {"model", "output", "settings", *NAMES}
    assert all(f"    {row.name}: {row.help}" in (ortolan.optimize_onnx.__doc__ or "") for row in rows())


def test_the_command_line_has_all_options_but_the_callback() -> None:
    assert set(NAMES) - arguments(cli.optimize) == {"progress"}
    command = typer.main.get_command(cli.app).commands["optimize"]  # type: ignore[attr-defined]
    flags = {flag for parameter in command.params for flag in parameter.opts}
    assert {flag_of(option) for option in options_of("cli")} <= flags


def test_search() -> None:
    assert arguments(ortolan.search) - arguments(cli.search) == {"shapes", "progress"}  # shapes is --shape


def test_hosts_leave_out_what_they_cannot_pass_on() -> None:
    optimum = {option.name for option in options_of("optimum")}
    assert set(NAMES) - optimum == {"prompt", "texts_in", "serve", "portable", "dry_run", "progress"}
    transformers = {option.name for option in options_of("transformers")}
    assert set(NAMES) - transformers == {"prompt", "texts_in", "serve", "dry_run", "progress"}


def test_values_of_a_command_line() -> None:
    class Choice(str):
        value = property(str)

    found = from_command_line(
        {"weights": "int4", "group_size": "64", "method": ["gptq"], "ignore": [""], "options": ["a=1"], "budget": None}
    )
    assert found == OptimizeOptions(weights="int4", group_size=64, method=["gptq"], ignore=[], options={"a": 1})


def test_format_options_are_those_of_the_form() -> None:
    assert {name for name in NAMES if name in FORMAT_OPTIONS} == set(FORMAT_OPTIONS)
    assert set(text_plan.SCORE_ACTIVATIONS.values()) == set(SCORE_ACTIVATIONS)


def test_the_shell_completes_choices() -> None:
    script = "import sys; sys.argv[0] = 'ortolan'; from ortolan.cli import main; main()"
    shown = {}
    for words in ("optimize m.onnx --weights ", "optimize m.onnx --recipe int", "inspect m.onnx --precision b"):
        environment = {"_ORTOLAN_COMPLETE": "complete_bash", "COMP_WORDS": f"ortolan {words}", "PATH": ""}
        environment["COMP_CWORD"] = str(len(f"ortolan {words}".split(" ")) - 1)
        environment["PYTHONPATH"] = ":".join(sys.path)
        done = subprocess.run(
            [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        shown[words] = done.stdout.split()
    assert list(shown.values()) == [["bf16", "int8", "int6", "int5", "int4"], ["int4", "int8"], ["bf16"]]


# Calls with one bad argument. A wrong value raises a ValueError and a wrong type a TypeError; both are OrtolanErrors.
MODEL = "model.onnx"
CALLS: list[tuple[str, type[Exception], Callable[[Any], object]]] = [
    ("unknown recipe", ValueError, lambda model: ortolan.optimize_onnx(model, recipe="int3")),
    ("type of recipe", TypeError, lambda model: ortolan.optimize_onnx(model, recipe=3)),  # type: ignore[arg-type]
    ("unknown weights", ValueError, lambda model: ortolan.optimize_onnx(model, weights="int3")),
    ("type of weights", TypeError, lambda model: ortolan.optimize_onnx(model, weights=8)),  # type: ignore[arg-type]
    ("sparsity", ValueError, lambda model: ortolan.optimize_onnx(model, sparsity=1.5)),
    ("type of sparsity", TypeError, lambda model: ortolan.optimize_onnx(model, sparsity="half")),  # type: ignore
    ("method", ValueError, lambda model: ortolan.optimize_onnx(model, weights="int4", method="obq")),
    ("type of method", TypeError, lambda model: ortolan.optimize_onnx(model, weights="int4", method=3)),  # type: ignore
    ("type of ignore", TypeError, lambda model: ortolan.optimize_onnx(model, weights="int8", ignore=3)),  # type: ignore
    ("budget", ValueError, lambda model: ortolan.optimize_onnx(model, weights="int4", budget=2.0)),
    ("type of budget", TypeError, lambda model: ortolan.optimize_onnx(model, weights="int4", budget="0.9")),  # type: ignore
    ("max_bytes", ValueError, lambda model: ortolan.optimize_onnx(model, weights="int4", max_bytes="much")),
    ("type of max_bytes", TypeError, lambda model: ortolan.optimize_onnx(model, weights="int4", max_bytes=1.5)),  # type: ignore
    ("two budgets", ValueError, lambda model: ortolan.optimize_onnx(model, budget=0.9, max_bytes="1MB")),
    ("calibration", ValueError, lambda model: ortolan.optimize_onnx(model, weights="int8", calibration={"y": 1})),  # type: ignore
    ("type of calibration", TypeError, lambda model: ortolan.optimize_onnx(model, weights="int8", calibration=3)),  # type: ignore
    ("threads", ValueError, lambda model: ortolan.optimize_onnx(model, threads=0)),
    ("type of threads", TypeError, lambda model: ortolan.optimize_onnx(model, threads="2")),  # type: ignore
    ("type of options", TypeError, lambda model: ortolan.optimize_onnx(model, options=["a"])),  # type: ignore
    ("name in options", ValueError, lambda model: ortolan.optimize_onnx(model, weights="int8", options={"a": 1})),
    ("type of portable", TypeError, lambda model: ortolan.optimize_onnx(model, portable="no")),  # type: ignore
    ("type of texts_in", TypeError, lambda model: ortolan.optimize_onnx(model, texts_in="yes")),  # type: ignore
    ("type of progress", TypeError, lambda model: ortolan.optimize_onnx(model, progress=3)),  # type: ignore
    ("type of output", TypeError, lambda model: ortolan.optimize_onnx(model, 3)),  # type: ignore
    ("type of settings", TypeError, lambda model: ortolan.optimize_onnx(model, None, "int8")),  # type: ignore
    ("unknown keyword", TypeError, lambda model: ortolan.optimize_onnx(model, weigths="int8")),  # type: ignore
    ("type of model", TypeError, lambda model: ortolan.optimize_onnx(3)),  # type: ignore
    ("search sparsity", ValueError, lambda model: ortolan.search(model, sparsity=2)),
    ("search shapes", ValueError, lambda model: ortolan.search(model, shapes=[(0, 1)])),
    ("search type of shapes", TypeError, lambda model: ortolan.search(model, shapes=3)),  # type: ignore
    ("search type of budget", TypeError, lambda model: ortolan.search(model, budget="x")),  # type: ignore
    ("search threads", ValueError, lambda model: ortolan.search(model, threads=-1)),
    ("Recipe.of", ValueError, lambda model: Recipe.of(weights="int3")),
    ("Recipe.of keyword", TypeError, lambda model: Recipe.of(weight="int8")),
    ("Recipe.load", ValueError, lambda model: Recipe.load("none")),
    ("Recipe.load type", TypeError, lambda model: Recipe.load(3)),  # type: ignore
    ("with_options", TypeError, lambda model: Recipe.load("int8").with_options(3)),  # type: ignore
    ("with_pass", ValueError, lambda model: Recipe.load("int8").with_pass("none")),
    ("session model", TypeError, lambda model: ortolan.create_session(3)),  # type: ignore
    ("session options", TypeError, lambda model: ortolan.create_session(model, {})),  # type: ignore
    ("register", TypeError, lambda model: ortolan.register(3)),  # type: ignore
    ("session_options", ValueError, lambda model: ortolan.session_options(precision="int3")),  # type: ignore
    ("inspect_provider", ValueError, lambda model: ortolan.inspect_provider(model, claims="some")),  # type: ignore
    ("inspect_onnx", TypeError, lambda model: ortolan.inspect_onnx(3)),  # type: ignore
    ("import_gguf", TypeError, lambda model: ortolan.import_gguf(3, "out")),  # type: ignore
    ("keep_last_logits", TypeError, lambda model: ortolan.keep_last_logits(3, "out")),  # type: ignore
    ("embed", TypeError, lambda model: ortolan.embed("one text", Encoder())),  # type: ignore
    ("embed texts", TypeError, lambda model: ortolan.embed([3], Encoder())),  # type: ignore
    ("embed_stream", ValueError, lambda model: list(ortolan.embed_stream(["a"], Encoder(), batch_tokens=0))),  # type: ignore
    ("rerank", ValueError, lambda model: ortolan.rerank("q", ["a"], Encoder(), top_k=0)),  # type: ignore
    ("OrtolanOptimizer", TypeError, lambda model: OrtolanOptimizer.from_pretrained(3)),
]


class Encoder(TextEncoder):
    """A TextEncoder without a model, for tests of argument errors."""

    kind = "embedding"

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(("kind", "call"), [call[1:] for call in CALLS], ids=[call[0] for call in CALLS])
def test_errors_of_arguments_are_pythons_own(
    kind: type[Exception], call: Callable[[Any], object], mlp_path: Path
) -> None:
    with pytest.raises(OrtolanError) as caught:
        call(mlp_path)
    assert isinstance(caught.value, kind)
    assert isinstance(caught.value, ArgumentTypeError if kind is TypeError else ArgumentError)

"""The search: its decisions with injected times, and the models that its recipes make."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import Recipe, _native
from ortolan.errors import ArgumentTypeError, CalibrationError, RecipeError
from ortolan.graph_passes.auto import layer_times, path, search, trials
from ortolan.graph_passes.auto.budget import Limit, perplexity, perplexity_rise
from ortolan.graph_passes.auto.candidates import ORIGINAL, candidates_for, escape, make_recipe
from ortolan.graph_passes.measure.fits import Fits
from ortolan.graph_passes.passes.prune import calibrated as prune_calibrated
from ortolan.graph_passes.passes.quantize import quantize
from ortolan.graph_passes.report.figures import Timing
from ortolan.models import tiny
from ortolan.progress import Stage
from ortolan.times_file import KeptTimes, read_times, today, write_times

from .cached_llama import VOCABULARY, llama, prompt
from .small_models import make_model, random_weight, run

SHAPES = [(2, 5)]
LAYERS = 4
WIDTH = 64


def chain() -> onnx.ModelProto:
    """Return equal linear layers with a Tanh after each.

    Layer names contain characters with a special meaning in patterns.
    """
    nodes, weights, x = [], {}, "x"
    for number in range(LAYERS):
        weights[f"W{number}"] = random_weight(WIDTH, WIDTH, seed=number)
        y = "y" if number == LAYERS - 1 else f"tanh{number}"
        nodes.append(helper.make_node("MatMul", [x, f"W{number}"], [f"product{number}"], name=f"layer[{number}]"))
        nodes.append(helper.make_node("Tanh", [f"product{number}"], [y], name=f"tanh_{number}"))
        x = y
    shape = ["batch", "sequence", WIDTH]
    return make_model(nodes, {"x": (TensorProto.FLOAT, shape)}, {"y": (TensorProto.FLOAT, shape)}, weights)


def feeds() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((3, 7, WIDTH)).astype(np.float32)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return a function that sets the times of layers and optimized models.

    The original layer takes 1 ms, the original model 10 ms.
    """
    calls: list[Any] = []

    def put(layers: dict[str, float], model_ms: float) -> list[Any]:
        def measure(case: Any, matrix: np.ndarray, candidates: Any) -> dict[str, float]:
            calls.append(case)
            names = {candidate.name for candidate in candidates}
            return {ORIGINAL: 1.0} | {name: ms for name, ms in layers.items() if name in names}

        def time_models(original: Any, paths: Any, shapes: Any) -> Any:
            return [Timing(10.0, 10.0)] * len(shapes), [[Timing(model_ms, model_ms)] * len(shapes) for _ in paths]

        monkeypatch.setattr(layer_times, "measure", measure)
        monkeypatch.setattr(search, "time_models", time_models)
        return calls

    return put


def auto(model: Any = None, output: Any = None, **arguments: Any) -> ortolan.OptimizationReport:
    """Run the search and return its report."""
    model = chain() if model is None else model
    arguments = {"calibration": feeds(), "shapes": SHAPES} | arguments
    found = ortolan.search(model, **arguments)
    both = {name: arguments[name] for name in ("calibration", "progress") if name in arguments}
    return ortolan.optimize_onnx(model, output, recipe=found, **both)


def cosine(report: ortolan.OptimizationReport) -> float:
    """Return the cosine of the optimized model's answers, computed without the code under test."""
    assert report.model is not None
    found, expected = (run(model, feeds(), library=True)[0].ravel() for model in (report.model, chain()))
    return float(found @ expected / (np.linalg.norm(found) * np.linalg.norm(expected)))


FAST_INT4 = {"bf16": 0.8, "int8": 0.6, "int4": 0.2}


def test_takes_the_fastest_form_where_the_budget_allows(inject: Callable[..., Any]) -> None:
    inject(FAST_INT4, 5.0)
    report = auto(budget=0.5)
    assert report.auto is not None
    assert [layer.chosen for layer in report.auto.layers] == ["int4 gptq"] * LAYERS
    assert [layer.new_op for layer in report.layers] == ["W4A8MatMul"] * LAYERS
    assert report.auto.gain == 2.0 and "2.00x faster" in report.auto.outcome
    assert any("fastest run 10 -> 5 ms" in text and "(2.00x)" in text for _, text in report.auto.facts())
    assert [layer.after_ms for layer in report.auto.layers] == [[0.2]] * LAYERS


def test_a_dry_run_of_the_search_says_what_would_be_replaced(inject: Callable[..., Any], tmp_path: Path) -> None:
    inject({"bf16": 0.8, "int8": 0.6}, 5.0)
    onnx.save(chain(), tmp_path / "model.onnx")
    report = ortolan.optimize_onnx(
        tmp_path / "model.onnx", tmp_path / "out.onnx", recipe="auto", calibration=feeds(), dry_run=True
    )
    assert [(layer.status, layer.new_op) for layer in report.layers] == [("would replace", "SparseAMXMatMul")] * LAYERS
    assert report.auto is not None
    assert report.auto.changed
    assert report.output is None
    assert report.model is None
    assert report.output_error == []
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "cache"}


@pytest.mark.parametrize("budget", [0.9, 0.99, 0.997, 0.999, 0.9999])
def test_never_over_budget(inject: Callable[..., Any], budget: float) -> None:
    inject(FAST_INT4, 5.0)
    report = auto(budget=budget)
    assert report.auto is not None
    assert report.auto.changed
    assert cosine(report) >= budget
    assert report.auto.trials[0].layers == LAYERS


def many_feeds(seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Return inputs; every fourth one is drawn from `seed` and has larger values in eight columns."""
    rng, others = np.random.default_rng(1), np.random.default_rng(seed)
    scale = np.where(np.arange(WIDTH) < 8, 4, 1)
    return [
        {"x": (others.standard_normal((1, 9, WIDTH)) * scale).astype(np.float32)}
        if number % 4 == 3
        else {"x": rng.standard_normal((1, 9, WIDTH)).astype(np.float32)}
        for number in range(8)
    ]


@pytest.mark.parametrize("budget", [0.98, 0.99, 0.995, 0.999])
def test_the_budget_is_held_on_feeds_that_nothing_is_fitted_to(inject: Callable[..., Any], budget: float) -> None:
    inject(FAST_INT4, 5.0)
    given = many_feeds()
    report = auto(budget=budget, calibration=given)
    assert report.model is not None
    pairs = [
        [run(model, one, library=True)[0].ravel() for model in (report.model, chain())] for one in (given[3], given[7])
    ]
    found, expected = (np.concatenate(column).astype(np.float64) for column in zip(*pairs, strict=True))
    exact = float(found @ expected / (np.linalg.norm(found) * np.linalg.norm(expected)))
    assert exact >= budget
    (error,) = report.output_error
    assert error.cosine == pytest.approx(exact, abs=1e-6)
    assert "fitted to" not in report.auto.budget


def test_nothing_is_fitted_to_the_feeds_that_judge(inject: Callable[..., Any]) -> None:
    inject({"int4": 0.2}, 5.0)
    models = [auto(budget=0.5, calibration=many_feeds(seed)).model for seed in (0, 1)]
    weights = [{tensor.name: tensor.raw_data for tensor in model.graph.initializer} for model in models]
    assert weights[0] == weights[1]
    inside = auto(budget=0.5, calibration=many_feeds(0)[:3])
    assert "fitted to; 4 or more feeds or texts give" in inside.auto.budget


def test_smaller_budgets_choose_more_exact_forms(inject: Callable[..., Any]) -> None:
    inject(FAST_INT4, 5.0)
    report = auto(budget=0.9995)
    assert report.auto is not None
    # The fastest recipe exceeds the error budget, so the search found a slower one within it.
    assert not report.auto.trials[0].within
    chosen = {layer.chosen for layer in report.auto.layers}
    assert chosen - {"int4 gptq"}
    assert chosen != {None}


def test_a_budget_that_nothing_meets_gives_the_original(inject: Callable[..., Any]) -> None:
    inject(FAST_INT4, 5.0)
    model = chain()
    report = auto(model, budget=1.0)
    assert report.auto is not None
    assert report.model == model
    assert "none of the models tried is within the budget" in report.auto.outcome


def test_gives_the_original_where_its_layers_are_faster(inject: Callable[..., Any]) -> None:
    inject({"bf16": 1.1, "int8": 1.2, "int4": 1.3}, 5.0)
    model = chain()
    report = auto(model)
    assert report.auto is not None
    assert report.model == model
    assert report.auto.trials == []
    assert "no layer has a format that is faster" in str(report)


def test_gives_the_original_where_the_whole_model_is_faster(inject: Callable[..., Any], tmp_path: Path) -> None:
    inject(FAST_INT4, 10.5)
    onnx.save(chain(), tmp_path / "model.onnx")
    report = auto(tmp_path / "model.onnx", tmp_path / "out.onnx", budget=0.5)
    assert report.auto is not None
    assert not report.auto.changed
    assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()
    assert "no model within the budget is 1.05x as fast as the original" in report.auto.outcome
    # Each trial replaces at most as many layers as the one before.
    assert [trial.layers for trial in report.auto.trials] == [4, 4, 3, 1]


def test_a_form_that_loses_at_one_shape_is_not_taken(
    inject: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inject({}, 5.0)

    def measure(case: Any, matrix: np.ndarray, candidates: Any) -> dict[str, float]:
        return {ORIGINAL: 1.0, "int4": 0.1 if case.rows == 10 else 1.01, "int8": 0.5}

    monkeypatch.setattr(layer_times, "measure", measure)
    report = auto(shapes=[(2, 5), (1, 2)], budget=0.5)
    assert report.auto is not None
    assert {layer.chosen for layer in report.auto.layers} == {"int8"}


def test_the_users_function_decides(inject: Callable[..., Any]) -> None:
    inject(FAST_INT4, 5.0)
    seen = []

    def accepts(original: Any, optimized: Any) -> bool:
        expected, found = original(feeds())["y"], optimized(feeds())["y"]
        seen.append(float(np.abs(expected - found).max()))
        return seen[-1] < 0.05

    report = auto(budget=accepts)
    assert report.auto is not None
    assert len(seen) == len(report.auto.trials) > 1
    assert report.model is not None
    assert report.auto.changed
    answers = (run(model, feeds(), library=True)[0] for model in (report.model, chain()))
    assert np.abs(np.subtract(*answers)).max() < 0.05


def test_the_recipe_gives_the_same_model_again(inject: Callable[..., Any]) -> None:
    inject(FAST_INT4, 5.0)
    first = auto(budget=0.997)
    recipe = Recipe.from_dict(first.recipe)
    again = ortolan.optimize_onnx(chain(), recipe=Recipe.from_toml(recipe.to_toml()), calibration=feeds())
    assert first.model is not None
    assert again.model is not None
    assert again.model.SerializeToString(deterministic=True) == first.model.SerializeToString(deterministic=True)
    stored = {entry.key: entry.value for entry in first.model.metadata_props}
    assert json.dumps(first.recipe["pass"]) in stored.values()


def test_times_are_kept_and_used_again(inject: Callable[..., Any], tmp_path: Path) -> None:
    calls = inject(FAST_INT4, 5.0)
    first = auto(budget=0.9)
    assert len(calls) == 1  # all four layers have the same shape, so one measurement suffices
    second = auto(budget=0.9)
    assert len(calls) == 1
    assert first.auto is not None
    assert second.auto is not None
    assert (first.auto.measured, second.auto.measured) == (1, 0)
    assert first.recipe == second.recipe
    (tmp_path / "cache" / "layer-times.txt").write_text("ortolan layer t")
    auto(budget=0.9)
    assert len(calls) == 2


def test_times_of_a_busy_machine_are_not_kept(
    inject: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = inject(FAST_INT4, 5.0)
    monkeypatch.setattr(layer_times, "is_busy", lambda: True)
    for count in (1, 2):
        auto(budget=0.9)
        assert len(calls) == count and not (tmp_path / "cache" / "layer-times.txt").exists()


def test_old_times_are_measured_again_and_the_shorter_ones_kept(
    inject: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = inject(FAST_INT4, 5.0)
    file = tmp_path / "cache" / "layer-times.txt"

    auto(budget=0.9)
    ((case, first),) = read_times(file).items()
    # Make all times of formats look like those of a busy machine.
    ms = {name: time / 2 if name == ORIGINAL else 3 * time for name, time in first.ms.items()}
    for days, count in ((0, 1), (7, 1), (8, 2), (-1, 3)):
        write_times(file, {case: KeptTimes((today() - timedelta(days)).isoformat(), ms)})
        auto(budget=0.9)
        assert len(calls) == count
        if days == 8:
            expected = {name: time / 2 if name == ORIGINAL else time for name, time in first.ms.items()}
            assert read_times(file) == {case: KeptTimes(today().isoformat(), expected)}


def test_times_of_another_machine_are_not_used(inject: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = inject(FAST_INT4, 5.0)
    auto(budget=0.9)
    monkeypatch.setattr(layer_times, "machine", lambda: "another")
    auto(budget=0.9)
    assert len(calls) == 2


@pytest.mark.parametrize("stage", [Stage.TIME_LAYERS, Stage.LAYER_ERRORS, Stage.TRY_MODELS, Stage.VERIFY])
def test_interrupted_it_leaves_no_output(inject: Callable[..., Any], tmp_path: Path, stage: Stage) -> None:
    inject(FAST_INT4, 5.0)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "model.onnx").write_text("older")

    def progress(found: str, done: int, total: int) -> None:
        if found == stage and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        auto(None, folder / "model.onnx", budget=0.997, progress=progress)
    assert [path.name for path in folder.iterdir()] == ["model.onnx"]
    assert (folder / "model.onnx").read_text() == "older"


def test_times_survive_an_interrupt(inject: Callable[..., Any]) -> None:
    calls = inject(FAST_INT4, 5.0)

    def progress(found: str, done: int, total: int) -> None:
        if found == Stage.LAYER_ERRORS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        auto(progress=progress)
    auto()
    assert len(calls) == 1


def test_really_measures() -> None:
    """A search with real times stays within the budget, and the report lists all layers."""
    report = auto()
    assert report.auto is not None
    assert report.model is not None
    assert cosine(report) >= 0.99
    assert all(layer.before_ms[0] > 0 and set(layer.forms) for layer in report.auto.layers)
    assert json.loads(report.to_json())["auto"]["layers"][0]["name"] == "layer[0]"


def test_a_sparsity_adds_pruned_forms(inject: Callable[..., Any]) -> None:
    inject(FAST_INT4 | {"pruned bf16": 0.1}, 5.0)
    report = auto(budget=0.01, sparsity=0.5)
    assert report.auto is not None
    assert {layer.chosen for layer in report.auto.layers} == {"pruned bf16"}
    assert all(layer.sparsity == pytest.approx(0.5, abs=0.01) for layer in report.layers)


def test_what_a_cpu_is_slow_with_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs without an expand instruction: int8 weights stored as bitmaps are not a candidate."""
    names = {}
    for isa in ("avx2", "avx512"):
        monkeypatch.setattr(_native, "bitmaps_are_fast", lambda bits, isa=isa: bits == 16 or isa == "avx512")
        for sparsity in (None, 0.5, 0.6):
            names[isa, sparsity] = {one.name for one in candidates_for(True, sparsity) if "pruned" in one.name}
    assert names["avx2", None] == names["avx512", None] == set()
    assert names["avx2", 0.6] == {"pruned bf16", "pruned int8 4x1"}
    assert names["avx512", 0.6] == names["avx2", 0.6] | {"pruned int8"}
    for isa in ("avx2", "avx512"):
        assert names[isa, 0.5] == names[isa, 0.6] | {"pruned int8 2:4", "pruned int4 2:4"}


@pytest.mark.parametrize("gains", [False, True])
def test_a_reduced_range_is_tried_where_kernels_gain_from_it(monkeypatch: pytest.MonkeyPatch, gains: bool) -> None:
    monkeypatch.setattr(_native, "gains_from_pairs", lambda: gains)
    assert ("int8 reduced range" in {one.name for one in candidates_for(False, None)}) == gains


def test_a_reduced_range_is_taken_where_it_is_faster(
    inject: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "gains_from_pairs", lambda: True)
    inject({"int8": 0.6, "int8 reduced range": 0.4}, 5.0)
    report = auto(budget=0.9)
    assert report.auto is not None
    assert {layer.chosen for layer in report.auto.layers} == {"int8 reduced range"}
    assert all(layer.weight_bits == 8 for layer in report.layers)


@pytest.mark.parametrize("name", ["int8", "int4 2:4", "pruned int8 2:4"])
def test_two_four(inject: Callable[..., Any], name: str) -> None:
    """Weights that are 2:4 sparse are stored as 2:4. Other weights are pruned to 2:4 only on request."""
    calls = inject({name: 0.2}, 5.0)
    model, prunes = chain(), name.startswith("pruned")
    if not prunes:
        for tensor in model.graph.initializer:
            array = numpy_helper.to_array(tensor).copy()
            array[0::4], array[3::4] = 0, 0
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    report = auto(model, budget=0.01, sparsity=0.5 if prunes else None)
    assert report.auto is not None
    assert all(case.two_four != prunes and ("2:4, " in case.columns) != prunes for case in calls)
    assert {layer.chosen.removesuffix(" gptq") for layer in report.auto.layers} == {name}
    assert all(layer.storage == "2:4" for layer in report.layers)


@pytest.mark.parametrize("sparsity", [None, 0.5])
def test_reproducible_formats_round_to_integers(sparsity: float | None) -> None:
    names, all_names = ({one.name for one in candidates_for(True, sparsity, where)} for where in ("everywhere", None))
    assert all_names - names == {"bf16"} | ({"pruned bf16"} & all_names)


def test_a_reproducible_search_fuses_attention_without_bf16(inject: Callable[..., Any]) -> None:
    """ONNX Runtime's attention and bf16 layers depend on the CPU, so neither is tried, although both are fastest."""
    inject({"bf16": 0.1, "int8": 0.5}, 5.0)
    found = ortolan.search(
        ir.to_proto(tiny.tiny_bert()), budget=lambda *_: True, shapes=[(1, 20)], reproducible="everywhere"
    )
    assert found.search is not None and {trial.attention for trial in found.search.trials if trial.chosen} == {True}
    assert {layer.chosen for layer in found.search.layers} == {"int8"}
    wheres = [step.options.reproducible for step in found.passes if "reproducible" in step.options.names()]
    assert wheres == ["everywhere"] * 2


@pytest.mark.parametrize(
    ("int8", "note"),
    [
        (0.5, "layers or attention left to ONNX Runtime: of_activations; the bytes depend on the CPU, although"),
        (2.0, "the model is unchanged, so its bytes depend on the CPU, although reproducible is 'everywhere'"),
    ],
)
def test_a_reproducible_search_names_what_it_leaves(inject: Callable[..., Any], int8: float, note: str) -> None:
    inject({"int8": int8}, 5.0)
    model = chain()
    model.graph.node.add(op_type="Transpose", name="turn", input=["x"], output=["turned"]).attribute.append(
        helper.make_attribute("perm", [0, 2, 1])
    )
    model.graph.node.add(op_type="MatMul", name="of_activations", input=["turned", "y"], output=["z"])
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", WIDTH, WIDTH]))
    for where in ("everywhere", None):
        report = ortolan.optimize_onnx(model, None, recipe="auto", calibration=feeds(), reproducible=where)
        assert any(text.startswith(note) for text in report.notes) == (where is not None), report.notes


def test_recipes_select_layers_by_name() -> None:
    bf16, int8 = candidates_for(True, None)[:2]
    recipe = make_recipe({bf16: ["a*"], int8: ["b[0]"]}, verify={})
    assert [step.name for step in recipe.passes] == ["normalize", "calibrate", "quantize", "replace", "verify"]
    assert recipe.passes[2].options.select == ("b[[]0]",)  # type: ignore[attr-defined]
    assert recipe.passes[3].options.select == ("a[*]", "b[[]0]")  # type: ignore[attr-defined]
    assert escape("x?") == "x[?]"


def test_convex_leaves_out_forms_that_others_outdo() -> None:
    forms = {"a": (0.1, 1.0), "b": (0.5, 2.0), "c": (0.4, 3.0), "d": (0.6, 10.0)}
    assert [name for name, _, _ in path.convex(forms)] == ["b", "d"]


@pytest.mark.parametrize(
    ("gains", "taken"),
    [((2.0, 1.92), 1), ((2.0, 1.8), 0), ((1.5, 2.0), 1), ((1.06, 1.04), 0), ((1.0, 0.99), 1), ((2.0,), 0)],
)
def test_fused_attention_is_taken_where_it_is_nearly_as_fast(gains: tuple[float, ...], taken: int) -> None:
    assert search.best_of(gains, [False, True][: len(gains)]) == taken


@pytest.mark.parametrize("budget", [0.0, 1.5, "0.99", {"cosine": 1}, True])
def test_refuses_budgets(budget: Any) -> None:
    with pytest.raises((RecipeError, ArgumentTypeError), match="budget is"):
        auto(budget=budget)


@pytest.mark.parametrize("increase", [-0.1, float("nan"), "1 %"])
def test_refuses_perplexity_increases(increase: Any) -> None:
    with pytest.raises((RecipeError, ArgumentTypeError), match="max_perplexity_increase is"):
        ortolan.search(chain(), max_perplexity_increase=increase)


@pytest.mark.parametrize("shapes", [[], 5, [(1,)], [(0, 3)], [("1", 2)]])
def test_refuses_shapes(shapes: Any) -> None:
    with pytest.raises((RecipeError, ArgumentTypeError), match="shapes is"):
        auto(shapes=shapes)


@pytest.mark.parametrize("sparsity", [0, 1.0, "half", True])
def test_refuses_sparsities(sparsity: Any) -> None:
    with pytest.raises((RecipeError, ArgumentTypeError), match="sparsity is"):
        auto(sparsity=sparsity)


def test_the_preset_is_the_search_with_its_defaults(inject: Callable[..., Any]) -> None:
    inject(FAST_INT4, 5.0)
    found = ortolan.search(chain(), calibration=feeds())
    for recipe in ("auto", None):
        report = ortolan.optimize_onnx(chain(), recipe=recipe, calibration=feeds(), options={"verify.seconds": 0.0})
        assert report.auto is not None and report.auto.changed
        assert Recipe.from_dict(report.recipe) == found.with_options({"verify.seconds": 0.0})


def test_what_does_not_go_with_a_search() -> None:
    with pytest.raises(
        RecipeError, match=r"sparsity cannot be combined with recipe 'auto', .*ortolan\.search, which takes"
    ):
        ortolan.optimize_onnx(chain(), recipe="auto", sparsity=0.5)
    with pytest.raises(RecipeError, match=r"recipe 'auto' has no option 'bits'; .*to set options of other passes"):
        ortolan.optimize_onnx(chain(), options={"bits": 4})
    with pytest.raises(RecipeError, match="ignore needs a target format"):
        ortolan.optimize_onnx(chain(), ignore=())


def test_a_recipe_that_changes_nothing(inject: Callable[..., Any], tmp_path: Path) -> None:
    inject({"bf16": 1.1}, 5.0)
    found = ortolan.search(chain(), calibration=feeds(), shapes=SHAPES)
    assert found.passes == () and "the model is unchanged" in found.description and found.search is not None
    (tmp_path / "found.toml").write_text(found.to_toml())
    model = chain()
    assert ortolan.optimize_onnx(model, recipe=tmp_path / "found.toml").model == model
    with pytest.raises(RecipeError, match=r"'sparsity' cannot be used: recipe 'auto' has no passes"):
        ortolan.optimize_onnx(model, recipe=found, options={"sparsity": 0.5})


def test_perplexity_of_a_uniform_model() -> None:
    def uniform(feeds: Any) -> dict[str, np.ndarray]:
        return {"logits": np.zeros((*feeds["input_ids"].shape, 10), np.float32)}

    ids = np.array([[1, 2, 3]])
    assert perplexity(uniform, [{"input_ids": ids}]) == pytest.approx(10)
    limit = Limit("perplexity", 0.05)

    def sure(feeds: Any) -> dict[str, np.ndarray]:
        logits = uniform(feeds)["logits"]
        logits[0, [0, 1], [2, 3]] = 5
        return {"logits": logits}

    assert limit.judge([], [{"input_ids": ids}], sure, uniform)[0] is False
    assert limit.judge([], [{"input_ids": ids}], uniform, sure)[0] is True


def test_logits_of_one_token_have_no_perplexity(inject: Callable[..., Any], tmp_path: Path) -> None:
    """A model with keep_last_logits cannot use a perplexity budget; the error says which step to do first."""
    inject({"int8": 0.5}, 5.0)
    model = llama("gqa")
    onnx.save(model, tmp_path / "all.onnx")
    ortolan.keep_last_logits(tmp_path / "all.onnx", tmp_path / "last.onnx")
    with pytest.raises(CalibrationError, match="those of one token") as refused:
        ortolan.optimize_onnx(tmp_path / "last.onnx", tmp_path / "fast.onnx", calibration=[prompt(model, 2, 8)])
    assert str(refused.value) == (
        f"logits have shape [2, 1, {VOCABULARY}] for input_ids [2, 8], those of one token, but a limit on perplexity "
        f"needs all, [2, 8, {VOCABULARY}]; optimize the model before keep_last_logits, then call keep_last_logits on "
        "the result; or give a cosine as budget"
    )
    assert not (tmp_path / "fast.onnx").exists()


def test_a_rise_of_perplexity_that_few_tokens_leave_open_is_over_the_budget() -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((1, 4000, 10)).astype(np.float32)

    def exact(feeds: Any) -> dict[str, np.ndarray]:
        return {"logits": np.zeros((*feeds["input_ids"].shape, 10), np.float32)}

    def noisy(feeds: Any) -> dict[str, np.ndarray]:
        return {"logits": 0.2 * noise[:, : feeds["input_ids"].shape[1]]}

    few, many = ([{"input_ids": rng.integers(0, 10, (1, count))}] for count in (20, 4000))
    rise, error = perplexity_rise(exact, noisy, many)
    # For ten logits with noise of variance 0.04, the loss rises by about 0.018.
    assert rise == pytest.approx(0.018, abs=3 * error)
    assert error == pytest.approx(0.2 / math.sqrt(4000), rel=0.1)
    assert perplexity_rise(exact, noisy, few)[1] > 10 * error
    limit = Limit("perplexity", 0.04)
    assert limit.judge([], many, exact, noisy)[0] is True
    assert limit.judge([], few, exact, noisy)[0] is False


@pytest.mark.parametrize(("build", "shape"), [(tiny.tiny_bert, (1, 16)), (tiny.tiny_llama, (1, 1))])
def test_whole_transformers(inject: Callable[..., Any], build: Any, shape: tuple[int, int]) -> None:
    """The search times encoders on sequences and decoders on one token, and tries fused attention for encoders."""
    inject({"int8": 0.5}, 5.0)
    model = ir.to_proto(build())
    report = auto(model, budget=0.9, shapes=None if shape == (1, 1) else [shape], calibration=None)
    assert report.auto is not None
    assert report.auto.shapes == [shape]
    assert report.auto.changed
    assert all(error.cosine >= 0.9 for error in report.output_error)
    if build is tiny.tiny_bert:
        assert {trial.attention for trial in report.auto.trials} == {False, True}
        assert "synthetic inputs" in report.auto.outcome
    else:  # the search tries 4 bits with fused attention first
        assert len(report.auto.trials) == 1 and {layer.weight_bits for layer in report.replaced} >= {4, 8}
        assert any("with a cache became one NoMADAttention" in note for note in report.notes)
        assert "sampled from the model" in report.auto.outcome


def test_shapes_that_the_model_does_not_take(inject: Callable[..., Any]) -> None:
    inject({"int8": 0.5}, 5.0)
    with pytest.raises(CalibrationError, match="does not run at shape 1 x 4000"):
        ortolan.search(ir.to_proto(tiny.tiny_bert()), shapes=[(1, 4000)])


@pytest.mark.parametrize("sparsity", [None, 0.5])
def test_weights_are_fitted_once(inject: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, sparsity: Any) -> None:
    """The search builds several models but fits each layer once per format. Its recipe then makes the same model."""
    inject(FAST_INT4 if sparsity is None else {"bf16": 0.8, "pruned bf16": 0.1}, 5.0)
    module, name = (quantize, "gptq") if sparsity is None else (prune_calibrated, "sparsegpt")
    fits: list[bytes] = []
    fit = getattr(module, name)

    def count(matrix: np.ndarray, *arguments: Any) -> Any:
        fits.append(matrix.tobytes())
        return fit(matrix, *arguments)

    monkeypatch.setattr(module, name, count)
    monkeypatch.setattr(prune_calibrated, "best_damping", lambda *arguments: 0.01)
    arguments = {"calibration": feeds(), "shapes": SHAPES, "sparsity": sparsity}
    arguments["budget"] = 0.997 if sparsity is None else 0.98
    found = ortolan.search(chain(), **arguments)
    assert found.search is not None
    assert len(found.search.trials) > 2
    assert len(fits) == len(set(fits)) == LAYERS
    monkeypatch.setattr(Fits, "knows", lambda *arguments: False)
    again = ortolan.search(chain(), **arguments)
    assert len(fits) > 2 * LAYERS
    assert found == again
    assert again.search is not None
    assert [layer.error for layer in found.search.layers] == [layer.error for layer in again.search.layers]


def test_a_model_of_few_positions_is_measured_at_what_it_takes(inject: Callable[..., Any]) -> None:
    inject(FAST_INT4, 5.0)
    model = ir.to_proto(tiny.tiny_bert(max_position_embeddings=12))
    found = ortolan.search(model, budget=0.5)
    assert found.search is not None
    assert found.search.shapes == [(1, 8)]
    with pytest.raises(CalibrationError, match="does not run at shape 1 x 16"):
        ortolan.search(model, shapes=[(1, 8), (1, 16)])


def test_beaten_models_are_deleted(inject: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The search keeps only the best model so far and the one being built."""
    inject(FAST_INT4, 20.0)  # the int4 model is slower than the original, so the search tries recipes with fewer layers
    make, kept = trials.Trials.make, []

    def counted(self: Any, *arguments: Any) -> Any:
        made = make(self, *arguments)
        kept.append(len(list(self._evidence.folder.rglob("model.onnx"))))
        return made

    monkeypatch.setattr(trials.Trials, "make", counted)
    found = ortolan.search(chain(), calibration=feeds(), shapes=SHAPES, budget=0.5)
    assert found.search is not None and not found.search.changed
    assert len(kept) > 3 and max(kept) <= 2
    assert 2 < len(found.search.trials) <= len(kept)


@pytest.mark.parametrize("weights", [None, "int4"])
def test_perplexity_needs_logits(weights: str | None, tmp_path: Path) -> None:
    model = ir.to_proto(tiny.tiny_bert())
    error = r"max_perplexity_increase needs a decoder with an output 'logits'; the model's outputs are .*hidden_state"
    with pytest.raises(RecipeError, match=error):
        if weights is None:
            ortolan.search(model, max_perplexity_increase=0.01)
        else:
            ortolan.optimize_onnx(model, tmp_path / "x.onnx", weights=weights, max_perplexity_increase=0.01)
    assert not list(tmp_path.iterdir())

"""Recipes: allowed values, error messages, and TOML files."""

from __future__ import annotations

import contextlib

import onnx_ir as ir
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import ortolan
from ortolan import Recipe, RecipeError
from ortolan.graph_passes.recipe import parse_setting
from ortolan.graph_passes.registry import PASSES
from ortolan.models import tiny

from ..sampling import examples
from .forms import NAMED


@pytest.mark.parametrize("name", Recipe.names())
def test_built_in_recipes_load_and_survive_toml(name):
    recipe = Recipe.load(name)
    assert recipe.name == name and recipe.description
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_load_from_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(NAMED["sparse-bf16"].to_toml())
    assert Recipe.load(path) == Recipe.load(str(path)) == NAMED["sparse-bf16"]
    with pytest.raises(RecipeError, match=r"weights cannot be combined with recipe file .*mine\.toml', .*leave it out"):
        Recipe.load(path, weights="int8")


def test_a_recipe_without_passes_says_so():
    recipe = Recipe("stays", "nothing is faster", ())
    assert Recipe.from_toml(recipe.to_toml()) == recipe and "pass = []" in recipe.to_toml()


def test_one_more_pass():
    recipe = NAMED["sparse-int8-4x1"]
    assert [step.name for step in recipe.with_pass("ranges", max_values=20).passes][-8:] == [
        *("fuse_attention", "ranges", "fuse_cached_attention", "linear_attention"),
        *("replace", "fuse_norm", "unpad", "verify"),
    ]
    with pytest.raises(RecipeError, match="unknown option 'numbers'"):
        recipe.with_pass("ranges", numbers=20)
    with pytest.raises(RecipeError, match=r"name is 'range', expected one of: .*did you mean 'ranges'"):
        recipe.with_pass("range")


PRUNE = 'name = "r"\n[[pass]]\nname = "prune"\n'
QUANTIZE = PRUNE.replace("prune", "quantize")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no name"),
        ('name = ""', "has no name"),
        ("name = 3", "name is 3, expected a string"),
        (
            'name = "r"',
            r"has no \[\[pass\]\]; the passes are: activations, cache_prompt, calibrate, compress_cache, "
            "embeddings, experts, float_activations, fuse_attention, fuse_cached_attention, fuse_lut, fuse_norm, "
            "linear_attention, normalize, prune, quantize, ranges, replace, unpad, verify",
        ),
        ('name = "r"\npass = 3', r"has no \[\[pass\]\]"),
        ('name = "r"\npass = [1]', r"has no \[\[pass\]\]; .* write: pass = \[\]"),
        ('name = "r"\nsparsity = 0.5', "unknown key 'sparsity', known ones are: description, name, pass"),
        ('name = "r"\n[[pass]]\nname = "prun"', r"name is 'prun', expected one of: .*prune.*did you mean 'prune'"),
        ('name = "r"\n[[pass]]\nsparsity = 0.5', "name is None, expected one of"),
        ('name = "r', "not valid TOML"),
        (PRUNE + "sparsty = 0.5", "unknown option 'sparsty', known ones are: .*; did you mean 'sparsity'"),
        (PRUNE + "sparsity = 1.5", r"pass 1 \(prune\): sparsity is 1.5, expected a number from 0 to below 1"),
        (PRUNE + "sparsity = 1.0", "sparsity is 1.0"),
        (PRUNE + "sparsity = -0.1", "sparsity is -0.1"),
        (PRUNE + "sparsity = nan", "sparsity is nan"),
        (PRUNE + "sparsity = true", "sparsity is True"),
        (PRUNE + 'sparsity = "0.5"', "sparsity is '0.5'"),
        (PRUNE + 'method = "obd"', "method is 'obd', expected one of 'magnitude', 'wanda', 'sparsegpt'"),
        (PRUNE + 'pattern = "4:2"', "pattern is '4:2', expected 'unstructured', '4x1', or 'N:M' with N < M <= 128"),
        (PRUNE + 'pattern = "1:4"', "sparsity is 0.5, expected 0.75, which pattern '1:4' has"),
        (PRUNE + 'pattern = "2:4"\nscope = "global"', "scope is 'global', but with pattern '2:4' all layers have one"),
        (
            PRUNE + 'method = "wanda"\nscope = "global"',
            "scope is 'global', expected 'layer' or 'sensitivity' with method = 'wanda'",
        ),
        (PRUNE + "weight_bits = 4", "weight_bits is 4, which needs method = 'sparsegpt'"),
        (
            PRUNE + 'method = "sparsegpt"\nweight_group_size = 32',
            "weight_group_size is 32, which needs weight_bits = 4",
        ),
        (
            PRUNE + 'method = "sparsegpt"\nweight_bits = 8\nzero_points = true',
            "zero_points is True, which needs weight_bits = 4",
        ),
        (
            PRUNE + 'method = "sparsegpt"\nweight_bits = 8\nrepair = true',
            "repair is true, expected false with weight_bits",
        ),
        (PRUNE + "damping = 0.1", "damping is 0.1, which needs method = 'sparsegpt' or repair"),
        (QUANTIZE + "bits = 3", r"pass 1 \(quantize\): bits is 3, expected one of 4, 5, 6, 8"),
        (QUANTIZE + "bits = 4.0", "bits is 4.0, expected one of 4, 5, 6, 8"),
        (QUANTIZE + "bits = true", "bits is True"),
        (QUANTIZE + "bits = 4\ngroup_size = 48", "group_size is 48, expected one of 32, 64, 128"),
        (QUANTIZE + "bits = 4\ngroup_size = 256", "group_size is 256, which needs subgroup_size = 16 or 32"),
        (QUANTIZE + "bits = 5\ngroup_size = 32", "group_size is 32, expected one of 64, 128, 256 with 5 bits"),
        (QUANTIZE + "bits = 4\nsubgroup_size = 64", "subgroup_size is 64, expected one of 16, 32"),
        (QUANTIZE + "bits = 8\nsubgroup_size = 16", "subgroup_size is 16, which needs bits = 4, 5 or 6"),
        (QUANTIZE + 'bits = 6\nmethod = "hqq"', "method is 'hqq', .* but zero points are integers with 6 bits"),
        (QUANTIZE + "bits = 4\nsubgroup_size = 16\nsymmetric = true", "symmetric is True, expected no value with subg"),
        (QUANTIZE + 'bits = 5\nzero_points = "minimum"', "zero_points is 'minimum', expected no value with 5 bits"),
        (QUANTIZE + "bits = 8\nsymmetric = false", "symmetric is false, which needs bits = 4"),
        (
            QUANTIZE + 'bits = 4\nzero_points = "integer"',
            "zero_points is 'integer', which needs symmetric = f",
        ),
        (QUANTIZE + 'method = "obq"', "method is 'obq', expected one of 'rtn', 'mse', 'gptq'"),
        (PRUNE + "exclude = [3]", "exclude is .*, expected a list of name patterns"),
        (PRUNE + "layers = { a = 2.0 }", r"layers\['a'\] is 2.0, expected a number from 0 to below 1"),
        (PRUNE + "layers = 0.5", "layers is 0.5, expected a table"),
        ('name = "r"\n[[pass]]\nname = "calibrate"\nmax_rows = 1.5', "max_rows is 1.5, expected an integer from 1"),
        ('name = "r"\n[[pass]]\nname = "normalize"\nx = 1', "unknown option 'x', known ones are: none"),
        ('name = "r"\n[[pass]]\nname = "verify"\nmax_error = 1' + "0" * 400, "max_error is 1000"),
    ],
)
def test_refused(text, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.from_toml(text)


@pytest.mark.parametrize(
    "names",
    [
        "prune normalize",
        "replace prune",
        "replace quantize",
        "quantize prune",
        "replace calibrate",
        "verify replace",
        "verify verify",
    ],
)
def test_passes_in_the_wrong_order(names):
    before, after = names.split()
    steps = [{"name": name} for name in ("normalize", before, after)]
    order = (
        "normalize, float_activations, calibrate, prune, quantize, embeddings, fuse_attention, ranges, activations, "
        "cache_prompt, compress_cache, fuse_cached_attention, linear_attention, experts, replace, fuse_lut, fuse_norm, "
        "unpad, verify"
    )
    message = f"'{after}' follows pass '{before}', expected the order: {order}"
    with pytest.raises(RecipeError, match=message):
        Recipe.from_dict({"name": "r", "pass": steps})


def test_unknown_names_and_missing_files(tmp_path):
    with pytest.raises(
        RecipeError, match=r"unknown recipe 'sparse-encode'; the recipes are: .*did you mean 'sparse-encoder'"
    ):
        Recipe.load("sparse-encode")
    with pytest.raises(RecipeError, match=r"none\.toml' does not exist"):
        Recipe.load(tmp_path / "none.toml")
    with pytest.raises(RecipeError, match="is a folder, expected a TOML file"):
        Recipe.load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="cannot be read as UTF-8"):
        Recipe.load(tmp_path / "binary.toml")


def option_of(recipe: Recipe, pass_name: str, option: str):
    return next(getattr(step.options, option) for step in recipe.passes if step.name == pass_name)


def test_with_options():
    recipe = NAMED["sparse-bf16"]
    changed = recipe.with_options({"sparsity": 0.7, "prune.exclude": "*head*", "max_error": 1, "layers": {"a": 0}})
    assert option_of(changed, "prune", "sparsity") == 0.7
    assert option_of(changed, "prune", "exclude") == ("*head*",)
    assert option_of(changed, "verify", "max_error") == 1.0
    assert option_of(changed, "prune", "layers") == {"a": 0.0}
    assert option_of(recipe, "prune", "sparsity") == 0.5
    assert recipe.with_options({}) == recipe


@pytest.mark.parametrize(
    ("name", "options"),
    [("sparse-int8", {"group_size": 32, "bits": 4}), ("sparse-int4", {"bits": 8})],
)
def test_options_that_depend_on_each_other_are_changed_together(name, options):
    changed = NAMED[name].with_options(options)
    assert {option: option_of(changed, "quantize", option) for option in options} == options
    with pytest.raises(RecipeError, match=r"pass 'quantize': symmetric is false, which needs bits = 4"):
        NAMED[name].with_options({"bits": 8, "symmetric": False})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsty": 0.5}, "has no option 'sparsty'; did you mean 'sparsity'"),
        ({"verify.sparsity": 0.5}, "has no option 'verify.sparsity'"),
        ({"quantize.bits": 4}, "has no option 'quantize.bits'"),
        (
            {"exclude": ["a"]},
            "'exclude' is ambiguous .*: fuse_attention.exclude, fuse_cached_attention.exclude, prune.exclude, "
            "replace.exclude",
        ),
        ({"sparsity": 1.5}, "pass 'prune': sparsity is 1.5"),
        ({"": 1}, "has no option ''"),
        ({3: 1}, "has no option '3'"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(RecipeError, match=message):
        NAMED["sparse-bf16"].with_options(options)


def test_settings_of_the_command_line():
    assert parse_setting("sparsity=0.7") == ("sparsity", 0.7)
    assert parse_setting("prune.exclude = ['a', 'b=c']") == ("prune.exclude", ["a", "b=c"])
    assert parse_setting("scope=global") == ("scope", "global")
    assert parse_setting("x=a\ny=1") == ("x", "a\ny=1")
    for text in ("sparsity", "=3"):
        with pytest.raises(RecipeError, match="not of the form name=value"):
            parse_setting(text)


@pytest.mark.parametrize("fuses_others", [False, True])
def test_what_is_selected_of_attentions_is_for_those_with_a_cache_and_without(fuses_others):
    recipe = Recipe.load("long-context")
    if fuses_others:
        recipe = recipe.with_pass("fuse_cached_attention")
    changed = recipe.with_options({"select": ["a*"], "compress_cache.exclude": "b"})
    selected = {
        step.name: (step.options.select, step.options.exclude)
        for step in changed.passes
        if step.name in ("fuse_attention", "compress_cache", "fuse_cached_attention")
    }
    others = {"fuse_cached_attention": (("a*",), ())} if fuses_others else {}
    assert selected == {"fuse_attention": (("a*",), ()), "compress_cache": (("a*",), ("b",))} | others


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
OPTION_NAMES = st.sampled_from(sorted({name for entry in PASSES.values() for name in entry.options_type.names()}))
STEPS = st.dictionaries(OPTION_NAMES | st.text(max_size=5), VALUES, max_size=4).flatmap(
    lambda options: st.sampled_from(sorted(PASSES)).map(lambda name: options | {"name": name})
)
TABLES = st.fixed_dictionaries({"name": st.text(max_size=5), "pass": st.lists(STEPS, max_size=3)})


@examples(300)
@given(TABLES | st.dictionaries(st.sampled_from(["name", "description", "pass"]) | st.text(max_size=4), VALUES))
def test_any_table_is_a_recipe_or_a_recipe_error(table):
    try:
        recipe = Recipe.from_dict(table)
    except RecipeError:
        return
    assert Recipe.from_toml(recipe.to_toml()) == recipe


@examples(300)
@given(st.text(st.sampled_from("[]{}=.\"'\n,#passnme0.5-e") | st.characters(), max_size=60))
@example("name='a'\n[[pass]]\nname='verify'\nmax_error=" + "[" * 5000)
def test_any_text_is_a_recipe_or_a_recipe_error(text):
    with contextlib.suppress(RecipeError):
        Recipe.from_toml(text)


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=10)), st.floats(0, 0.99))
def test_awkward_values_survive_toml(name, globs, sparsity):
    steps = [{"name": "prune", "exclude": globs, "layers": dict.fromkeys(globs, sparsity)}]
    recipe = Recipe.from_dict({"name": "n" + name, "description": name, "pass": steps})
    assert Recipe.from_toml(recipe.to_toml()) == recipe


@pytest.mark.parametrize(
    "form", [{"weights": "int8"}, {"weights": "int4"}, {"pattern": "4x1"}, {"weights": "int8", "cache": "codes"}]
)
def test_reproducible_is_set_in_all_passes_that_replace_attention(form):
    recipe = Recipe.of(**form).reproducing("everywhere")
    steps = [step.options for step in recipe.passes if "reproducible" in step.options.names()]
    assert len(steps) == 2 and all(options.reproducible == "everywhere" for options in steps)
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert recipe.with_options({"reproducible": None}) == Recipe.of(**form) == Recipe.of(**form).reproducing(None)


@pytest.mark.parametrize("form", [{"weights": "bf16"}, {"sparsity": 0.5}, {"sparsity": 0.5, "pattern": "2:4"}])
def test_layers_whose_bits_depend_on_the_cpu_refuse_reproducible(form):
    with pytest.raises(
        RecipeError, match=r"makes layers whose bits depend on the CPU .*; give weights='int8', 'int6', 'int5' or"
    ):
        Recipe.of(**form).reproducing("everywhere")


def test_reproducible_needs_attention_in_bf16():
    with pytest.raises(RecipeError, match='reproducible = "everywhere" needs precision = "bf16"; precision is "f32"'):
        Recipe.of(cache="float32").reproducing("everywhere")


def test_reproducible_needs_a_pass_that_replaces_attention():
    recipe = Recipe.of(weights="int8").without_pass("fuse_attention")
    assert recipe.reproducing("everywhere").replaces_attention  # by fuse_cached_attention
    recipe = recipe.without_pass("fuse_cached_attention")
    for one in (recipe, Recipe("unchanged", "", ())):
        with pytest.raises(RecipeError, match=r"has no pass that replaces attention, .*; add pass 'fuse_attention' wi"):
            one.reproducing("everywhere")
        assert one.reproducing(None) == one


def test_passes_of_one_name_are_told_apart_by_number():
    recipe = Recipe.from_toml(PRUNE + 'select = ["a"]\n[[pass]]\nname = "prune"\nselect = ["b"]\n')
    changed = recipe.with_options({"prune.2.sparsity": 0.7, "prune.1.scope": "global"})
    assert [(step.options.sparsity, step.options.scope) for step in changed.passes] == [(0.5, "global"), (0.7, "layer")]
    changed = recipe.with_options({"prune.exclude": "c"})
    assert [step.options.exclude for step in changed.passes] == [("c",), ("c",)]
    for name in ("sparsity", "prune.sparsity"):
        with pytest.raises(RecipeError, match=rf"'{name}' is ambiguous .*: prune.1.sparsity, prune.2.sparsity"):
            recipe.with_options({name: 0.7})
    for name in ("prune.0.sparsity", "prune.3.sparsity", "prune.2.prune.sparsity"):
        with pytest.raises(RecipeError, match="has no option"):
            recipe.with_options({name: 0.7})


@pytest.mark.parametrize(
    ("form", "name", "value", "numbers"),
    [
        ({"weights": "int8"}, "storage", "small", [3]),
        ({"weights": "int8"}, "replace.storage", "2:4", [3]),
        ({"weights": "int8"}, "quantized_only", True, [2, 3]),
        ({"weights": "int8"}, "keep_stored", False, [1, 2, 3]),
        ({"weights": "int8", "method": "gptq"}, "damping", 0.5, [1]),
        ({"weights": "int8", "method": "gptq"}, "quantize.act_order", False, [1]),
        ({"weights": "int4", "group_size": 64}, "symmetric", True, [1]),
        ({"weights": "int4", "group_size": 64}, "quantize.zero_points", "minimum", [1]),
        ({"weights": "int4"}, "subgroup_size", 32, [1]),
        ({"weights": "int4"}, "quantized_only", True, [2]),
        ({"weights": "int8", "sparsity": 0.8, "pattern": "4x1"}, "fixed_ranges", "all", [1]),
    ],
)
def test_an_option_is_for_the_passes_that_have_it(form, name, value, numbers):
    recipe, option = Recipe.of(**form), name.rpartition(".")[2]
    changed = recipe.with_options({name: value})
    before, after = (
        [getattr(step.options, option) for step in one.passes if option in step.options.names()]
        for one in (recipe, changed)
    )
    assert [number for number, new in enumerate(after, 1) if new == value] == numbers
    assert all(new in (old, value) for old, new in zip(before, after, strict=True))


def test_options_that_several_passes_have_are_ambiguous():
    for name, form in (("method", {"weights": "int8"}), ("storage", {"pattern": "2:4"}), ("bits", {"weights": "int4"})):
        with pytest.raises(RecipeError, match=rf"'{name}' is ambiguous .*: \w+\.1\.{name}, \w+\.2\.{name}"):
            Recipe.of(**form).with_options({name: 8 if name == "bits" else "2:4"})


def test_numbers_of_numpy():
    np = pytest.importorskip("numpy")
    changed = NAMED["sparse-bf16"].with_options({"sparsity": np.float32(0.5), "max_rows": np.int64(3)})
    assert type(option_of(changed, "prune", "sparsity")) is float and option_of(changed, "calibrate", "max_rows") == 3
    assert Recipe.from_toml(changed.to_toml()) == changed
    for value in (np.float32("nan"), np.bool_(True), np.ones(1)):
        with pytest.raises(RecipeError, match="sparsity is"):
            NAMED["sparse-bf16"].with_options({"sparsity": value})


def test_a_recipe_that_only_verifies_runs(tmp_path):
    recipe = ortolan.Recipe.from_dict({"name": "check", "pass": [{"name": "verify", "seconds": 0.0}]})
    report = ortolan.optimize_onnx(ir.to_proto(tiny.mlp()), recipe=recipe)
    assert all(error.relative_l2 == 0 for error in report.output_error)

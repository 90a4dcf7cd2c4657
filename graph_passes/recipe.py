"""Recipes: ordered lists of passes with their options, from a target format (forms.py) or a TOML file.

name = "mine"
description = "one line"

[[pass]]
name = "prune"
sparsity = 0.5          # any option of the pass
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortolan.errors import ArgumentTypeError, RecipeError, listing, suggestion, wrong_type

from .forms import PRESETS, Form
from .names import AUTO, FORMAT_OPTIONS
from .options import PassOptions, read_options
from .passes.plan.quantize import QuantizeOptions
from .passes.plan.replace import ReplaceOptions, ReplaceRule
from .registry import PASSES

if TYPE_CHECKING:
    from .report.search import AutoReport

# Options that `Recipe.with_options` sets for all passes of one name.
_OF_ALL = ("select", "exclude", "may_grow", "fuse", "quantized_only", "keep_stored", "precision", "reproducible")
# Passes that replace attention; they share `select`, `exclude`, `precision` and `reproducible`.
_OF_ATTENTIONS = {"fuse_attention", "compress_cache", "fuse_cached_attention"}


@dataclass(frozen=True)
class RecipeStep:
    """One pass of a recipe."""

    name: str
    options: PassOptions


@dataclass(frozen=True)
class Recipe:
    """The passes that optimize a model: `Recipe.of(weights="int4")`, `Recipe.load("int8")`, `Recipe.load("my.toml")`.

    A recipe without passes leaves the model unchanged.

    Attributes:
        name: The name that reports show.
        description: One line for reports.
        passes: The passes in order, each with its options.
        search: Measurements of `ortolan.search`, if it found this recipe.

    Raises:
        RecipeError: The passes are in the wrong order, or no operator supports the weights of a pass `quantize`.
    """

    name: str
    description: str
    passes: tuple[RecipeStep, ...]
    search: AutoReport | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check the order of the passes."""
        order = list(PASSES)
        for before, after in pairwise(step.name for step in self.passes):
            if order.index(after) < order.index(before) or before == "verify":
                raise RecipeError(
                    f"recipe {self.name!r}: pass {after!r} follows pass {before!r}, expected the order: "
                    f"{', '.join(order)}, with verify at most once; move it"
                )
        options = [step.options for step in self.passes]
        rules = [ReplaceRule(one) for one in options if isinstance(one, ReplaceOptions)]
        for one in options if rules else ():
            if isinstance(one, QuantizeOptions):
                reasons = [rule.replacement.why_not(1, one.quantization) for rule in rules]
                if None not in reasons:
                    raise RecipeError(
                        f"recipe {self.name!r}: no pass 'replace' supports layers of pass 'quantize' with bits = "
                        f"{one.bits}: such a layer {reasons[0]}"
                    )

    @staticmethod
    def names() -> list[str]:
        """Return the names of the presets; "auto" is not one of them."""
        return sorted(PRESETS)

    @classmethod
    def of(cls, **choices: Any) -> Recipe:
        """Return the recipe of a target format.

        Args:
            choices: weights, group_size, sparsity, pattern, method, cache and ignore, as for `optimize_onnx`.

        Raises:
            ArgumentTypeError: An option is unknown or has the wrong type.
            RecipeError: A value is not allowed, or values contradict each other.
        """
        form = _changed(Form(), choices)
        return cls._of_form(form, _call(form.changes()) or "no change", form.describe())

    @classmethod
    def _of_form(cls, form: Form, name: str, description: str) -> Recipe:
        return cls.from_dict({"name": name, "description": description, "pass": form.passes()})

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str], **choices: Any) -> Recipe:
        """Return a preset, or the recipe of a TOML file.

        Args:
            name_or_path: A preset, or a path: it ends in .toml, contains a folder, or is a Path.
            choices: Options of the target format that change a preset, as for `Recipe.of`.

        Raises:
            ArgumentTypeError: An argument has the wrong type, or an option is unknown.
            RecipeError: The preset is unknown, or the file is missing or not a recipe.
        """
        try:
            text = os.fsdecode(name_or_path)
        except TypeError:
            expected = (
                f"a name ({listing(cls.names())}), the path of a .toml file or a Recipe (for a dict: Recipe.from_dict)"
            )
            raise wrong_type("recipe", name_or_path, expected) from None
        if isinstance(name_or_path, str) and not text.endswith(".toml") and os.path.basename(text) == text:
            return cls._preset(text, choices)
        if choices:
            raise RecipeError(
                f"{next(iter(choices))} cannot be combined with recipe file {text!r}, which defines the target format; "
                "leave it out, or change the file"
            )
        path = Path(text)
        if path.is_dir():
            raise RecipeError(f"recipe file {text!r} is a folder, expected a TOML file")
        try:
            content = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise RecipeError(
                f"recipe file {text!r} does not exist; the built-in recipes are: {listing(cls.names())}"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"recipe file {text!r} cannot be read as UTF-8 text: {error}") from error
        return cls.from_toml(content, where=f"recipe {text!r}")

    @classmethod
    def _preset(cls, name: str, choices: Mapping[str, Any]) -> Recipe:
        if name == AUTO:
            raise RecipeError(f"recipe {AUTO!r} is measured for each model; call ortolan.search(model)")
        if name not in PRESETS:
            raise RecipeError(
                f"unknown recipe {name!r}; the recipes are: {listing([*cls.names(), AUTO])}; "
                f"or give the path of a .toml file{suggestion(name, [*cls.names(), AUTO])}"
            )
        preset = PRESETS[name]
        if not choices:
            return cls._of_form(preset.form, name, preset.description)
        form = _changed(preset.form, choices)
        changed = {key: value for key, value in form.changes().items() if key in choices}
        return cls._of_form(form, ", ".join(filter(None, (name, _call(changed)))), form.describe())

    @classmethod
    def from_toml(cls, text: str, where: str = "recipe") -> Recipe:
        """Return the recipe of a TOML text; `where` opens error messages.

        Raises:
            RecipeError: The text is not TOML, or not a recipe.
        """
        try:
            table = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise RecipeError(f"{where} is not valid TOML: {error}") from None
        return cls.from_dict(table, where)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "recipe") -> Recipe:
        """Return the recipe that `to_dict` returned; `where` opens error messages.

        Raises:
            RecipeError: The table is not a recipe.
        """
        known = ("name", "description", "pass")
        for key in table:
            if key not in known:
                raise RecipeError(
                    f"{where}: unknown key {key!r}, known ones are: {listing(known)}"
                    f"{suggestion(key, known)}; options of a pass belong under its [[pass]]"
                )
        for key in ("name", "description"):
            if not isinstance(table.get(key, ""), str):
                raise RecipeError(f"{where}: {key} is {table[key]!r}, expected a string")
        if not table.get("name"):
            raise RecipeError(f'{where} has no name; add a line like: name = "my-recipe"')
        steps = table.get("pass")
        if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
            raise RecipeError(
                f"{where} has no [[pass]]; the passes are: {listing(PASSES)}; to leave a model unchanged, write: "
                "pass = []"
            )
        passes = tuple(_read_step(step, f"{where}, pass {number}") for number, step in enumerate(steps, 1))
        return cls(table["name"], table.get("description", ""), passes)

    def to_dict(self) -> dict[str, Any]:
        """Return all passes with all options, defaults included."""
        steps = []
        for step in self.passes:
            values = {name: getattr(step.options, name) for name in step.options.names()}
            plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
            steps.append({"name": step.name} | {name: value for name, value in plain.items() if value is not None})
        return {"name": self.name, "description": self.description, "pass": steps}

    def to_toml(self) -> str:
        """Return the recipe as TOML text, which `load` and `from_toml` read."""
        table = self.to_dict()
        lines = [f"{key} = {_toml(table[key])}" for key in ("name", "description")]
        lines += [] if self.passes else ["pass = []"]
        for step in table["pass"]:
            lines += ["", "[[pass]]", *(f"{key} = {_toml(value)}" for key, value in step.items())]
        return "\n".join(lines) + "\n"

    def with_pass(self, name: str, **options: Any) -> Recipe:
        """Return the recipe with one more pass, placed in the required order, after other passes of that name.

        Raises:
            RecipeError: The pass or an option is unknown, or a value is not allowed.
        """
        step = _read_step({"name": name, **options}, f"recipe {self.name!r}, pass {name!r}")
        order = list(PASSES)
        at = sum(order.index(one.name) <= order.index(name) for one in self.passes)
        return replace(self, passes=(*self.passes[:at], step, *self.passes[at:]))

    def without_pass(self, name: str) -> Recipe:
        """Return the recipe without its passes of this name."""
        return replace(self, passes=tuple(step for step in self.passes if step.name != name))

    def with_prompt(self) -> Recipe:
        """Return the recipe with pass cache_prompt.

        Raises:
            RecipeError: The recipe has no pass compress_cache.
        """
        names = [step.name for step in self.passes]
        if "compress_cache" not in names:
            raise RecipeError(
                f"prompt needs pass 'compress_cache', which recipe {self.name!r} does not have; give cache='float32' "
                "or 'codes', or add the pass"
            )
        return self if "cache_prompt" in names else self.with_pass("cache_prompt")

    def for_equal_caches(self, host: str) -> Recipe:
        """Return the recipe for a host that gives all caches one shape: compressed caches get `equal_rows`.

        Args:
            host: The host's name, for errors.

        Raises:
            RecipeError: The recipe has a prompt or cache inputs that the host does not support.
        """
        steps = []
        for step in self.passes:
            values = {key: getattr(step.options, key) for key in step.options.names()}
            if step.name == "cache_prompt":
                raise RecipeError(
                    f"recipe {self.name!r} makes a prompt part of the model, but {host} does not count its tokens; "
                    "leave the prompt out, or give the path of the ONNX file and serve it with ortolan.generate"
                )
            if step.name == "compress_cache":
                if values["window"] or values["sinks"]:
                    raise RecipeError(
                        f"window = {values['window']} and sinks = {values['sinks']} of pass 'compress_cache' need "
                        f"inputs that {host} does not pass on, expected 0; or give the path of the ONNX file and serve "
                        "it with ortolan.generate"
                    )
                if (values["keys"], values["values"]) != ("float32", "float32"):
                    values["equal_rows"] = True
                options = read_options(type(step.options), values, f"pass {step.name!r}, for {host}")
                step = replace(step, options=options)
            steps.append(step)
        return replace(self, passes=tuple(steps))

    def with_options(self, options: Mapping[str, Any]) -> Recipe:
        """Return the recipe with some options changed.

        Args:
            options: Values by name: `{"sparsity": 0.7}`, or `{"prune.sparsity": 0.7}` if two passes have the option.
                "prune.1.sparsity" is that of the first of several prune passes. Options such as "select", "exclude"
                and "fuse" are set in all passes of one name. An option that has an effect in only some of these passes
                is set only there. "select", "exclude", "precision" and "reproducible" are set in all passes that
                replace attention.

        Raises:
            ArgumentTypeError: `options` is not a mapping.
            RecipeError: No pass has the option, a name is ambiguous, or a value is not allowed.
        """
        if not isinstance(options, Mapping):
            raise wrong_type("options", options, 'a dict such as {"sparsity": 0.7}')
        # All options of a pass change together, because a value may be allowed only with another new value.
        changes: list[dict[str, Any]] = [{} for _ in self.passes]
        for name, value in options.items():
            found = self._meant(str(name))
            option = str(name).rpartition(".")[2]
            passes = {self.passes[index].name for index in found}
            for_all = option in _OF_ALL and (len(passes) == 1 or passes <= _OF_ATTENTIONS)
            if len(found) > 1 and not for_all:
                choices = listing(self._full_name(index, option) for index in found)
                raise RecipeError(f"option {name!r} is ambiguous in recipe {self.name!r}; give one of: {choices}")
            for index in found:
                changes[index][option] = value
        steps = []
        for step, change in zip(self.passes, changes, strict=True):
            values = {key: getattr(step.options, key) for key in step.options.names()} | change
            steps.append(replace(step, options=read_options(type(step.options), values, f"pass {step.name!r}")))
        return replace(self, passes=tuple(steps))

    @property
    def replaces_attention(self) -> bool:
        """Return True if a pass replaces attention."""
        return any(step.name in _OF_ATTENTIONS for step in self.passes)

    def reproducing(self, where: str | None) -> Recipe:
        """Return the recipe with option `reproducible` in all passes that replace attention.

        Args:
            where: "everywhere" for the same bits on every CPU; None: the recipe is unchanged.

        Raises:
            RecipeError: The value is not allowed, the recipe stores layers in bf16, whose bits depend on the CPU, or it
                has no pass that replaces attention.
        """
        if where is None:
            return self
        rounds = any(step.name == "quantize" or getattr(step.options, "weight_bits", None) for step in self.passes)
        replacing = [step.options for step in self.passes if isinstance(step.options, ReplaceOptions)]
        makes_bf16 = any(one.op == "SparseAMXMatMul" and not one.quantized_only for one in replacing) and not rounds
        if makes_bf16 or any(one.op == "MaskedMatMul" for one in replacing):
            raise RecipeError(
                f"reproducible is {where!r}, but recipe {self.name!r} makes layers whose bits depend on the CPU (bf16, "
                "or skipped inputs); give weights='int8', 'int6', 'int5' or 'int4'"
            )
        if not self.replaces_attention:
            raise RecipeError(
                f"reproducible is {where!r}, but recipe {self.name!r} has no pass that replaces attention, and the "
                "bits of ONNX Runtime's attention depend on the CPU; add pass 'fuse_attention' with precision = "
                '"bf16", or leave reproducible out'
            )
        return self.with_options({"reproducible": where})

    def _full_name(self, index: int, option: str) -> str:
        """Return the unambiguous name of an option: prune.sparsity, or prune.2.sparsity for the second prune pass."""
        name = self.passes[index].name
        same = [other for other, step in enumerate(self.passes) if step.name == name]
        number = f".{same.index(index) + 1}" if len(same) > 1 else ""
        return f"{name}{number}.{option}"

    def _meant(self, name: str) -> list[int]:
        """Return the indices of the passes in which `with_options` sets an option; never empty."""
        found = self._owners(name)
        having = [index for index in found if self.passes[index].options.has(name.rpartition(".")[2])]
        of_one_name = len({self.passes[index].name for index in found}) == 1
        return having if having and of_one_name else found

    def _owners(self, name: str) -> list[int]:
        """Return the indices of the passes with an option of this name; never empty."""
        _, _, option_name = name.rpartition(".")
        found = [
            index
            for index, step in enumerate(self.passes)
            if option_name in step.options.names()
            and name in (option_name, f"{step.name}.{option_name}", self._full_name(index, option_name))
        ]
        if not found:
            known = [
                self._full_name(index, option)
                for index, step in enumerate(self.passes)
                for option in step.options.names()
            ]
            close = suggestion(option_name, [option.rpartition(".")[2] for option in known])
            hint = close or f"; its options are: {listing(known)}"
            raise RecipeError(f"recipe {self.name!r} has no option {name!r}{hint}")
        return found


def parse_setting(text: str) -> tuple[str, Any]:
    """Return "sparsity=0.7" as ("sparsity", 0.7). The value is TOML; if it is not valid TOML, it is a string.

    Raises:
        RecipeError: The text has no "=" or no name.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise RecipeError(f"setting {text!r} is not of the form name=value, such as sparsity=0.7")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def _changed(form: Form, choices: Mapping[str, Any]) -> Form:
    for name in choices:
        if name not in FORMAT_OPTIONS:
            raise ArgumentTypeError(
                f"unknown option {name!r}, expected one of: {listing(FORMAT_OPTIONS)}"
                f"{suggestion(str(name), FORMAT_OPTIONS)}"
            )
    values = {name: getattr(form, name) for name in form.names()} | dict(choices)
    if values["method"] is None:
        values["method"] = ()
    return Form(**values)


def _call(choices: Mapping[str, Any]) -> str:
    """Return the options as the name of a recipe: "weights=int8, sparsity=0.5"."""
    words = {name: "+".join(value) if isinstance(value, tuple) else value for name, value in choices.items()}
    return ", ".join(f"{name}={value or 'none'}" for name, value in words.items())


def _read_step(step: Mapping[str, Any], where: str) -> RecipeStep:
    name = step.get("name")
    if not isinstance(name, str) or name not in PASSES:
        raise RecipeError(
            f"{where}: name is {name!r}, expected one of: {listing(PASSES)}{suggestion(str(name), PASSES)}"
        )
    values = {key: value for key, value in step.items() if key != "name"}
    return RecipeStep(name, read_options(PASSES[name].options_type, values, f"{where} ({name})"))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON and TOML have the same escapes, except that TOML also escapes DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)

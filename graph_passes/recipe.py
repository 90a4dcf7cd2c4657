"""A recipe: the ordered list of passes with their options. Recipes are TOML files; unknown keys are refused.

name = "sparse-bf16"
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
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ortolan.errors import RecipeError, listing, suggestion

from .options import PassOptions, read_options
from .registry import PASSES

FOLDER = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class RecipeStep:
    """One pass of a recipe."""

    name: str
    options: PassOptions


@dataclass(frozen=True)
class Recipe:
    """What to do to a model. Load one with Recipe.load("sparse-bf16") or Recipe.load("my.toml")."""

    name: str
    description: str
    passes: tuple[RecipeStep, ...]

    def __post_init__(self) -> None:
        order = list(PASSES)
        for before, after in pairwise(step.name for step in self.passes):
            if order.index(after) < order.index(before) or before == "verify":
                raise RecipeError(
                    f"recipe {self.name!r}: pass {after!r} comes after pass {before!r}, expected the order: "
                    f"{', '.join(order)}, which comes once; move it"
                )

    @staticmethod
    def names() -> list[str]:
        """The recipes that come with Ortolan."""
        return sorted(path.stem for path in FOLDER.glob("*.toml"))

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Recipe:
        """A recipe by name, or from a TOML file: anything that ends in .toml or has a folder in it is a path."""
        try:
            text = os.fsdecode(name_or_path)
        except TypeError:
            raise RecipeError(
                f"recipe is a {type(name_or_path).__name__}, expected a name ({listing(cls.names())}), the path of a "
                ".toml file or a Recipe (of a dict: Recipe.from_dict)"
            ) from None
        is_path = not isinstance(name_or_path, str) or text.endswith(".toml") or os.path.basename(text) != text
        if not is_path and text not in cls.names():
            raise RecipeError(
                f"unknown recipe {text!r}; the recipes are: {listing([*cls.names(), 'auto'])}; "
                f"or give the path of a .toml file{suggestion(text, [*cls.names(), 'auto'])}"
            )
        path = Path(text) if is_path else FOLDER / f"{text}.toml"
        if path.is_dir():
            raise RecipeError(f"recipe file {text!r} cannot be read: it is a folder, expected a TOML file")
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
    def from_toml(cls, text: str, where: str = "recipe") -> Recipe:
        """Reads a recipe from TOML text. `where` opens the error messages."""
        try:
            table = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise RecipeError(f"{where} is not valid TOML: {error}") from None
        return cls.from_dict(table, where)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "recipe") -> Recipe:
        """The inverse of to_dict."""
        known = ("name", "description", "pass")
        for key in table:
            if key not in known:
                raise RecipeError(
                    f"{where}: unknown key {key!r}, known ones are: {listing(known)}"
                    f"{suggestion(key, known)}; options of a pass stand under its [[pass]]"
                )
        for key in ("name", "description"):
            if not isinstance(table.get(key, ""), str):
                raise RecipeError(f"{where}: {key} is {table[key]!r}, expected a text")
        if not table.get("name"):
            raise RecipeError(f'{where} has no name; add a line like: name = "my-recipe"')
        steps = table.get("pass", [])
        if not isinstance(steps, list) or not steps or not all(isinstance(step, Mapping) for step in steps):
            raise RecipeError(f"{where} has no [[pass]]; the passes are: {listing(PASSES)}")
        passes = tuple(_read_step(step, f"{where}, pass {number}") for number, step in enumerate(steps, 1))
        return cls(table["name"], table.get("description", ""), passes)

    def to_dict(self) -> dict[str, Any]:
        """All names and all options, defaults included: what really ran."""
        steps = []
        for step in self.passes:
            values = {name: getattr(step.options, name) for name in step.options.names()}
            plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
            steps.append({"name": step.name} | {name: value for name, value in plain.items() if value is not None})
        return {"name": self.name, "description": self.description, "pass": steps}

    def to_toml(self) -> str:
        table = self.to_dict()
        lines = [f"{key} = {_toml(table[key])}" for key in ("name", "description")]
        for step in table["pass"]:
            lines += ["", "[[pass]]", *(f"{key} = {_toml(value)}" for key, value in step.items())]
        return "\n".join(lines) + "\n"

    def with_prompt(self) -> Recipe:
        """The recipe with a pass cache_prompt in front of compress_cache, if it has none. Raises RecipeError for a
        recipe without compress_cache."""
        names = [step.name for step in self.passes]
        if "compress_cache" not in names:
            raise RecipeError(
                f"a prompt was given, but recipe {self.name!r} has no pass 'compress_cache', which puts it into the "
                "graph; give recipe 'cached-prompt' or 'long-context', or add the pass"
            )
        if "cache_prompt" in names:
            return self
        at = names.index("compress_cache")
        step = RecipeStep("cache_prompt", PASSES["cache_prompt"].options_type())
        return replace(self, passes=(*self.passes[:at], step, *self.passes[at:]))

    def with_options(self, options: Mapping[str, Any]) -> Recipe:
        """The recipe with some options changed: {"sparsity": 0.7}, or {"prune.sparsity": 0.7} where two passes have it.

        Of several passes of one name, "prune.1.sparsity" is the first one's, "prune.2.sparsity" the second's;
        "prune.select" and "prune.exclude" are for all of them.

        Raises RecipeError for a name that no pass of this recipe has.
        """
        if not isinstance(options, Mapping):
            raise RecipeError(f'options is a {type(options).__name__}, expected a dict such as {{"sparsity": 0.7}}')
        # All of a pass are changed at once: one may be allowed only with the other.
        changes: list[dict[str, Any]] = [{} for _ in self.passes]
        for name, value in options.items():
            found = self._owners(str(name))
            option = str(name).rpartition(".")[2]
            of_layers = option in ("select", "exclude") and len({self.passes[index].name for index in found}) == 1
            if len(found) > 1 and not of_layers:
                choices = listing(self._full_name(index, option) for index in found)
                raise RecipeError(f"option {name!r} is ambiguous in recipe {self.name!r}: say which one: {choices}")
            for index in found:
                changes[index][option] = value
        steps = []
        for step, change in zip(self.passes, changes, strict=True):
            values = {key: getattr(step.options, key) for key in step.options.names()} | change
            steps.append(replace(step, options=read_options(type(step.options), values, f"pass {step.name!r}")))
        return replace(self, passes=tuple(steps))

    def _full_name(self, index: int, option: str) -> str:
        """What only this option of this pass is called: prune.sparsity, or prune.2.sparsity of the second one."""
        name = self.passes[index].name
        same = [other for other, step in enumerate(self.passes) if step.name == name]
        number = f".{same.index(index) + 1}" if len(same) > 1 else ""
        return f"{name}{number}.{option}"

    def _owners(self, name: str) -> list[int]:
        """The indices of the passes that have this option; never empty."""
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
            raise RecipeError(f"recipe {self.name!r} has no option {name!r}; its options are: {listing(known)}{close}")
        return found


def parse_setting(text: str) -> tuple[str, Any]:
    """ "sparsity=0.7" as ("sparsity", 0.7). The value is TOML; what is not TOML is taken as a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise RecipeError(f"setting {text!r} is not of the form name=value, such as sparsity=0.7")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


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
        # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)

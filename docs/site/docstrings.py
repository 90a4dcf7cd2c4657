"""An extension of griffe: lines "name: what it is" of a docstring become a list, as the sources write parameters."""

from __future__ import annotations

import re
from typing import Any

import griffe

_NAMED = re.compile(r"^(\w+(?:, \w+)*): ")


class NamedLines(griffe.Extension):
    """Of functions: their parameters; of classes: attributes and what __init__ takes."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = as_list(func.docstring.value, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is not None:
            cls.docstring.value = as_list(cls.docstring.value, set(cls.members))


def as_list(text: str, names: set[str]) -> str:
    """Lines that begin with one of the names, or several, become items; what follows indented belongs to its item."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        match = _NAMED.match(line)
        if match and set(match[1].split(", ")) <= names:
            if not inside and lines and lines[-1]:
                lines.append("")
            inside = True
            lines.append(f"- `{match[1]}`: {line[match.end() :]}")
        else:
            if inside and line and not line.startswith(" "):
                if lines[-1]:
                    lines.append("")
                inside = False
            lines.append(line)
    return "\n".join(lines)

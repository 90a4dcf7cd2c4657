"""The errors that Ortolan raises: what is wrong, what was expected and what to do.

Errors about arguments are also Python's own: `ArgumentError`, `RecipeError` and `CalibrationError` are `ValueError`,
`ArgumentTypeError` is `TypeError`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches


class OrtolanError(Exception):
    """Base class of all errors of this package."""


class ArgumentError(OrtolanError, ValueError):
    """An argument has a value that is out of range or does not fit the other arguments."""


class ArgumentTypeError(OrtolanError, TypeError):
    """An argument has the wrong type, or its name is unknown."""


class ModelError(OrtolanError):
    """A model cannot be read, or has a structure that Ortolan does not support."""


class OutputError(OrtolanError):
    """A result cannot be written to its output path."""


class RecipeError(ArgumentError):
    """A recipe, a pass or an option is unknown, has a bad value, or contradicts another one."""


class CalibrationError(ArgumentError):
    """Calibration data does not fit the model's inputs, or is needed and missing."""


class NothingToReplaceError(OrtolanError):
    """The recipe found no layer of the model to work on."""


class VerificationError(OrtolanError):
    """The outputs of the optimized model differ too much from the original's. Nothing was saved."""


class LibraryError(OrtolanError):
    """The native library is missing or does not load."""


class SessionError(OrtolanError):
    """ONNX Runtime could not open or run a model."""


def wrong_type(name: str, value: object, expected: str) -> ArgumentTypeError:
    """Return the error for an argument of the wrong type: `threads is a str, expected an integer`."""
    return ArgumentTypeError(f"{name} is {type_name(value)}, expected {expected}")


def type_name(value: object) -> str:
    """Return the name of a value's type with its article: "a str", "an int"."""
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def listing(names: Iterable[str]) -> str:
    """Return the names, sorted and joined for an error message."""
    return ", ".join(sorted(names)) or "none"


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" if one of the known names is close, else an empty string."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks; if it is empty, the error's type."""
    return " ".join(str(error).split()) or type(error).__name__


def missing_model(path: str | bytes | os.PathLike[str]) -> str:
    """Return an error message for a missing model file; for a name like one on the Hugging Face Hub, with advice."""
    name = os.fsdecode(path)
    is_file = name.endswith((".onnx", ".gguf", ".ort"))
    message = f"model file{'' if is_file else ' or folder'} {name!r} does not exist"
    # owner/name, without the extension of a model file
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) and not is_file:
        message += (
            "; if it is a model of the Hugging Face Hub, export it first, with "
            f"optimum-cli export onnx --model {name} FOLDER, and give the folder"
        )
    return message

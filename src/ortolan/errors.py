"""Every error that Ortolan raises on purpose. Each says what was found, what was expected and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches


class OrtolanError(Exception):
    """Base of all errors of this package."""


class ModelError(OrtolanError):
    """A model that cannot be read, or that Ortolan cannot work on."""


class OutputError(OrtolanError):
    """An output path to which the result cannot be written."""


class RecipeError(OrtolanError):
    """An unknown recipe, pass or option, or a value out of its range."""


class CalibrationError(OrtolanError):
    """Feeds that do not fit the model's inputs, or inputs for which none can be made up."""


class NothingToReplaceError(OrtolanError):
    """A model in which the recipe found no layer to work on."""


class VerificationError(OrtolanError):
    """An optimized model whose answers are not good enough. Nothing was saved."""


class LibraryError(OrtolanError):
    """The native library is missing or does not load."""


class SessionError(OrtolanError):
    """ONNX Runtime could not open or run a model."""


def listing(names: Iterable[str]) -> str:
    """The names, for the end of an error message."""
    return ", ".join(sorted(names)) or "none"


def suggestion(name: str, known: Iterable[str]) -> str:
    """'; did you mean …?' if one of the known names is close, else nothing."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def one_line(error: BaseException) -> str:
    """An error's message without its line breaks; where there is none, the error's type."""
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

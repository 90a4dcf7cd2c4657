"""Model folders of ONNX Runtime GenAI: genai_config.json names the ONNX file and session options of each part.

An optimized folder contains the operator library, and its configuration loads it, because GenAI only loads libraries
from inside the folder.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortolan.errors import ModelError, OutputError
from ortolan.library import LIBRARY_NAME, get_library_path

CONFIG_NAME = "genai_config.json"
_OPTIONS, _LIBRARY = "session_options", "custom_ops_library"
_MAX_BYTES = 16 << 20  # limit for genai_config.json; real files have a few thousand bytes


@dataclass(frozen=True)
class GenaiConfig:
    """A genai_config.json that loads Ortolan's library for one ONNX file. path: the original. content: the new JSON."""

    path: Path
    content: dict[str, Any]

    def to_json(self) -> str:
        """Return the configuration as JSON.

        Raises:
            ModelError: It cannot be written as JSON.
        """
        try:
            text = json.dumps(self.content, indent=4, ensure_ascii=False)
            text.encode()
            return text
        except UnicodeEncodeError as error:
            raise ModelError(
                f"{str(self.path)!r} holds half of a surrogate pair: {error}; export the model again"
            ) from None
        except RecursionError:  # json.dumps has a lower depth limit than json.loads
            raise ModelError(f"{str(self.path)!r} is nested too deeply; export the model again") from None

    def write(self, into: Path) -> None:
        """Write the configuration and the operator library into a folder.

        Raises:
            LibraryError: The library is missing.
            OutputError: A file cannot be written.
        """
        library = get_library_path()
        try:
            (into / CONFIG_NAME).write_text(self.to_json(), encoding="utf-8")
            # Copy the file, because a hard link would change with the installed library.
            shutil.copyfile(library, into / LIBRARY_NAME)
        except OSError as error:
            raise OutputError(f"cannot write into {str(into)!r}: {error.strerror or error}") from error


def read_genai_config(path: Path, model_name: str) -> GenaiConfig:
    """Read a genai_config.json, and add Ortolan's library to the session options of parts that use file `model_name`.

    If a part has no session options, ONNX Runtime GenAI uses those of the decoder, so the library is added there.

    Raises:
        ModelError: The configuration is malformed, does not name the file, or already loads another library.
    """
    content = _read(path)
    model = content["model"]
    parts = [part for part in _parts(model) if os.path.normpath(part["filename"]) == model_name]
    if not parts:
        known = sorted({part["filename"] for part in _parts(model)})
        raise ModelError(
            f"{str(path)!r} names {', '.join(map(repr, known)) or 'no file'} as parts of the model, but the folder's "
            f"ONNX file is {model_name!r}; correct 'filename', or give the path of the ONNX file"
        )
    for part in parts:
        owner = part if _OPTIONS in part else _object(path, model, "decoder", "'model'")
        options = _object(path, owner, _OPTIONS, f"the part of {model_name!r}")
        other = options.get(_LIBRARY, LIBRARY_NAME)
        if not isinstance(other, str) or os.path.basename(other) != LIBRARY_NAME:
            raise ModelError(
                f"{str(path)!r} has {_LIBRARY} = {other!r} for {model_name!r}, expected {LIBRARY_NAME!r} or no entry, "
                "because onnxruntime-genai loads one library only; remove the entry if the model does not need it"
            )
        options[_LIBRARY] = LIBRARY_NAME
    config = GenaiConfig(path, content)
    config.to_json()  # raises now, before any long work, if the configuration cannot be written
    return config


def decoder_file(path: Path) -> str | None:
    """Return the decoder's ONNX file, if a genai_config.json names one.

    Raises:
        ModelError: The configuration is malformed.
    """
    decoder = _read(path)["model"].get("decoder")
    name = decoder.get("filename") if isinstance(decoder, dict) else None
    return name if isinstance(name, str) else None


def _read(path: Path) -> dict[str, Any]:
    """Return the configuration, an object in which "model" is an object."""
    advice = "; export the model again, or give the path of the ONNX file"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelError(f"{str(path)!r} has {path.stat().st_size} bytes, expected at most {_MAX_BYTES}{advice}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # the file is not JSON or not UTF-8
        raise ModelError(f"{str(path)!r} is not a JSON text: {error}{advice}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ModelError(f"{str(path)!r} has no object 'model', expected what onnxruntime-genai writes{advice}")
    return content


def _object(path: Path, owner: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """Return the object with this key, adding an empty one if it is missing."""
    found = owner.setdefault(key, {})
    if not isinstance(found, dict):
        raise ModelError(f"{str(path)!r} has {key} = {found!r} in {where}, expected an object; correct or remove it")
    return found


def _parts(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all objects that name a file: encoder, decoder, embedding, the models of a pipeline, ..."""
    found, level = [], [model]
    while level:
        found += [item for item in level if isinstance(item.get("filename"), str)]
        inside = [value for item in level for value in item.values()]
        inside += [entry for value in inside if isinstance(value, list) for entry in value]
        level = [value for value in inside if isinstance(value, dict)]
    return found

"""The state of a training on disk: written beside, then renamed, so that a crash leaves the one before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ortolan.errors import OutputError

from .report import CurvePoint

_FILE = "checkpoint.pt"


@dataclass
class State:
    """After `step` steps. settings: what must be the same to go on; masks: which weights are kept."""

    settings: dict[str, Any]
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    parameters: dict[str, Any] = field(default_factory=dict)
    masks: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    curve: list[CurvePoint] = field(default_factory=list)


def save(folder: Path, state: State) -> None:
    """Raises OutputError."""
    temporary = folder / f"{_FILE}.new"
    content = {**vars(state), "curve": [vars(point) for point in state.curve]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / _FILE)
    except OSError as error:
        raise OutputError(f"cannot write a checkpoint to {str(folder)!r}: {error.strerror}") from error


def load(folder: Path, settings: Mapping[str, Any]) -> State | None:
    """None: there is none. Raises OutputError for one that is damaged, or of another training."""
    path = folder / _FILE
    if not path.is_file():
        return None
    advice = "give another checkpoint folder, or begin anew with resume=False (--no-resume)"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        curve = [CurvePoint(**point) for point in content.pop("curve")]
        state = State(**content, curve=curve)
    except Exception as error:  # torch raises whatever it trips over in a damaged file
        raise OutputError(f"checkpoint {str(path)!r} cannot be read: {error}; {advice}") from error
    for name, value in settings.items():
        if state.settings.get(name) != value:
            raise OutputError(
                f"checkpoint {str(path)!r} is of a training with {name} = {state.settings.get(name)!r}, this one has "
                f"{value!r}; {advice}"
            )
    return state

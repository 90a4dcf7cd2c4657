"""The state of a training on disk. A crash leaves the previous checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ortolan.errors import OutputError
from ortolan.graph_passes.files.output import new_file

from .report import CurvePoint

_FILE = "checkpoint.pt"


@dataclass
class State:
    """The state after some steps.

    Attributes:
        settings: The settings of the training. Only a training with equal settings can continue from this state.
        tokens: The number of tokens that were trained on.
        masks: Maps the name of a pruned weight to a mask of its elements that are kept.
    """

    settings: dict[str, Any]
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    parameters: dict[str, Any] = field(default_factory=dict)
    masks: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    curve: list[CurvePoint] = field(default_factory=list)


def save(folder: Path, state: State) -> None:
    """Write a checkpoint, or replace it. Raises OutputError if it cannot be written."""
    content = {**vars(state), "curve": [vars(point) for point in state.curve]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write a checkpoint to {str(folder)!r}: {error.strerror}") from error
    with new_file(folder / _FILE) as file:
        torch.save(content, file)


def load(folder: Path, settings: Mapping[str, Any]) -> State | None:
    """Return the state of a checkpoint; None if there is no checkpoint.

    Raises:
        OutputError: The checkpoint is damaged, or belongs to a training with other settings.
    """
    path = folder / _FILE
    if not path.is_file():
        return None
    advice = "give another checkpoint folder, or start again with resume=False (--no-resume)"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        curve = [CurvePoint(**point) for point in content.pop("curve")]
        state = State(**content, curve=curve)
    except Exception as error:  # for damaged files, torch raises many types of exceptions
        raise OutputError(f"checkpoint {str(path)!r} cannot be read: {error}; {advice}") from error
    for name, value in settings.items():
        if state.settings.get(name) != value:
            raise OutputError(
                f"checkpoint {str(path)!r} has {name} = {state.settings.get(name)!r}, expected {value!r}; {advice}"
            )
    return state

"""The rotary embedding of GGUF files: frequencies that are scaled for contexts longer than those of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..graph_builder import ModelBuildError
from .file import GgufFile, StoredWeight

_FACTORS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
TENSORS = (_FACTORS, _SHORT, _LONG)


@dataclass(frozen=True)
class Rotary:
    """Fields of LlamaConfig. context: the most tokens for which they hold."""

    theta: float
    dim: int
    factors: tuple[float, ...] | None
    magnitude: float
    context: int


def read_rotary(
    file: GgufFile, name: str, weights: Mapping[str, StoredWeight], head_dim: int, context: int
) -> tuple[Rotary, list[str]]:
    """Return the rotary embedding of a file of architecture `name`, and notes for the user.

    Raises:
        ModelBuildError: The frequencies are scaled in a way that is not supported, or malformed.
    """
    dim = file.integer(f"{name}.rope.dimension_count", head_dim)
    if dim > head_dim or dim % 2:
        raise ModelBuildError(
            f"{file.path}: {name}.rope.dimension_count is {dim}, expected an even number up to {head_dim}, the size of "
            "a head"
        )
    theta = file.positive(f"{name}.rope.freq_base", 10000.0)
    factors, magnitude, notes = np.ones(dim // 2), 1.0, list[str]()
    if _FACTORS in weights:
        factors = _tensor(weights, _FACTORS, dim)
    kind = file.metadata.get(f"{name}.rope.scaling.type", "linear")
    if _SHORT in weights:
        factors = _tensor(weights, _SHORT, dim)
        magnitude = file.positive(f"{name}.rope.scaling.attn_factor", 1.0)
        trained = file.integer(f"{name}.rope.scaling.original_context_length", context)
        if trained < context:
            notes.append(
                f"the context is {trained} tokens, not {context}: longer texts have other rotary factors "
                f"({_LONG}), which are not supported"
            )
            context = trained
    elif kind == "linear":
        factors = factors * file.positive(f"{name}.rope.scaling.factor", 1.0)
    elif kind == "yarn":
        factors, magnitude = _yarn(file, name, theta, dim)
    elif kind != "none":
        raise ModelBuildError(
            f"{file.path}: {name}.rope.scaling.type is {kind!r}, expected none, linear or yarn, or the tensor "
            f"{_SHORT!r}; other scaling of rotary frequencies is not supported"
        )
    given = None if (factors == 1).all() else tuple(factors.tolist())
    return Rotary(theta, dim, given, magnitude, context), notes


def _tensor(weights: Mapping[str, StoredWeight], name: str, dim: int) -> np.ndarray:
    factors = weights[name].floats().ravel()
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelBuildError(f"tensor {name!r} holds values that are not positive")
    if len(factors) != dim // 2:
        raise ModelBuildError(f"tensor {name!r} has {len(factors)} values, expected {dim // 2}")
    return factors


def _yarn(file: GgufFile, name: str, theta: float, dim: int) -> tuple[np.ndarray, float]:
    """Return the factors and the magnitude of YaRN.

    Pairs that turn more than `fast` times within the original context stay. Pairs that turn less than `slow` times are
    divided by the factor. Between these, both are blended. Reference: YaRN, section 3.2 (arXiv 2309.00071).
    """
    prefix = f"{name}.rope.scaling"
    if file.metadata.get(f"{prefix}.yarn_log_multiplier"):
        raise ModelBuildError(f"{file.path} has {prefix}.yarn_log_multiplier, which is not supported")
    if theta <= 1:
        raise ModelBuildError(f"{file.path}: {name}.rope.freq_base is {theta}, expected more than 1 for YaRN")
    factor, trained = file.positive(f"{prefix}.factor"), file.integer(f"{prefix}.original_context_length")
    if factor < 1:
        raise ModelBuildError(f"{file.path}: {prefix}.factor is {factor}, expected at least 1 for YaRN")
    fast, slow = (file.positive(f"{prefix}.yarn_beta_{part}", value) for part, value in (("fast", 32.0), ("slow", 1.0)))

    def pair(turns: float) -> float:
        """Return the pair that turns this often within the original context."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(0, math.floor(pair(fast))), min(dim - 1, math.ceil(pair(slow)))
    blend = np.clip((np.arange(dim // 2) - low) / max(0.001, high - low), 0, 1)
    magnitude = file.positive(f"{prefix}.attn_factor", 1.0) * (1 + 0.1 * math.log(factor))
    return 1 / (blend / factor + (1 - blend)), magnitude

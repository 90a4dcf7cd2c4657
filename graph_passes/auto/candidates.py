"""The formats that the search tries for a linear layer, and the recipe for a choice of formats."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ortolan import _native

from ..operators.sparse_amx_matmul_storage import BF16, bitmaps_are_fast
from ..passes.plan.prune import SPARSITY_TOLERANCE
from ..recipe import Recipe

NAME = "auto"
ORIGINAL = "original"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A format of a layer, as options of the passes that produce it.

    Attributes:
        name: The name in reports and stored times.
        op: The operator.
        quantize: Options of pass quantize.
        prune: Options of pass prune.
        replace: Options of pass replace.
        timed_as: Another candidate with the same speed, which differs only in how weights are chosen.
        calibrated: Weights are fitted to the calibration feeds.
    """

    name: str
    op: str
    quantize: Mapping[str, Any] = field(default_factory=dict)
    prune: Mapping[str, Any] = field(default_factory=dict)
    replace: Mapping[str, Any] = field(default_factory=dict)
    timed_as: str | None = None
    calibrated: bool = False

    @property
    def needs_two_four(self) -> bool:
        """True if the candidate supports only weights that are already 2:4 sparse."""
        return not self.prune and self.replace.get("storage") == "2:4"

    @property
    def timing(self) -> str:
        """The name of the candidate whose time is measured."""
        return self.timed_as or self.name


_INT4 = {"bits": 4, "group_size": 128, "symmetric": False}
_INT4_32 = _INT4 | {"group_size": 32}
_INT4_16 = {"bits": 4, "subgroup_size": 16}
_INT4_SYMMETRIC = {"bits": 4, "group_size": 128}
_GPTQ = {"method": "gptq"}
_INT8 = {"bits": 8}
_REDUCED = _INT8 | {"reduce_range": True}
ROWS = 256  # number of input rows on which the error of each layer is measured
HELD_OUT = 4  # every fourth feed is held out from fitting, to evaluate the whole model
_BLOCKS = {"min_sparsity": _native.LEAST_ZERO_BLOCKS}
_TWO_FOUR = {"storage": "2:4"}

# Ordered by increasing error: a candidate is considered only if it is faster than all candidates before it. VNNISpMM
# skips zeros that a weight already has; so does SparseAMXMatMul, for 2:4 sparse weights and on CPUs where it is faster.
CANDIDATES: tuple[Candidate, ...] = (
    Candidate("bf16", "SparseAMXMatMul"),
    Candidate("int8", "SparseAMXMatMul", quantize=_INT8),
    Candidate("int8 reduced range", "SparseAMXMatMul", quantize=_REDUCED),
    Candidate("int8 4x1", "VNNISpMM", quantize=_INT8, replace=_BLOCKS),
    Candidate("int4/16 gptq", "W4A8MatMul", quantize=_INT4_16 | _GPTQ, timed_as="int4/16", calibrated=True),
    Candidate("int4/16", "W4A8MatMul", quantize=_INT4_16),
    Candidate("int4/32 gptq", "W4A8MatMul", quantize=_INT4_32 | _GPTQ, timed_as="int4/32", calibrated=True),
    Candidate("int4/32", "W4A8MatMul", quantize=_INT4_32),
    Candidate("int4 gptq", "W4A8MatMul", quantize=_INT4 | _GPTQ, timed_as="int4", calibrated=True),
    Candidate("int4", "W4A8MatMul", quantize=_INT4),
    Candidate(
        "int4 2:4 gptq",
        "SparseAMXMatMul",
        quantize=_INT4_SYMMETRIC | _GPTQ,
        replace=_TWO_FOUR,
        timed_as="int4 2:4",
        calibrated=True,
    ),
    Candidate("int4 2:4", "SparseAMXMatMul", quantize=_INT4_SYMMETRIC, replace=_TWO_FOUR),
)
# Candidates if the user gave a sparsity.
PRUNED: tuple[Candidate, ...] = (
    Candidate("pruned bf16", "SparseAMXMatMul", prune={"pattern": "unstructured"}),
    Candidate("pruned int8", "SparseAMXMatMul", quantize=_INT8, prune={"pattern": "unstructured"}),
    Candidate("pruned int8 2:4", "SparseAMXMatMul", quantize=_INT8, prune={"pattern": "2:4"}, replace=_TWO_FOUR),
    Candidate(
        "pruned int4 2:4", "SparseAMXMatMul", quantize=_INT4_SYMMETRIC, prune={"pattern": "2:4"}, replace=_TWO_FOUR
    ),
    Candidate("pruned int8 4x1", "VNNISpMM", quantize=_INT8, prune={"pattern": "4x1"}, replace=_BLOCKS),
)


def candidates_for(calibrated: bool, sparsity: float | None, reproducible: str | None = None) -> list[Candidate]:
    """Return the candidates that the user's data allow and that are fast on this CPU.

    sparsity: The sparsity of pruned formats; None: no format is pruned. reproducible: "everywhere": only formats with
    the same bits on every CPU.
    """
    found = _candidates_for(calibrated, sparsity)
    return found if reproducible is None else [candidate for candidate in found if candidate.quantize]


def _candidates_for(calibrated: bool, sparsity: float | None) -> list[Candidate]:
    found = [candidate for candidate in CANDIDATES if calibrated or not candidate.calibrated]
    if not _native.gains_from_pairs():
        found = [candidate for candidate in found if candidate.quantize is not _REDUCED]
    # Weights without calibration have the speed of calibrated ones and a larger error, so they are dropped.
    fitted = {candidate.timed_as for candidate in found}
    found = [candidate for candidate in found if candidate.name not in fitted]
    if sparsity is None:
        return found
    method = "sparsegpt" if calibrated else "magnitude"
    for one in PRUNED:
        if _is_possible(one, sparsity):
            prune: dict[str, Any] = {"method": method, "sparsity": sparsity, "inputs": "original", **one.prune}
            found.append(Candidate(one.name, one.op, one.quantize, prune, one.replace))
    return found


def _is_possible(pruned: Candidate, sparsity: float) -> bool:
    """Return True if kernels for the pattern are fast on this CPU, and the pattern allows the sparsity."""
    pattern = pruned.prune["pattern"]
    if pattern == "unstructured":
        return bitmaps_are_fast(pruned.quantize.get("bits", BF16))
    return pattern != "2:4" or abs(sparsity - 0.5) <= SPARSITY_TOLERANCE


def for_timing(candidate: Candidate) -> Candidate:
    """Return the candidate without calibration, which has the same speed."""
    prune = dict(candidate.prune) | ({"method": "magnitude"} if candidate.prune else {})
    quantize = dict(candidate.quantize) | ({"method": "rtn"} if candidate.quantize else {})
    return Candidate(candidate.timing, candidate.op, quantize, prune, candidate.replace)


def make_recipe(
    layers: Mapping[Candidate, Sequence[str]],
    *,
    attention: bool = False,
    embeddings: bool = False,
    verify: Mapping[str, Any] | None = None,
    calibrate: bool = True,
    rows: int | None = None,
    description: str = "chosen by measurement",
) -> Recipe:
    """Return the recipe that gives each layer its format.

    layers: Names of the layers by candidate. embeddings: Store embedding tables in int8 if a layer is quantized.
    verify: Options of pass verify; None: the recipe has no such pass. rows: Input rows recorded for each layer; None:
    the pass's default.
    """
    # Layers with calibrated formats come first. Each is then fitted to its inputs in the original model, whatever the
    # formats of other layers, so the fit can be reused in all recipes (measure/fits.py).
    order = sorted((candidate for candidate, names in layers.items() if names), key=lambda one: not one.calibrated)
    globs = {candidate: list(map(escape, layers[candidate])) for candidate in order}
    steps: list[dict[str, Any]] = [{"name": "normalize"}]
    if calibrate:
        steps.append({"name": "calibrate", "held_out": HELD_OUT} | ({} if rows is None else {"max_rows": rows}))
    steps += _steps("prune", ((candidate.prune, select) for candidate, select in globs.items()))
    steps += _steps("quantize", ((candidate.quantize, select) for candidate, select in globs.items()))
    has_integers = any(candidate.quantize for candidate in order)
    if embeddings and has_integers:
        steps.append({"name": "embeddings"})
    if attention:
        steps += [{"name": name, "precision": "bf16"} for name in ("fuse_attention", "fuse_cached_attention")]
        steps.append({"name": "linear_attention"})
    steps += _steps("replace", ((dict(one.replace) | {"op": one.op}, select) for one, select in globs.items()))
    if attention and has_integers:
        steps.append({"name": "fuse_norm"})
    if attention:
        steps.append({"name": "unpad"})
    if verify is not None:
        steps.append({"name": "verify", **verify})
    return Recipe.from_dict({"name": NAME, "description": description, "pass": steps})


def _steps(name: str, parts: Iterator[tuple[Mapping[str, Any], Collection[str]]]) -> list[dict[str, Any]]:
    """Return one pass for all layers with the same options, because only layers of one pass can be joined."""
    found: list[tuple[Mapping[str, Any], list[str]]] = []
    for options, select in parts:
        if not options:
            continue
        same = next((others for known, others in found if known == options), None)
        if same is None:
            found.append((options, list(select)))
        else:
            same += select
    return [{"name": name, **options, "select": select} for options, select in found]


def escape(name: str) -> str:
    """Return a pattern that matches only this name."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)

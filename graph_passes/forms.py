"""The target format of layers (Form), the passes that produce it, and the presets.

    weights     bf16, int8, int6, int5 or int4
    group_size  inputs of a group. int4, int5, int6: 16 (default) or 32, with an integer scale and zero point each, and
                a float scale for 256 inputs. int4 also: 64 or 128, with a float scale and zero point each
    sparsity    fraction of weights to prune, in a pattern: unstructured, 4x1 (blocks of four outputs) or N:M.
                Without a sparsity, patterns 4x1 and 2:4 are for weights that already have such zeros
    method      how weights are rounded (names.ROUNDING) and pruned (names.PRUNING)
    cache       KV cache of attention: codes (4-bit keys, int8 values) or float32
    ignore      layers that keep a higher precision

The operator follows from the format: W4A8MatMul for 4 to 6 bits if weights are not pruned, VNNISpMM for 4x1,
MaskedMatMul for layers that skip inputs, SparseAMXMatMul for all others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ortolan import _native
from ortolan.errors import RecipeError

from .names import (
    BLOCKS,
    CACHES,
    FEW_BITS,
    FORMAT_GROUP_SIZES,
    FORMAT_OPTIONS,
    METHODS,
    PRUNING,
    ROUNDING,
    TWO_FOUR,
    UNSTRUCTURED,
    WEIGHTS,
)
from .options import HEADS, Globs, PassOptions, takes
from .weights.pruners.masks import MAX_OF_GROUP, Pattern
from .weights.quantizers.grid import EIGHT_BIT_GROUP, GROUPS_OF_SUBGROUPS, SUBGROUP_SIZES

_BITS = {"int8": 8, **FEW_BITS}
_ONLY_SUBGROUPS = ("int5", "int6")
_SAME = 1e-3  # tolerance of the sparsity given with an N:M pattern, such as 0.667 for 1:3

Pass = dict[str, Any]


@dataclass(frozen=True)
class Form(PassOptions):
    """The target format of layers.

    Attributes:
        method: At most one method of rounding and one of pruning.
        skipped_inputs: Fraction of each input that is skipped; only presets set it.
        prompt: Include a prompt in the model; only presets set it.

    Raises:
        ArgumentTypeError: A value has the wrong type.
        RecipeError: A value is not allowed, or values contradict each other.
    """

    weights: str | None = field(default=None, metadata=takes("str", choices=WEIGHTS, none=True))
    group_size: int | None = field(default=None, metadata=takes("int", choices=FORMAT_GROUP_SIZES, none=True))
    sparsity: float | None = field(default=None, metadata=takes("float", low=0.0, below=1.0, none=True))
    pattern: str | None = field(default=None, metadata=takes("str", none=True))
    method: tuple[str, ...] = field(default=(), metadata=takes("texts", choices=METHODS))
    cache: str | None = field(default=None, metadata=takes("str", choices=CACHES, none=True))
    ignore: Globs = field(default=(HEADS,), metadata=takes("globs"))
    skipped_inputs: float | None = field(default=None, metadata=takes("float", low=0.0, below=1.0, none=True))
    prompt: bool = field(default=False, metadata=takes("bool"))

    def __post_init__(self) -> None:
        """Check single values and their combinations."""
        # Checked first, so that an invalid size does not hide the missing weights='int4'.
        if self.group_size is not None and self.weights not in FEW_BITS:
            raise RecipeError(
                f"group_size is {self.group_size!r}, which needs weights='int4', 'int5' or 'int6'; leave it out"
            )
        super().__post_init__()
        self._check_method()
        self._check_pattern()
        self._check_rounding()
        self._check_groups()
        if self.skipped_inputs is not None:
            for name in ("sparsity", "pattern", "group_size", "method"):
                self._refuse(name, "with the preset 'activation-sparse', which neither prunes nor fits weights")
            if self.weights in FEW_BITS:
                self._refuse("weights", "'bf16' or 'int8' with the preset 'activation-sparse'")

    def _refuse(self, name: str, expected: str) -> None:
        value = getattr(self, name)
        if value not in (None, ()):
            shown = value[0] if isinstance(value, tuple) and len(value) == 1 else value
            raise RecipeError(f"{name} is {shown!r}, expected {'' if name == 'weights' else 'no value '}{expected}")

    def _check_method(self) -> None:
        for kind, names in (("rounding", ROUNDING), ("pruning", PRUNING)):
            if sum(one in names for one in self.method) > 1:
                raise RecipeError(
                    f"method is {self.method!r}, expected at most one method of {kind}: {', '.join(names)}"
                )
        given = next((one for one in self.method if one in PRUNING), None)
        if given is not None and self.sparsity is None:
            raise RecipeError(f"method is {given!r}, which prunes, but sparsity is missing; give one, such as 0.5")
        given = next((one for one in self.method if one in ROUNDING), None)
        if given is not None and self.stored not in _BITS:
            raise RecipeError(
                f"method is {given!r}, which rounds to integers, but weights is {self.weights!r}; give "
                "weights='int8' or 'int4'"
            )

    def _check_pattern(self) -> None:
        if self.sparsity == 0:
            raise RecipeError("sparsity is 0, expected a number above 0 and below 1; leave it out to prune no weights")
        pattern = None if self.pattern is None else Pattern.read(self.pattern)
        if self.pattern is not None and pattern is None:
            raise RecipeError(
                f"pattern is {self.pattern!r}, expected 'unstructured', '4x1', or 'N:M' with N < M <= {MAX_OF_GROUP}, "
                "such as '2:4'"
            )
        if pattern is not None and pattern.of:
            share = 1 - pattern.kept / pattern.of
            already = self.sparsity is None and self.pattern == TWO_FOUR
            if not already and (self.sparsity is None or abs(share - self.sparsity) > _SAME):
                found = "missing" if self.sparsity is None else f"{self.sparsity:g}"
                raise RecipeError(f"sparsity is {found}, expected {share:g} with pattern {self.pattern!r}")
        if self.pattern == UNSTRUCTURED and self.sparsity is None and self.weights != "int4":
            raise RecipeError("pattern is 'unstructured', but sparsity is missing; give one, or leave the pattern out")
        if self.pattern == BLOCKS and self.weights not in (None, "int8"):
            raise RecipeError(f"weights is {self.weights!r}, expected 'int8' with pattern {BLOCKS!r}; leave it out")

    def _check_rounding(self) -> None:
        if "hqq" in self.method and (self.weights not in FEW_BITS or self.sparsity is not None):
            raise RecipeError(
                "method is 'hqq', but int8 and pruned weights have no zero points, which it needs; give 'gptq'"
            )

        if "hqq" in self.method and self._subgroup_size is not None:
            advice = "give 64 or 128, or another method" if self.weights == "int4" else "give another method"
            raise RecipeError(
                f"method is 'hqq', which fits fractional zero points, but group_size={self._subgroup_size} has "
                f"integers; {advice}"
            )

    def _check_groups(self) -> None:
        dense = self.sparsity is None and self.pattern is None
        if self.weights in _ONLY_SUBGROUPS and not dense:
            name = "sparsity" if self.sparsity is not None else "pattern"
            raise RecipeError(f"weights is {self.weights!r}, expected 'int8' or 'int4' with {name}; leave it out")
        if self.weights in _ONLY_SUBGROUPS and self.group_size not in (None, *SUBGROUP_SIZES):
            raise RecipeError(f"group_size is {self.group_size}, expected 16 or 32 with weights={self.weights!r}")
        if self.group_size == SUBGROUP_SIZES[0] and not dense:
            raise RecipeError(f"group_size is {self.group_size}, expected 32, 64 or 128 with pruned weights")

    @property
    def stored(self) -> str | None:
        """The type of stored weights; None: layers are unchanged."""
        if self.weights is not None:
            return self.weights
        if self.pattern == BLOCKS:
            return "int8"
        return None if self.sparsity is None and self.pattern is None and self.skipped_inputs is None else "bf16"

    @property
    def is_dense_int4(self) -> bool:
        """True if linear layers get 4 bits, by W4A8MatMul."""
        return self.weights == "int4" and self._has_few_bits

    @property
    def bit_widths(self) -> tuple[int, ...]:
        """The bits among which a search can choose for each layer of dense int4, in increasing order."""
        return (4, 8) if self._subgroup_size is None else (4, 5, 6, 8)

    @property
    def _has_few_bits(self) -> bool:
        """True if W4A8MatMul replaces linear layers."""
        return self.weights in FEW_BITS and self.sparsity is None and self.pattern is None

    @property
    def _subgroup_size(self) -> int | None:
        """The inputs that share an integer scale; None: groups have no subgroups."""
        wanted = self.group_size or SUBGROUP_SIZES[0]
        return wanted if self._has_few_bits and wanted in SUBGROUP_SIZES else None

    @property
    def keeps_stored(self) -> bool:
        """True for dense int8, which keeps weights that the model stores in 4 or 8 bits exactly."""
        dense = self.sparsity is None and self.pattern is None and self.skipped_inputs is None
        return dense and self.weights == "int8"

    @property
    def ignores_in_eight_bits(self) -> bool:
        """True if ignored layers get 8-bit weights in groups (W8A8MatMul) instead of bf16."""
        dense = self.sparsity is None and self.pattern is None and self.skipped_inputs is None
        return dense and self.stored in _BITS and bool(self.ignore)

    @property
    def stores_embeddings(self) -> bool:
        """True if embedding tables are quantized too."""
        return self.stored in _BITS

    @property
    def _group_size(self) -> int:
        """The inputs that share a floating-point scale."""
        return GROUPS_OF_SUBGROUPS[-1] if self._subgroup_size is not None else self.group_size or 128

    @property
    def fuses_attention(self) -> bool:
        """True if NoMADAttention replaces attention, and one operator replaces its QKV layers."""
        return (self.stored is not None or self.cache is not None) and self.skipped_inputs is None

    @property
    def fuses_norms(self) -> bool:
        """True if AddLayerNorm replaces each LayerNormalization that does not follow a linear layer.

        The operator gives the same bits on every CPU.
        """
        return self.stored in _BITS and self.fuses_attention

    @property
    def rounding(self) -> str:
        """The method of rounding."""
        default = "mse" if self.stored in FEW_BITS else "rtn"
        return next((one for one in self.method if one in ROUNDING), default)

    @property
    def pruning(self) -> str:
        """The method of pruning."""
        return next((one for one in self.method if one in PRUNING), "magnitude")

    @property
    def prunes_and_rounds(self) -> bool:
        """True if one step prunes and rounds, and compensates the errors of both."""
        return self.method == ("sparsegpt",) and self.stored in _BITS

    def changes(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        found = {name: getattr(self, name) for name in FORMAT_OPTIONS}
        return {name: value for name, value in found.items() if value != getattr(_PLAIN, name)}

    def describe(self) -> str:
        """Return the description of a recipe for this format."""
        words = []
        if self.sparsity is not None:
            unit = "" if self.pattern in (None, UNSTRUCTURED) else f" {self.pattern}"
            words.append(f"prune {self.sparsity:.0%}{unit} by {self.pruning}")
        elif self.pattern == TWO_FOUR:
            words.append("layers that already have 2:4 zeros")
        if self.stored is not None:
            groups = f" in groups of {self._subgroup_size or self._group_size}" if self.stored in FEW_BITS else ""
            how = f" by {self.rounding}" if self.stored in _BITS and not self.prunes_and_rounds else ""
            words.append(f"{self.stored} weights{groups}{how}")
        if self.skipped_inputs is not None:
            words.append(f"skip the smallest {self.skipped_inputs:.0%} of inputs")
        if self.cache is not None:
            words.append("KV cache with 4-bit keys and int8 values" if self.cache == "codes" else "float32 KV cache")
        if self.prompt:
            words.append("a prompt in the model")
        return "; ".join(words) or "no change"

    def passes(self, more_bits: Mapping[int, Sequence[str]] | None = None) -> list[Pass]:
        """Return the passes that produce this format.

        more_bits: Name patterns of layers that get 5, 6 or 8 bits, by bits; only for dense int4. 5 and 6 need
        subgroups. Layers with 8 bits become what ignored layers become.
        """
        more_bits = more_bits or {}
        if more_bits.get(8):
            eight = dataclasses.replace(self, ignore=(*self.ignore, *more_bits[8]))
            return eight.passes({bits: names for bits, names in more_bits.items() if bits != 8})
        steps: list[Pass] = [{"name": "normalize"}]
        if self.keeps_stored:
            steps.append({"name": "float_activations"})
        if self.stored is not None:
            steps += [{"name": "calibrate"}, *self._prune(), *self._quantize(more_bits)]
        if self.stores_embeddings:
            steps.append({"name": "embeddings"})
        precision = "f32" if self.stored is None else "bf16"
        if self.fuses_attention:
            steps.append({"name": "fuse_attention", "precision": precision})
        if self.skipped_inputs is not None:
            steps.append({"name": "activations", "sparsity": self.skipped_inputs, "exclude": list(self.ignore)})
        if self.prompt:
            steps.append({"name": "cache_prompt"})
        if self.cache is not None:
            values = "int8" if self.cache == "codes" else self.cache
            steps.append({"name": "compress_cache", "precision": precision, "keys": self.cache, "values": values})
        elif self.fuses_attention:
            steps.append({"name": "fuse_cached_attention", "precision": precision})
        if self.fuses_attention:
            steps.append({"name": "linear_attention"})
        if self.stored is not None:
            steps += [*self._experts(), *self._replace()]
        if self.fuses_norms:
            steps.append({"name": "fuse_norm"})
        if self.fuses_attention and self.cache is None:
            steps.append({"name": "unpad"})
        return [*steps, {"name": "verify"}]

    def _prune(self) -> list[Pass]:
        if self.sparsity is None:
            return []
        step: Pass = {"name": "prune", "method": self.pruning, "sparsity": self.sparsity, "exclude": list(self.ignore)}
        if self.pattern is not None:
            step["pattern"] = self.pattern
        if self.pattern == BLOCKS:
            step["keep_sparse"] = 0.5  # do not prune layers again that were pruned in training
        if self.prunes_and_rounds:
            step["weight_bits"] = _BITS[self.stored or ""]
            if self.stored == "int4":
                step["weight_group_size"] = self._group_size
        elif self.pruning == "sparsegpt":
            step["repair"] = True
        return [step]

    def _quantize(self, more_bits: Mapping[int, Sequence[str]]) -> list[Pass]:
        if self.stored not in _BITS:
            return []
        if self.pattern == BLOCKS:  # ignored layers too, because VNNISpMM supports only 8 bits
            return [{"name": "quantize", "method": self.rounding, "bits": 8}]
        if self.prunes_and_rounds:
            return []
        step: Pass = {"name": "quantize", "method": self.rounding, "bits": _BITS[self.stored]}
        step["exclude"] = list(self.ignore)
        if self._subgroup_size is not None:
            step |= {"subgroup_size": self._subgroup_size, "group_size": self._group_size}
        elif self.group_size is not None:
            step["group_size"] = self._group_size
            if self.is_dense_int4:
                step["symmetric"] = False
        others = [{**step, "bits": bits, "select": list(names)} for bits, names in more_bits.items() if names]
        step["exclude"] = [*self.ignore, *(name for names in more_bits.values() for name in names)]
        # The last pass quantizes the layers that the others excluded.
        eight = {"name": "quantize", "bits": 8, "group_size": EIGHT_BIT_GROUP}
        return [step, *others, *([eight] if self.ignores_in_eight_bits else [])]

    def _experts(self) -> list[Pass]:
        """Return the pass that keeps stored experts, and rounds float experts of a dense format."""
        dense = self.sparsity is None and self.pattern is None and self.skipped_inputs is None
        if not dense or self.stored not in _BITS:
            return []
        size = {} if self._subgroup_size is None else {"expert_subgroup_size": self._subgroup_size}
        return [{"name": "experts", "expert_bits": _BITS[self.stored], **size}]

    def _replace(self) -> list[Pass]:
        if self.pattern == BLOCKS:
            return [{"name": "replace", "op": "VNNISpMM"}]
        if self.skipped_inputs is not None:
            stored = {"weights": "bf16"} if self.stored == "bf16" else {}
            return [{"name": "replace", "op": "MaskedMatMul", **stored}]
        if self.keeps_stored:
            # Each operator also keeps weights that the model stores in the operator's format.
            return [
                {"name": "replace", "op": "W4A8MatMul"},
                {"name": "replace", "op": "W8A8MatMul", "keep_stored": True},
                {"name": "replace", "op": "SparseAMXMatMul", "keep_stored": True},
            ]
        # This step runs before SparseAMXMatMul, which would store ignored layers in bf16.
        eight: list[Pass] = [{"name": "replace", "op": "W8A8MatMul"}] if self.ignores_in_eight_bits else []
        if self._has_few_bits:
            return [{"name": "replace", "op": "W4A8MatMul"}, *eight]
        if self.pattern != TWO_FOUR:
            # A pruned model should be small even if dense weights are faster.
            stored = {} if self.sparsity is None else {"storage": "small"}
            return [*eight, {"name": "replace", "op": "SparseAMXMatMul", **stored}]
        step: Pass = {"name": "replace", "op": "SparseAMXMatMul", "storage": TWO_FOUR, "exclude": list(self.ignore)}
        if self.sparsity is None and self.stored in _BITS:
            step["quantized_only"] = True
        ignored = [{"name": "replace", "op": "SparseAMXMatMul", "select": list(self.ignore)}] if self.ignore else []
        return [step, *ignored]


_PLAIN = Form()


@dataclass(frozen=True)
class Preset:
    """A target format with a name."""

    form: Form
    description: str


PRESETS: Mapping[str, Preset] = {
    "int8": Preset(Form(weights="int8"), "int8 weights and word embeddings (SparseAMXMatMul)"),
    "int4": Preset(Form(weights="int4"), "4-bit weights in groups of 16, int8 heads and word embeddings (W4A8MatMul)"),
    "sparse-encoder": Preset(
        Form(sparsity=0.5, pattern=BLOCKS, method=("sparsegpt",)),
        "Prune 4x1 blocks and round to int8 in one step by SparseGPT (VNNISpMM); for encoders; needs calibration",
    ),
    "long-context": Preset(
        Form(cache="codes"),
        "KV cache with 4-bit keys and int8 values, a fifth of float32 (NoMADAttention); needs calibration",
    ),
    "cached-prompt": Preset(
        Form(cache="float32", prompt=True),
        "A prompt in the model, keys 30 % and values 50 % sparse; float32 cache for later tokens; needs a prompt",
    ),
    "activation-sparse": Preset(
        Form(weights="bf16", skipped_inputs=0.4),
        "Skip the smallest 40 % of each layer's inputs; bf16 weights (MaskedMatMul); needs calibration",
    ),
}

# The recipe for a model that stores quantized weights: they are kept exactly.
ADOPT: Mapping[str, Any] = {
    "name": "weights as stored",  # users cannot choose it
    "description": "Keep stored weights exactly: 4-bit (W4A8MatMul), int8 with zero blocks (VNNISpMM), int8 with "
    "groups (W8A8MatMul), other int8 and 2:4 sparse weights (SparseAMXMatMul)",
    "pass": [
        {"name": "normalize"},
        {"name": "float_activations"},
        {"name": "calibrate"},
        {"name": "fuse_attention", "precision": "bf16"},
        {"name": "fuse_cached_attention", "precision": "bf16"},
        {"name": "linear_attention"},
        {"name": "experts"},
        # min_sparsity is the fraction of zero blocks (four outputs, one input).
        {"name": "replace", "op": "VNNISpMM", "min_sparsity": _native.LEAST_ZERO_BLOCKS},
        # min_sparsity is needed because a weight with one or two inputs fits 2:4 without any zero.
        {"name": "replace", "op": "SparseAMXMatMul", "storage": TWO_FOUR, "quantized_only": True, "min_sparsity": 0.4},
        {"name": "replace", "op": "W4A8MatMul"},
        {"name": "replace", "op": "W8A8MatMul", "quantized_only": True},
        {"name": "replace", "op": "SparseAMXMatMul", "quantized_only": True},
        {"name": "fuse_norm"},
        {"name": "unpad"},
        {"name": "verify"},
    ],
}

# The recipe for a model whose quantized weights come from elsewhere (PassContext.given), such as a GGUF file.
IMPORT: Mapping[str, Any] = {
    "name": "import",
    "description": "Keep 4-bit (W4A8MatMul) and 8-bit (W8A8MatMul) weights exactly",
    "pass": [
        {"name": "normalize"},
        {"name": "embeddings"},
        {"name": "fuse_cached_attention", "precision": "bf16"},
        {"name": "experts"},
        {"name": "replace", "op": "W4A8MatMul"},
        {"name": "replace", "op": "W8A8MatMul"},
    ],
}

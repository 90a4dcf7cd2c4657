"""A form: what layers become, apart from how its numbers are found. And the passes that make it.

    weights     bf16, int8 or int4; of int4, group_size inputs share a scale
    sparsity    the share of weights that is pruned, by pattern: unstructured, 4x1 (blocks of four outputs) or N:M.
                The patterns 4x1 and 2:4 alone are for weights that have such zeros already
    method      how weights are rounded (rtn, mse, gptq, awq, hqq) and pruned (magnitude, wanda, sparsegpt)
    cache       of attention with a KV cache: 4-bit key codes, or floats
    ignore      layers that are not part of it

The operator follows: 4-bit weights that are not pruned run in W4A8MatMul, 4x1 in VNNISpMM, layers that skip inputs in
MaskedMatMul, all others in SparseAMXMatMul.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ortolan import _native
from ortolan.errors import RecipeError

from .options import HEADS, Globs, PassOptions, takes
from .weights.pruners.masks import MOST_OF_GROUP, Pattern
from .weights.quantizers.grid import EIGHT_BIT_GROUP, GROUP_SIZES

WEIGHTS = ("bf16", "int8", "int4")
ROUNDING = ("rtn", "mse", "gptq", "awq", "hqq")
PRUNING = ("magnitude", "wanda", "sparsegpt")
METHODS = (*ROUNDING, *PRUNING)
CACHES = ("codes", "float32")
BLOCKS = "4x1"
TWO_FOUR = "2:4"
UNSTRUCTURED = "unstructured"
_BITS = {"int8": 8, "int4": 4}
_SAME = 1e-3  # shares of N:M need not be written with more digits

Pass = dict[str, Any]


@dataclass(frozen=True)
class Form(PassOptions):
    """A point of the grid. Raises RecipeError for values that do not go together."""

    weights: str | None = field(default=None, metadata=takes("str", choices=WEIGHTS, none=True))
    group_size: int | None = field(default=None, metadata=takes("int", choices=GROUP_SIZES, none=True))
    sparsity: float | None = field(default=None, metadata=takes("float", low=0.0, below=1.0, none=True))
    pattern: str | None = field(default=None, metadata=takes("str", none=True))
    method: tuple[str, ...] = field(default=(), metadata=takes("texts", choices=METHODS))  # one of each kind
    cache: str | None = field(default=None, metadata=takes("str", choices=CACHES, none=True))
    ignore: Globs = field(default=(HEADS,), metadata=takes("globs"))
    # What only presets have: the share of each input that is skipped, and whether a prompt becomes part of the model.
    skipped_inputs: float | None = field(default=None, metadata=takes("float", low=0.0, below=1.0, none=True))
    prompt: bool = field(default=False, metadata=takes("bool"))

    def __post_init__(self) -> None:
        if self.group_size is not None and self.weights in (None, "bf16", "int8"):  # whatever the size
            raise RecipeError(f"group_size is {self.group_size!r}, which only weights='int4' has; leave it out")
        super().__post_init__()
        self._check_method()
        self._check_pattern()
        self._check_rounding()
        if self.skipped_inputs is not None:
            for name in ("sparsity", "pattern", "group_size", "method"):
                self._refuse(name, "with the preset 'activation-sparse', which rounds weights to nearest at most")
            if self.weights == "int4":
                self._refuse("weights", "'bf16' or 'int8' with the preset 'activation-sparse'")

    def _refuse(self, name: str, expected: str) -> None:
        value = getattr(self, name)
        if value not in (None, ()):
            shown = value[0] if isinstance(value, tuple) and len(value) == 1 else value
            raise RecipeError(f"{name} is {shown!r}, expected {'' if name == 'weights' else 'none '}{expected}")

    def _check_method(self) -> None:
        for kind, names in (("rounding", ROUNDING), ("pruning", PRUNING)):
            if sum(one in names for one in self.method) > 1:
                raise RecipeError(
                    f"method is {self.method!r}, expected one method of {kind} at most: {', '.join(names)}"
                )
        given = next((one for one in self.method if one in PRUNING), None)
        if given is not None and self.sparsity is None:
            raise RecipeError(f"method is {given!r}, which prunes, but sparsity is not given; give sparsity=0.5, say")
        given = next((one for one in self.method if one in ROUNDING), None)
        if given is not None and self.stored not in _BITS:
            raise RecipeError(
                f"method is {given!r}, which rounds to whole numbers, but weights is {self.weights!r}; give "
                "weights='int8' or 'int4'"
            )

    def _check_pattern(self) -> None:
        if self.sparsity == 0:
            raise RecipeError("sparsity is 0, expected a number above 0 and below 1; leave it out to prune nothing")
        pattern = None if self.pattern is None else Pattern.read(self.pattern)
        if self.pattern is not None and pattern is None:
            raise RecipeError(
                f"pattern is {self.pattern!r}, expected 'unstructured', '4x1', or 'N:M' with N < M <= {MOST_OF_GROUP}, "
                "such as '2:4'"
            )
        if pattern is not None and pattern.of:
            share = 1 - pattern.kept / pattern.of
            already = self.sparsity is None and self.pattern == TWO_FOUR
            if not already and (self.sparsity is None or abs(share - self.sparsity) > _SAME):
                found = "not given" if self.sparsity is None else f"{self.sparsity:g}"
                raise RecipeError(f"sparsity is {found}, but pattern {self.pattern!r} makes it {share:g}; give that")
        if self.pattern == UNSTRUCTURED and self.sparsity is None and self.weights != "int4":
            raise RecipeError(
                "pattern is 'unstructured', but sparsity is not given; give that, or leave the pattern out"
            )
        if self.pattern == BLOCKS and self.weights not in (None, "int8"):
            raise RecipeError(f"weights is {self.weights!r}, expected 'int8' with pattern {BLOCKS!r}; leave it out")

    def _check_rounding(self) -> None:
        if "hqq" in self.method and (self.weights != "int4" or self.sparsity is not None):
            raise RecipeError(
                "method is 'hqq', expected another one with int8 or pruned weights, which have no zero points; give "
                "'gptq'"
            )

    @property
    def stored(self) -> str | None:
        """How weights are stored; None: layers stay as they are."""
        if self.weights is not None:
            return self.weights
        if self.pattern == BLOCKS:
            return "int8"
        return None if self.sparsity is None and self.pattern is None and self.skipped_inputs is None else "bf16"

    @property
    def is_dense_int4(self) -> bool:
        """Whether layers become W4A8MatMul."""
        return self.weights == "int4" and self.sparsity is None and self.pattern is None

    @property
    def keeps_stored(self) -> bool:
        """Whether weights that the model stores in 4 or 8 bits are kept exactly: in dense int8, rounding them again
        would gain nothing."""
        dense = self.sparsity is None and self.pattern is None and self.skipped_inputs is None
        return dense and self.weights == "int8"

    @property
    def ignores_in_eight_bits(self) -> bool:
        """Whether layers that it ignores take 8 bits in groups (W8A8MatMul), else bf16."""
        dense = self.sparsity is None and self.pattern is None and self.skipped_inputs is None
        return dense and self.stored in _BITS and bool(self.ignore)

    @property
    def stores_embeddings(self) -> bool:
        """Whether tables of words are stored in few bits as well."""
        return self.stored in _BITS

    @property
    def _group_size(self) -> int:
        """Of int4. What is dense has short groups, with zero points that are fractions: the least error."""
        return self.group_size or (32 if self.is_dense_int4 else 128)

    @property
    def fuses_attention(self) -> bool:
        """Whether attention becomes one operator, and its query, key and value layers another."""
        return (self.stored is not None or self.cache is not None) and self.skipped_inputs is None

    @property
    def fuses_norms(self) -> bool:
        """Whether LayerNormalizations that are no layer's end become an operator, too. Layers of int8 and int4 have the
        same bits on every CPU, and so do encoders, then; with layers of bf16 it would gain nothing."""
        return self.stored in _BITS and self.fuses_attention

    @property
    def rounding(self) -> str:
        default = "mse" if self.stored == "int4" else "rtn"
        return next((one for one in self.method if one in ROUNDING), default)

    @property
    def pruning(self) -> str:
        return next((one for one in self.method if one in PRUNING), "magnitude")

    @property
    def prunes_and_rounds(self) -> bool:
        """Whether both are one step, which makes up for the errors of both."""
        return self.method == ("sparsegpt",) and self.stored in _BITS

    def changes(self) -> dict[str, Any]:
        """The values that are not the default."""
        found = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name in CHOICES}
        return {name: value for name, value in found.items() if value != getattr(_PLAIN, name)}

    def describe(self) -> str:
        """In words, for a recipe's description."""
        words = []
        if self.sparsity is not None:
            unit = "" if self.pattern in (None, UNSTRUCTURED) else f" {self.pattern}"
            words.append(f"prune {self.sparsity:.0%}{unit} by {self.pruning}")
        elif self.pattern == TWO_FOUR:
            words.append("layers that are 2:4 sparse already")
        if self.stored is not None:
            groups = f" in groups of {self._group_size}" if self.stored == "int4" else ""
            how = f" by {self.rounding}" if self.stored in _BITS and not self.prunes_and_rounds else ""
            words.append(f"{self.stored} weights{groups}{how}")
        if self.skipped_inputs is not None:
            words.append(f"skip the {self.skipped_inputs:.0%} of inputs that are smallest")
        if self.cache is not None:
            words.append("a cache of 4-bit key codes and int8 values" if self.cache == "codes" else "a cache of floats")
        if self.prompt:
            words.append("a prompt in the model")
        return "; ".join(words) or "nothing"

    def passes(self, eight_bits: Sequence[str] = ()) -> list[Pass]:
        """The passes of a recipe that makes this form. eight_bits: patterns of layers that take 8 bits as those it
        ignores do, where the form is dense int4."""
        if eight_bits:
            return dataclasses.replace(self, ignore=(*self.ignore, *eight_bits)).passes()
        steps: list[Pass] = [{"name": "normalize"}]
        if self.keeps_stored:
            steps.append({"name": "float_activations"})
        if self.stored is not None:
            steps += [{"name": "calibrate"}, *self._prune(), *self._quantize()]
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
        if self.stored is not None:
            steps += self._replace()
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
            step["keep_sparse"] = 0.5  # weights that training has made sparse stay as they are
        if self.prunes_and_rounds:
            step["weight_bits"] = _BITS[self.stored or ""]
            if self.stored == "int4":
                step["weight_group_size"] = self._group_size
        elif self.pruning == "sparsegpt":
            step["repair"] = True
        return [step]

    def _quantize(self) -> list[Pass]:
        if self.stored not in _BITS:
            return []
        if self.pattern == BLOCKS:  # all layers: the operator takes no others
            return [{"name": "quantize", "method": self.rounding, "bits": 8}]
        if self.prunes_and_rounds:
            return []
        step: Pass = {"name": "quantize", "method": self.rounding, "bits": _BITS[self.stored]}
        step["exclude"] = list(self.ignore)
        if self.group_size is not None or self.is_dense_int4:
            step["group_size"] = self._group_size
        if self.is_dense_int4:
            step["symmetric"] = False
        # What the first has left out, the second takes: it quantizes no layer again.
        eight = {"name": "quantize", "bits": 8, "group_size": EIGHT_BIT_GROUP}
        return [step, *([eight] if self.ignores_in_eight_bits else [])]

    def _replace(self) -> list[Pass]:
        if self.pattern == BLOCKS:
            return [{"name": "replace", "op": "VNNISpMM"}]
        if self.skipped_inputs is not None:
            stored = {"weights": "bf16"} if self.stored == "bf16" else {}
            return [{"name": "replace", "op": "MaskedMatMul", **stored}]
        if self.keeps_stored:
            # Each operator takes the stored weights of its format as well.
            return [
                {"name": "replace", "op": "W4A8MatMul"},
                {"name": "replace", "op": "W8A8MatMul", "keep_stored": True},
                {"name": "replace", "op": "SparseAMXMatMul", "keep_stored": True},
            ]
        # In front of SparseAMXMatMul, which would take what is ignored as well, in bf16.
        eight: list[Pass] = [{"name": "replace", "op": "W8A8MatMul"}] if self.ignores_in_eight_bits else []
        if self.is_dense_int4:
            return [{"name": "replace", "op": "W4A8MatMul"}, *eight]
        if self.pattern != TWO_FOUR:
            # Who asks for zeros gets the smaller file.
            stored = {} if self.sparsity is None else {"storage": "small"}
            return [*eight, {"name": "replace", "op": "SparseAMXMatMul", **stored}]
        step: Pass = {"name": "replace", "op": "SparseAMXMatMul", "storage": TWO_FOUR, "exclude": list(self.ignore)}
        if self.sparsity is None and self.stored in _BITS:
            step["keep_quantized"] = True
        ignored = [{"name": "replace", "op": "SparseAMXMatMul", "select": list(self.ignore)}] if self.ignore else []
        return [step, *ignored]


# What callers choose a form by.
CHOICES = ("weights", "group_size", "sparsity", "pattern", "method", "cache", "ignore")
_PLAIN = Form()


@dataclass(frozen=True)
class Preset:
    form: Form
    description: str


PRESETS: Mapping[str, Preset] = {
    "int8": Preset(Form(weights="int8"), "int8 weights and word embeddings (SparseAMXMatMul)"),
    "int4": Preset(
        Form(weights="int4"), "4-bit weights in groups of 32, heads and word embeddings in int8 (W4A8MatMul)"
    ),
    "sparse-encoder": Preset(
        Form(sparsity=0.5, pattern=BLOCKS, method=("sparsegpt",)),
        "Prune 4x1 blocks and round to int8 jointly by SparseGPT (VNNISpMM); for encoders; needs calibration",
    ),
    "long-context": Preset(
        Form(cache="codes"),
        "A cache of 4-bit key codes and int8 values, a fifth of float32 (NoMADAttention); needs calibration",
    ),
    "cached-prompt": Preset(
        Form(cache="float32", prompt=True),
        "A prompt in the model, its keys 30 % and values 50 % sparse; what follows in a float cache; needs a prompt",
    ),
    "activation-sparse": Preset(
        Form(weights="bf16", skipped_inputs=0.4),
        "Skip the 40 % of each layer's inputs that are smallest; bf16 weights (MaskedMatMul); needs calibration",
    ),
}
AUTO = "auto"  # the recipe that is found by measurement

# For a model that stores few-bit weights: they are taken over as they are.
ADOPT: Mapping[str, Any] = {
    "name": "weights as stored",  # none that can be given
    "description": "Weights that the model stores already: 4-bit ones (W4A8MatMul), int8 ones with blocks of zeros "
    "(VNNISpMM), in groups (W8A8MatMul), others and 2:4 sparse ones (SparseAMXMatMul), taken over as they are",
    "pass": [
        {"name": "normalize"},
        {"name": "float_activations"},
        {"name": "calibrate"},
        {"name": "fuse_attention", "precision": "bf16"},
        {"name": "fuse_cached_attention", "precision": "bf16"},
        # Of blocks of four outputs and one input.
        {"name": "replace", "op": "VNNISpMM", "min_sparsity": _native.LEAST_ZERO_BLOCKS},
        # A weight of one or two inputs has the pattern without a zero.
        {"name": "replace", "op": "SparseAMXMatMul", "storage": TWO_FOUR, "keep_quantized": True, "min_sparsity": 0.4},
        {"name": "replace", "op": "W4A8MatMul"},
        {"name": "replace", "op": "W8A8MatMul", "keep_quantized": True},
        {"name": "replace", "op": "SparseAMXMatMul", "keep_quantized": True},
        {"name": "fuse_norm"},
        {"name": "unpad"},
        {"name": "verify"},
    ],
}

# For a model whose numbers are given beside it (PassContext.given), as a GGUF file has them.
IMPORT: Mapping[str, Any] = {
    "name": "import",
    "description": "Weights of 4 bits (W4A8MatMul) and of 8 (W8A8MatMul), number by number",
    "pass": [
        {"name": "normalize"},
        {"name": "embeddings"},
        {"name": "fuse_cached_attention", "precision": "bf16"},
        {"name": "replace", "op": "W4A8MatMul"},
        {"name": "replace", "op": "W8A8MatMul"},
    ],
}

# Names that recipes had before the first release, and what they are called by now.
_OLD: Mapping[str, Mapping[str, Any]] = {
    "sparse-bf16": {"weights": "bf16", "sparsity": 0.5},
    "sparse-int8": {"weights": "int8", "sparsity": 0.5},
    "sparse-int4": {"weights": "int4", "sparsity": 0.5},
    "sparse-int8-4x1": {"weights": "int8", "sparsity": 0.8, "pattern": BLOCKS},
    "sparsegpt-bf16": {"weights": "bf16", "sparsity": 0.5, "method": "sparsegpt"},
    "sparsegpt-int8": {"weights": "int8", "sparsity": 0.5, "method": "sparsegpt"},
    "sparsegpt-int4": {"weights": "int4", "sparsity": 0.5, "method": "sparsegpt"},
    "sparsegpt-int8-4x1": {"recipe": "sparse-encoder"},
    "int4-gptq": {"weights": "int4", "method": "gptq"},
    "int4-awq": {"weights": "int4", "method": "awq"},
    "int4-hqq": {"weights": "int4", "method": "hqq"},
    "activation-sparse-int8": {"recipe": "activation-sparse", "weights": "int8"},
}
_OLD_OTHERS: Mapping[str, str] = {
    "adopt": "leave recipe out: weights of few bits that a model stores are then taken over as they are",
    "sparse-int8-4x1-static": "give recipe=Recipe.of(weights='int8', sparsity=0.8, pattern='4x1').with_pass('ranges'), "
    "or what its to_toml() gives in a file",
}


def new_call(old_name: str) -> str | None:
    """What to give in place of a recipe of an old name; None for what never was one."""
    if old_name in _OLD_OTHERS:
        return _OLD_OTHERS[old_name]
    if old_name not in _OLD:
        return None
    call = _OLD[old_name]
    python = ", ".join(f"{name}={value!r}" for name, value in call.items())
    line = " ".join(f"--{name} {value}" for name, value in call.items())
    return f"give {python} (on the command line: {line})"

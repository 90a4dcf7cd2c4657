"""Names that users and model files use, without any imports, so that `ortolan --help` is quick."""

from __future__ import annotations

# The options that choose the target format of layers (forms.py), and their values.
FORMAT_OPTIONS = ("weights", "group_size", "sparsity", "pattern", "method", "cache", "ignore")
WEIGHTS = ("bf16", "int8", "int6", "int5", "int4")
FEW_BITS = {"int4": 4, "int5": 5, "int6": 6}  # those with subgroups (ops/formats/subgroup.h)
# Values of the option group_size. 16, 32: inputs that share an integer scale, in groups of 256
# (ops/formats/subgroup.h). 64, 128 (int4), and 32 with pruned weights: inputs that share a floating-point scale.
FORMAT_GROUP_SIZES = (16, 32, 64, 128)
GROUP_SIZES = (32, 64, 128)  # inputs that share a floating-point scale, in groups without subgroups
ROUNDING = ("rtn", "mse", "gptq", "awq", "hqq")
PRUNING = ("magnitude", "wanda", "sparsegpt")
METHODS = (*ROUNDING, *PRUNING)
CACHES = ("codes", "float32")
UNSTRUCTURED = "unstructured"
BLOCKS = "4x1"
TWO_FOUR = "2:4"
EVERYWHERE = "everywhere"  # value of `reproducible`: the same bits on every CPU
AUTO = "auto"  # name of the recipe that `ortolan.search` finds by measurement

ORTOLAN_DOMAIN = "ai.ortolan"
# Keys of the metadata of an optimized model.
RECIPE_KEY = "ortolan.recipe"
VERSION_KEY = "ortolan.version"
OPTIONS_KEY = "ortolan.options"
PADDING_KEY = "ortolan.padding"  # set if the model skips padding tokens
PROMPT_KEY = "ortolan.prompt_tokens"  # length of the prompt that is part of the model
SERVING_KEY = "ortolan.serving"  # the version of the form for serving, if the model has it (serve/form.py)
CONTEXT_KEY = "ortolan.context"  # the most tokens of a sequence, if the model has a limit
MINIMUM_OPSET = 13  # first opset with a Cast to bfloat16, which Ortolan's ONNX functions need
MINIMUM_IR_VERSION = 8  # first IR version with functions in a model
# Ways to pool token vectors to a text's vector, and functions that turn a reranker's logit into a score.
POOLINGS = ("mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean")
SCORE_ACTIVATIONS = ("sigmoid", "none")

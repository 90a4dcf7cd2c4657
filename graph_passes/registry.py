"""The passes of recipes, in the order in which they run. A new pass is one module and one line here."""

from __future__ import annotations

from .passes.activations import ActivationsPass
from .passes.attention.fuse_attention import FuseAttentionPass
from .passes.cache.cache_prompt import CachePromptPass
from .passes.cache.compress_cache import CompressCachePass
from .passes.cache.fuse_cached_attention import FuseCachedAttentionPass
from .passes.calibrate import CalibratePass
from .passes.context import RecipePass
from .passes.embeddings import EmbeddingsPass
from .passes.experts import ExpertsPass
from .passes.float_activations import FloatActivationsPass
from .passes.fuse_lut import FuseLutPass
from .passes.fuse_norm import FuseNormPass
from .passes.linear_attention import LinearAttentionPass
from .passes.normalize import NormalizePass
from .passes.prune.prune import PrunePass
from .passes.quantize.quantize import QuantizePass
from .passes.ranges import RangesPass
from .passes.replace.replace import ReplacePass
from .passes.unpad import UnpadPass
from .passes.verify.verify import VerifyPass

PASSES: dict[str, type[RecipePass]] = {
    "normalize": NormalizePass,
    "float_activations": FloatActivationsPass,
    "calibrate": CalibratePass,
    "prune": PrunePass,
    "quantize": QuantizePass,
    "embeddings": EmbeddingsPass,
    "fuse_attention": FuseAttentionPass,
    "ranges": RangesPass,
    "activations": ActivationsPass,
    "cache_prompt": CachePromptPass,
    "compress_cache": CompressCachePass,
    "fuse_cached_attention": FuseCachedAttentionPass,
    "linear_attention": LinearAttentionPass,
    "experts": ExpertsPass,
    "replace": ReplacePass,
    "fuse_lut": FuseLutPass,
    "fuse_norm": FuseNormPass,
    "unpad": UnpadPass,
    "verify": VerifyPass,
}

"""The passes that a recipe may name, in the order that it must keep. A new pass is one module and one line here."""

from __future__ import annotations

from .activations import ActivationsPass
from .cache_prompt import CachePromptPass
from .calibrate import CalibratePass
from .compress_cache import CompressCachePass
from .fuse_attention import FuseAttentionPass
from .fuse_lut import FuseLutPass
from .normalize import NormalizePass
from .pipeline import RecipePass
from .prune import PrunePass
from .quantize import QuantizePass
from .ranges import RangesPass
from .replace import ReplacePass
from .verify import VerifyPass

PASSES: dict[str, type[RecipePass]] = {
    "normalize": NormalizePass,
    "calibrate": CalibratePass,
    "prune": PrunePass,
    "quantize": QuantizePass,
    "fuse_attention": FuseAttentionPass,
    "ranges": RangesPass,
    "activations": ActivationsPass,
    "cache_prompt": CachePromptPass,
    "compress_cache": CompressCachePass,
    "replace": ReplacePass,
    "fuse_lut": FuseLutPass,
    "verify": VerifyPass,
}

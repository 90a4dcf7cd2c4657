"""Names that a model file carries, and the versions that it needs."""

from __future__ import annotations

ORTOLAN_DOMAIN = "ai.ortolan"
RECIPE_KEY = "ortolan.recipe"  # these three stand in the metadata of an optimized model
VERSION_KEY = "ortolan.version"
OPTIONS_KEY = "ortolan.options"
PADDING_KEY = "ortolan.padding"  # of a model that leaves padding out
PROMPT_KEY = "ortolan.prompt_tokens"  # of a model that a prompt is part of: their number
MINIMUM_OPSET = 13  # the first with a Cast to bfloat16, which the portable body of our operators needs
MINIMUM_IR_VERSION = 8  # the first with functions inside of a model

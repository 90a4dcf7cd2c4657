"""The configuration of ONNX Runtime GenAI for a decoder in the form for serving.

GenAI's Engine (0.18.0) batches requests if genai_config.json has `engine.dynamic_batching`. It looks at the model's
inputs and outputs alone: int32 lengths and block table, and for each layer a pool of keys and one of values
[num_blocks, block_size, kv_heads, head size], which it binds to an input and an output.
"""

from __future__ import annotations

import copy

from ortolan.errors import ModelError

from ..files.genai_folder import GenaiConfig
from ..operators.paged_attention_function import BLOCK_TOKENS
from .form import POOL

_INPUTS = {
    "input_ids": "input_ids",
    "position_ids": "position_ids",
    "cumulative_sequence_lengths": "sequence_starts",
    "past_sequence_lengths": "past_lengths",
    "block_table": "block_table",
    "logits_indices": "logit_rows",
    "past_key_names": f"{POOL}%d.key",
    "past_value_names": f"{POOL}%d.value",
}
_OUTPUTS = {
    "logits": "logits",
    "present_key_names": f"new_{POOL}%d.key",
    "present_value_names": f"new_{POOL}%d.value",
}
_MOST_REQUESTS = 16  # requests that run at the same time
_MOST_TOKENS = 8192  # of a request, for which the pools have blocks for all requests


def engine_config(config: GenaiConfig) -> GenaiConfig:
    """Return the configuration with which GenAI's Engine runs the form for serving of the decoder.

    `num_blocks` is always given: without it, GenAI asks the device for its free memory, which is 0 for CPUs.

    Raises:
        ModelError: The configuration has no decoder or no context length.
    """
    content = copy.deepcopy(config.content)
    context, decoder = (content["model"].get(name) for name in ("context_length", "decoder"))
    if type(context) is not int or context < 1:
        raise ModelError(
            f"{str(config.path)!r} has context_length = {context!r} in 'model', expected a number of tokens; correct it"
        )
    if not isinstance(decoder, dict):
        raise ModelError(f"{str(config.path)!r} has decoder = {decoder!r} in 'model', expected an object; correct it")
    decoder |= {"inputs": dict(_INPUTS), "outputs": dict(_OUTPUTS)}
    tokens = max(context, _MOST_REQUESTS * min(context, _MOST_TOKENS))
    batching = {"block_size": BLOCK_TOKENS, "num_blocks": -(-tokens // BLOCK_TOKENS), "max_batch_size": _MOST_REQUESTS}
    return GenaiConfig(config.path, {**content, "engine": {"dynamic_batching": batching}})

"""Linear layers by name, as (k, n): "up", "smollm2:down", or all layers of a model: "minilm"."""

from __future__ import annotations

from collections.abc import Mapping

# Llama 3 8B: SparAMX, Table 2.
LLAMA_3_8B: Mapping[str, tuple[int, int]] = {
    "q": (4096, 4096),
    "k": (4096, 1024),
    "v": (4096, 1024),
    "o": (4096, 4096),
    "gate": (4096, 14336),
    "up": (4096, 14336),
    "down": (14336, 4096),
}

# SmolLM2-135M with q, k and v as one layer, as ORT GenAI's builder and build_llama write it.
SMOLLM2_135M: Mapping[str, tuple[int, int]] = {
    "qkv": (576, 960),
    "o": (576, 576),
    "gate": (576, 1536),
    "up": (576, 1536),
    "down": (1536, 576),
    "lm_head": (576, 49152),
}

ALL_MINILM_L6_V2: Mapping[str, tuple[int, int]] = {
    "q": (384, 384),
    "k": (384, 384),
    "v": (384, 384),
    "o": (384, 384),
    "ffn_up": (384, 1536),
    "ffn_down": (1536, 384),
}

# The model of layer names without a prefix.
_DEFAULT_MODEL = "llama"
_MODELS = {_DEFAULT_MODEL: LLAMA_3_8B, "smollm2": SMOLLM2_135M, "minilm": ALL_MINILM_L6_V2}


def _name(model: str, layer: str) -> str:
    return layer if model == _DEFAULT_MODEL else f"{model}:{layer}"


# Maps a model to the names of its layers.
MODELS: Mapping[str, tuple[str, ...]] = {
    model: tuple(_name(model, layer) for layer in layers) for model, layers in _MODELS.items()
}
LAYERS: Mapping[str, tuple[int, int]] = {
    _name(model, layer): size for model, layers in _MODELS.items() for layer, size in layers.items()
}


def find_layers(text: str) -> tuple[str, ...]:
    """Return the names of one layer ("up", "llama:up", "smollm2:down") or of a model's ("minilm"); () if unknown."""
    if text in MODELS:
        return MODELS[text]
    name = text.removeprefix(f"{_DEFAULT_MODEL}:")
    return (name,) if name in LAYERS else ()

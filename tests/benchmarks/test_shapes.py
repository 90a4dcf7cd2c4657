"""Layer names in the benchmarks."""

import pytest

from ortolan.benchmarks.shapes import LAYERS, MODELS, find_layers


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("up", ("up",)),
        ("llama:up", ("up",)),
        ("smollm2:down", ("smollm2:down",)),
        ("llama", ("q", "k", "v", "o", "gate", "up", "down")),
        ("minilm", tuple(f"minilm:{layer}" for layer in ("q", "k", "v", "o", "ffn_up", "ffn_down"))),
        ("qkv", ()),
        ("minilm:", ()),
        ("llama:minilm", ()),
        ("", ()),
    ],
)
def test_layers_and_models_have_names(text, names):
    assert find_layers(text) == names


def test_every_layer_is_one_models():
    assert sorted(name for names in MODELS.values() for name in names) == sorted(LAYERS)
    assert (LAYERS["up"], LAYERS["smollm2:up"], LAYERS["minilm:ffn_up"]) == ((4096, 14336), (576, 1536), (384, 1536))

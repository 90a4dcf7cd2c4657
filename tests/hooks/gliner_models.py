"""Small random GLiNER models, made with gliner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .folders import write_tokenizer

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "initializer_range": 0.2}
BACKBONES: dict[str, dict[str, Any]] = {
    "bert": {"num_hidden_layers": 2},
    "deberta-v2": {
        "num_hidden_layers": 2,
        "relative_attention": True,
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
    },
    "modernbert": {"num_hidden_layers": 4, "local_attention": 16, "cls_token_id": 2, "sep_token_id": 3},
}


def make_gliner(folder: Path, backbone: str, by_spans: bool = True) -> Any:
    """Return a model that scores spans or tokens. The backbone's configuration and tokenizer are written to a folder.

    backbone: one of BACKBONES.
    """
    import torch
    from gliner import GLiNER

    vocabulary = write_tokenizer(folder, encoder=True)
    encoder = {"model_type": backbone, "vocab_size": vocabulary, "pad_token_id": 0, **SIZES, **BACKBONES[backbone]}
    (folder / "config.json").write_text(json.dumps(encoder))
    torch.manual_seed(0)
    model = GLiNER.from_config(
        {
            "model_type": f"gliner_uni_encoder_{'span' if by_spans else 'token'}",
            "model_name": str(folder),
            "encoder_config": encoder,
            "hidden_size": SIZES["hidden_size"],
            "span_mode": "markerV0" if by_spans else "token_level",
            "max_width": 5,
        },
        backbone_from_pretrained=False,
    )
    for name, weight in model.named_parameters():  # larger weights spread the scores
        if "token_rep_layer" not in name and weight.ndim > 1:
            weight.data.mul_(2)
    return model.eval()

"""The zoo: one small random model for each popular architecture, as Optimum exports it.

Needs ortolan[optimum] (torch, transformers). Nothing is downloaded. `zoo_exporters` has the other exporters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The size of a zoo model."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    image: int  # height and width in pixels
    patch: int

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden // self.heads


SMALL = Size(hidden=64, layers=2, heads=4, intermediate=112, vocab=211, image=32, patch=8)  # sizes for tests
BASE = Size(hidden=384, layers=4, heads=6, intermediate=1536, vocab=8000, image=224, patch=16)  # sizes for timing


def _bert(size: Size) -> Config:
    return {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.intermediate,
        "max_position_embeddings": 512,
    }


def _roberta(size: Size) -> Config:
    return {**_bert(size), "max_position_embeddings": 514, "pad_token_id": 1}


def _distilbert(size: Size) -> Config:
    return {
        "vocab_size": size.vocab,
        "dim": size.hidden,
        "n_layers": size.layers,
        "n_heads": size.heads,
        "hidden_dim": size.intermediate,
    }


def _factorized(size: Size) -> Config:
    return {**_bert(size), "embedding_size": size.hidden // 2}


def _deberta(size: Size) -> Config:
    relative = {"relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    return {**_bert(size), **relative, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}


def _deberta_1(size: Size) -> Config:
    return {**_bert(size), "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}


def _modernbert(size: Size) -> Config:
    ids = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    return {**_bert(size), **ids, "num_hidden_layers": size.layers + 2, "local_attention": 16}


def _mobilebert(size: Size) -> Config:
    narrow = {"embedding_size": size.hidden // 2, "intra_bottleneck_size": size.hidden // 2}
    return {**_bert(size), **narrow, "true_hidden_size": size.hidden // 2}


def _squeezebert(size: Size) -> Config:
    groups = {f"{name}_groups": 4 for name in ("q", "k", "v", "intermediate", "output")}
    return {**_bert(size), **groups, "embedding_size": size.hidden}


def _xlm(size: Size) -> Config:
    return {"vocab_size": size.vocab, "emb_dim": size.hidden, "n_layers": size.layers, "n_heads": size.heads}


def _llama(size: Size) -> Config:
    return {
        **_bert(size),
        "num_key_value_heads": size.heads // 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _gemma(size: Size) -> Config:
    return {**_llama(size), "head_dim": size.head_dim}


def _gemma_windows(size: Size) -> Config:
    return {**_gemma(size), "sliding_window": 8, "query_pre_attn_scalar": size.head_dim}


def _gemma3(size: Size) -> Config:
    return {**_gemma_windows(size), "layer_types": ["sliding_attention", "full_attention"] * (size.layers // 2)}


def _gpt2(size: Size) -> Config:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "n_positions": 512}
    return {
        **ids,
        "vocab_size": size.vocab,
        "n_embd": size.hidden,
        "n_layer": size.layers,
        "n_head": size.heads,
    }


def _gptj(size: Size) -> Config:
    return {**_gpt2(size), "rotary_dim": size.head_dim // 2}


def _gpt_neo(size: Size) -> Config:
    return {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_layers": size.layers,
        "num_heads": size.heads,
        "attention_types": [[["global", "local"], size.layers // 2]],
        "window_size": 8,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _gpt_neox(size: Size) -> Config:
    return {**_bert(size), "rotary_pct": 0.25, "bos_token_id": 1, "eos_token_id": 2}


def _opt(size: Size) -> Config:
    return {**_bert(size), "ffn_dim": size.intermediate, "word_embed_proj_dim": size.hidden, "pad_token_id": 1}


def _bloom(size: Size) -> Config:
    return {"vocab_size": size.vocab, "hidden_size": size.hidden, "n_layer": size.layers, "n_head": size.heads}


def _mpt(size: Size) -> Config:
    return {"vocab_size": size.vocab, "d_model": size.hidden, "n_layers": size.layers, "n_heads": size.heads}


def _falcon(size: Size) -> Config:
    return {**_bert(size), "multi_query": True, "new_decoder_architecture": False, "alibi": False}


def _moe(size: Size) -> Config:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": size.intermediate}
    return {**_gemma(size), **experts}


def _mixtral(size: Size) -> Config:
    return {**_llama(size), "num_local_experts": 4, "num_experts_per_tok": 2}


def _gpt_oss(size: Size) -> Config:
    types = ["sliding_attention", "full_attention"] * (size.layers // 2)
    return {**_mixtral(size), "head_dim": size.head_dim, "sliding_window": 8, "layer_types": types}


def _hybrid(kind: str) -> Callable[[Size], Config]:
    """Return the configuration of a decoder whose layers are all of this kind, except the last, which has attention."""

    def config(size: Size) -> Config:
        return {**_gemma(size), "layer_types": [kind] * (size.layers - 1) + ["full_attention"]}

    return config


def _delta(size: Size) -> Config:
    heads = {"linear_num_key_heads": size.heads // 2, "linear_num_value_heads": size.heads}
    heads |= {f"linear_{name}_head_dim": size.head_dim for name in ("key", "value")}
    # A quarter of the head is rotated, in multiples of 16.
    return {**_hybrid("linear_attention")(size), **heads, "linear_conv_kernel_dim": 4, "head_dim": 64}


def _delta_moe(size: Size) -> Config:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    widths = {f"{name}_intermediate_size": size.intermediate for name in ("moe", "shared_expert")}
    return {**_delta(size), **experts, **widths}


def _granite_hybrid(size: Size) -> Config:
    scans = {"mamba_n_heads": size.heads * 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
    config = {
        **_mixtral(size),
        **scans,
        "shared_intermediate_size": size.intermediate,
        "mamba_chunk_size": 8,
        "position_embedding_type": "rope",
    }
    return {**config, "layer_types": ["mamba"] * (size.layers - 1) + ["attention"]}


def _moonshine(size: Size) -> Config:
    sides = ("encoder", "decoder")
    heads = {f"{side}_num_{name}heads": size.heads for side in sides for name in ("attention_", "key_value_")}
    layers = {f"{side}_num_hidden_layers": size.layers for side in sides}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "decoder_start_token_id": 1}
    widths = {"vocab_size": size.vocab, "hidden_size": size.hidden, "intermediate_size": size.intermediate}
    return {**widths, **heads, **layers, **ids}


def _t5(size: Size) -> Config:
    return {
        "vocab_size": size.vocab,
        "d_model": size.hidden,
        "d_kv": size.head_dim,
        "d_ff": size.intermediate,
        "num_layers": size.layers,
        "num_heads": size.heads,
        "decoder_start_token_id": 0,
    }


def _bart(size: Size) -> Config:
    sides = ("encoder", "decoder")
    return {
        "vocab_size": size.vocab,
        "d_model": size.hidden,
        **{f"{side}_layers": size.layers for side in sides},
        **{f"{side}_attention_heads": size.heads for side in sides},
        **{f"{side}_ffn_dim": size.intermediate for side in sides},
        "max_position_embeddings": 512,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    }


def _whisper(size: Size) -> Config:
    ids = {"pad_token_id": 1, "begin_suppress_tokens": None}
    return {**_bart(size), **ids, "max_target_positions": 64, "max_source_positions": 1500, "num_mel_bins": 80}


def _vit(size: Size) -> Config:
    config = _bert(size)
    for name in ("vocab_size", "max_position_embeddings"):
        del config[name]
    return {**config, "image_size": size.image, "patch_size": size.patch}


def _dinov2(size: Size) -> Config:
    return {**_vit(size), "mlp_ratio": 2}


def _clip(size: Size) -> Config:
    text = {**_bert(size), "max_position_embeddings": 77, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    return {"text_config": text, "vision_config": _vit(size), "projection_dim": size.hidden}


def _swin(size: Size) -> Config:
    return {
        "image_size": size.image,
        "patch_size": 4,
        "embed_dim": size.hidden // 2,
        "depths": [2, 2],
        "num_heads": [size.heads // 2, size.heads],
        "window_size": 4 if size.image == 32 else 7,
    }


def _segformer(size: Size) -> Config:
    widths = [size.hidden // 4, size.hidden // 2, size.hidden, size.hidden]
    heads = [1, 1, 2, size.heads // 2]
    return {"hidden_sizes": widths, "depths": [1, 1, 1, 1], "num_attention_heads": heads, "decoder_hidden_size": 32}


def _detr(size: Size) -> Config:
    backbone = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 10}
    resnet = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
    return {**_bart(size), **backbone, "backbone_config": {**resnet, "out_features": ["stage4"]}}


def _yolos(size: Size) -> Config:
    return {**_vit(size), "image_size": [size.image, size.image], "num_detection_tokens": 10}


def _wav2vec2(size: Size) -> Config:
    convolutions = {"conv_dim": [32, 32, 32], "conv_kernel": [10, 3, 3], "conv_stride": [5, 4, 4]}
    config = {**_bert(size), **convolutions, "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16}
    return {**config, "num_conv_pos_embedding_groups": 4}


def _conformer(size: Size) -> Config:
    return {**_wav2vec2(size), "conv_depthwise_kernel_size": 7}


def _spectrogram(size: Size) -> Config:
    config = _vit(size)
    del config["image_size"]
    return {**config, "max_length": 128, "num_mel_bins": 64}


def _rembert(size: Size) -> Config:
    narrow = size.hidden // 2
    return {**_bert(size), "input_embedding_size": narrow, "output_embedding_size": narrow}


@dataclass(frozen=True)
class Architecture:
    """One architecture of the zoo and its export."""

    name: str  # the name in transformers
    config: Callable[[Size], Config]
    task: str = "feature-extraction"
    model_type: str | None = None  # the model_type in transformers, if it differs from the name
    model_class: str | None = None  # the class in transformers, if it is not the default of the task
    processor: str | None = None  # the image processor, if Optimum needs one
    tokens: int = 128  # sequence length for timing
    layer_softmaxes: int = 0  # Softmax nodes per layer outside attention, such as in a router
    options: Mapping[str, Any] = field(default_factory=dict)  # further fields of the configuration


_PAST = "text-generation-with-past"
_PAIR = "text2text-generation-with-past"
_IMAGES = "image-classification"
_BIDIRECTIONAL = {"use_bidirectional_attention": True}

ARCHITECTURES = (
    Architecture("bert", _bert),
    Architecture("distilbert", _distilbert),
    Architecture("roberta", _roberta),
    Architecture("xlm-roberta", _roberta),
    Architecture("camembert", _roberta),
    Architecture("mpnet", _roberta),
    Architecture("electra", _factorized),
    Architecture("albert", _factorized),
    Architecture("deberta", _deberta_1),
    Architecture("deberta-v2", _deberta),
    Architecture("modernbert", _modernbert),
    Architecture("mobilebert", _mobilebert),
    Architecture("squeezebert", _squeezebert),
    Architecture("roformer", _factorized),
    Architecture("rembert", _rembert),
    Architecture("xlm", _xlm),
    Architecture("flaubert", _xlm),
    Architecture("esm", _bert, options={"position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 2}),
    Architecture("convbert", _factorized, layer_softmaxes=1),
    Architecture("longformer", _roberta, options={"attention_window": 16}, tokens=32),
    Architecture("embedding-gemma", _gemma3, model_type="gemma3_text", options=_BIDIRECTIONAL),
    Architecture("qwen3-embedding", _gemma, model_type="qwen3"),
    Architecture("e5-mistral", _llama, model_type="mistral", options={"sliding_window": 4096}),
    Architecture("vit", _vit, _IMAGES),
    Architecture("deit", _vit, _IMAGES, model_class="DeiTForImageClassification"),
    Architecture("beit", _vit, _IMAGES, options={"use_relative_position_bias": True}),
    Architecture("data2vec-vision", _vit, _IMAGES),
    Architecture("dinov2", _dinov2, processor="BitImageProcessor"),
    Architecture("siglip_vision_model", _vit),
    Architecture("clip", _clip, "zero-shot-image-classification", tokens=64),
    Architecture("swin", _swin, _IMAGES),
    Architecture("segformer", _segformer, _IMAGES),
    Architecture("detr", _detr, "object-detection"),
    Architecture("yolos", _yolos, "object-detection"),
    Architecture("wav2vec2", _wav2vec2),
    Architecture("hubert", _wav2vec2),
    Architecture("wavlm", _wav2vec2),
    Architecture("wav2vec2-conformer", _conformer, options={"position_embeddings_type": "relative"}),
    Architecture("audio-spectrogram-transformer", _spectrogram, "audio-classification"),
    Architecture("gpt2", _gpt2, _PAST),
    Architecture("gptj", _gptj, _PAST),
    Architecture("gpt_neo", _gpt_neo, _PAST),
    Architecture("gpt_neox", _gpt_neox, _PAST),
    Architecture("opt", _opt, _PAST),
    Architecture("bloom", _bloom, _PAST),
    Architecture("mpt", _mpt, _PAST),
    Architecture("falcon", _falcon, _PAST),
    Architecture("llama", _llama, _PAST),
    Architecture("mistral", _llama, _PAST, options={"sliding_window": 8}),
    Architecture("qwen2", _llama, _PAST),
    Architecture("qwen3", _gemma, _PAST),
    Architecture("phi", _bert, _PAST, options={"partial_rotary_factor": 0.5}),
    Architecture("phi3", _llama, _PAST, options={"original_max_position_embeddings": 512}),
    Architecture("gemma", _gemma, _PAST),
    Architecture("gemma2", _gemma_windows, _PAST),
    Architecture("gemma2_eager", _gemma_windows, _PAST, model_type="gemma2", options={"attn_implementation": "eager"}),
    Architecture("gemma3_text", _gemma3, _PAST),
    Architecture("smollm3", _llama, _PAST),
    Architecture("granite", _llama, _PAST),
    Architecture("olmo2", _llama, _PAST),
    Architecture("qwen3_moe", _moe, _PAST, layer_softmaxes=1),
    Architecture("t5", _t5, _PAIR),
    Architecture("mt5", _t5, _PAIR),
    Architecture("bart", _bart, _PAIR),
    Architecture("mbart", _bart, _PAIR),
    Architecture("marian", _bart, _PAIR),
    Architecture("pegasus", _bart, _PAIR),
    Architecture("m2m_100", _bart, _PAIR),
    Architecture("blenderbot", _bart, _PAIR),
    Architecture("whisper", _whisper, "automatic-speech-recognition-with-past", tokens=48),
    Architecture("moonshine", _moonshine, "automatic-speech-recognition-with-past", tokens=48),
)


# Architectures that Optimum does not export.
NEWER = (
    Architecture("mixtral", _mixtral, _PAST, layer_softmaxes=1),
    Architecture("olmoe", _moe, _PAST, layer_softmaxes=1),
    Architecture("gpt_oss", _gpt_oss, _PAST, layer_softmaxes=1),
    Architecture("lfm2", _hybrid("conv"), _PAST),
    Architecture("granitemoehybrid", _granite_hybrid, _PAST, layer_softmaxes=1),
    Architecture("qwen3_next", _delta_moe, _PAST, layer_softmaxes=1),
    Architecture("qwen3_5_text", _delta, _PAST),
)


def find_architecture(name: str) -> Architecture:
    """Return the architecture with this name."""
    return next(one for one in (*ARCHITECTURES, *NEWER) if one.name == name)


def export(architecture: Architecture, size: Size, folder: Path, seed: int = 0) -> Path:
    """Write the models of one architecture to a folder, as Optimum exports them, and return the folder.

    Raises:
        ImportError: ortolan[optimum] is not installed.
    """
    import torch
    import transformers
    from optimum.exporters.onnx import onnx_export_from_model
    from optimum.exporters.tasks import TasksManager

    config = transformers.AutoConfig.for_model(
        architecture.model_type or architecture.name, **{**architecture.config(size), **architecture.options}
    )
    if architecture.processor is not None:
        folder.mkdir(parents=True, exist_ok=True)
        side = {"height": size.image, "width": size.image}
        getattr(transformers, architecture.processor)(size=side, crop_size=side).save_pretrained(folder)
        config._name_or_path = str(folder)
    torch.manual_seed(seed)
    task = architecture.task.removesuffix("-with-past")
    model_class = TasksManager.get_model_class_for_task(task, model_type=config.model_type)
    if architecture.model_class is not None:
        model_class = getattr(transformers, architecture.model_class)
    model = model_class.from_config(config) if hasattr(model_class, "from_config") else model_class(config)
    model.eval()
    onnx_export_from_model(model, folder, task=architecture.task, do_validation=False)
    return folder

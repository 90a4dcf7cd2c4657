"""A model folder of sentence-transformers or PyLate: pooling, prompts, maximum text length, activation of scores.

No code of the folder is run: modules are recognized by name, and weights are read from safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ortolan.errors import ModelError, listing

from .pair_prompt import PairPrompts, read_pair_prompts
from .pooling import ACTIVATIONS, POOLINGS, Dense
from .token_outputs import LateInteraction, TermPooling, TokenLayer, read_late_interaction, read_term_pooling
from .tokenizer_file import read_json

MODULES = "modules.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"
_WEIGHTS = "model.safetensors"
_MAX_BYTES = 2**30  # limit for the weights of a module
_LOGIT_SCORE = "LogitScore"
# Maps settings of older files to values of pooling_mode.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Types of models whose positions start after the padding token's id.
_POSITIONS_BEHIND_PAD = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "mpnet",
    "longformer",
    "data2vec-text",
)


@dataclass(frozen=True)
class SentenceFolder:
    """The settings of a folder. None or an empty value means not set.

    Attributes:
        pooling: One of POOLINGS.
        normalize: Scale vectors to length 1.
        dense: Linear layers after pooling.
        max_tokens: Limit per text.
        lowercase: Lower-case texts before the tokenizer.
        prompts: Prompts by name.
        default_prompt: Name of the default prompt.
        labels: Number of labels of a classifier.
        activation: Activation of a score, by the name in the files.
        model_type: The model_type in config.json.
        positions: Number of positions in the model's table.
        vocabulary: Number of tokens in the model's table.
        late: Settings of a late-interaction model.
        terms: Settings of a model that weights terms.
        pair_prompts: Prompts in which a reranker reads pairs.
    """

    pooling: str | None = None
    normalize: bool | None = None
    dense: tuple[Dense, ...] = ()
    max_tokens: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    labels: int | None = None
    activation: str | None = None
    model_type: str | None = None
    positions: int | None = None
    vocabulary: int | None = None
    late: LateInteraction | None = None
    terms: TermPooling | None = None
    pair_prompts: PairPrompts | None = None

    @property
    def positions_behind_pad(self) -> bool:
        """True if positions start after the padding token's id."""
        return self.model_type in _POSITIONS_BEHIND_PAD


def folder_of(model: Path | None) -> Path | None:
    """Return the folder with the model's configuration: the model's folder, or if that is named onnx, its parent."""
    if model is None:
        return None
    above = model.parent.name == "onnx" and not (model.parent / "config.json").is_file()
    return model.parent.parent if above else model.parent


def read_sentence_folder(folder: Path | None) -> SentenceFolder:
    """Read the settings of a folder.

    Raises:
        ModelError: A setting is not supported or malformed.
    """
    if folder is None:
        return SentenceFolder()
    config = read_json(folder / "config.json")
    said: dict[str, Any] = _config(config, folder / "config.json")
    late = read_late_interaction(folder, config)
    if late is not None:
        said |= _late(folder, late)
    elif (folder / MODULES).is_file():
        said |= _modules(folder)
    return SentenceFolder(**said, pair_prompts=read_pair_prompts(folder))


@dataclass(frozen=True)
class LogitScore:
    """The tokens whose logits are a reranker's score; false: its logit is subtracted, if it is given."""

    true: int
    false: int | None


def read_logit_score(folder: Path) -> LogitScore | None:
    """Return the settings of module LogitScore; None if the folder has no such module.

    Raises:
        ModelError: The module is malformed.
    """
    modules = dict(_read_modules(folder / MODULES)) if (folder / MODULES).is_file() else {}
    if _LOGIT_SCORE not in modules:
        return None
    path = _inside(folder, modules[_LOGIT_SCORE]) / "config.json"
    said = read_json(path)
    true: Any = said.get("true_token_id")
    false: Any = said.get("false_token_id")
    _check(_is_count(true), path, "true_token_id", true)
    _check(false is None or _is_count(false), path, "false_token_id", false)
    return LogitScore(true, false)


def _config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings of transformers and CrossEncoder."""
    labels = config.get("num_labels", len(config["id2label"]) if isinstance(config.get("id2label"), dict) else None)
    sentence = config.get("sentence_transformers")
    activation = sentence.get("activation_fn") if isinstance(sentence, dict) else None
    activation = activation or config.get("sbert_ce_default_activation_function")
    positions, vocabulary = config.get("max_position_embeddings"), config.get("vocab_size")
    _check(labels is None or _is_count(labels), path, "num_labels", labels)
    _check(activation is None or isinstance(activation, str), path, "activation_fn", activation)
    return {
        "labels": labels,
        "activation": activation,
        "model_type": config.get("model_type"),
        "positions": positions if _is_count(positions) else None,
        "vocabulary": vocabulary if _is_count(vocabulary) else None,
    }


def _modules(folder: Path) -> dict[str, Any]:
    """Return the settings of SentenceTransformer."""
    modules = _read_modules(folder / MODULES)
    kinds = [kind for kind, _ in modules]
    expected = ["Transformer", "Pooling", *["Dense"] * kinds.count("Dense"), *["Normalize"] * ("Normalize" in kinds)]
    if kinds == ["Transformer"] and _is_cross_encoder(folder):
        return _transformer(_inside(folder, modules[0][1])) | _cross_encoder(folder)
    if kinds in (["Transformer", "SpladePooling"], ["MLMTransformer", "SpladePooling"]):
        (_, before), (_, after) = modules
        terms = read_term_pooling(_inside(folder, after) / "config.json")
        return {"terms": terms} | _transformer(_inside(folder, before)) | _prompts(folder / SENTENCE_CONFIG)
    if kinds == ["Transformer", _LOGIT_SCORE]:
        raise ModelError(
            f"{str(folder)!r} holds a decoder that judges pairs by the logits of two tokens; make a reranker of it: "
            "ortolan.make_reranker(folder, output)"
        )
    if kinds != expected:
        raise ModelError(
            f"{str(folder / MODULES)!r} names the modules {', '.join(kinds)}, expected Transformer and Pooling, "
            "optionally followed by Dense and Normalize, or Transformer and SpladePooling: keep tokens as the model's "
            "inputs"
        )
    paths = dict(modules)
    said: dict[str, Any] = {
        "pooling": _pooling(_inside(folder, paths["Pooling"]) / "config.json"),
        "normalize": "Normalize" in kinds,
        "dense": tuple(_dense(_inside(folder, path)) for kind, path in modules if kind == "Dense"),
    }
    return said | _transformer(_inside(folder, paths["Transformer"])) | _prompts(folder / SENTENCE_CONFIG)


def _late(folder: Path, late: LateInteraction) -> dict[str, Any]:
    """Return the settings of a late-interaction model, with the linear layers of its modules."""
    said = {"normalize": True, "max_tokens": late.document.length} | _prompts(folder / SENTENCE_CONFIG)
    modules = _read_modules(folder / MODULES) if (folder / MODULES).is_file() else []
    kinds = [kind for kind, _ in modules]
    if kinds != [*["Transformer"] * bool(kinds), *["Dense"] * (len(kinds) - 1)]:
        raise ModelError(
            f"{str(folder / MODULES)!r} names the modules {', '.join(kinds)}, expected Transformer, optionally "
            "followed by Dense"
        )
    layers = tuple(_token_layer(_inside(folder, path)) for _, path in modules[1:])
    lowercase = _transformer(_inside(folder, modules[0][1]))["lowercase"] if modules else False
    return said | {"late": replace(late, layers=layers), "lowercase": lowercase}


def _transformer(module: Path) -> dict[str, Any]:
    bert = module / "sentence_bert_config.json"
    settings = read_json(bert)
    limit = settings.get("max_seq_length")
    _check(limit is None or _is_count(limit), bert, "max_seq_length", limit)
    return {"max_tokens": limit, "lowercase": bool(settings.get("do_lower_case"))}


def _is_cross_encoder(folder: Path) -> bool:
    """Return whether sentence-transformers (5.7 or later) wrote a CrossEncoder; earlier versions wrote no modules."""
    return bool(read_json(folder / SENTENCE_CONFIG).get("model_type") == "CrossEncoder")


def _cross_encoder(folder: Path) -> dict[str, Any]:
    path = folder / SENTENCE_CONFIG
    activation = read_json(path).get("activation_fn")
    _check(activation is None or isinstance(activation, str), path, "activation_fn", activation)
    return {} if activation is None else {"activation": activation}


def _read_modules(path: Path) -> list[tuple[str, str]]:
    """Return kind and path of each module."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        modules = [(_kind(str(one["type"])), one.get("path") or "") for one in said]
        if not all(isinstance(relative, str) for _, relative in modules):
            raise TypeError("a path is not a string")
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{str(path)!r} is not a list of modules: {error!r}") from error
    return modules


def _kind(name: str) -> str:
    """Return a module's class name if it is part of sentence-transformers or PyLate, else its full name."""
    return name.rsplit(".", 1)[-1] if name.startswith(("sentence_transformers.", "pylate.")) else name


def _inside(folder: Path, relative: str) -> Path:
    """Return a path inside a folder. The relative path is untrusted, so paths that lead out are refused."""
    parts = Path(relative).parts
    if Path(relative).is_absolute() or ".." in parts:
        raise ModelError(f"{str(folder / MODULES)!r} names the path {relative!r}, which leads out of the folder")
    return folder.joinpath(*parts)


def _pooling(path: Path) -> str:
    said = read_json(path)
    modes = said.get("pooling_mode") or [mode for flag, mode in _FLAGS.items() if said.get(flag)]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelError(f"{str(path)!r} has the poolings {modes!r}, expected one of {', '.join(POOLINGS)}")
    if said.get("include_prompt") is False:
        raise ModelError(
            f"{str(path)!r} leaves prompts out of the pooling (include_prompt), which is not supported: keep tokens as "
            "the model's inputs"
        )
    return str(modes[0])


def _prompts(path: Path) -> dict[str, Any]:
    said = read_json(path)
    prompts = said.get("prompts") or {}
    name = said.get("default_prompt_name")
    _check(isinstance(prompts, dict), path, "prompts", prompts)
    prompts = {key: prompt for key, prompt in prompts.items() if prompt is not None}
    _check(all(isinstance(prompt, str) for prompt in prompts.values()), path, "prompts", prompts)
    _check(name is None or name in prompts, path, "default_prompt_name", name)
    return {"prompts": prompts, "default_prompt": name}


def _token_layer(folder: Path) -> TokenLayer:
    path = folder / "config.json"
    said = read_json(path)
    adds_input = said.get("use_residual", False)
    _check(isinstance(adds_input, bool), path, "use_residual", adds_input)
    layer = _dense(folder, adds_input, "token_embeddings")
    residual = read_safetensors(folder / _WEIGHTS).get("residual.weight")
    shape = layer.weight.shape
    found = shape[:1] if residual is None else residual.shape
    if adds_input and found != (shape[1:] if residual is None else shape):
        raise ModelError(
            f"{str(folder / _WEIGHTS)!r} has no residual.weight of shape {shape}, which use_residual needs"
        )
    return TokenLayer(layer, adds_input, residual if adds_input else None)


def _dense(folder: Path, adds_input: bool = False, vector: str = "sentence_embedding") -> Dense:
    """Return a linear layer. vector: the name of the vectors that it may read and write."""
    path = folder / "config.json"
    said = read_json(path)
    activation = str(said.get("activation_function")).rsplit(".", 1)[-1]
    if said.get("activation_function") is None:
        activation = "Identity"
    unknown = [key for key in ("use_residual", "module_input_name", "module_output_name") if said.get(key)]
    plain = all(said.get(key) in (None, adds_input, "sentence_embedding", vector) for key in unknown)
    if activation not in ACTIVATIONS or not plain:
        raise ModelError(
            f"{str(path)!r} describes a Dense module with activation {activation!r} and {listing(unknown)}, expected "
            f"one of {listing(ACTIVATIONS)}, and a vector in and out"
        )
    tensors = read_safetensors(folder / _WEIGHTS)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    shape = (said.get("out_features"), said.get("in_features"))
    if weight is None or weight.shape != shape or (bias is not None and bias.shape != shape[:1]):
        raise ModelError(
            f"{str(folder / _WEIGHTS)!r} has the tensors {listing(tensors)}, expected linear.weight of shape {shape}"
        )
    return Dense(weight, bias, ACTIVATIONS[activation])


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a small file as float32.

    Raises:
        ModelError: The file cannot be read or is too large.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelError(f"{str(path)!r} has {path.stat().st_size} bytes, expected at most {_MAX_BYTES}")
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        return {name: _tensor(said, data) for name, said in header.items() if name != "__metadata__"}
    except FileNotFoundError:
        raise ModelError(f"{str(path)!r} does not exist: save the model with safetensors") from None
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{str(path)!r} is not a safetensors file of floats: {error!r}") from error


def _tensor(said: dict[str, Any], data: bytes) -> np.ndarray:
    start, end = said["data_offsets"]
    shape = [int(size) for size in said["shape"]]
    if not 0 <= start <= end <= len(data) or any(size < 0 for size in shape):
        raise ValueError("a tensor is outside of the file")
    part = data[start:end]
    if said["dtype"] == "BF16":
        return (np.frombuffer(part, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return (
        np.frombuffer(part, {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[said["dtype"]]).astype(np.float32).reshape(shape)
    )


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _check(holds: bool, path: Path, name: str, found: Any) -> None:
    if not holds:
        raise ModelError(f"{str(path)!r} has {name} {found!r}, which is not valid; restore the file")

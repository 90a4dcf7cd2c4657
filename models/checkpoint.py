"""Real models as folders for Hugging Face's tools: config.json, model.safetensors and the tokenizer.

python -m ortolan.models.checkpoint all-minilm-l6-v2|all-mpnet-base-v2|smollm2-135m-instruct FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import OrtolanError
from .catalog import MPNET, MPNET_ZIP, safetensors_numpy
from .fetch import Progress, fetch
from .gguf import read_gguf, read_gguf_tokenizer
from .gguf.side_files import config_fields
from .llama import reorder_heads, rows_to_halves
from .manifest import ManifestError

CHECKPOINTS = ("all-minilm-l6-v2", MPNET, "smollm2-135m-instruct")
_MPNET_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
_BERT_TOKENS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
SMOLLM2_TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}


def write_checkpoint(
    name: str,
    folder: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Fetch a model, write it to a new or empty folder, and return the folder.

    Args:
        name: One of CHECKPOINTS.
        folder: The folder.
        cache_dir: See `fetch`.
        progress: See `fetch`.

    Raises:
        ManifestError: The name is unknown.
        FetchError: Fetching fails.
        OrtolanError: A package is missing, or the folder is not empty.
    """
    if name not in CHECKPOINTS:
        raise ManifestError(f"{name!r} is not available as a checkpoint, expected one of {', '.join(CHECKPOINTS)}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise OrtolanError(f"folder {str(target)!r} is not empty; give another one")
    source = fetch(name, cache_dir, progress)
    if name == "all-minilm-l6-v2":
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            shutil.copyfile(source / file, target / file)
        _write_json(target / "tokenizer_config.json", {"tokenizer_class": "BertTokenizerFast", **_BERT_TOKENS})
    elif name == MPNET:
        with zipfile.ZipFile(source / MPNET_ZIP) as archive:
            for file in _MPNET_FILES:
                with archive.open(f"{MPNET}/{file}") as member, (target / file).open("wb") as out:
                    shutil.copyfileobj(member, out)
    else:
        write_llama(next(source.glob("*.gguf")), target, SMOLLM2_TOKENS)
    return target


def write_llama(gguf: Path, target: Path, special: Mapping[str, str]) -> None:
    """Write a GGUF file's model (in float32) and tokenizer to a folder. special: bos_token, eos_token and pad_token."""
    config, weights = read_gguf(gguf)
    tensors: dict[str, np.ndarray] = {}
    order = rows_to_halves(config)
    for name in weights:
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            turned = name.endswith(("q_proj.weight", "k_proj.weight"))
            weight = weights[name]
            tensors[name] = np.ascontiguousarray(reorder_heads(weight, order) if turned else weight)
    safetensors_numpy().save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    tokenizer = read_gguf_tokenizer(gguf)
    tokenizer.save(str(target / "tokenizer.json"))
    ids = {f"{name}_id": tokenizer.token_to_id(token) for name, token in special.items()}
    _write_json(target / "config.json", {**config_fields(config), **ids})
    _write_json(target / "generation_config.json", ids)
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "model_max_length": config.max_position_embeddings,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CHECKPOINTS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    try:
        write_checkpoint(arguments.name, arguments.folder, progress=lambda line: print(line, file=sys.stderr))
    except OrtolanError as error:
        sys.exit(f"ortolan: {error}")


if __name__ == "__main__":
    main()

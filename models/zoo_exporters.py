"""Exports of the zoo's random models by other tools than Optimum, each from a checkpoint folder.

    python -m ortolan.models.zoo_exporters FOLDER genai llama qwen3 …

Each architecture gets a folder FOLDER/NAME, with the error in error.txt if it cannot be exported.

Exporters need different versions of transformers, so the environment selects them: optimum
(ortolan[optimum]), torch and torch-fused (ortolan[transformers]), genai (onnxruntime-genai), mobius (mobius-onnx).
Nothing is downloaded.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .zoo import SMALL, Architecture, Config, Size, export, find_architecture

_GENERATES = "text-generation"
# The longest option of transformers' random initialization: with its default of 0.02, greedy text repeats one token.
_SPREAD = 0.2
CHECKPOINT = "checkpoint"
ERROR = "error.txt"  # the file with the error of an export that failed
_OPSET = 23  # the first with Attention, RotaryEmbedding and RMSNormalization


def write_checkpoint(architecture: Architecture, size: Size, folder: Path, seed: int = 0) -> Any:
    """Write a random model of an architecture with a tokenizer to a folder, and return the model."""
    import torch
    import transformers

    settings: Config = {**architecture.config(size), "initializer_range": _SPREAD, **architecture.options}
    config = transformers.AutoConfig.for_model(architecture.model_type or architecture.name, **settings)
    torch.manual_seed(seed)
    task = architecture.task.removesuffix("-with-past")
    kinds = {
        _GENERATES: "AutoModelForCausalLM",
        "text2text-generation": "AutoModelForSeq2SeqLM",
        "automatic-speech-recognition": "AutoModelForSpeechSeq2Seq",
        "image-classification": "AutoModelForImageClassification",
    }
    model = getattr(transformers, kinds.get(task, "AutoModel")).from_config(config).float().eval()
    model.save_pretrained(folder)
    _write_tokenizer(folder, size)
    return model


def _write_tokenizer(folder: Path, size: Size) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(size.vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w0", bos_token="w1", eos_token="w2"
    ).save_pretrained(folder)


def _export_torch(architecture: Architecture, size: Size, folder: Path, fusions: str | None = None) -> Path:
    """Export with torch.onnx (dynamo), through the exporter of transformers 5.23."""
    import torch
    from transformers.exporters import OnnxConfig, OnnxExporter

    model = write_checkpoint(architecture, size, folder / CHECKPOINT)
    config = OnnxConfig(dynamic=True, opset_version=_OPSET, ort_fusions=fusions)
    inputs = _sample_inputs(architecture, size)
    generates = architecture.task.endswith("-with-past")
    if not generates:
        exported = OnnxExporter().export(model, inputs, config)
        OnnxExporter.save_program(exported.program, folder / "model.onnx")
        return folder
    with torch.no_grad():
        exported = OnnxExporter().export_for_generation(model, inputs, config, multi_token_decode=True)
    for name, component in exported.components.items():
        if name != "prefill":  # `decode` with an empty cache does the same
            OnnxExporter.save_program(component.program, folder / f"{name}.onnx")
    return folder


def _sample_inputs(architecture: Architecture, size: Size) -> dict[str, Any]:
    import torch

    if architecture.task.startswith("automatic-speech-recognition"):
        shape = (2, 80, 3000) if architecture.name == "whisper" else (2, 16000)
        return {"input_features" if architecture.name == "whisper" else "input_values": torch.randn(shape)}
    if architecture.task == "image-classification":
        return {"pixel_values": torch.randn(2, 3, size.image, size.image)}
    ids = torch.randint(3, size.vocab, (2, 12))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _export_genai(architecture: Architecture, size: Size, folder: Path, precision: str = "fp32") -> Path:
    """Export with the model builder of ONNX Runtime GenAI.

    Caches of local layers grow like the others: by default they are windows of fixed size, which only GenAI can feed.
    """
    write_checkpoint(architecture, size, folder / CHECKPOINT)
    options = ("-p", precision, "-e", "cpu", "--extra_options", "windowed_kv_cache=false")
    _run("onnxruntime_genai.models.builder", "-i", folder / CHECKPOINT, "-o", folder, *options)
    return folder


def _export_mobius(architecture: Architecture, size: Size, folder: Path) -> Path:
    """Export with mobius, whose graphs for CPUs have the operators of ONNX Runtime."""
    write_checkpoint(architecture, size, folder / CHECKPOINT)
    _run("mobius", "build", "--config", folder / CHECKPOINT, "--ep", "cpu", "--dtype", "f32", folder)
    return folder


def _run(module: str, *arguments: str | Path) -> None:
    """Run a module as a command, in this process: importing torch takes longer than the export of a small model."""
    given, sys.argv = sys.argv, [module, *map(str, arguments)]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{module} ended with {end.code}") from None
    finally:
        sys.argv = given


EXPORTERS: dict[str, Callable[[Architecture, Size, Path], Path]] = {
    "optimum": export,
    "torch": _export_torch,
    "torch-fused": partial(_export_torch, fusions="cpu"),
    "genai": _export_genai,
    "mobius": _export_mobius,
}


def main(folder: str, exporter: str, *architectures: str) -> None:
    """Export architectures in the size for tests; a folder that exists is left as it is."""
    for name in architectures:
        target = Path(folder) / name
        if target.exists():
            continue
        target.mkdir(parents=True)
        try:
            EXPORTERS[exporter](find_architecture(name), SMALL, target)
        except Exception as error:  # exporters raise various exceptions
            lines = str(error).strip().splitlines() or [""]
            (target / ERROR).write_text(f"{type(error).__name__}: {lines[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Compare text encoders by texts per second, from token ids to one unit vector per text."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ortolan.benchmarks.encoder import FP32, INT8, PUBLISHED, SENTENCES, Encoder, calibration_feeds, open_model
from ortolan.models.checkpoint import write_checkpoint
from ortolan.text_encoder import BATCH_TOKENS

from .comparison import Job, compare
from .configuration import Configuration
from .encoder_texts import EncoderJudge, make_works, write_batches
from .result import PeersResult
from .verdict import ENCODERS

SCRIPT = "encoders.py"  # in tools/workers
ONNX, CHECKPOINT, BOTH = "ONNX file", "transformers folder", "transformers folder with ONNX file"


@dataclass(frozen=True)
class Variant:
    """A configuration whose paths are not known yet.

    `source` is the kind of its input file, an argument of `Source.path`. A `calibrated` variant gets calibration
    batches.
    """

    name: str
    engine: str
    options: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = False
    source: str = ONNX
    calibrated: bool = False


# The same bits on every CPU; by default, attention sums in the order that is fastest on the CPU.
EVERYWHERE = {"reproducible": "everywhere"}
# The first variant is the reference for the accuracy of all other variants.
ONNX_RUNTIME = (Variant(FP32, "onnxruntime", exact=True), Variant(INT8, "onnxruntime", {"quantized": True}))
OURS = (
    Variant("Ortolan, by default", "ortolan", {"choices": {}, "batch_tokens": BATCH_TOKENS}),
    Variant("Ortolan int8, a batch a call", "ortolan", {"choices": {"weights": "int8"}}),
    Variant(
        f"Ortolan int8, {BATCH_TOKENS} tokens a call",
        "ortolan",
        {"choices": {"weights": "int8"}, "batch_tokens": BATCH_TOKENS},
    ),
    Variant(
        "Ortolan int8, reproducible",
        "ortolan",
        {"choices": {"weights": "int8"}, "changed": EVERYWHERE, "batch_tokens": BATCH_TOKENS},
    ),
    Variant("Ortolan bf16", "ortolan", {"choices": {"weights": "bf16"}, "batch_tokens": BATCH_TOKENS}),
    Variant("Ortolan int4", "ortolan", {"choices": {"weights": "int4"}, "batch_tokens": BATCH_TOKENS}),
)
OPENVINO = (
    Variant("OpenVINO", "openvino", {"precision": "default"}),
    Variant("OpenVINO int8 (nncf)", "openvino", {"precision": "int8"}, calibrated=True),
)
OTHERS = (
    Variant("OpenVINO f32", "openvino", {"precision": "f32"}, exact=True),
    *OPENVINO,
    Variant("CTranslate2 fp32", "ctranslate2", {"compute_type": "float32"}, True, CHECKPOINT),
    Variant("CTranslate2 int8", "ctranslate2", {"compute_type": "int8"}, False, CHECKPOINT),
    Variant("torch fp32", "torch", {"dtype": "float32"}, True, CHECKPOINT),
    Variant("torch bf16", "torch", {"dtype": "bfloat16"}, False, CHECKPOINT),
    Variant("torch int8", "torch", {"dtype": "float32", "quantized": True}, False, CHECKPOINT),
    Variant("torch compile fp32", "torch", {"dtype": "float32", "compiled": True}, True, CHECKPOINT),
    Variant("torch compile bf16", "torch", {"dtype": "bfloat16", "compiled": True}, False, CHECKPOINT),
    Variant("sentence-transformers", "sentence-transformers", {}, True, CHECKPOINT),
    Variant("fastembed", "fastembed", {}, True),
    Variant("infinity, torch", "infinity", {"engine": "torch", "dtype": "float32"}, True, BOTH),
    Variant("infinity, torch bf16", "infinity", {"engine": "torch", "dtype": "bfloat16"}, False, BOTH),
    Variant("infinity, ONNX Runtime", "infinity", {"engine": "optimum", "dtype": "float32"}, True, BOTH),
    Variant("EmbedAnything, candle", "embed-anything", {"engine": "candle"}, True, BOTH),
    Variant("EmbedAnything, ONNX Runtime", "embed-anything", {"engine": "onnx"}, True, BOTH),
)


def measure(job: Job, result: PeersResult) -> None:
    """Add the rows of every model."""
    for name in PUBLISHED:
        if not job.takes_model(ENCODERS, name):
            continue
        folder = job.folder / ENCODERS / f"{name}, given"
        encoder = open_model(name, folder)
        works = make_works(job, encoder, folder)
        if works:
            source = Source(name, encoder, folder)
            configurations = configurations_of(job, source, (*ONNX_RUNTIME, *OURS, *OTHERS))
            compare(job, ENCODERS, name, SCRIPT, configurations, works, EncoderJudge(job, encoder, folder), result)


class Source:
    """The files that the variants of a model are made from."""

    def __init__(self, model: str, encoder: Encoder, folder: Path) -> None:
        """Remember the encoder; files besides its ONNX file are written to `folder`."""
        self._model, self._folder, self.encoder = model, folder, encoder
        self._made: dict[str, Path] = {}

    def path(self, kind: str) -> Path:
        """Return the path of a kind of source, made on first use."""
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def _make(self, kind: str) -> Path:
        if kind == CHECKPOINT:
            return write_checkpoint(self._model, self._folder / "checkpoint")
        if kind == BOTH:
            folder = write_checkpoint(self._model, self._folder / "checkpoint and ONNX file")
            shutil.copyfile(self.encoder.onnx, folder / "model.onnx")
            return folder
        assert kind == ONNX
        return self.encoder.onnx

    @cached_property
    def calibration(self) -> Path:
        """A file of calibration batches: the built-in sentences."""
        return write_batches(calibration_feeds(self.encoder, SENTENCES), self._folder / "calibration.npz")


def configurations_of(job: Job, source: Source, forms: Iterable[Variant]) -> list[Configuration]:
    """Return the configurations of the variants whose engine takes part."""
    found = []
    for form in forms:
        ours = form.engine == "ortolan"
        python = sys.executable if ours or form.engine == "onnxruntime" else job.pythons.get(form.engine)
        if python is None:
            continue
        options = dict(form.options)
        if ours:
            options["tokenizer"] = str(source.encoder.tokenizer)
        if ours or form.calibrated:
            options["calibration"] = str(source.calibration)
        path = source.path(form.source)
        found.append(Configuration(form.name, form.engine, path, options, python, ours, form.exact))
    return found

"""Other runtimes that text encoders are compared with, each in an environment of its own: --peer NAME=PYTHON.

A peer's environment needs these packages and nothing else; Python 3.11 or later.

    openvino                pip install openvino nncf
    ctranslate2             pip install ctranslate2 transformers torch
    sentence-transformers   pip install sentence-transformers torch
    fastembed               pip install fastembed
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import which
from typing import Any

from ortolan.errors import OrtolanError
from ortolan.graph_passes.measure.feeds import Feeds

from ..models.bert import BertConfig, bert_weight_shapes
from ..models.catalog import safetensors_numpy
from ..models.checkpoint import write_checkpoint
from ..models.tiny import random_weights
from .encoder import RANDOM, Encoder
from .encoder_process import EncoderSpec, write_batches


@dataclass(frozen=True)
class PeerRow:
    """A form of a peer's. checkpoint: it starts from a folder of transformers', not from the ONNX file. exact: it
    computes in fp32. calibrated: it takes batches to calibrate on. architectures: those that it knows; empty: all."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: bool = False
    exact: bool = False
    calibrated: bool = False
    architectures: tuple[str, ...] = ()


# By engine, as workers/encoders.py calls it.
PEERS: Mapping[str, Sequence[PeerRow]] = {
    "openvino": (
        PeerRow("OpenVINO f32", {"precision": "f32"}, exact=True),
        PeerRow("OpenVINO", {"precision": "default"}),
        PeerRow("OpenVINO int8 (nncf)", {"precision": "int8"}, calibrated=True),
    ),
    "ctranslate2": (
        PeerRow("CTranslate2 fp32", {"compute_type": "float32"}, True, True, architectures=("bert",)),
        PeerRow("CTranslate2 int8", {"compute_type": "int8"}, True, architectures=("bert",)),
    ),
    "sentence-transformers": (PeerRow("sentence-transformers", checkpoint=True, exact=True),),
    "fastembed": (PeerRow("fastembed", exact=True),),
}


def read_peer(text: str) -> tuple[str, str]:
    """NAME=PYTHON."""
    name, equals, python = text.partition("=")
    if name not in PEERS or not equals:
        known = ", ".join(PEERS)
        raise argparse.ArgumentTypeError(f"expected NAME=PYTHON, the name one of {known}; found {text!r}")
    if which(python) is None:
        raise argparse.ArgumentTypeError(f"expected a Python to run {name} with, found {python!r}")
    return name, python


def peer_specs(
    peers: Mapping[str, str],
    model: str,
    encoder: Encoder,
    calibration: Sequence[Feeds],
    folder: Path,
    leave_out: Callable[[str, str], None],
) -> dict[str, EncoderSpec]:
    """By what the table calls it. peers: name -> interpreter. leave_out is told the rows that cannot be, and why."""
    architecture = "mpnet" if "mpnet" in model else "bert"
    checkpoint: Path | None = None
    specs = {}
    for engine, python in peers.items():
        for row in PEERS[engine]:
            if row.architectures and architecture not in row.architectures:
                leave_out(row.name, f"it converts no {architecture}")
                continue
            source = encoder.onnx
            if row.checkpoint:
                try:
                    checkpoint = checkpoint or _write_checkpoint(model, folder / "checkpoint")
                except OrtolanError as error:
                    leave_out(row.name, str(error))
                    continue
                source = checkpoint
            options = dict(row.options)
            if row.calibrated:
                options["calibration"] = str(write_batches(calibration, folder / "calibration.npz"))
            specs[row.name] = EncoderSpec(engine, source, options, python, row.exact)
    return specs


def _write_checkpoint(model: str, folder: Path) -> Path:
    if model != RANDOM:
        return write_checkpoint(model, folder)
    # Converters want a tokenizer: one of as many words.
    write_checkpoint("all-minilm-l6-v2", folder)
    config = BertConfig()
    weights = random_weights(bert_weight_shapes(config))
    safetensors_numpy().save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {"model_type": "bert", "architectures": ["BertModel"], **asdict(config)}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder

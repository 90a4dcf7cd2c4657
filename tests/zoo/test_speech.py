"""Speech encoders that Optimum does not export alone: Parakeet, and the text encoders of VITS and Kokoro.

Exported by torch with random weights. Skipped without ortolan[optimum].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.57")  # the first with Parakeet

import ortolan  # noqa: E402
from ortolan.graph_passes.operators.nomad_attention_function import ATTENTIONS  # noqa: E402
from ortolan.models.zoo import SMALL  # noqa: E402
from ortolan.session import create_session  # noqa: E402

LIMITS = {"bf16": 2e-2, "int8": 6e-2}
BINS, CHANNELS = 80, 32
LENGTHS = (21, 13)  # the second sequence has padding
Inputs = dict[str, Any]


class Parakeet(torch.nn.Module):
    """Conformer with relative positions behind 2-D convolutions that reduce the frames to an eighth."""

    def __init__(self) -> None:
        super().__init__()
        encoder = {
            "hidden_size": SMALL.hidden,
            "num_hidden_layers": SMALL.layers,
            "num_attention_heads": SMALL.heads,
            "intermediate_size": SMALL.intermediate,
            "subsampling_conv_channels": CHANNELS,
            "num_mel_bins": BINS,
        }
        config = transformers.ParakeetCTCConfig(vocab_size=SMALL.vocab, pad_token_id=0, encoder_config=encoder)
        self.model = transformers.ParakeetForCTC(config)

    def forward(self, input_features: Any, attention_mask: Any) -> Any:
        return self.model(input_features=input_features, attention_mask=attention_mask).logits


class VitsText(torch.nn.Module):
    """Attention with relative keys and values, and feed-forward networks of two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.VitsConfig(
            vocab_size=SMALL.vocab,
            hidden_size=SMALL.hidden,
            num_hidden_layers=SMALL.layers,
            num_attention_heads=SMALL.heads,
            ffn_dim=SMALL.intermediate,
            flow_size=SMALL.hidden,
        )
        self.encoder = transformers.models.vits.modeling_vits.VitsTextEncoder(config)

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.encoder(input_ids, attention_mask.unsqueeze(-1).float(), attention_mask, return_dict=False)[1]


class ChannelNorm(torch.nn.LayerNorm):
    """LayerNorm of [batch, channels, tokens]."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class KokoroText(torch.nn.Module):
    """Weight-normalized convolutions with masks, then an LSTM in both directions, as in StyleTTS 2."""

    def __init__(self) -> None:
        super().__init__()
        width = SMALL.hidden
        self.embedding = torch.nn.Embedding(SMALL.vocab, width)
        blocks = [
            torch.nn.Sequential(
                torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(width, width, 5, padding=2)),
                ChannelNorm(width),
                torch.nn.LeakyReLU(0.2),
            )
            for _ in range(3)
        ]
        self.blocks = torch.nn.ModuleList(blocks)
        self.lstm = torch.nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        hidden = attention_mask.unsqueeze(1) == 0
        x = self.embedding(input_ids).transpose(1, 2).masked_fill(hidden, 0.0)
        for block in self.blocks:
            x = block(x).masked_fill(hidden, 0.0)
        return self.lstm(x.transpose(1, 2))[0].transpose(1, 2).masked_fill(hidden, 0.0)


def masks(lengths: tuple[int, ...], frames: int) -> Any:
    return (torch.arange(max(lengths) * frames) < torch.tensor(lengths)[:, None] * frames).long()


def sound(lengths: tuple[int, ...]) -> Inputs:
    frames = 8
    return {
        "input_features": torch.randn(len(lengths), max(lengths) * frames, BINS),
        "attention_mask": masks(lengths, frames),
    }


def text(lengths: tuple[int, ...]) -> Inputs:
    ids = torch.randint(1, SMALL.vocab, (len(lengths), max(lengths)))
    return {"input_ids": ids, "attention_mask": masks(lengths, 1)}


@dataclass(frozen=True)
class Case:
    """An encoder and its nodes after optimization."""

    model: Callable[[], Any]
    inputs: Callable[[tuple[int, ...]], Inputs]
    layers: int
    attentions: int
    stay: Mapping[str, int]  # numbers of Conv, LSTM and Softmax nodes


# Parakeet's layers have four products for attention, a product with positions, four of feed-forward networks, and two
# pointwise convolutions. Depthwise and 2-D convolutions stay. VITS multiplies the weights of attention with positions
# too, so attention stays. LSTMs stay.
CASES = {
    "parakeet": Case(Parakeet, sound, 11 * SMALL.layers + 2, SMALL.layers, {"Conv": 5 + SMALL.layers}),
    "vits": Case(VitsText, text, 6 * SMALL.layers + 1, 0, {"Softmax": SMALL.layers}),
    "kokoro": Case(KokoroText, text, 3, 0, {"LSTM": 1}),
}


def export(case: Case, path: Path) -> None:
    torch.manual_seed(0)
    inputs = case.inputs((9, 7))
    axes = {name: {0: "batch", 1: "sequence"} for name in inputs}
    names = list(inputs)
    torch.onnx.export(
        case.model().eval(), tuple(inputs.values()), path, input_names=names, output_names=["y"], dynamic_axes=axes,
        opset_version=17, dynamo=False,
    )  # fmt: skip


def relative_error(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the error of all values but those of padding, for which Parakeet answers NaN."""
    finite = np.isfinite(expected)
    assert finite[0].all()  # it has no padding; with some releases of transformers, padding makes all others NaN
    return float(np.linalg.norm((found - expected)[finite]) / np.linalg.norm(expected[finite]))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_layers_and_answers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    source = tmp_path / "model.onnx"
    export(case, source)
    feeds = {key: value.numpy() for key, value in case.inputs(LENGTHS).items()}
    (expected,) = ort.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, feeds)
    for weights, limit in LIMITS.items():
        output = tmp_path / f"{weights}.onnx"
        report = ortolan.optimize_onnx(source, output, weights=weights, options={"verify.seconds": 0.0})
        kinds = Counter(node.op_type for node in ir.load(output).graph.all_nodes())
        assert sum(layer.status == "replaced" for layer in report.layers) == case.layers + 2 * case.attentions
        assert sum(kinds[kind] for kind in ATTENTIONS) == case.attentions
        assert {kind: kinds[kind] for kind in ("Conv", "LSTM", "Softmax") if kinds[kind]} == case.stay
        (found,) = create_session(output).run(None, feeds)
        assert relative_error(expected, found) < limit
    (claimed,) = ort.InferenceSession(source, ortolan.session_options()).run(None, feeds)
    assert relative_error(expected, claimed) < LIMITS["int8"]

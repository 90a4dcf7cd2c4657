"""Compare pruned text encoders, with 80 % or 90 % of the 4x1 blocks zero, in texts per second.

All runtimes get the same weights: a float model pruned by magnitude, without training. Its answers are far from the
original's, so quality is the distance to the pruned model in fp32.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from ortolan.benchmarks.encoder import SENTENCES, Encoder, calibration_feeds, open_model
from ortolan.graph_passes.recipe import Recipe
from ortolan.models.sparseml_form import float_form, quantized_form
from ortolan.optimize import optimize_onnx
from ortolan.text_encoder import BATCH_TOKENS

from .comparison import Job, compare
from .encoder_texts import MIXED, SORTED, STS, EncoderJudge, make_works
from .encoders import ONNX_RUNTIME, OPENVINO, SCRIPT, Source, Variant, configurations_of
from .result import PeersResult
from .verdict import SPARSE_ENCODERS

MODEL, SPARSITIES = "all-minilm-l6-v2", (0.8, 0.9)
_LEFT_OUT = ("8x512", MIXED + SORTED, STS, STS + SORTED)
# Exports in SparseML's form: floats, quantization-aware training, and the latter with float MatMuls in attention.
_FLOATS, _QUANTIZED, _LAYERS = "export of floats", "quantized export", "export of quantized layers"

_TOKENS = {"batch_tokens": BATCH_TOKENS}
OURS = (
    Variant("Ortolan 4x1", "ortolan", {"choices": {"pattern": "4x1"}, **_TOKENS}),
    Variant(
        "Ortolan 4x1, fixed ranges",
        "ortolan",
        {"choices": {"pattern": "4x1"}, "more": "ranges", **_TOKENS},
    ),
    Variant(
        "Ortolan int8", "ortolan", {"choices": {"weights": "int8"}, **_TOKENS}
    ),  # because dense AMX tiles may be as fast as sparse weights
    Variant("Ortolan, of the quantized export", "ortolan", {"choices": {}, **_TOKENS}, source=_QUANTIZED),
)
MODELS = {f"{MODEL}, {sparsity:.0%}".replace("%", " %"): sparsity for sparsity in SPARSITIES}
DEEPSPARSE = (
    Variant("DeepSparse fp32", "deepsparse", exact=True, source=_FLOATS),
    Variant("DeepSparse int8, quantized export", "deepsparse", source=_QUANTIZED),
    Variant("DeepSparse int8, export of quantized layers", "deepsparse", source=_LAYERS),
)


def measure(job: Job, result: PeersResult) -> None:
    """Add the rows of every sparsity."""
    for name, sparsity in MODELS.items():
        if not job.takes_model(SPARSE_ENCODERS, name):
            continue
        folder = job.folder / SPARSE_ENCODERS.replace(" ", "-") / f"{name}, given"
        encoder = prune(open_model(MODEL, folder), sparsity, folder)
        works = make_works(job, encoder, folder, _LEFT_OUT)
        if works:
            source = SparseSource(MODEL, encoder, folder)
            configurations = configurations_of(job, source, (*ONNX_RUNTIME, *OURS, *OPENVINO, *DEEPSPARSE))
            judge = EncoderJudge(job, encoder, folder)
            compare(job, SPARSE_ENCODERS, name, SCRIPT, configurations, works, judge, result)


def prune(encoder: Encoder, sparsity: float, folder: Path) -> Encoder:
    """Return the encoder in floats, with this fraction of its 4x1 blocks zero."""
    passes = [{"name": "normalize"}, {"name": "prune", "method": "magnitude", "pattern": "4x1", "sparsity": sparsity}]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pruned.onnx"
    recipe = Recipe.from_dict({"name": "pruned", "pass": passes})
    model = optimize_onnx(encoder.onnx, recipe=recipe, calibration=calibration_feeds(encoder, SENTENCES)).model
    assert model is not None
    del model.metadata_props[:]  # the metadata marks the model as optimized
    onnx.save(model, path)
    return Encoder(path, encoder.tokenizer, encoder.inputs)


class SparseSource(Source):
    """A source that also exports the pruned model as SparseML does."""

    def _make(self, kind: str) -> Path:
        if kind not in (_FLOATS, _QUANTIZED, _LAYERS):
            return super()._make(kind)
        model = onnx.load(self.encoder.onnx)
        if kind == _FLOATS:
            made = float_form(model)
        else:
            feeds = calibration_feeds(self.encoder, SENTENCES)
            made = quantized_form(model, feeds, products=kind == _QUANTIZED)
        path = self._folder / f"{kind}.onnx"
        onnx.save(made, path)
        return path

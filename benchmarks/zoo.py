"""The zoo: coverage, accuracy and speed for each architecture of models/zoo.py.

For each model, it reports the replaced parts of the graph, the similarity of the answers, and speedups over ONNX
Runtime's float32 and dynamic int8. The dynamic int8 file also runs, unmodified, on the execution provider. So does the
float32 file, in bf16: the answers should have the bits of the file that is optimized to bf16.

Weights are random, so the similarity shows the error of the operators, not of int8 on a trained model.
Encoders run 1 x 128 tokens, 3 seconds of sound, or one image; decoders one token after 128 tokens. Decoder caches stay
float32. Needs ortolan[optimum].
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.quantization import quantize_dynamic

from ortolan.graph_passes.measure.feeds import Sizes, has_past, synthetic_feeds
from ortolan.graph_passes.measure.timing import interleave, pinned
from ortolan.graph_passes.operators.nomad_attention_function import ATTENTIONS, OP_TYPE
from ortolan.session import create_session

from ..errors import OrtolanError
from ..models.zoo import ARCHITECTURES, BASE, SMALL, Architecture, Size, export, find_architecture
from ..optimize import optimize_onnx
from ..progress import Progress, no_progress
from ..provider import CLAIMS_FILE, checked_options, options_with
from ..provider import session_options as provider_options
from .encoder import silent_root_logger
from .result import BenchOptions, BenchResult, BenchRow
from .variants import session_options

FP32, INT8 = "ORT fp32", "ORT dynamic int8"
_OPTIMIZED, _PROVIDER = "optimized int8", "provider, of dynamic int8"  # compared with the two candidates above
_SECONDS, _QUICK_SECONDS = 2.0, 0.5
_MERGED = "decoder_model_merged"  # contains both other decoder files
# Parts of the reasons for matrix products without a weight, which are not linear layers.
_NO_WEIGHT = ("computed at run time", "both inputs are constant", "an outer product")

# Operators for which the provider reports an attention that it computes alone.
_ATTENTIONS = ("Softmax", "Attention", "MultiHeadAttention", "GroupQueryAttention")


@dataclass(frozen=True)
class Study:
    """The result of optimize_onnx on one model."""

    linear: int  # linear layers (with a constant weight)
    linear_replaced: int
    attentions: int
    fused: int
    joined: int  # attentions whose query, key and value layers are joined
    cosine: float  # cosine of the worst output
    reasons: tuple[str, ...]  # reasons why layers and attentions were kept

    def to_case(self) -> dict[str, Any]:
        """Return the columns of the result table."""
        return {
            "linear": f"{self.linear_replaced}/{self.linear}",
            "attention": f"{self.fused}/{self.attentions}",
            "joined": self.joined,
        }


def parts(folder: Path) -> list[Path]:
    """Return the models of an export. If it has merged and separate decoders, only the separate ones are returned."""
    return [path for path in sorted(folder.glob("*.onnx")) if path.stem != _MERGED]


def study(architecture: Architecture, size: Size, source: Path, output: Path, weights: str) -> Study:
    """Optimize one model of an architecture; caches stay float32."""
    cache = "float32" if architecture.task.endswith("-with-past") else None
    report = optimize_onnx(source, output, weights=weights, cache=cache)
    before, after = (_count(ir.load(path)) for path in (source, output))
    attentions = sum(before[op_type] for op_type in _ATTENTIONS) - architecture.layer_softmaxes * size.layers
    layers = [layer for layer in report.layers if layer.new_op != OP_TYPE]
    layers = [layer for layer in layers if not any(text in (layer.reason or "") for text in _NO_WEIGHT)]
    reasons = Counter(layer.reason for layer in layers if layer.reason)
    reasons.update(note for note in report.notes if "not fused" in note or ("cache of" in note and "left" in note))
    return Study(
        len(layers),
        sum(layer.status == "replaced" for layer in layers),
        attentions,
        sum(after[op_type] for op_type in ATTENTIONS),
        after["joined"],
        min((output.cosine for output in report.output_error), default=1.0),
        tuple(reasons),
    )


@dataclass(frozen=True)
class Provided:
    """Claims and answers of the execution provider on an unmodified model in bf16."""

    attentions: float  # attentions that it claims
    unequal: tuple[str, ...]  # outputs that differ in any bit from those of the optimized file


def provided(source: Path, optimized: Path, feeds: dict[str, np.ndarray]) -> Provided:
    """Run a model on the provider, which claims all nodes that it supports, and its file that was optimized to bf16."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "claims.jsonl"
        options = options_with({**checked_options("bf16", "all"), CLAIMS_FILE: str(file)})
        options.log_severity_level = 3
        session = create_session(source, options)
        found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    # The provider sees a graph again after functions are inlined.
    nodes = {node["node"]: node for node in found if "attention of" in node.get("what", "")}.values()
    # An attention with its query, key and value layers is reported for each layer.
    attentions = sum(1 if node["op"] in _ATTENTIONS else 1 / 3 for node in nodes)
    answers = (one.run(None, feeds) for one in (session, create_session(optimized)))
    names = [one.name for one in session.get_outputs()]
    pairs = zip(names, *answers, strict=True)
    unequal = tuple(name for name, one, other in pairs if not np.array_equal(one, other, equal_nan=True))
    return Provided(round(attentions, 1), unequal)


def _count(model: ir.Model) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in model.graph.all_nodes():
        found[node.op_type] += 1
        if node.op_type in ATTENTIONS and not any(node.inputs[2:4]):
            found["joined"] += 1
    return found


def run(options: BenchOptions, progress: Progress = no_progress) -> BenchResult:
    """Measure the zoo: the architectures named by `options.kinds`; with `options.quick`, small models.

    Raises:
        OrtolanError: A name is unknown, or Optimum is not installed.
    """
    names = options.kinds or tuple(one.name for one in ARCHITECTURES)
    unknown = set(names) - {one.name for one in ARCHITECTURES}
    if unknown:
        known = ", ".join(one.name for one in ARCHITECTURES)
        raise OrtolanError(f"the zoo has no {', '.join(sorted(unknown))}, expected {known}")
    chosen = [find_architecture(name) for name in names]
    size = SMALL if options.quick else BASE
    result = BenchResult()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            for done, architecture in enumerate(chosen):
                progress(architecture.name, done, len(chosen))
                folder = Path(temporary) / architecture.name
                try:
                    export(architecture, size, folder)
                except ImportError as error:
                    raise OrtolanError(
                        f"the zoo needs Optimum: pip install 'optimum-onnx[onnxruntime]==0.1.0' ({error})"
                    ) from None
                for source in parts(folder):
                    try:
                        result.rows += _rows(architecture, size, source, options, result.notes)
                    except Exception as error:  # continue with the other models
                        result.notes.append(f"{architecture.name}, {source.name}, failed: {error}")
        progress("done", len(chosen), len(chosen))
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def _rows(
    architecture: Architecture, size: Size, source: Path, options: BenchOptions, notes: list[str]
) -> Iterator[BenchRow]:
    name = architecture.name if source.stem == "model" else f"{architecture.name} {source.stem.removesuffix('_model')}"
    paths = {FP32: source, **{kind: source.with_name(f"{kind}-{source.name}") for kind in ("bf16", "int8", INT8)}}
    found = {kind: study(architecture, size, source, paths[kind], kind) for kind in ("bf16", "int8")}
    case = {"model": name, **found["int8"].to_case()}
    case |= {f"cosine {kind}": f"{one.cosine:.5f}" for kind, one in found.items()}
    notes += [f"{name}: {reason}" for reason in found["int8"].reasons]
    try:
        with silent_root_logger():
            quantize_dynamic(source, paths[INT8])
    except Exception as error:  # ONNX Runtime's quantizer raises various exceptions
        notes.append(f"{name}: ONNX Runtime cannot quantize it: {error}")
        del paths[INT8]
    model = ir.load(source)
    tokens = architecture.tokens
    feeds = synthetic_feeds(model, Sizes(1, 1, tokens) if has_past(model) else Sizes(1, tokens, 0))
    in_provider = provided(source, paths["bf16"], feeds)
    case["provider attention"] = f"{in_provider.attentions:g}/{found['bf16'].attentions}"
    case["provider's bf16 answers"] = "other bits" if in_provider.unequal else "the same bits"
    for threads in options.threads:
        with pinned(threads):
            sessions = {kind: create_session(path, session_options(threads)) for kind, path in paths.items()}
            del sessions["bf16"]
            if INT8 in paths:
                with_provider = provider_options()
                with_provider.intra_op_num_threads = threads
                sessions[_PROVIDER] = ort.InferenceSession(paths[INT8], with_provider)
            calls = {kind: partial(one.run, None, feeds) for kind, one in sessions.items()}
            times = interleave(calls, seconds=_QUICK_SECONDS if options.quick else _SECONDS)
        for ours, name, peer in (("int8", _OPTIMIZED, FP32), ("int8", _OPTIMIZED, INT8), (_PROVIDER, _PROVIDER, INT8)):
            if ours in times and peer in times:
                shown = case if ours == "int8" else {"model": case["model"]}
                yield BenchRow("zoo", {"ours": name, **shown}, threads, times[ours], peer, times[peer])

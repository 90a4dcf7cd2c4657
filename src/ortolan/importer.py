"""import_gguf: converts a GGUF file to a folder for onnxruntime-genai and Optimum."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ortolan.graph_passes.files.genai_folder import CONFIG_NAME, GenaiConfig
from ortolan.graph_passes.files.model_file import ModelFile
from ortolan.graph_passes.files.output import check_new_folder, move_folder_into_place
from ortolan.graph_passes.files.spill import TensorSpill
from ortolan.graph_passes.files.work_folder import work_folder
from ortolan.graph_passes.find.experts import GivenExperts
from ortolan.graph_passes.find.linear import layer_key
from ortolan.graph_passes.find.quantized_weight import QuantizedWeight, dequantized_tensor
from ortolan.graph_passes.forms import IMPORT
from ortolan.graph_passes.measure.evidence import Evidence
from ortolan.graph_passes.names import FEW_BITS
from ortolan.graph_passes.passes.context import PassContext
from ortolan.graph_passes.recipe import Recipe
from ortolan.graph_passes.report.figures import human_bytes
from ortolan.graph_passes.report.optimization import LayerReport, OptimizationReport
from ortolan.graph_passes.run import plan, transform, write
from ortolan.graph_passes.serve.check import make_serving_form
from ortolan.graph_passes.serve.genai import engine_config
from ortolan.graph_passes.weights.quantizers.grid import GROUPS_OF_SUBGROUPS, SUBGROUP_SIZES, Quantization
from ortolan.graph_passes.weights.quantizers.k_quants import Q6_K

from .errors import ArgumentError, VerificationError, wrong_type
from .generate import Decoder, generate
from .library import LIBRARY_NAME, get_library_path
from .models.gguf.file import StoredWeight
from .models.gguf.model import GgufModel, read_model
from .models.gguf.side_files import genai_config, side_files
from .models.gguf.tokenizer import TokenizerFacts, read_gguf_tokenizer, read_tokenizer_facts
from .models.gguf.weights import KeptWeight, in_turns, join_quantized, keep_experts, keep_gguf_weight
from .models.graph_builder import ModelBuildError, Weight, lazy_weight
from .models.llama import build_llama
from .progress import Progress, Stage, no_progress, told
from .session import create_session, known_cpu, package_versions

if TYPE_CHECKING:
    import onnx_ir as ir

_MODEL = "model.onnx"
_TABLE = "model.embed_tokens.weight"
_ROUTER = "mlp.gate.weight"
_TABLE_AND_HEAD = (_TABLE, "lm_head.weight")
_TOKENS_TO_COMPARE = 40  # of the model's own text, with which its form for serving is checked
_ROWS_TO_CHECK = 4  # number of random input rows on which each layer is checked


def import_gguf(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    requantize: str | None = None,
    serve: bool = False,
    progress: Progress | None = None,
) -> OptimizationReport:
    """Convert a decoder of the Llama family from a GGUF file into a folder for onnxruntime-genai and Optimum.

    The folder has model.onnx with Ortolan's operators, model.onnx.data with the weights, the operator library, the
    tokenizer with its chat template, and the configuration files of onnxruntime-genai and Optimum. Weights of Q4_0,
    Q4_1, Q5_0, Q5_1, Q8_0, MXFP4 and Q2_K to Q6_K are kept exactly; all other weights become 8-bit in groups of 32. The
    notes of the report list the weights with their errors. Each layer is checked on random inputs.

    Args:
        path: The GGUF file, of architecture llama (Mistral, Mixtral), qwen2, qwen3, qwen3moe, phi3, gemma, gemma2,
            gemma3 (text), granite, granitemoe, gpt-oss or smollm3. Needs the extra ortolan[decoder].
        folder: A new or empty folder, which appears when it is complete.
        requantize: "int4", "int5" or "int6": round weights of at least this many bits to this format, which is faster
            for prompts. A word embedding and a head of more than 6 bits become Q6_K.
        serve: Write the form for serving, as `optimize_onnx(serve=True)` does. The folder then is for `ortolan serve`
            and for onnxruntime-genai's Engine.
        progress: As for `optimize_onnx`.

    Returns:
        The report.

    Raises:
        ArgumentTypeError: A path is not a path.
        OrtolanError: The model cannot be imported. This is found before any long work.
    """
    for name, value in (("path", path), ("folder", folder)):
        if not isinstance(value, str | os.PathLike):
            raise wrong_type(name, value, "a path")
    if requantize is not None and requantize not in FEW_BITS:
        raise ArgumentError(f"requantize is {requantize!r}, expected one of {', '.join(map(repr, FEW_BITS))}")
    target = Path(folder)
    check_new_folder(target, "a model with its tokenizer is a folder", ".onnx")
    with told(progress or no_progress) as tell:
        run = _Import(read_model(path).with_halves(), target, requantize, serve)
        run.execute(tell)
    return run.report


@dataclass
class _Weights:
    """The weights from which the graph is built.

    Attributes:
        lazy: Float weights, read on demand, by their Hugging Face names.
        given: Quantized weights by their names in the graph.
        separate_qkv: Layers whose query, key and value weights cannot be joined.
        experts: Quantized weights of experts by their names in the graph.
        taken: Quantized weights by their Hugging Face names; of experts, the first expert's.
    """

    lazy: dict[str, Weight] = field(default_factory=dict)
    given: dict[str, QuantizedWeight] = field(default_factory=dict)
    separate_qkv: list[int] = field(default_factory=list)
    experts: dict[str, GivenExperts] = field(default_factory=dict)
    taken: dict[str, KeptWeight] = field(default_factory=dict)


class _Import:
    """A call of `import_gguf`. Cheap checks run before any weight is read."""

    def __init__(self, model: GgufModel, target: Path, requantize: str | None, serve: bool) -> None:
        get_library_path()
        self.model, self.target, self.serve = model, target, serve
        self.requantize = requantize
        tokenizer = read_gguf_tokenizer(model.file)
        facts = read_tokenizer_facts(model.file)
        tokens = [str(tokenizer.id_to_token(index)) for index in range(tokenizer.get_vocab_size())]
        self.texts = {"tokenizer.json": tokenizer.to_str(pretty=False)}
        for name, content in side_files(model, facts, tokens).items():
            self.texts[name] = json.dumps(content, indent=2, ensure_ascii=False)
        self.genai = GenaiConfig(target / CONFIG_NAME, genai_config(model, facts, _MODEL, LIBRARY_NAME))
        if serve:
            self.genai = engine_config(self.genai)
        self.start = _first_token(facts)
        self.recipe = Recipe.from_dict(IMPORT)
        self.report = OptimizationReport(
            recipe=self.recipe.to_dict(),
            input=str(model.file.path),
            output=str(target),
            file_size_before=model.file.path.stat().st_size,
            feeds=f"{_ROWS_TO_CHECK} random inputs of each layer",
            versions=package_versions(),
            cpu=known_cpu(),
        )
        if (size := model.config.head_size) % 16:
            raise ModelBuildError(
                f"{model.file.path} has a head size of {size}, expected a multiple of 16 for GroupQueryAttention; the "
                "model cannot be imported"
            )
        # Build the graph with lazy float weights, to find out whether it can be built before any weight is read.
        floats = {name: _lazy_floats(weight) for name, weight in model.weights.items()}
        build_llama(floats, model.config, attention="gqa", one_table=True)

    def execute(self, tell: Progress) -> None:
        """Convert the model."""
        with work_folder(self.target) as work, TensorSpill(work) as spill:
            weights = self._take(spill, tell)
            source = ModelFile(self._graph(weights), self.model.file.path, None)
            result = work / "result"
            result.mkdir()
            with Evidence(source, work) as evidence:
                context = PassContext(
                    evidence,
                    source,
                    self.report,
                    result / _MODEL,
                    spill,
                    progress=tell,
                    given=weights.given,
                    given_experts=weights.experts,
                )
                steps = plan(self.recipe, context)
                layers = _fill_inputs(context)
                transform(steps, context)
                self._tell_weights(weights, layers)
                write(steps, context, embed_limit=0)
                decoder = self._check_runs(result / _MODEL)
                if self.serve:
                    ids = np.array([self.start, *generate(decoder, [self.start], _TOKENS_TO_COMPARE)])
                    make_serving_form(context, ids, embed_limit=0)
            self._write_others(result)
            tell(Stage.SAVE, 0, 1)
            move_folder_into_place(result, self.target)
            tell(Stage.SAVE, 1, 1)

    def _take(self, spill: TensorSpill, tell: Progress) -> _Weights:
        """Read all weights. Matrices stay quantized or are quantized; vectors are floats."""
        weights, total = _Weights(), len(self.model.weights)
        for done, (name, stored) in enumerate(self.model.weights.items()):
            tell(Stage.READ_WEIGHTS, done, total)
            if len(stored.shape) == 1:
                weights.lazy[name] = np.asarray(stored.floats())
                continue
            if len(stored.shape) == 3 or name.endswith((_ROUTER, ".bias")):
                weights.lazy[name] = _lazy_floats(stored)
                continue
            weights.taken[name] = taken = keep_gguf_weight(stored, spill, self._wanted(name))
            weights.lazy[name] = _float_weight(taken.quantized)
            weights.given[name if name == _TABLE else f"{name}_t"] = taken.quantized
        for layer in range(self.model.config.num_hidden_layers if self.model.config.num_experts else 0):
            self._take_experts(f"model.layers.{layer}.mlp.experts", weights, spill)
        tell(Stage.READ_WEIGHTS, total, total)
        self._join_qkv(weights)
        return weights

    def _take_experts(self, prefix: str, weights: _Weights, spill: TensorSpill) -> None:
        """Read the experts of a layer."""
        names = [f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")]
        gate, up, down = (self.model.weights[name] for name in names)
        first, second = keep_experts([gate, up], spill, self._wanted(names[0]))
        (last,) = keep_experts([down], spill, self._wanted(names[2]))
        for name, stored, kept in zip(names, (gate, up, down), (first, second, last), strict=True):
            weights.taken[name] = KeptWeight(stored, kept[0].quantized, max(one.error for one in kept))
        pairs = [in_turns(one.quantized, other.quantized) for one, other in zip(first, second, strict=True)]
        weights.experts[f"{prefix}.gate_up_proj"] = GivenExperts(pairs, gate.nbytes + up.nbytes)
        weights.experts[f"{prefix}.down_proj"] = GivenExperts([one.quantized for one in last], down.nbytes)

    def _wanted(self, name: str) -> Quantization | None:
        """Return the format to which a weight is rounded if it has as many bits or more; None: it is kept."""
        if self.requantize is None:
            return None
        if name in _TABLE_AND_HEAD:
            return Q6_K
        bits, group, subgroup = FEW_BITS[self.requantize], GROUPS_OF_SUBGROUPS[-1], SUBGROUP_SIZES[0]
        return Quantization(bits, group, symmetric=False, subgroup_size=subgroup)

    def _join_qkv(self, weights: _Weights) -> None:
        if self.model.config.qk_norm:
            return
        for layer in range(self.model.config.num_hidden_layers):
            prefix = f"model.layers.{layer}.self_attn"
            names = [f"{prefix}.{part}_proj.weight" for part in "qkv"]
            joined = join_quantized([weights.taken[name].quantized for name in names])
            if joined is None:
                weights.separate_qkv.append(layer)
            else:
                weights.given[f"{prefix}.qkv_proj.weight_t"] = joined

    def _graph(self, weights: _Weights) -> ir.Model:
        graph = build_llama(
            weights.lazy,
            self.model.config,
            self.model.file.metadata.get("general.name") or "gguf",
            "gqa",
            one_table=True,
            separate_qkv=weights.separate_qkv,
        )
        _add_position_ids(graph)
        graph.metadata_props["source"] = self.model.file.path.name
        if licence := self.model.file.metadata.get("general.license"):
            graph.metadata_props["licence"] = str(licence)
        return graph

    def _tell_weights(self, weights: _Weights, layers: Sequence[tuple[LayerReport, str]]) -> None:
        """Add the sizes of layers in the file, and a note on each type of weights, to the report."""
        for layer, name in layers:
            layer.bytes_before = self._stored_bytes(name)
        self.report.notes[:0] = [*self.model.notes, *_describe(weights.taken)]

    def _stored_bytes(self, name: str) -> int:
        """Return the bytes that a weight, by its name in the graph, occupies in the GGUF file."""
        names = [name.replace("qkv_proj", f"{part}_proj") for part in "qkv"] if "qkv_proj" in name else [name]
        return sum(self.model.weights[one.removesuffix("_t")].nbytes for one in names)

    def _check_runs(self, path: Path) -> Decoder:
        """Run the model on one token, and return it as a decoder.

        Raises:
            SessionError: It cannot be opened.
            VerificationError: It returns NaN or infinity.
        """
        decoder = Decoder(create_session(path))
        logits = decoder.step([self.start])
        if not np.isfinite(logits).all():
            raise VerificationError(
                f"model returns NaN or infinity for token {self.start}; nothing was saved; check that "
                f"{str(self.model.file.path)!r} is complete"
            )
        decoder.reset()
        return decoder

    def _write_others(self, result: Path) -> None:
        self.report.file_size_after = sum(file.stat().st_size for file in result.iterdir())
        for name, text in self.texts.items():
            (result / name).write_text(text, encoding="utf-8")
        self.genai.write(result)


def _first_token(facts: TokenizerFacts) -> int:
    return facts.bos or facts.eos or 0


def _add_position_ids(model: ir.Model) -> None:
    """Add an input `position_ids` that no node reads: GroupQueryAttention derives positions from attention_mask.

    Optimum expects this input in these model families; without it, Optimum advises to export the model again.
    """
    import onnx_ir as ir

    ids = next(value for value in model.graph.inputs if value.name == "input_ids")
    model.graph.inputs.insert(2, ir.Value(name="position_ids", type=ids.type, shape=ids.shape))


def _lazy_floats(weight: StoredWeight) -> Weight:
    return lazy_weight(weight.floats, weight.shape)


def _float_weight(numbers: QuantizedWeight) -> ir.LazyTensor:
    import onnx_ir as ir

    return dequantized_tensor(numbers, True, ir.DataType.FLOAT)


def _fill_inputs(context: PassContext) -> list[tuple[LayerReport, str]]:
    """Give each layer random inputs, on which pass replace checks the packed weights.

    Returns:
        The report of each layer and the name of its weight.
    """
    rng = np.random.default_rng(0)
    layers = []
    for linear in context.survey(context.source.model):
        x = rng.standard_normal((_ROWS_TO_CHECK, linear.k), np.float32)
        context.layers.captured[layer_key(linear)] = x
        layers.append((context.layer(linear), linear.weight_names[-1]))
    return layers


def _describe(taken: Mapping[str, KeptWeight]) -> list[str]:
    """Return one line for each type of weights in the file."""
    kinds: dict[tuple[str, str], list[KeptWeight]] = {}
    for one in taken.values():
        kinds.setdefault((one.stored.kind, one.format), []).append(one)
    lines = []
    for (kind, form), group in kinds.items():
        errors = [one.error for one in group]
        size = human_bytes(sum(one.stored.nbytes for one in group))
        how = "exact" if not any(errors) else f"relative error of the weights up to {max(errors):.2g}"
        names = f"{len(group)} matrices" if len(group) > 1 else repr(group[0].stored.name)
        lines.append(f"{names} of {kind} ({size}) -> {form}, {how}")
    return lines

"""Write models optimized on this machine, with their inputs and outputs, for check_models.py on an emulated Arm CPU.

`python -m tests.aarch64.answers FOLDER` writes them. Real models are included if they are in the cache of
`ortolan.models`; `--fetch` downloads them first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

import ortolan
from ortolan import Recipe
from ortolan.cache_folder import default_cache_dir
from ortolan.models import get_model, tiny
from ortolan.models.manifest import find_entry

from ..passes import cached_llama, small_models
from ..recipes.forms import NAMED

LAYERS = ("sparse-int8", "sparse-int4", "sparse-int8-4x1", "int4")
BF16 = "sparse-bf16"
BF16_NODE = f"model {BF16}, node "  # see BOUND in check_models.py, which has it too
MODELS = (BF16, "sparse-int8", "sparse-int8-4x1", "int4", "sparse-encoder")

# Names of real models in the catalog, and their formats.
ENCODER, ENCODER_FORMS = "all-minilm-l6-v2", ("int8", "int4")
DECODER, DECODER_FORMS = "stories15m", ("int4", "long-context")

Arrays = dict[str, np.ndarray]


def is_cached(name: str) -> bool:
    """Return True if the files of a model in the catalog are in the cache."""
    return (default_cache_dir() / f"{name}-{find_entry(name).digest}").is_dir()


@dataclass(frozen=True)
class Case:
    """A model to run, its inputs, and the relative error of its first output against the original model's.

    All errors here are norms of differences, relative to the norm of the expected values.
    """

    name: str
    model: onnx.ModelProto
    feeds: Arrays
    lost: float = 0.0


def real() -> Iterator[Case]:
    """Yield the real models that are in the cache."""
    if is_cached(ENCODER):
        original = onnx.load(get_model(ENCODER).onnx)
        ids = np.random.default_rng(4).integers(1000, 30000, (2, 12))
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        feeds = {value.name: given[value.name] for value in original.graph.input}
        for form in ENCODER_FORMS:
            model = quickly(original, same_everywhere(NAMED[form]), feeds)
            yield Case(f"real {ENCODER} {form}", model, feeds, lost(run(original, feeds), run(model, feeds)))
    if is_cached(DECODER):
        original = onnx.load(get_model(DECODER).onnx)
        prompt = cached_llama.prompt(original, batch=1, tokens=60, seed=4)
        for form in DECODER_FORMS:
            model = quickly(original, NAMED[form], prompt)
            feeds = [prompt, next_token(original, prompt)]
            own = cached_llama.prompt(model, batch=1, tokens=60, seed=4)
            for name, theirs, ours in zip(("", ", next token"), feeds, (own, next_token(model, own)), strict=True):
                yield Case(f"real {DECODER} {form}{name}", model, ours, lost(run(original, theirs), run(model, ours)))


def same_everywhere(recipe: Recipe) -> Recipe:
    """Return the recipe whose attention has the same bits on every CPU, also beside bf16 layers."""
    fused = [step.options for step in recipe.passes if "reproducible" in step.options.names()]
    return recipe.with_options({"reproducible": "everywhere"}) if fused else recipe


def quickly(model: onnx.ModelProto, recipe: Recipe, feeds: Arrays) -> onnx.ModelProto:
    """Return the model optimized by a recipe, without timing it."""
    report = ortolan.optimize_onnx(model, recipe=recipe, calibration=[feeds], options={"verify.seconds": 0})
    assert report.model is not None
    return report.model


def run(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    session = cached_llama.session(model)
    return dict(zip((value.name for value in session.get_outputs()), session.run(None, feeds), strict=True))


def lost(there: Arrays, here: Arrays) -> float:
    """Return the relative error of the first output: the norm of the difference over the norm of `there`."""
    output = next(iter(there))
    return float(np.linalg.norm(here[output] - there[output]) / np.linalg.norm(there[output]))


def next_token(model: onnx.ModelProto, prompt: Arrays) -> Arrays:
    """Return the inputs for one more token after a prompt; batch size 1."""
    outputs = run(model, prompt)
    tokens = prompt["attention_mask"].shape[1]
    token = {"input_ids": np.array([[7]]), "attention_mask": np.ones((1, tokens + 1), np.int64)}
    token["position_ids"] = np.array([[tokens]])
    return {
        name: token[name] if name in token else outputs[name.replace("past_key_values", "present")] for name in prompt
    }


def nodes(model: onnx.ModelProto, feeds: Arrays) -> Iterator[tuple[onnx.ModelProto, Arrays]]:
    """Yield a one-node model for each ai.ortolan node, with the inputs that the node gets inside `model`."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    ours = [node for node in model.graph.node if node.domain == "ai.ortolan"]
    between = {name for node in model.graph.node for name in node.output if name}
    wanted = {name for node in ours for name in node.input if name in between}
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(wanted))
    found = {**feeds, **run(shown, feeds)}
    for node in ours:
        given = {name: found[name] for name in node.input if name in found}
        inputs = [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in given.items()
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        used = [constants[name] for name in dict.fromkeys(node.input) if name in constants]
        graph = onnx.helper.make_graph([node], "node", inputs, outputs, initializer=used)
        alone = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
        yield alone, given


def made(with_real: bool) -> Iterator[Case]:
    """Yield the optimized models, and the real models if `with_real` is set."""
    x = np.random.default_rng(0).standard_normal((5, 200)).astype(np.float32)
    for form in LAYERS:
        layer = ir.to_proto(tiny.mlp(widths=(200, 72), forms="matmul_add"))
        yield Case(f"layer {form}", small_models.optimize(layer, recipe=form).model, {"x": x})
    ids = np.random.default_rng(1).integers(0, tiny.TINY_BERT.vocab_size, (3, 20))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    for form in MODELS:
        bert = ir.to_proto(tiny.tiny_bert())
        given = {value.name: feeds[value.name] for value in bert.graph.input}
        recipe = same_everywhere(NAMED[form])
        model = small_models.optimize(bert, recipe=recipe, calibration=[given]).model
        if form == BF16:
            for i, (node, inputs) in enumerate(nodes(model, given)):
                yield Case(f"{BF16_NODE}{i}", node, inputs)
        else:
            yield Case(f"model {form}", model, given)
    decoder, _ = cached_llama.compress(cached_llama.llama("standard"))
    yield Case("model decoder", decoder, cached_llama.prompt(decoder, seed=3))
    if with_real:
        yield from real()


def main(folder: Path, with_real: bool = True) -> None:
    """Write NAME.onnx and NAME.npz for each model.

    Keys of the arrays: "in.NAME" for inputs, "out.NAME" for outputs, and "lost" for the error of the format.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for case in made(with_real):
        (folder / f"{case.name}.onnx").write_bytes(case.model.SerializeToString())
        arrays = {f"in.{key}": value for key, value in case.feeds.items()}
        arrays |= {f"out.{key}": value for key, value in run(case.model, case.feeds).items()}
        np.savez(folder / f"{case.name}.npz", lost=np.float64(case.lost), **arrays)  # type: ignore[arg-type]
        operators = sorted({node.op_type for node in case.model.graph.node if node.domain == "ai.ortolan"})
        print(case.name, operators, f"{case.lost:.1e} from its original" if case.lost else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.aarch64.answers", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fetch", action="store_true", help="fetch the real models that are not in the cache")
    options = parser.parse_args()
    if options.fetch:
        for name in (ENCODER, DECODER):
            get_model(name, progress=print)
    main(options.folder)

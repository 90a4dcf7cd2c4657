"""import_gguf: the model in the new folder computes with the weights of the GGUF file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import ortolan
from ortolan.generate import Decoder
from ortolan.graph_passes.report.optimization import OptimizationReport
from ortolan.models.gguf import read_gguf
from ortolan.models.graph_builder import ModelBuildError
from ortolan.models.llama_config import LlamaConfig

from ..models.gguf_file import CONFIGS, METADATA, TEMPLATE, TOKENS, write
from ..models.llama_reference import reference_llama

pytest.importorskip("tokenizers")

IDS = np.random.default_rng(3).integers(0, len(TOKENS), 9)
MIXED = ["Q5_0", "Q5_0", "Q5_0", "Q8_0", "Q4_1", "Q4_1", "Q4_0", "Q4_0", "Q4_1", "Q4_0"]
OPS = ("W4A8MatMul", "W8A8MatMul")
FILES = [
    *("config.json", "genai_config.json", "generation_config.json", "libortolan_ops.so", "model.onnx"),
    *("model.onnx.data", "tokenizer.json", "tokenizer_config.json"),
]


def nodes(folder: Path) -> dict[str, str]:
    """Return the operator type of each node, by the layer's name."""
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    return {node.name: node.op_type for node in graph.node if node.name.endswith("MatMul")}


def compare(path: Path, folder: Path, atol: float) -> None:
    """Compare the model with float64 arithmetic on the dequantized weights of the file."""
    config, weights = read_gguf(path)
    expected = reference_llama(dict(weights), config, IDS)
    found = Decoder(ortolan.create_session(folder / "model.onnx")).step(IDS)
    assert np.abs(found - expected).max() < atol * np.abs(expected).max()


def run(tmp_path: Path, name: str = "llama", requantize: str | None = None, **options: object) -> OptimizationReport:
    config = CONFIGS[name]
    options = {"metadata": METADATA.get(name), **options}
    write(tmp_path / "model.gguf", config, architecture=name.split(",")[0], **options)
    return ortolan.import_gguf(tmp_path / "model.gguf", tmp_path / "folder", requantize=requantize)


@pytest.mark.parametrize("name", CONFIGS)
def test_architectures(tmp_path: Path, name: str) -> None:
    report = run(tmp_path, name, table="Q8_0")
    assert sorted(file.name for file in (tmp_path / "folder").iterdir()) == FILES
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "model.gguf"]
    left = [layer for layer in report.layers if layer.new_op not in ("W4A8MatMul", "W8A8MatMul", "MoE")]
    assert all(layer.reason == "it routes tokens to experts, and stays float" for layer in left)
    kept = [layer.name for layer in left]
    routers = CONFIGS[name].num_hidden_layers if CONFIGS[name].num_experts else 0
    assert len(kept) == routers and all(layer.endswith("/mlp/gate/MatMul") for layer in kept)
    assert sum(layer.new_op == "MoE" for layer in report.layers) == routers
    assert any("Q4_1" in note and "exact" in note for note in report.notes)
    # The remaining error comes from rounding activations to 8 bits.
    assert all(0 < layer.output_error < 0.02 for layer in report.layers if layer.output_error is not None)
    compare(tmp_path / "model.gguf", tmp_path / "folder", 0.05)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"])
def test_types(tmp_path: Path, kind: str) -> None:
    report = run(tmp_path, kinds=[kind], table=kind)
    op = "W4A8MatMul" if kind.startswith(("Q4", "Q5")) else "W8A8MatMul"
    assert set(nodes(tmp_path / "folder").values()) == {op}
    exact = kind.startswith("Q")
    (note,) = [note for note in report.notes if note.startswith("14 matrices") or note.startswith("15 matrices")]
    assert f"of {kind} (" in note
    assert ("exact" in note) == exact
    assert exact or "relative error of the weights up to 0.00" in note
    compare(tmp_path / "model.gguf", tmp_path / "folder", 0.05)


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    report = run(tmp_path, "gpt-oss", kinds=["MXFP4"], table="Q8_0")
    (note,) = [note for note in report.notes if "MXFP4" in note]
    assert note.endswith("-> 5 bits in groups of 32, exact")
    compare(tmp_path / "model.gguf", tmp_path / "folder", 0.05)


def test_experts_in_k_quants(tmp_path: Path) -> None:
    tool = pytest.importorskip("tools.random_gguf")
    write(tmp_path / "tokenizer.gguf", table="Q8_0")
    shape = tool.Shape(2, 256, 256, 4, 2, 32, 500, tied=True, experts=6, experts_used=2)
    tool.write_random_gguf(shape, "small", tmp_path / "model.gguf", tmp_path / "tokenizer.gguf", "Q4_K_M")
    report = ortolan.import_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    experts = [layer for layer in report.layers if layer.new_op == "MoE"]
    assert len(experts) == 2
    for layer in experts:
        assert layer.bytes_before <= layer.bytes_after <= 1.06 * layer.bytes_before
    compare(tmp_path / "model.gguf", tmp_path / "folder", 0.05)


@pytest.mark.parametrize("kinds", [["Q4_0", "Q8_0", "Q4_1"], ["Q5_0", "Q4_0", "F32"]])
def test_gate_and_up_of_different_types(tmp_path: Path, kinds: list[str]) -> None:
    run(tmp_path, "qwen3moe", kinds=kinds, table="Q8_0")
    compare(tmp_path / "model.gguf", tmp_path / "folder", 0.05)


def test_mixed_types(tmp_path: Path) -> None:
    """Query, key and value layers are joined only if their weights have the same type."""
    run(tmp_path, kinds=MIXED, table="Q8_0")
    names = nodes(tmp_path / "folder")
    assert names["/model/layers.0/self_attn/qkv_proj/MatMul"] == "W4A8MatMul"
    assert names["/model/layers.1/self_attn/q_proj/MatMul"] == names["/model/layers.1/self_attn/k_proj/MatMul"]
    compare(tmp_path / "model.gguf", tmp_path / "folder", 0.05)


def rows_of(folder: Path, config: LlamaConfig) -> np.ndarray:
    """Return the rows of the word embedding that the model looks up, [vocab_size, hidden_size]."""
    graph = onnx.load(folder / "model.onnx")
    assert not any(list(tensor.dims) == [config.vocab_size, config.hidden_size] for tensor in graph.graph.initializer)
    first = next(node for node in graph.graph.node if node.op_type == "SimplifiedLayerNormalization")
    graph.graph.output.append(onnx.helper.make_tensor_value_info(first.input[0], onnx.TensorProto.FLOAT, None))
    graph.graph.output[-1].type.tensor_type.ClearField("shape")
    (folder / "rows").mkdir()
    onnx.save(graph, folder / "rows/model.onnx")
    ids = np.arange(config.vocab_size)[None]
    session = ortolan.create_session(folder / "rows/model.onnx")
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": ids}
    empty = np.zeros((1, config.num_key_value_heads, 0, config.head_size), np.float32)
    feeds |= {value.name: empty for value in session.get_inputs() if value.name.startswith("past")}
    (rows,) = session.run([first.input[0]], feeds)
    return np.asarray(rows[0])


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        *[(f"Q{bits}_{part}", bits) for bits in (4, 5) for part in "01K"],
        *[("Q2_K", 4), ("Q3_K", 4), ("Q6_K", 6), ("Q8_0", 8), ("MXFP4", 5)],
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_tables_are_exact(tmp_path: Path, kind: str, bits: int, tied: bool) -> None:
    """The table keeps the file's integers, which a tied head shares."""
    size = 256 if kind.endswith("K") else 96
    config = replace(CONFIGS["llama"], vocab_size=1200, hidden_size=size, tie_word_embeddings=tied)
    write(tmp_path / "model.gguf", config, table=kind)
    report = ortolan.import_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    assert any(f"'model.embed_tokens.weight' is stored in int{bits}, in groups of" in note for note in report.notes)
    assert any("from the weight of '/lm_head/MatMul', its tied head" in note for note in report.notes) == tied
    graph = onnx.load(tmp_path / "folder/model.onnx", load_external_data=False).graph
    padded = -(-size // 64) * 64
    integers = (1200 * size, 1200 * padded) if bits == 8 else (1200 * padded // 2,)  # bytes, without high bits
    assert sum(np.prod(tensor.dims) in integers for tensor in graph.initializer) == (1 if tied else 2)
    compare(tmp_path / "model.gguf", tmp_path / "folder", 0.05)
    _, weights = read_gguf(tmp_path / "model.gguf")
    np.testing.assert_array_equal(rows_of(tmp_path / "folder", config), weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("requantize", "layers", "atol"), [("int4", {4}, 0.3), ("int5", {4, 5}, 0.2), ("int6", {4, 5, 6}, 0.1)]
)
def test_requantize(tmp_path: Path, requantize: str, layers: set[int], atol: float, tied: bool) -> None:
    """Weights of as many bits are rounded, table and head to Q6_K."""
    config = replace(CONFIGS["llama"], vocab_size=1200, tie_word_embeddings=tied)
    write(tmp_path / "model.gguf", config, table="Q8_0", kinds=MIXED)
    report = ortolan.import_gguf(tmp_path / "model.gguf", tmp_path / "folder", requantize=requantize)
    graph = onnx.load(tmp_path / "folder/model.onnx", load_external_data=False).graph
    found = {node.name: {one.name: one.i for one in node.attribute} for node in graph.node if node.op_type in OPS}
    head = found.pop("/lm_head/MatMul")
    assert (head["bits"], head["subgroup_zero_point"], head["subgroup_scale_bits"]) == (6, 32, 8)
    assert {one["bits"] for one in found.values()} == layers
    assert any("Q8_0" in note and "-> 6 bits in groups of 16, relative error" in note for note in report.notes)
    assert any("Q4_1" in note and ("exact" in note) == (requantize != "int4") for note in report.notes)
    compare(tmp_path / "model.gguf", tmp_path / "folder", atol)
    _, weights = read_gguf(tmp_path / "model.gguf")
    rows, table = rows_of(tmp_path / "folder", config), weights["model.embed_tokens.weight"]
    assert 0.01 < np.linalg.norm(rows - table) / np.linalg.norm(table) < 0.03


def test_sizes(tmp_path: Path) -> None:
    report = run(tmp_path, table="Q8_0")
    size = (tmp_path / "folder/model.onnx.data").stat().st_size
    assert report.file_size_after == size + (tmp_path / "folder/model.onnx").stat().st_size
    (layer,) = [layer for layer in report.layers if layer.name.endswith("layers.0/self_attn/o_proj/MatMul")]
    # Q4_1 has 20 bytes per 32 weights, and the packed weight has the same size.
    assert layer.bytes_before == layer.bytes_after == 64 * 64 // 32 * 20


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", ["Q4_1"]),
        ("llama", MIXED),
        ("gemma3", MIXED),
        ("smollm3", MIXED),
        ("qwen3moe", MIXED),
        ("gpt-oss", ["MXFP4"]),
    ],
)
def test_the_form_for_serving(tmp_path: Path, name: str, kinds: list[str]) -> None:
    """The folder's configuration names the inputs and outputs of the form for serving, for GenAI's Engine."""
    config = CONFIGS[name]
    write(tmp_path / "model.gguf", config, architecture=name, kinds=kinds, table="Q8_0", metadata=METADATA.get(name))
    ortolan.import_gguf(tmp_path / "model.gguf", tmp_path / "folder", serve=True)
    graph = onnx.load(tmp_path / "folder/model.onnx", load_external_data=False).graph
    nodes = [node for node in graph.node if node.op_type == "PagedNoMADAttention"]
    windows = [next(one.i for one in node.attribute if one.name == "window") for node in nodes]
    assert tuple(windows) == (config.windows or (0,) * config.num_hidden_layers)
    content = json.loads((tmp_path / "folder/genai_config.json").read_text())
    assert content["engine"]["dynamic_batching"]["block_size"] == 16
    decoder, session = content["model"]["decoder"], ortolan.create_session(tmp_path / "folder")
    for part, values in (("inputs", session.get_inputs()), ("outputs", session.get_outputs())):
        layers = range(config.num_hidden_layers)
        names = {name % layer if "%d" in name else name for name in decoder[part].values() for layer in layers}
        assert names == {value.name for value in values}
    assert (tmp_path / "folder" / decoder["session_options"]["custom_ops_library"]).is_file()


def test_configurations(tmp_path: Path) -> None:
    run(tmp_path, "qwen2", table="Q8_0", metadata={"tokenizer.ggml.padding_token_id": 1, "general.license": "mit"})
    read = {name: json.loads((tmp_path / "folder" / name).read_text()) for name in FILES if name.endswith(".json")}
    config = CONFIGS["qwen2"]
    assert read["config.json"]["architectures"] == ["Qwen2ForCausalLM"]
    assert read["config.json"]["hidden_size"] == config.hidden_size
    # Optimum and transformers log warnings if one of these is missing.
    session = ortolan.create_session(tmp_path / "folder")
    assert [value.name for value in session.get_inputs()[:3]] == ["input_ids", "attention_mask", "position_ids"]
    assert read["config.json"]["transformers_version"] == "4.57.2"
    assert read["config.json"]["eos_token_id"] == read["generation_config.json"]["eos_token_id"] == [1, 0]
    assert read["tokenizer_config.json"]["chat_template"] == TEMPLATE
    assert read["tokenizer_config.json"]["eos_token"] == "<|im_end|>"
    decoder = read["genai_config.json"]["model"]["decoder"]
    assert decoder["session_options"]["custom_ops_library"] == "libortolan_ops.so"
    assert (decoder["head_size"], decoder["num_key_value_heads"]) == (16, 2)
    assert read["genai_config.json"]["model"]["type"] == "qwen2"
    metadata = onnx.load(tmp_path / "folder/model.onnx", load_external_data=False).metadata_props
    found = {entry.key: entry.value for entry in metadata}
    assert found["source"] == "model.gguf" and found["licence"] == "mit"
    with pytest.raises(ortolan.ModelError, match="already optimized by Ortolan"):
        ortolan.optimize_onnx(tmp_path / "folder", tmp_path / "other", weights="int8")


def test_refused_before_anything_is_written(tmp_path: Path) -> None:
    path, folder = tmp_path / "model.gguf", tmp_path / "folder"
    with pytest.raises(ortolan.ArgumentError, match="requantize is 'int8', expected one of 'int4', 'int5', 'int6'"):
        ortolan.import_gguf(path, folder, requantize="int8")
    write(path, replace(CONFIGS["llama"], head_dim=8))
    with pytest.raises(
        ModelBuildError, match="has a head size of 8, expected a multiple of 16 for GroupQueryAttention"
    ):
        ortolan.import_gguf(path, folder)
    write(path, pre="bloom")
    with pytest.raises(ModelBuildError, match="splits text as 'bloom'"):
        ortolan.import_gguf(path, folder)
    write(path)
    folder.mkdir()
    (folder / "note.txt").write_text("mine")
    with pytest.raises(ortolan.OutputError, match="is not empty"):
        ortolan.import_gguf(path, folder)
    with pytest.raises(ortolan.OutputError, match="is a file, but a model with its tokenizer is a folder"):
        ortolan.import_gguf(path, path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "model.gguf"]


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf")
    stages: list[str] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        if stage == "write" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ortolan.import_gguf(tmp_path / "model.gguf", tmp_path / "folder", progress=interrupt)
    assert list(dict.fromkeys(stages))[:2] == ["read weights", "normalize"]
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    weights = write(tmp_path / "model.gguf", config)
    weights["model.norm.weight"][3] = np.nan
    write(tmp_path / "model.gguf", config, weights)
    with pytest.raises(ortolan.VerificationError, match=r"NaN or infinity for token .*; nothing was saved"):
        ortolan.import_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()

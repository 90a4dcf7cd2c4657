"""The exporter of transformers followed by Ortolan.

Skipped before transformers 5.23 (ortolan[transformers]).
"""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import ortolan

from .folders import TEXTS, write_bert, write_llama

transformers = pytest.importorskip("transformers", "5.23")
torch = pytest.importorskip("torch")
exporters = pytest.importorskip("transformers.exporters")

from ortolan.transformers import OrtolanConfig, OrtolanExporter, OrtolanModelRunner, empty_cache  # noqa: E402

from ..external_weights import put_weights_outside  # noqa: E402
from ..recipes.forms import NAMED  # noqa: E402

FAST = {"verify.seconds": 0.0}
DENSE = FAST | {"may_grow": True, "sparsity": 0.0}


def tokens(folder: Path, texts: list[str]) -> dict[str, Any]:
    return dict(transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt"))


def distance(found: Any, expected: Any) -> float:
    """||found - expected|| / ||expected||"""
    return float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))


def ops(program: Any) -> set[str]:
    return {node.op_type for node in program.graph}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), "BertForSequenceClassification", num_labels=3)


@pytest.fixture(scope="module")
def model(bert: Path) -> Any:
    return transformers.AutoModelForSequenceClassification.from_pretrained(bert).eval()


@pytest.fixture(scope="module")
def exported(bert: Path, model: Any) -> Any:
    config = OrtolanConfig(dynamic=True, recipe=NAMED["sparse-bf16"], options=DENSE)
    return OrtolanExporter().export(model, tokens(bert, TEXTS[:2]), config)


def test_export_runs_like_the_model(bert: Path, model: Any, exported: Any) -> None:
    assert "SparseAMXMatMul" in ops(exported.program)
    assert isinstance(exported.runners["model"], OrtolanModelRunner)
    report = exported.program.meta["ortolan_report"]
    assert report.recipe["name"] == "weights=bf16, sparsity=0.5" and any(
        layer.status == "replaced" for layer in report.layers
    )
    inputs = tokens(bert, [*TEXTS, "a"])  # batch and length differ from those of the export
    with torch.no_grad():
        assert distance(exported(**inputs).logits, model(**inputs).logits) < 0.02


def test_a_saved_export(bert: Path, exported: Any, tmp_path: Path) -> None:
    exported.save_pretrained(tmp_path / "fast")
    manifest = json.loads((tmp_path / "fast" / "export.json").read_text())
    assert manifest["export_format"] == "ortolan"
    loaded = exporters.ExportedModel.from_pretrained(tmp_path / "fast")
    inputs = tokens(bert, TEXTS)
    assert torch.equal(loaded(**inputs).logits, exported(**inputs).logits)
    stored = onnx.load(tmp_path / "fast" / "model.onnx", load_external_data=False)
    offsets = [
        int(entry.value)
        for tensor in stored.graph.initializer
        for entry in tensor.external_data
        if entry.key == "offset"
    ]
    assert offsets and all(offset % 64 == 0 for offset in offsets)
    loaded.save_pretrained(tmp_path / "again")
    again = exporters.ExportedModel.from_pretrained(tmp_path / "again")
    assert torch.equal(again(**inputs).logits, loaded(**inputs).logits)


def test_large_weights_go_with_the_program(
    bert: Path, model: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    put_weights_outside(monkeypatch)  # treat these weights as large
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # pytest keeps log records, and one of them would keep the program alive.
    logging.disable(logging.CRITICAL)
    request.addfinalizer(lambda: logging.disable(logging.NOTSET))
    inputs = tokens(bert, TEXTS)
    made = OrtolanExporter().export(
        model, inputs, OrtolanConfig(dynamic=True, recipe=NAMED["sparse-bf16"], options=DENSE)
    )
    path = Path(made.program.meta["path"])
    assert sorted(file.name for file in path.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
    before = made(**inputs).logits.clone()
    made.save_pretrained(tmp_path / "fast")
    runner = made.runners["model"]
    del made
    gc.collect()
    assert not path.parent.exists()
    assert torch.equal(runner(**inputs).logits, before)
    assert torch.equal(exporters.ExportedModel.from_pretrained(tmp_path / "fast")(**inputs).logits, before)


def test_calibration_is_used_and_not_saved(bert: Path, model: Any, tmp_path: Path) -> None:
    inputs = tokens(bert, TEXTS)
    config = OrtolanConfig(
        dynamic=True,
        recipe=NAMED["sparsegpt-int8"],
        options=FAST | {"may_grow": True},
        calibration=["the quick cat", "a lazy dog sat"],
        tokenizer=str(bert / "tokenizer.json"),
    )
    exported = OrtolanExporter().export(model, inputs, config)
    assert "inputs from 2 texts" in exported.program.meta["ortolan_report"].feeds
    exported.save_pretrained(tmp_path / "fast")
    assert "lazy" not in (tmp_path / "fast" / "export.json").read_text()


def test_errors_reach_the_caller(bert: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    inputs = tokens(bert, TEXTS)
    with pytest.raises(ortolan.RecipeError, match="unknown recipe 'nonsense'"):
        OrtolanExporter().export(model, inputs, OrtolanConfig(recipe="nonsense"))
    assert list(tmp_path.iterdir()) == []


def test_auto_classes_find_the_exporter() -> None:
    assert isinstance(exporters.AutoHfExporter.from_config(OrtolanConfig()), OrtolanExporter)
    assert isinstance(
        exporters.AutoExportConfig.from_dict({"export_format": "ortolan", "recipe": NAMED["int4"]}), OrtolanConfig
    )


def generate(exported: Any, inputs: dict[str, Any], count: int, first: str = "prefill") -> np.ndarray:
    ids = inputs["input_ids"]
    positions = torch.arange(ids.shape[1] + count)[None]
    begin = {} if first == "prefill" else {"past_key_values": empty_cache(exported.runners[first])}
    output = exported.runners[first](input_ids=ids, position_ids=positions[:, : ids.shape[1]], **begin)
    for _ in range(count):
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
        output = exported.runners["decode"](
            input_ids=token,
            position_ids=positions[:, ids.shape[1] - 1 : ids.shape[1]],
            past_key_values=output.past_key_values,
        )
    return ids.numpy()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model, and a prompt."""
    folder = write_llama(tmp_path_factory.mktemp("llama"))
    inputs = tokens(folder, TEXTS[:1])
    inputs.pop("token_type_ids", None)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), inputs


def without_cache(model: Any, inputs: dict[str, Any], count: int) -> np.ndarray:
    """Return the tokens of greedy decoding in PyTorch without a cache."""
    ids = inputs["input_ids"]
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids.numpy()


def test_exact_settings_generate_the_same_tokens(llama: Any) -> None:
    model, inputs = llama
    options = FAST | {"keys": "float32", "values": "float32"}
    config = OrtolanConfig(dynamic=True, recipe="long-context", options=options)
    exported = OrtolanExporter().export_for_generation(model, inputs, config, multi_token_decode=True)
    assert "NoMADAttention" in ops(exported.components["decode"].program)
    # The component 'prefill' has no cache, so its attention is not replaced.
    assert "NoMADAttention" not in ops(exported.components["prefill"].program)
    expected = without_cache(model, inputs, 12)
    for first in ("prefill", "decode"):
        assert (generate(exported, inputs, 12, first) == expected).all()
    with pytest.raises(ortolan.ModelError, match="component has no cache inputs of known shape, only input_ids"):
        empty_cache(exported.runners["prefill"])


def test_a_recipe_that_finds_nothing_in_any_component_is_refused(llama: Any) -> None:
    options = FAST | {"keys": "float32", "values": "float32", "select": ["absent*"]}
    config = OrtolanConfig(dynamic=True, recipe="long-context", options=options)
    with pytest.raises(ortolan.NothingToReplaceError, match="not selected"):
        OrtolanExporter().export_for_generation(*llama, config, multi_token_decode=True)


def reader(*inputs: tuple[str, str]) -> Any:
    """Return a runner for empty_cache whose session has inputs of these names and types."""
    specs = [SimpleNamespace(name=name, type=type, shape=["batch", 2, "past", 16]) for name, type in inputs]
    return SimpleNamespace(session=SimpleNamespace(get_inputs=lambda: specs))


CACHE_TYPES = {"float": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "uint8": torch.uint8}


@pytest.mark.parametrize("name", CACHE_TYPES)
def test_empty_caches_have_the_type_of_the_inputs(name: str) -> None:
    keys, values = (f"past_key_values.layers.0.{part}" for part in ("keys", "values"))
    layer = empty_cache(reader((keys, f"tensor({name})"), (values, "tensor(float)"))).layers[0]
    assert (layer.keys.dtype, layer.values.dtype) == (CACHE_TYPES[name], torch.float32)
    assert layer.keys.shape == layer.values.shape == (1, 2, 0, 16)


def test_a_cache_of_an_unknown_type() -> None:
    with pytest.raises(ortolan.ModelError, match=r"'past_key_values.layers.0.keys' is .* tensor\(double\), expected"):
        empty_cache(reader(("past_key_values.layers.0.keys", "tensor(double)")))


def test_a_component_that_compresses_needs_several_tokens_at_a_time(llama: Any) -> None:
    model, inputs = llama
    config = OrtolanConfig(dynamic=True, recipe="long-context", options=FAST)
    configs = {"prefill": OrtolanConfig(dynamic=True, recipe=NAMED["sparse-bf16"]), "decode": config}
    for options in ({}, {"multi_token_decode": False}):
        with pytest.raises(ortolan.RecipeError, match=r"'decode' compresses caches, .* multi_token_decode=True"):
            OrtolanExporter().export_for_generation(model, inputs, configs, **options)


def test_compressed_caches(llama: Any, tmp_path: Path) -> None:
    model, inputs = llama
    calibration = [{"input_ids": np.random.default_rng(seed).integers(4, 24, (1, 200))} for seed in range(8)]
    config = OrtolanConfig(dynamic=True, recipe="long-context", options=FAST, calibration=calibration)
    with pytest.raises(ortolan.RecipeError, match="component 'prefill' gives float caches to 'decode'"):
        OrtolanExporter().export_for_generation(model, inputs, config)
    configs = {"prefill": OrtolanConfig(dynamic=True, recipe=NAMED["sparse-bf16"], options=DENSE), "decode": config}
    exported = OrtolanExporter().export_for_generation(model, inputs, configs, multi_token_decode=True)
    types = {spec.type for spec in exported.runners["decode"].session.get_inputs() if "past" in spec.name}
    assert types == {"tensor(uint8)"}
    first = inputs["input_ids"].shape[1]
    found, expected = generate(exported, inputs, 12, "decode"), without_cache(model, inputs, 12)
    assert (found[:, : first + 1] == expected[:, : first + 1]).all()  # attention reads no cache for the first token
    exported.save_pretrained(tmp_path / "saved")
    loaded = exporters.ExportedModel.from_pretrained(tmp_path / "saved")
    assert (generate(loaded, inputs, 12, "decode") == found).all()


def test_generation(llama: Any) -> None:
    model, inputs = llama
    made = {}
    for name, exporter, config in (
        ("onnx", exporters.OnnxExporter(), exporters.OnnxConfig(dynamic=True)),
        ("ortolan", OrtolanExporter(), OrtolanConfig(dynamic=True, recipe=NAMED["sparse-bf16"], options=DENSE)),
    ):
        made[name] = exporter.export_for_generation(model, inputs, config, multi_token_decode=True)
    assert all("SparseAMXMatMul" in ops(component.program) for component in made["ortolan"].components.values())
    expected, found = (generate(made[name], inputs, 12) for name in ("onnx", "ortolan"))
    first = inputs["input_ids"].shape[1]
    assert expected.shape == found.shape == (1, first + 12)
    assert (expected[:, : first + 3] == found[:, : first + 3]).all()  # bf16 weights: later tokens may differ

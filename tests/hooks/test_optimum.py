"""Optimum with models that Ortolan has optimized.

Skipped without Optimum's ONNX part (ortolan[optimum]).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ortolan

from .folders import TEXTS, write_bert, write_llama

onnxruntime_part = pytest.importorskip("optimum.onnxruntime", reason="needs optimum-onnx[onnxruntime]")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ortolan.benchmarks.matmul_nbits import make_matmul_nbits  # noqa: E402
from ortolan.generate import Decoder  # noqa: E402
from ortolan.optimum import OrtolanOptimizer  # noqa: E402
from ortolan.provider import PROVIDER  # noqa: E402

from ..external_weights import put_weights_outside  # noqa: E402
from ..provider.sessions import needs_provider  # noqa: E402
from ..recipes.forms import NAMED  # noqa: E402

FAST = {"verify.seconds": 0.0}
DENSE = FAST | {"may_grow": True, "sparsity": 0.0}  # convert weights to bf16 without pruning
EXACT = FAST | {"keys": "float32", "values": "float32"}  # for long-context: keep the caches in float32

Export = Callable[[str], Path]


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("optimum-cli")
    return subprocess.run([command, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a small checkpoint for each task, and return the folders."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "feature-extraction": write_bert(root / "bert"),
        "text-classification": write_bert(root / "classifier", "BertForSequenceClassification", num_labels=3),
        "text-generation-with-past": write_llama(root / "llama"),
    }


@pytest.fixture(scope="module")
def export(checkpoints: dict[str, Path]) -> Export:
    """Return a function that exports the checkpoint of a task with Optimum and returns the folder."""
    from optimum.exporters.onnx import main_export

    def run(task: str) -> Path:
        folder = checkpoints[task].with_name(f"{checkpoints[task].name}-onnx")
        if not folder.exists():
            main_export(str(checkpoints[task]), folder, task=task, do_validation=False)
        return folder

    return run


def tokens(folder: Path, texts: list[str] = TEXTS) -> dict[str, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


def ops(folder: Path) -> set[str]:
    return {node.op_type for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node}


def distance(found: Any, expected: Any) -> float:
    """||found - expected|| / ||expected||"""
    found, expected = np.asarray(found), np.asarray(expected)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_features(export: Export, tmp_path: Path) -> None:
    model_class = onnxruntime_part.ORTModelForFeatureExtraction
    source = export("feature-extraction")
    report = OrtolanOptimizer.from_pretrained(source).optimize(
        tmp_path / "fast", recipe=NAMED["sparse-bf16"], options=DENSE
    )
    assert report.output == str(tmp_path / "fast") and "SparseAMXMatMul" in ops(tmp_path / "fast")
    assert {path.name for path in source.iterdir()} <= {path.name for path in (tmp_path / "fast").iterdir()}
    fast = model_class.from_pretrained(tmp_path / "fast", session_options=ortolan.register())
    inputs = tokens(tmp_path / "fast")
    there = inputs["attention_mask"] != 0  # the optimized model returns 0 at padding
    expected = model_class.from_pretrained(source)(**inputs).last_hidden_state
    assert distance(fast(**inputs).last_hidden_state[there], expected[there]) < 0.02
    (features,) = transformers.pipeline(
        "feature-extraction", model=fast, tokenizer=transformers.AutoTokenizer.from_pretrained(source)
    )(TEXTS[:1])
    assert distance(features, fast(**tokens(source, TEXTS[:1])).last_hidden_state) < 1e-6


def test_classification_pipeline(export: Export, tmp_path: Path) -> None:
    model_class = onnxruntime_part.ORTModelForSequenceClassification
    source = export("text-classification")
    OrtolanOptimizer.from_pretrained(source).optimize(tmp_path / "fast", recipe=NAMED["sparse-bf16"], options=DENSE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)

    def answers(model: Any) -> list[list[dict[str, Any]]]:
        classify = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)
        return [sorted(scores, key=lambda score: str(score["label"])) for scores in classify(TEXTS)]

    expected = answers(model_class.from_pretrained(source))
    found = answers(model_class.from_pretrained(tmp_path / "fast", session_options=ortolan.register()))
    for before, after in zip(expected, found, strict=True):
        assert [score["label"] for score in after] == [score["label"] for score in before]
        assert [score["score"] for score in after] == pytest.approx([score["score"] for score in before], abs=0.02)


@pytest.mark.parametrize("embedded", [True, False])
@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("feature-extraction", "ORTModelForFeatureExtraction"),
        ("text-classification", "ORTModelForSequenceClassification"),
        ("text-generation-with-past", "ORTModelForCausalLM"),
    ],
)
def test_save_pretrained(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, name: str, embedded: bool
) -> None:
    """Test weights inside the model file and, as for large models, in a data file."""
    model_class = getattr(onnxruntime_part, name)
    if not embedded:
        put_weights_outside(monkeypatch)
    OrtolanOptimizer.from_pretrained(export(task)).optimize(
        tmp_path / "fast", recipe=NAMED["sparse-bf16"], options=DENSE
    )
    assert (tmp_path / "fast" / "model.onnx.data").exists() is not embedded
    fast = model_class.from_pretrained(tmp_path / "fast", session_options=ortolan.register())
    fast.save_pretrained(tmp_path / "saved")
    saved = model_class.from_pretrained(tmp_path / "saved", session_options=ortolan.register())
    inputs = prompts(tmp_path / "fast") if "generation" in task else tokens(tmp_path / "fast")
    assert torch.equal(next(iter(saved(**inputs).values())), next(iter(fast(**inputs).values())))
    assert "SparseAMXMatMul" in ops(tmp_path / "saved")


def causal_lm(folder: Path, **options: Any) -> Any:
    return onnxruntime_part.ORTModelForCausalLM.from_pretrained(folder, session_options=ortolan.register(), **options)


def prompts(folder: Path) -> dict[str, Any]:
    """Return two texts, padded on the left as `generate` requires."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    return {
        key: value
        for key, value in tokenizer(TEXTS[:2], padding=True, return_tensors="pt").items()
        if key != "token_type_ids"
    }


@pytest.mark.parametrize("io_binding", [False, True])
def test_exact_settings_generate_the_same_tokens(export: Export, tmp_path: Path, io_binding: bool) -> None:
    source = export("text-generation-with-past")
    OrtolanOptimizer.from_pretrained(source).optimize(tmp_path / "fast", recipe="long-context", options=EXACT)
    assert "NoMADAttention" in ops(tmp_path / "fast")
    inputs = prompts(source)
    expected, found = (
        causal_lm(folder, use_io_binding=io_binding).generate(**inputs, max_new_tokens=40, min_new_tokens=40)
        for folder in (source, tmp_path / "fast")
    )
    assert expected.shape[1] == inputs["input_ids"].shape[1] + 40 and len(set(expected[0].tolist())) > 5
    assert torch.equal(found, expected)


@pytest.mark.parametrize("io_binding", [False, True])
@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_attention_beside_layers(export: Export, tmp_path: Path, weights: str, io_binding: bool) -> None:
    """Fused attention gives nearly the logits and the first tokens of the same layers with unfused attention.

    The batch has sequences of unequal lengths.
    """
    source, options = export("text-generation-with-past"), FAST | {"may_grow": True}
    left = ortolan.Recipe.of(weights=weights).without_pass("fuse_cached_attention")
    for name, one in (("fused", left.with_pass("fuse_cached_attention", precision="f32")), ("left", left)):
        OrtolanOptimizer.from_pretrained(source).optimize(tmp_path / name, recipe=one, options=options)
    assert "NoMADAttention" in ops(tmp_path / "fused") and "NoMADAttention" not in ops(tmp_path / "left")
    inputs = prompts(source)
    there = inputs["attention_mask"] != 0
    models = [causal_lm(tmp_path / name, use_io_binding=io_binding) for name in ("fused", "left")]
    logits = [model(**inputs).logits[there] for model in models]
    assert distance(*logits) < 0.005
    made = [model.generate(**inputs, max_new_tokens=8, min_new_tokens=8) for model in models]
    # Later tokens may differ, because layers round their inputs and can amplify a difference of the last bit.
    assert torch.equal(made[0][:, :-4], made[1][:, :-4])


def test_beams_and_the_pipeline(export: Export, tmp_path: Path) -> None:
    source = export("text-generation-with-past")
    OrtolanOptimizer.from_pretrained(source).optimize(tmp_path / "fast", recipe="long-context", options=EXACT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    texts = []
    for folder in (source, tmp_path / "fast"):
        generate = transformers.pipeline("text-generation", model=causal_lm(folder), tokenizer=tokenizer)
        texts.append(generate(TEXTS[0], max_new_tokens=20, num_beams=3, do_sample=False)[0]["generated_text"])
    assert texts[0] == texts[1] and texts[0].startswith(TEXTS[0])


def test_fewer_bits_stay_near(export: Export, tmp_path: Path) -> None:
    source = export("text-generation-with-past")
    OrtolanOptimizer.from_pretrained(source).optimize(
        tmp_path / "fast", recipe=NAMED["int4"], options=FAST | {"may_grow": True, "subgroup_size": 32}
    )
    assert "W4A8MatMul" in ops(tmp_path / "fast")
    inputs = prompts(source)
    expected, found = (causal_lm(folder)(**inputs).logits for folder in (source, tmp_path / "fast"))
    assert distance(found, expected) < 0.5
    causal_lm(tmp_path / "fast").generate(**inputs, max_new_tokens=8)


@pytest.mark.parametrize("io_binding", [False, True])
def test_compressed_caches(export: Export, tmp_path: Path, io_binding: bool) -> None:
    source = export("text-generation-with-past")
    calibration = [{"input_ids": np.random.default_rng(0).integers(4, 24, (1, 200))}]
    OrtolanOptimizer.from_pretrained(source).optimize(
        tmp_path / "fast", recipe="long-context", options=FAST, calibration=calibration
    )
    model = causal_lm(tmp_path / "fast", use_io_binding=io_binding)
    model.embed_size_per_head = model.input_shapes["past_key_values.0.key"][3]
    assert model.embed_size_per_head == 16 + 2
    inputs = prompts(source)
    found = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8)
    assert found.shape[1] == inputs["input_ids"].shape[1] + 8
    first = causal_lm(source)(**inputs).logits[:, -1].argmax(-1)  # attention reads no cache for the first token
    assert torch.equal(found[:, inputs["input_ids"].shape[1]], first)


def test_an_optimizer_of_a_loaded_model(export: Export, tmp_path: Path) -> None:
    model = onnxruntime_part.ORTModelForFeatureExtraction.from_pretrained(export("feature-extraction"))
    OrtolanOptimizer.from_pretrained(model).optimize(tmp_path / "fast", weights="bf16", sparsity=0.5, options=DENSE)
    assert "SparseAMXMatMul" in ops(tmp_path / "fast") and (tmp_path / "fast" / "config.json").is_file()


@pytest.mark.parametrize("task", ["feature-extraction", "text-generation-with-past"])
def test_command_optimize(export: Export, tmp_path: Path, task: str) -> None:
    source = export(task)
    settings = [word for name, value in DENSE.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    form = ("--weights", "bf16", "--sparsity", "0.5")
    done = cli("ortolan", "optimize", "--onnx_model", source, "-o", tmp_path / "fast", *form, *settings)
    assert done.returncode == 0, done.stderr
    assert "recipe weights=bf16, sparsity=0.5" in " ".join(done.stdout.split()) and "SparseAMXMatMul" in ops(
        tmp_path / "fast"
    )
    inputs = prompts(source) if "generation" in task else tokens(source)
    found, expected = (
        next(iter(model(**inputs).values()))
        for model in (
            getattr(
                onnxruntime_part, "ORTModelForCausalLM" if "generation" in task else "ORTModelForFeatureExtraction"
            ).from_pretrained(folder, session_options=ortolan.register())
            for folder in (tmp_path / "fast", source)
        )
    )
    there = inputs["attention_mask"] != 0
    assert distance(found[there], expected[there]) < 0.05


@pytest.mark.parametrize("task", ["feature-extraction", "text-generation-with-past"])
def test_command_export(checkpoints: dict[str, Path], tmp_path: Path, task: str) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    done = cli(
        *("export", "ortolan", "-m", checkpoints[task], "--task", task, tmp_path / "deep" / "fast"),
        *("--weights", "bf16", "--set", "may_grow=true", "--set", "verify.seconds=0.0"),
        *("--calibration", tmp_path / "texts.txt"),
    )
    assert done.returncode == 0, done.stderr
    assert " from 3 texts" in " ".join(done.stdout.split())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["fast"]
    names = {path.name for path in (tmp_path / "deep" / "fast").iterdir()}
    assert {"model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert "SparseAMXMatMul" in ops(tmp_path / "deep" / "fast")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "nonsense"], "ortolan: unknown recipe 'nonsense'; the recipes are"),
        (["--cache", "codes", "--set", "window=8"], "need inputs that Optimum does not pass on"),
        (["--pattern", "4:2", "--sparsity", "0.5"], "ortolan: pattern is '4:2', expected"),
        (["--method", "gptq", "--method", "wanda", "--weights", "int8"], "which prunes, but sparsity is missing"),
        (["--set", "nonsense"], "setting 'nonsense' is not of the form name=value"),
    ],
)
def test_errors_of_commands_are_one_message(export: Export, tmp_path: Path, arguments: list[str], message: str) -> None:
    source = export("text-generation-with-past")
    done = cli("ortolan", "optimize", "--onnx_model", source, "-o", tmp_path / "fast", *arguments)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ortolan.ModelError, match="is not a folder; export the model first"):
        OrtolanOptimizer.from_pretrained(tmp_path / "none")
    with pytest.raises(ortolan.ArgumentTypeError, match="model is an int, expected a folder or an ORTModel"):
        OrtolanOptimizer.from_pretrained(3)


def test_choices_are_listed_by_the_help(export: Export, tmp_path: Path) -> None:
    source = export("text-generation-with-past")
    assert "--weights {bf16,int8,int6,int5,int4}" in cli("ortolan", "optimize", "--help").stdout
    wrong = cli("ortolan", "optimize", "--onnx_model", source, "-o", tmp_path / "fast", "--weights", "int3")
    assert wrong.returncode == 2 and "invalid choice: 'int3'" in wrong.stderr


def test_session_options_may_be_registered_again() -> None:
    options = ortolan.register()
    ortolan.register(options)


def test_imported_gguf(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gguf_file = pytest.importorskip("tests.models.gguf_file")
    gguf_file.write(tmp_path / "model.gguf", table="Q8_0")
    ortolan.import_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    model = onnxruntime_part.ORTModelForCausalLM.from_pretrained(
        tmp_path / "folder", session_options=ortolan.register(), use_io_binding=False
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    warned = capfd.readouterr().err
    assert "position_ids" not in warned and "fix_mistral_regex" not in warned
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab ab12"}], tokenize=False)
    inputs = tokenizer(text, return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    found = model.generate(**inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False)[0].tolist()
    stop = {0, 1}
    decoder, expected = Decoder(ortolan.create_session(tmp_path / "folder/model.onnx")), list(ids)
    step = ids
    for _ in range(12):
        logits = decoder.step(step)[-1]
        logits[list(stop)] = -np.inf
        step = [int(logits.argmax())]
        expected += step
    assert found == expected


@pytest.fixture
def stored_4_bits(export: Export, tmp_path: Path) -> Path:
    """A folder as Optimum writes it, with MatMulNBits layers."""
    folder = shutil.copytree(export("feature-extraction"), tmp_path / "stored")
    make_matmul_nbits(export("feature-extraction") / "model.onnx", folder / "model.onnx", 32, 4)
    return folder


@needs_provider
def test_the_provider_by_name(stored_4_bits: Path, tmp_path: Path) -> None:
    """Results equal those of the optimized folder, and nearly those of the original, as attention may use bf16."""
    model_class = onnxruntime_part.ORTModelForFeatureExtraction
    OrtolanOptimizer.from_pretrained(stored_4_bits).optimize(tmp_path / "fast")
    inputs = tokens(stored_4_bits)
    optimized = model_class.from_pretrained(tmp_path / "fast", session_options=ortolan.register())(**inputs)
    original = model_class.from_pretrained(stored_4_bits)(**inputs)
    ortolan.register_provider()
    options = {"claims_file": str(tmp_path / "claims.jsonl")}
    model = model_class.from_pretrained(stored_4_bits, provider=PROVIDER, provider_options=options)
    assert model.providers == [PROVIDER, "CPUExecutionProvider"]
    there = inputs["attention_mask"] != 0  # the optimized model returns 0 at padding
    found = model(**inputs).last_hidden_state[there]
    assert torch.equal(found, optimized.last_hidden_state[there])
    assert distance(found, original.last_hidden_state[there]) < 0.05
    lines = [json.loads(line) for line in (tmp_path / "claims.jsonl").read_text().splitlines()]
    claims = [line["taken"] for line in lines if "node" in line]
    assert claims == [True] * 13  # 6 nodes in each of 2 layers, and the LayerNormalization of the embeddings


@needs_provider
def test_the_provider_and_optimized_models(export: Export, tmp_path: Path) -> None:
    """The session options register the operators, and the provider is selected by name."""
    model_class = onnxruntime_part.ORTModelForFeatureExtraction
    source = export("feature-extraction")
    OrtolanOptimizer.from_pretrained(source).optimize(tmp_path / "fast", recipe=NAMED["sparse-bf16"], options=DENSE)
    ortolan.register_provider()
    inputs = tokens(source)
    found, expected = (
        model_class.from_pretrained(tmp_path / "fast", session_options=ortolan.register(), **named)
        for named in ({"provider": PROVIDER}, {})
    )
    assert found.providers == [PROVIDER, "CPUExecutionProvider"]
    assert torch.equal(found(**inputs).last_hidden_state, expected(**inputs).last_hidden_state)


@needs_provider
def test_options_alone_do_not_choose_the_provider(stored_4_bits: Path) -> None:
    """Optimum always passes providers, so options cannot select the provider (docs/optimum.md)."""
    with pytest.warns(UserWarning, match="already been configured with providers"):
        model = onnxruntime_part.ORTModelForFeatureExtraction.from_pretrained(
            stored_4_bits, session_options=ortolan.session_options()
        )
    assert model.providers == ["CPUExecutionProvider"]

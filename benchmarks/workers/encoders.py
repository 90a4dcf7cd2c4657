"""Text encoders in several runtimes: token ids in, a unit vector of each text out, the mean of its tokens' vectors.

    python -P serve.py encoders.py '{"threads": 1, "cpus": [0]}'

Which packages an engine needs stands at its class. This file is run by itself, never imported from a package, by
interpreters that have no Ortolan; runtimes are imported where an engine is loaded.

Batches are .npz files: ids_0, mask_0 and types_0 are int64 [texts, tokens] of the first batch, padded behind the texts.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

_LONGEST = 512  # tokens of a text
_WORDS = 1 << 17  # more than any vocabulary here has


@dataclass(frozen=True)
class Batch:
    """int64 [texts, tokens] each."""

    ids: np.ndarray
    mask: np.ndarray
    types: np.ndarray

    def feeds(self, names: list[str]) -> dict[str, np.ndarray]:
        """Of these inputs of an ONNX model."""
        known = {"input_ids": self.ids, "attention_mask": self.mask, "token_type_ids": self.types}
        return {name: known[name] for name in names}

    def texts(self, values: np.ndarray) -> list[list[int]]:
        """Without padding."""
        return [row[: kept.sum()].tolist() for row, kept in zip(values, self.mask, strict=True)]


def read_batches(path: str) -> list[Batch]:
    with np.load(path) as arrays:
        count = sum(name.startswith("ids_") for name in arrays.files)
        return [Batch(*(arrays[f"{name}_{i}"] for name in ("ids", "mask", "types"))) for i in range(count)]


def unit_means(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float32 [texts, width] of [texts, tokens, width]. Each text's is computed from its own tokens alone."""
    means = np.stack([rows[: kept.sum()].mean(axis=0) for rows, kept in zip(tokens, mask, strict=True)])
    return np.asarray(means / np.linalg.norm(means, axis=1, keepdims=True), np.float32)


def megabytes(*paths: Path) -> float:
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def with_data(model: Path) -> list[Path]:
    """An ONNX file, and that of its weights where they lie beside it."""
    return [path for path in (model, model.with_name(f"{model.name}.data")) if path.is_file()]


def session_options(options: Any, threads: int) -> Any:
    """Of ONNX Runtime."""
    options.intra_op_num_threads = threads
    # The threads of one side must not spin while another one is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


class Engine(ABC):
    """A model in a runtime. packages: whose versions matter. call: how it was made, as a reader would write it."""

    packages: tuple[str, ...]
    call: str
    megabytes: float

    @abstractmethod
    def prepare(self, batch: Batch) -> Any:
        """What `run` takes; not timed. Raises ValueError for what this engine cannot be given."""

    @abstractmethod
    def run(self, prepared: Any) -> np.ndarray:
        """float32 [texts, width]: vectors of length 1."""


class OnnxRuntime(Engine):
    """Stock ONNX Runtime: onnxruntime."""

    packages = ("onnxruntime",)

    def __init__(self, model: Path, threads: int, folder: Path) -> None:
        self.call = f"InferenceSession(model), intra_op_num_threads={threads}"
        self.megabytes = megabytes(*with_data(model))
        ort = importlib.import_module("onnxruntime")
        options = session_options(ort.SessionOptions(), threads)
        self._session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._inputs = [value.name for value in self._session.get_inputs()]
        self._output = self._session.get_outputs()[0].name

    def prepare(self, batch: Batch) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return batch.feeds(self._inputs), batch.mask

    def run(self, prepared: tuple[dict[str, np.ndarray], np.ndarray]) -> np.ndarray:
        feeds, mask = prepared
        return unit_means(self._session.run([self._output], feeds)[0], mask)


class Ortolan(Engine):
    """A file of Ortolan's in ONNX Runtime, by TextEncoder, whose padding and pooling are timed as well: ortolan."""

    packages = ("ortolan", "onnxruntime")

    def __init__(
        self, model: Path, threads: int, folder: Path, tokenizer: str, batch_tokens: int | None = None
    ) -> None:
        """tokenizer: a tokenizer.json, which names the token to pad with. batch_tokens: of a call of the session; None:
        a batch is a call."""
        ortolan = importlib.import_module("ortolan")
        self._tokens = importlib.import_module("ortolan.text_encoder").Tokens
        options = session_options(importlib.import_module("ortolan.session").new_options(), threads)
        settings = ortolan.TextInput(max_tokens=_LONGEST)
        self._encoder = ortolan.TextEncoder(model, tokenizer, settings, options)
        self._batch_tokens = batch_tokens
        calls = "a batch a call" if batch_tokens is None else f"batch_tokens={batch_tokens}"
        self.call = f"ortolan.TextEncoder(model), {calls}, intra_op_num_threads={threads}"
        self.megabytes = megabytes(*with_data(model))

    def prepare(self, batch: Batch) -> list[Any]:
        values = zip(batch.texts(batch.ids), batch.texts(batch.types), strict=True)
        return [self._tokens((), ids, types) for ids, types in values]

    def run(self, prepared: list[Any]) -> np.ndarray:
        if self._batch_tokens is None:
            return np.asarray(self._encoder.run(prepared))
        return np.asarray(self._encoder.encode_tokens(prepared, self._batch_tokens))


class OpenVino(Engine):
    """OpenVINO on its IR of the ONNX file: openvino, and nncf for int8."""

    def __init__(self, model: Path, threads: int, folder: Path, precision: str, calibration: str | None = None) -> None:
        """precision: "f32", "default" (what it takes on this CPU by itself) or "int8", which nncf.quantize makes."""
        openvino = importlib.import_module("openvino")
        self.packages = ("openvino", "nncf") if precision == "int8" else ("openvino",)
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        options["ENABLE_CPU_PINNING"] = False
        if precision == "f32":
            options["INFERENCE_PRECISION_HINT"] = "f32"
        core = openvino.Core()
        network, made = core.read_model(str(model)), "read_model(onnx)"
        self._inputs = [value.get_any_name() for value in network.inputs]
        if precision == "int8":
            network, made = self._quantized(network, calibration), "nncf.quantize(model_type=TRANSFORMER)"
        path = folder / "model.xml"
        openvino.save_model(network, str(path), compress_to_fp16=False)
        compiled = core.compile_model(str(path), "CPU", options)
        runs_in = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        self.call = f"{made}, save_model, compile_model(xml, 'CPU', {options}); floats in {runs_in}"
        self.megabytes = megabytes(path, path.with_suffix(".bin"))
        self._request = compiled.create_infer_request()

    def _quantized(self, network: Any, calibration: str | None) -> Any:
        if calibration is None:
            raise ValueError("precision int8 needs batches to calibrate on")
        nncf = importlib.import_module("nncf")
        feeds = [batch.feeds(self._inputs) for batch in read_batches(calibration)]
        return nncf.quantize(
            network, nncf.Dataset(feeds), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(feeds)
        )

    def prepare(self, batch: Batch) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return batch.feeds(self._inputs), batch.mask

    def run(self, prepared: tuple[dict[str, np.ndarray], np.ndarray]) -> np.ndarray:
        feeds, mask = prepared
        self._request.infer(feeds, share_inputs=True)
        return unit_means(self._request.get_output_tensor(0).data, mask)


class CTranslate2(Engine):
    """CTranslate2 from a folder of transformers': ctranslate2; transformers and torch convert it."""

    packages = ("ctranslate2",)

    def __init__(self, model: Path, threads: int, folder: Path, compute_type: str) -> None:
        """model: the folder. compute_type: CTranslate2's name, such as "int8"."""
        ctranslate2 = importlib.import_module("ctranslate2")
        converters = importlib.import_module("ctranslate2.converters")
        target = folder / "converted"
        converters.TransformersConverter(str(model)).convert(str(target), quantization=compute_type)
        self.call = (
            f"TransformersConverter(folder).convert(quantization={compute_type!r}), Encoder(intra_threads={threads})"
        )
        self.megabytes = megabytes(target / "model.bin")
        self._encoder = ctranslate2.Encoder(
            str(target), "cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
        )
        fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self._typed = fields.get("type_vocab_size", 0) > 0

    def prepare(self, batch: Batch) -> tuple[dict[str, Any], np.ndarray]:
        given: dict[str, Any] = {"inputs": batch.texts(batch.ids)}
        if self._typed:
            given["token_type_ids"] = batch.texts(batch.types)
        return given, batch.mask

    def run(self, prepared: tuple[dict[str, Any], np.ndarray]) -> np.ndarray:
        given, mask = prepared
        return unit_means(np.array(self._encoder.forward_batch(**given).last_hidden_state), mask)


class SentenceTransformers(Engine):
    """sentence-transformers from a folder of transformers': sentence-transformers, transformers, torch."""

    packages = ("sentence-transformers", "transformers", "torch")

    def __init__(self, model: Path, threads: int, folder: Path) -> None:
        """model: the folder."""
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        package = importlib.import_module("sentence_transformers")
        models = importlib.import_module("sentence_transformers.models")
        encoder = models.Transformer(str(model), max_seq_length=_LONGEST)
        width = json.loads((model / "config.json").read_text(encoding="utf-8"))["hidden_size"]
        modules = [encoder, models.Pooling(width, pooling_mode="mean"), models.Normalize()]
        self._model = package.SentenceTransformer(modules=modules, device="cpu").eval()
        self.call = (
            f"SentenceTransformer([Transformer, Pooling('mean'), Normalize])(features), set_num_threads({threads})"
        )
        self.megabytes = megabytes(model / "model.safetensors")

    def prepare(self, batch: Batch) -> dict[str, Any]:
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if batch.types.any() else [])]
        return {name: self._torch.from_numpy(array) for name, array in batch.feeds(names).items()}

    def run(self, prepared: dict[str, Any]) -> np.ndarray:
        with self._torch.inference_mode():
            # What is in the dict is replaced, so each run has its own.
            return np.asarray(self._model(dict(prepared))["sentence_embedding"].numpy())


class FastEmbed(Engine):
    """fastembed on the ONNX file, by its door for models of one's own: fastembed.

    It takes texts, not ids: a tokenizer whose words are numbers gives it the ids. Its token types are zero.
    """

    packages = ("fastembed", "onnxruntime")

    def __init__(self, model: Path, threads: int, folder: Path) -> None:
        fastembed = importlib.import_module("fastembed")
        description = importlib.import_module("fastembed.common.model_description")
        self._write_tokenizer(folder)
        for path in with_data(model):
            # A link: ONNX Runtime wants the data to lie in the model's folder, symbolic links followed.
            _link(path, folder / path.name)
        name = "benchmarked/model"
        fastembed.TextEmbedding.add_custom_model(
            model=name,
            pooling=description.PoolingType.MEAN,
            normalization=True,
            sources=description.ModelSource(url="file://local"),  # asked for, and not used with a path
            dim=1,  # not used but to describe it
            model_file=model.name,
            additional_files=[path.name for path in with_data(model)[1:]],
        )
        self._embedding = fastembed.TextEmbedding(name, threads=threads, specific_model_path=str(folder))
        self.call = f"TextEmbedding.add_custom_model(pooling=MEAN, normalization=True), threads={threads}"
        self.megabytes = megabytes(*with_data(model))

    @staticmethod
    def _write_tokenizer(folder: Path) -> None:
        tokenizers = importlib.import_module("tokenizers")
        words = {str(number): number for number in range(_WORDS)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
        fields = {"model_max_length": _LONGEST, "pad_token": "0"}
        (folder / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")

    def prepare(self, batch: Batch) -> list[str]:
        if batch.types.any():
            raise ValueError("fastembed gives models no token types but 0")
        return [" ".join(map(str, ids)) for ids in batch.texts(batch.ids)]

    def run(self, prepared: list[str]) -> np.ndarray:
        return np.stack(list(self._embedding.embed(prepared, batch_size=len(prepared))))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        target.write_bytes(source.read_bytes())


ENGINES: Mapping[str, Callable[..., Engine]] = {
    "onnxruntime": OnnxRuntime,
    "ortolan": Ortolan,
    "openvino": OpenVino,
    "ctranslate2": CTranslate2,
    "sentence-transformers": SentenceTransformers,
    "fastembed": FastEmbed,
}


def _versions(packages: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in packages:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:  # of a source tree
            yield name, "of a source tree"


class Worker:
    """An engine, and the batches that it is given."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._engine: Engine | None = None
        self._batches: list[Any] = []
        self.actions: Mapping[str, Callable[..., dict[str, Any]]] = {
            "load": self.load,
            "give": self.give,
            "time": self.time,
            "vectors": self.vectors,
        }

    def load(self, engine: str, model: str, folder: str, **options: Any) -> dict[str, Any]:
        """Opens a model in place of the last one. folder: empty, for what the engine makes of it.

        Answers "versions" (package -> version), "call" (how it was made) and "megabytes" (on disk).
        """
        if engine not in ENGINES:
            raise ValueError(f"no engine {engine!r}; these are known: {', '.join(ENGINES)}")
        self._engine, self._batches = None, []
        found = ENGINES[engine](Path(model), self._threads, Path(folder), **options)
        self._engine = found
        return {"versions": dict(_versions(found.packages)), "call": found.call, "megabytes": found.megabytes}

    def give(self, batches: str) -> dict[str, Any]:
        """Takes batches in place of the last ones; batches: an .npz file."""
        engine = self._loaded()
        self._batches = []
        self._batches = [engine.prepare(batch) for batch in read_batches(batches)]
        return {"batches": len(self._batches)}

    def time(self, passes: int, warm_up: float) -> dict[str, Any]:
        """Runs batches untimed for warm_up seconds, one at least, then all of them so many times.

        Answers "seconds" of each pass.
        """
        engine = self._loaded()
        until, warm = time.perf_counter() + warm_up, 0
        while warm == 0 or time.perf_counter() < until:
            engine.run(self._batches[warm % len(self._batches)])
            warm += 1
        seconds = []
        for _ in range(passes):
            start = time.perf_counter()
            for prepared in self._batches:
                engine.run(prepared)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    def vectors(self, answer: str) -> dict[str, Any]:
        """Writes those of all texts to the file `answer`: .npy, float32 [texts, width]."""
        engine = self._loaded()
        np.save(answer, np.concatenate([engine.run(prepared) for prepared in self._batches]).astype(np.float32))
        return {}

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("load a model first")
        return self._engine

"""Text encoders in several runtimes: from token ids to one vector per text, the normalized mean of its token vectors.

serve.py runs this script. The work is {"batches": PATH}, an .npz file: its arrays ids_0, mask_0 and types_0, int64
[texts, tokens], are the first batch, padded at the end. A part of a pass is a batch.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from .engine import Engine, EngineWorker, Made, megabytes, ort_options, with_data
else:
    from engine import Engine, EngineWorker, Made, megabytes, ort_options, with_data

_LONGEST = 512  # tokens in a text
_WORDS = 1 << 15  # exceeds the vocabularies here
_PAD = "[PAD]"  # the word of id 0


@dataclass(frozen=True)
class Batch:
    """Token ids, mask and token types of a batch, int64 [texts, tokens] each."""

    ids: np.ndarray
    mask: np.ndarray
    types: np.ndarray

    def feeds(self, names: list[str]) -> dict[str, np.ndarray]:
        """Return the feeds for these inputs of an ONNX model."""
        known = {"input_ids": self.ids, "attention_mask": self.mask, "token_type_ids": self.types}
        return {name: known[name] for name in names}

    def texts(self, values: np.ndarray) -> list[list[int]]:
        """Return the rows without padding."""
        return [row[: kept.sum()].tolist() for row, kept in zip(values, self.mask, strict=True)]


def read_batches(path: str) -> list[Batch]:
    """Return the batches of a file."""
    with np.load(path) as arrays:
        count = sum(name.startswith("ids_") for name in arrays.files)
        return [Batch(*(arrays[f"{name}_{i}"] for name in ("ids", "mask", "types"))) for i in range(count)]


def unit_means(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return unit vectors, float32 [texts, width], of token vectors [texts, tokens, width]; padding has no effect."""
    means = np.stack([rows[: kept.sum()].mean(axis=0) for rows, kept in zip(tokens, mask, strict=True)])
    return np.asarray(means / np.linalg.norm(means, axis=1, keepdims=True), np.float32)


class EncoderEngine(Engine):
    """A text encoder."""

    def prepare(self, work: Mapping[str, Any]) -> list[Any]:
        """Return one part per batch."""
        return [self.part(batch) for batch in read_batches(work["batches"])]

    @abstractmethod
    def part(self, batch: Batch) -> Any:
        """Return the argument of `run` for a batch.

        Raises:
            ValueError: The engine cannot run this batch.
        """


class OnnxRuntime(EncoderEngine):
    """Stock ONNX Runtime."""

    packages = ("onnxruntime",)
    modules = ("onnxruntime",)

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Use the ONNX file, or quantize it with quantize_dynamic if `quantized`."""
        path, call = model, "InferenceSession(model)"
        if options.get("quantized"):
            path = folder / "int8.onnx"
            importlib.import_module("onnxruntime.quantization").quantize_dynamic(model, path)
            call = f"quantize_dynamic(model, int8), {call.replace('model', 'int8')}"
        return Made({"path": str(path)}, f"{call}, intra_op_num_threads={threads}", megabytes(*with_data(path)))

    def __init__(self, threads: int, **opened: Any) -> None:
        ort = importlib.import_module("onnxruntime")
        options = ort_options(ort.SessionOptions(), threads)
        self._session = ort.InferenceSession(opened["path"], options, providers=["CPUExecutionProvider"])
        self._inputs = [value.name for value in self._session.get_inputs()]
        self._output = self._session.get_outputs()[0].name

    def part(self, batch: Batch) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the inputs of a batch."""
        return batch.feeds(self._inputs), batch.mask

    def run(self, part: tuple[dict[str, np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the vectors of a batch."""
        feeds, mask = part
        return unit_means(self._session.run([self._output], feeds)[0], mask)


class Ortolan(EncoderEngine):
    """A file made by Ortolan, run by TextEncoder. Padding and pooling are also timed."""

    packages = ("ortolan", "onnxruntime")
    modules = ("onnxruntime", "ortolan", "ortolan.text_encoder")

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Optimize the model.

        Options: `choices`, arguments of optimize_onnx; `more`, a pass to add to their recipe; `changed`, options of the
        recipe; `calibration`, batches; `tokenizer`, a tokenizer.json, which names the padding token; `batch_tokens`,
        tokens of one session run, by default one run per batch.
        """
        ortolan = importlib.import_module("ortolan")
        path, choices = folder / "fast.onnx", options["choices"]
        settings = ", ".join(f"{name}={value!r}" for name, value in choices.items()) or "calibration=batches"
        more, changed = options.get("more"), options.get("changed")
        if more is not None or changed is not None:
            recipe, settings = ortolan.Recipe.of(**choices), f"recipe=Recipe.of({settings})"
            if more is not None:
                recipe, settings = recipe.with_pass(more), f"{settings}.with_pass({more!r})"
            if changed is not None:
                recipe, settings = recipe.with_options(changed), f"{settings}.with_options({changed!r})"
            choices = {"recipe": recipe}
        feeds = _inputs_of(model, read_batches(options["calibration"]))
        ortolan.optimize_onnx(model, path, calibration=feeds, **choices)
        batch_tokens = options.get("batch_tokens")
        calls = "a batch a call" if batch_tokens is None else f"batch_tokens={batch_tokens}"
        return Made(
            {"path": str(path), "tokenizer": options["tokenizer"], "batch_tokens": batch_tokens},
            f"ortolan.optimize_onnx({', '.join(filter(None, ('model, fast', settings)))}), TextEncoder(fast), {calls},"
            f" intra_op_num_threads={threads}",
            megabytes(*with_data(path)),
        )

    def __init__(self, threads: int, **opened: Any) -> None:
        ortolan = importlib.import_module("ortolan")
        self._tokens = importlib.import_module("ortolan.text_encoder").Tokens
        options = ort_options(importlib.import_module("ortolan.session").new_options(), threads)
        settings = ortolan.TextInput(max_tokens=_LONGEST)
        self._encoder = ortolan.TextEncoder(opened["path"], opened["tokenizer"], settings, options)
        self._batch_tokens = opened["batch_tokens"]

    def part(self, batch: Batch) -> list[Any]:
        """Return the inputs of a batch."""
        values = zip(batch.texts(batch.ids), batch.texts(batch.types), strict=True)
        return [self._tokens((), ids, types) for ids, types in values]

    def run(self, part: list[Any]) -> np.ndarray:
        """Return the vectors of a batch."""
        if self._batch_tokens is None:
            return np.asarray(self._encoder.run(part))
        return np.asarray(self._encoder.encode_tokens(part, self._batch_tokens))


def _inputs_of(model: Path, batches: list[Batch]) -> list[dict[str, np.ndarray]]:
    """Return feeds for the inputs of an ONNX file."""
    graph = importlib.import_module("onnx").load(model, load_external_data=False).graph
    return [batch.feeds([value.name for value in graph.input]) for batch in batches]


class OpenVino(EncoderEngine):
    """OpenVINO on the ONNX file converted to OpenVINO's IR; nncf makes the int8 model."""

    packages = ("openvino", "nncf")
    modules = ("openvino",)

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Convert to IR.

        precision: "f32", "default" (OpenVINO's choice for this CPU) or "int8" (nncf.quantize on `calibration`).
        """
        openvino, precision = importlib.import_module("openvino"), options["precision"]
        network, made = openvino.Core().read_model(str(model)), "read_model(onnx)"
        if precision == "int8":
            nncf = importlib.import_module("nncf")
            inputs = [value.get_any_name() for value in network.inputs]
            feeds = [batch.feeds(inputs) for batch in read_batches(options["calibration"])]
            network = nncf.quantize(
                network, nncf.Dataset(feeds), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(feeds)
            )
            made = "nncf.quantize(read_model(onnx), model_type=TRANSFORMER)"
        path = folder / "model.xml"
        openvino.save_model(network, str(path), compress_to_fp16=False)
        settings = cls._settings(threads, precision)
        return Made(
            {"path": str(path), "precision": precision},
            f"{made}, save_model, compile_model(xml, 'CPU', {settings}); reshape to the work's shape where it has one",
            megabytes(path, path.with_suffix(".bin")),
        )

    @staticmethod
    def _settings(threads: int, precision: str) -> dict[str, Any]:
        settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False}
        return settings | ({"INFERENCE_PRECISION_HINT": "f32"} if precision == "f32" else {})

    def __init__(self, threads: int, **opened: Any) -> None:
        self._core, self._path = importlib.import_module("openvino").Core(), opened["path"]
        self._config = self._settings(threads, opened["precision"])
        compiled = self._core.compile_model(self._path, "CPU", self._config)
        self._inputs = [value.get_any_name() for value in compiled.inputs]
        self._request = self._of_any_shape = compiled.create_infer_request()

    def get_ready(self, parts: list[Any]) -> None:
        """Compile for one fixed shape if all batches have it, because a model of dynamic shape is slower."""
        self._request = self._of_any_shape
        shapes = {mask.shape for _, mask in parts}
        if len(shapes) == 1:
            network = self._core.read_model(self._path)
            network.reshape({name: list(*shapes) for name in self._inputs})
            self._request = self._core.compile_model(network, "CPU", self._config).create_infer_request()

    def part(self, batch: Batch) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the inputs of a batch."""
        return batch.feeds(self._inputs), batch.mask

    def run(self, part: tuple[dict[str, np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the vectors of a batch."""
        feeds, mask = part
        self._request.infer(feeds, share_inputs=True)
        return unit_means(self._request.get_output_tensor(0).data, mask)


class CTranslate2(EncoderEngine):
    """CTranslate2 from a transformers folder, which transformers and torch convert."""

    packages = ("ctranslate2",)
    modules = ("ctranslate2",)

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Convert the folder `model`. compute_type: CTranslate2's name, such as "int8"."""
        compute_type, target = options["compute_type"], folder / "converted"
        converters = importlib.import_module("ctranslate2.converters")
        converters.TransformersConverter(str(model)).convert(str(target), quantization=compute_type)
        fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
        typed = fields.get("type_vocab_size", 0) > 0
        return Made(
            {"path": str(target), "compute_type": compute_type, "typed": typed},
            f"TransformersConverter(folder).convert(quantization={compute_type!r}), Encoder(intra_threads={threads})",
            megabytes(target / "model.bin"),
        )

    def __init__(self, threads: int, **opened: Any) -> None:
        self._encoder = importlib.import_module("ctranslate2").Encoder(
            opened["path"], "cpu", compute_type=opened["compute_type"], inter_threads=1, intra_threads=threads
        )
        self._typed = opened["typed"]

    def part(self, batch: Batch) -> tuple[dict[str, Any], np.ndarray]:
        """Return the inputs of a batch."""
        given: dict[str, Any] = {"inputs": batch.texts(batch.ids)}
        if self._typed:
            given["token_type_ids"] = batch.texts(batch.types)
        return given, batch.mask

    def run(self, part: tuple[dict[str, Any], np.ndarray]) -> np.ndarray:
        """Return the vectors of a batch."""
        given, mask = part
        return unit_means(np.array(self._encoder.forward_batch(**given).last_hidden_state), mask)


class Torch(EncoderEngine):
    """A transformers model in torch, from a transformers folder."""

    packages = ("torch", "transformers")
    modules = ("torch", "transformers")
    environment: ClassVar = {"TORCHINDUCTOR_FREEZING": "1"}

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Describe the folder `model`.

        dtype: "float32" or "bfloat16". quantized: quantize_dynamic. compiled: torch.compile.
        """
        dtype, quantized, compiled = options["dtype"], options.get("quantized", False), options.get("compiled", False)
        call = f"AutoModel.from_pretrained(folder, dtype={dtype})"
        if quantized:
            call = f"quantize_dynamic({call}, {{Linear}}, qint8)"
        if compiled:
            call = f"torch.compile({call}), TORCHINDUCTOR_FREEZING=1"
        return Made(
            {"path": str(model), "dtype": dtype, "quantized": quantized, "compiled": compiled},
            f"{call}, inference_mode, set_num_threads({threads})",
            megabytes(model / "model.safetensors"),
        )

    def __init__(self, threads: int, **opened: Any) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        transformers = importlib.import_module("transformers")
        dtype = getattr(self._torch, opened["dtype"])
        self._model = transformers.AutoModel.from_pretrained(opened["path"], dtype=dtype).eval()
        if opened["quantized"]:
            quantization = importlib.import_module("torch.ao.quantization")
            self._model = quantization.quantize_dynamic(self._model, {self._torch.nn.Linear}, self._torch.qint8)
        self._typed = getattr(self._model.config, "type_vocab_size", 0) > 0
        self._call: Any = self._model
        if opened["compiled"]:
            self._call = self._torch.compile(self._model)
        self._compiled = opened["compiled"]

    def get_ready(self, parts: list[Any]) -> None:
        """Compile for one shape if all parts have it, else for dynamic shapes."""
        if self._compiled:
            self._torch.compiler.reset()
            for part in parts:
                self.run(part)

    def part(self, batch: Batch) -> tuple[dict[str, Any], np.ndarray]:
        """Return the inputs of a batch."""
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if self._typed else [])]
        return {name: self._torch.from_numpy(array) for name, array in batch.feeds(names).items()}, batch.mask

    def run(self, part: tuple[dict[str, Any], np.ndarray]) -> np.ndarray:
        """Return the vectors of a batch."""
        given, mask = part
        with self._torch.inference_mode():
            return unit_means(self._call(**given).last_hidden_state.float().numpy(), mask)


class SentenceTransformers(EncoderEngine):
    """sentence-transformers from a transformers folder."""

    packages = ("sentence-transformers", "transformers", "torch")
    modules = ("torch", "sentence_transformers")

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Describe the folder `model`."""
        call = f"SentenceTransformer([Transformer, Pooling('mean'), Normalize])(features), set_num_threads({threads})"
        return Made({"path": str(model)}, call, megabytes(model / "model.safetensors"))

    def __init__(self, threads: int, **opened: Any) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        package = importlib.import_module("sentence_transformers")
        models = importlib.import_module("sentence_transformers.models")
        path = Path(opened["path"])
        encoder = models.Transformer(str(path), max_seq_length=_LONGEST)
        width = json.loads((path / "config.json").read_text(encoding="utf-8"))["hidden_size"]
        modules = [encoder, models.Pooling(width, pooling_mode="mean"), models.Normalize()]
        self._model = package.SentenceTransformer(modules=modules, device="cpu").eval()

    def part(self, batch: Batch) -> dict[str, Any]:
        """Return the inputs of a batch."""
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if batch.types.any() else [])]
        return {name: self._torch.from_numpy(array) for name, array in batch.feeds(names).items()}

    def run(self, part: dict[str, Any]) -> np.ndarray:
        """Return the vectors of a batch."""
        with self._torch.inference_mode():
            # The model replaces entries of the dict, so each run gets a copy.
            return np.asarray(self._model(dict(part))["sentence_embedding"].numpy())


class _OfTexts(EncoderEngine):
    """A text encoder that takes texts, not ids.

    Each id is written as a word, and a tokenizer turns the words back into ids. Token types are zero.
    """

    @staticmethod
    def _write_tokenizer(folder: Path) -> None:
        words = {_PAD: 0, **{str(number): number for number in range(1, _WORDS)}}
        tokenizer = {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": _PAD},
        }
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        fields = {"model_max_length": _LONGEST, "pad_token": _PAD, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")

    def part(self, batch: Batch) -> list[str]:
        """Return the inputs of a batch."""
        if batch.types.any():
            raise ValueError(f"{self.packages[0]} supports only token type 0")
        return [" ".join(map(str, ids)) for ids in batch.texts(batch.ids)]


class FastEmbed(_OfTexts):
    """fastembed on the ONNX file, as a custom model."""

    packages = ("fastembed", "onnxruntime")
    modules = ("fastembed", "fastembed.common.model_description")

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Link the model and write the tokenizer of ids."""
        cls._write_tokenizer(folder)
        for path in with_data(model):
            # A hard link, because ONNX Runtime resolves symbolic links and wants external data beside the model.
            _link(path, folder / path.name)
        call = f"TextEmbedding.add_custom_model(pooling=MEAN, normalization=True), threads={threads}"
        return Made(
            {"folder": str(folder), "files": [path.name for path in with_data(model)]},
            call,
            megabytes(*with_data(model)),
        )

    def __init__(self, threads: int, **opened: Any) -> None:
        fastembed = importlib.import_module("fastembed")
        description = importlib.import_module("fastembed.common.model_description")
        name, (model, *data) = "benchmarked/model", opened["files"]
        fastembed.TextEmbedding.add_custom_model(
            model=name,
            pooling=description.PoolingType.MEAN,
            normalization=True,
            sources=description.ModelSource(url="file://local"),  # required, but unused with a path
            dim=1,  # not used by the computation
            model_file=model,
            additional_files=data,
        )
        self._embedding = fastembed.TextEmbedding(name, threads=threads, specific_model_path=opened["folder"])

    def run(self, part: list[str]) -> np.ndarray:
        """Return the vectors of a batch."""
        return np.stack(list(self._embedding.embed(part, batch_size=len(part))))


class Infinity(_OfTexts):
    """infinity's engine (infinity-emb), from a transformers folder that has an ONNX file too."""

    packages = ("infinity-emb", "torch", "onnxruntime")
    modules = ("infinity_emb", "torch")
    environment: ClassVar = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    _FILES: ClassVar = {"torch": "model.safetensors", "optimum": "model.onnx"}

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Link the model and write the tokenizer of ids.

        Options: `engine`, "torch" or "optimum" (ONNX Runtime); `dtype`, which only torch follows.
        """
        engine, dtype = options["engine"], options["dtype"]
        for name in ("config.json", cls._FILES[engine]):
            _link(model / name, folder / name)
        cls._write_tokenizer(folder)
        call = (
            f"AsyncEmbeddingEngine.from_args(EngineArgs(engine={engine!r}, dtype={dtype!r}, bettertransformer=False))"
        )
        return Made(
            {"folder": str(folder), "engine": engine, "dtype": dtype}, call, megabytes(folder / cls._FILES[engine])
        )

    def __init__(self, threads: int, **opened: Any) -> None:
        infinity = importlib.import_module("infinity_emb")
        importlib.import_module("torch").set_num_threads(threads)
        # optimum takes no absolute paths.
        os.chdir(opened["folder"])
        settings = infinity.EngineArgs(
            model_name_or_path=".",
            engine=opened["engine"],
            dtype=opened["dtype"],
            device="cpu",
            pooling_method="mean",
            batch_size=_LONGEST,  # of texts, more than a batch here has
            model_warmup=False,
            bettertransformer=False,  # it would replace torch's fused attention
            onnx_disable_optimize=True,  # it needs an older optimum; ONNX Runtime optimizes when it opens the file
        )
        self._engine = infinity.AsyncEmbeddingEngine.from_args(settings)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._engine.astart())

    def run(self, part: list[str]) -> np.ndarray:
        """Return the vectors of a batch."""
        vectors, _ = self._loop.run_until_complete(self._engine.embed(sentences=part))
        return np.stack(vectors)


class EmbedAnything(_OfTexts):
    """EmbedAnything (embed-anything), from a transformers folder that has an ONNX file too.

    It reads models of Hugging Face's hub only, so the folder becomes a cache of the hub.
    """

    packages = ("embed-anything", "onnxruntime")
    modules = ("embed_anything",)
    _NAME, _REVISION = "local/model", "0" * 40
    _FILES: ClassVar = {"candle": "model.safetensors", "onnx": "model.onnx"}

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Link the model into a cache of the hub, with the tokenizer of ids. Option `engine`: "candle" or "onnx"."""
        engine = options["engine"]
        repository = folder / "hub" / f"models--{cls._NAME.replace('/', '--')}"
        files = repository / "snapshots" / cls._REVISION
        for one in (files, repository / "refs"):
            one.mkdir(parents=True)
        (repository / "refs" / "main").write_text(cls._REVISION, encoding="utf-8")
        for name in ("config.json", cls._FILES[engine]):
            _link(model / name, files / name)
        cls._write_tokenizer(files)
        loaded = "from_pretrained_hf(pooling=Mean)" if engine == "candle" else "from_pretrained_onnx(Bert)"
        return Made(
            {"folder": str(folder), "engine": engine},
            f"EmbeddingModel.{loaded}, embed_query(TextEmbedConfig(batch_size)), RAYON_NUM_THREADS={threads}",
            megabytes(files / cls._FILES[engine]),
        )

    def __init__(self, threads: int, **opened: Any) -> None:
        # No server answers there, so files that a model may have but does not need are not searched for.
        os.environ |= {
            "HF_HOME": opened["folder"],
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "RAYON_NUM_THREADS": str(threads),
        }
        self._api = importlib.import_module("embed_anything")
        load = self._api.EmbeddingModel
        if opened["engine"] == "candle":
            self._model = load.from_pretrained_hf(model_id=self._NAME, pooling=self._api.Pooling.Mean)
        else:
            file = self._FILES[opened["engine"]]
            bert = self._api.WhichModel.Bert
            self._model = load.from_pretrained_onnx(bert, hf_model_id=self._NAME, path_in_repo=file)

    def run(self, part: list[str]) -> np.ndarray:
        """Return the vectors of a batch."""
        settings = self._api.TextEmbedConfig(batch_size=len(part))
        return np.array([one.embedding for one in self._api.embed_query(part, embedder=self._model, config=settings)])


class DeepSparse(EncoderEngine):
    """DeepSparse on an ONNX file, compiled for each batch shape, its fastest mode."""

    packages = ("deepsparse", "numpy")
    modules = ("deepsparse",)
    # Do not pin threads, because the process is pinned already, and send no telemetry.
    environment: ClassVar = {
        "NM_BIND_THREADS_TO_CORES": "0",
        "NM_BIND_THREADS_TO_SOCKETS": "0",
        "NM_DISABLE_ANALYTICS": "1",
    }

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Copy the model."""
        call = f"compile_model(model, batch_size, num_cores={threads}, input_shapes), NM_BIND_THREADS_TO_CORES=0"
        graph = (
            importlib.import_module("onnx").load(model, load_external_data=False).graph
        )  # deepsparse depends on onnx
        for path in with_data(model):  # copied, because it writes the shapes into the file that it compiles
            shutil.copyfile(path, folder / path.name)
        opened = {"path": str(folder / model.name), "inputs": [value.name for value in graph.input]}
        return Made(opened, call, megabytes(*with_data(model)))

    def __init__(self, threads: int, **opened: Any) -> None:
        self._deepsparse = importlib.import_module("deepsparse")
        self._path, self._inputs, self._threads = opened["path"], opened["inputs"], threads
        self._compiled: dict[tuple[int, int], Any] = {}

    def get_ready(self, parts: list[Any]) -> None:
        """Compile for the shapes of the batches."""
        self._compiled = {}
        for _, mask in parts:
            self._compile(mask.shape)

    def _compile(self, shape: tuple[int, int]) -> Any:
        if shape not in self._compiled:
            self._compiled[shape] = self._deepsparse.compile_model(
                self._path, shape[0], self._threads, input_shapes=[list(shape)] * len(self._inputs)
            )
        return self._compiled[shape]

    def part(self, batch: Batch) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the inputs of a batch."""
        return list(map(np.ascontiguousarray, batch.feeds(self._inputs).values())), batch.mask

    def run(self, part: tuple[list[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the vectors of a batch."""
        given, mask = part
        return unit_means(self._compile(mask.shape).run(given, val_inp=False)[0], mask)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        target.write_bytes(source.read_bytes())


class Worker(EngineWorker):
    """The worker of text encoders."""

    engines: ClassVar = {
        "onnxruntime": OnnxRuntime,
        "ortolan": Ortolan,
        "openvino": OpenVino,
        "ctranslate2": CTranslate2,
        "torch": Torch,
        "sentence-transformers": SentenceTransformers,
        "fastembed": FastEmbed,
        "infinity": Infinity,
        "embed-anything": EmbedAnything,
        "deepsparse": DeepSparse,
    }

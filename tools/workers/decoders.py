"""Decoders in several runtimes: prompts, steps of greedy decoding, or the probability of a text, from token ids.

    python -P serve.py decoders.py '{"threads": 1, "cpus": [0]}'

Work is a dict:

    {"kind": "prompt", "ids": […]}                      a pass runs all ids on an empty cache
    {"kind": "decode", "ids": […], "steps": 64}         a pass decodes this number of tokens after the ids
    {"kind": "step", "context": 16384, "steps": 8}      a pass decodes after `context` arbitrary tokens in the cache
    {"kind": "score", "windows": [[…], …], "step": 1}   the answer has one row per window: the sum of -log p(token) over
                                                        all tokens but the first, and their number. "step" tokens are
                                                        run at a time, by default a whole window

The engines' docstrings name the packages that they need. Interpreters run this file as a script, without Ortolan except
for the first two engines. Runtimes are imported when a model is opened.
"""

from __future__ import annotations

import importlib
import json
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from .decoder_engine import DecoderEngine, Part, any_ids
    from .engine import Engine, EngineWorker, Made, arguments, megabytes, ort_options, with_data
    from .llama_cpp_decoder import IkLlamaCpp, LlamaCpp
    from .openvino_decoder import OpenVinoGenAi
else:
    from decoder_engine import DecoderEngine, Part, any_ids
    from engine import Engine, EngineWorker, Made, arguments, megabytes, ort_options, with_data
    from llama_cpp_decoder import IkLlamaCpp, LlamaCpp
    from openvino_decoder import OpenVinoGenAi

_FILES = ("calibration", "tokenizer")  # arguments of optimize_onnx that are paths


class _Onnx(DecoderEngine):
    """A decoder run by ortolan.generate.Decoder, with past and present in one buffer."""

    _FILLED = 512  # tokens that are run to fill a cache; longer caches repeat them

    def __init__(self, threads: int, model: str) -> None:
        self._path = model
        self._decoder_class = importlib.import_module("ortolan.generate").Decoder
        self._session = self._open(model, threads)

    @abstractmethod
    def _open(self, model: str, threads: int) -> Any: ...

    def make_room(self, tokens: int) -> None:
        """Make an empty cache."""
        self._decoder = self._decoder_class(self._session, tokens)

    def rewind(self, tokens: int) -> None:
        """Keep the first tokens of the cache."""
        self._decoder.rewind(tokens)

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens and return the last logits."""
        return np.asarray(self._decoder.step(ids)[-1])

    def feed_all(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens and return their logits."""
        return np.asarray(self._decoder.step(ids))

    def fill(self, tokens: int) -> None:
        """Fill the cache with arbitrary tokens."""
        context = self._context()
        room = self._decoder.cache_length
        if context is not None and room > context:
            raise ValueError(f"the model has {context} positions, expected at least {room}")
        first = self._decoder_class(self._session, self._FILLED)
        first.step(any_ids(self._FILLED))
        # Compressed caches have blocks whose size divides _FILLED.
        times = -(-room // self._FILLED)
        cache = {name: np.tile(array, (1, 1, times, 1))[:, :, :room].copy() for name, array in first.cache().items()}
        self._decoder.fill(cache, tokens)

    def _context(self) -> int | None:
        found: int | None = importlib.import_module("ortolan.generate").read_context(self._path)
        return found


class OnnxRuntime(_Onnx):
    """Stock ONNX Runtime (onnxruntime). The model is a GroupQueryAttention graph."""

    packages = ("onnxruntime",)
    modules = ("onnxruntime", "ortolan.generate")

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Quantize the model.

        Options: `nbits`, arguments of make_matmul_nbits; `cache_ids`, tokens that calibrate the scales of an int8
        cache, only together with nbits.
        """
        steps, nbits, cache_ids = [], options.get("nbits"), options.get("cache_ids")
        if nbits is not None:
            source, model = model, folder / "model.onnx"
            importlib.import_module("ortolan.benchmarks.matmul_nbits").make_matmul_nbits(source, model, **nbits)
            steps.append(f"MatMulNBitsQuantizer({arguments(nbits)})")
        if cache_ids is not None:
            if nbits is None:
                raise ValueError("`cache_ids` needs `nbits`: only files made here get an int8 cache")
            importlib.import_module("ortolan.benchmarks.int8_cache").write_int8_cache(model, cache_ids)
            steps.append("GroupQueryAttention with kv_cache_bit_width=8, PER_CHANNEL")
        steps.append("InferenceSession, io_binding, past and present in one buffer")
        return Made({"model": str(model)}, ", ".join(steps), megabytes(*with_data(model)))

    def _open(self, model: str, threads: int) -> Any:
        ort = importlib.import_module("onnxruntime")
        options = ort_options(ort.SessionOptions(), threads)
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Ortolan(_Onnx):
    """A file made by Ortolan (ortolan), run in ONNX Runtime. The model is an ONNX file, or a GGUF file to import."""

    packages = ("ortolan", "onnxruntime")
    modules = ("onnxruntime", "ortolan.session", "ortolan.generate")

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Optimize or import the model. options: arguments of optimize_onnx."""
        ortolan = importlib.import_module("ortolan")
        made = folder / "made" / "model.onnx"
        if model.suffix == ".gguf":
            ortolan.import_gguf(model, made.parent)
            call = f"ortolan.import_gguf({model.name!r}, folder)"
        else:
            made.parent.mkdir()
            ortolan.optimize_onnx(model, made, **options)
            shown = {name: Path(value).name if name in _FILES else value for name, value in options.items()}
            call = f"ortolan.optimize_onnx(model, out, {arguments(shown)})"
        return Made({"model": str(made)}, f"{call}; generate.Decoder(create_session(out))", megabytes(*with_data(made)))

    def _open(self, model: str, threads: int) -> Any:
        session = importlib.import_module("ortolan.session")
        return session.create_session(model, ort_options(session.new_options(), threads))


class GenAi(DecoderEngine):
    """ONNX Runtime GenAI (onnxruntime-genai). The model is a GenAI folder."""

    packages = ("onnxruntime-genai", "onnxruntime")
    modules = ("onnxruntime_genai",)

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Describe the folder. Option `how`: the call that made its model."""
        files = [path for path in model.iterdir() if path.is_file()]
        call = f"{options['how']}; Generator.append_tokens, generate_next_token, rewind_to; past_present_share_buffer"
        return Made({"folder": str(model)}, call, megabytes(*files))

    def __init__(self, threads: int, folder: str) -> None:
        self._api = importlib.import_module("onnxruntime_genai")
        config = self._api.Config(folder)
        told = json.loads(Path(folder, "genai_config.json").read_text(encoding="utf-8"))
        self._longest = told["model"]["context_length"]
        options = {"intra_op_num_threads": threads, "session.force_spinning_stop": "1"}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = self._api.Model(config)

    def make_room(self, tokens: int) -> None:
        """Make an empty cache."""
        settings = self._api.GeneratorParams(self._model)
        length = min(tokens + 2, self._longest)  # GenAI stops after a token that fills the cache
        settings.set_search_options(max_length=length, min_length=length, do_sample=False)
        self._generator = self._api.Generator(self._model, settings)

    def rewind(self, tokens: int) -> None:
        """Keep the first tokens of the cache."""
        self._generator.rewind_to(tokens)

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens and return the last logits."""
        self._generator.append_tokens(np.asarray(ids, np.int32))
        return np.asarray(self._generator.get_logits()).reshape(-1)

    def feed_all(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens and return their logits."""
        self._generator.append_tokens(np.asarray(ids, np.int32))
        return np.asarray(self._generator.get_output("logits")[0])

    def fill(self, tokens: int) -> None:
        """Fill the cache with arbitrary tokens."""
        for begin in range(0, tokens, 512):  # GenAI computes the logits of all tokens of a call
            self.feed(any_ids(min(512, tokens - begin)))

    def set_up(self, part: Part) -> None:
        """Run the prompt before decoding."""
        self.rewind(part.context)
        if part.steps:
            self.feed(part.ids or any_ids(1))
            self._generator.generate_next_token()  # from the logits of the prompt

    def run(self, part: Part) -> np.ndarray:
        """Run the prompt, or decode the steps."""
        if not part.steps:
            return super().run(part)
        for _ in range(part.steps):
            self._generator.generate_next_token()
        return np.array([self._generator.get_next_tokens()])


class Torch(DecoderEngine):
    """A transformers model in torch, not compiled (torch, transformers). The model is a transformers folder."""

    packages = ("torch", "transformers")
    modules = ("torch", "transformers.models.llama.modeling_llama")
    _FILLED = 512  # as in _Onnx

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Write the model.

        form: "fp32"; "bf16", stored in bf16; "int8", quantized by quantize_dynamic when it is opened.
        """
        form = options["form"]
        calls = ["AutoModelForCausalLM.from_pretrained(folder, attn_implementation='sdpa')", "StaticCache"]
        if form == "bf16":
            transformers = importlib.import_module("transformers")
            torch = importlib.import_module("torch")
            loaded = transformers.AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.bfloat16)
            loaded.save_pretrained(str(folder))
            model = folder
            calls[0] = calls[0].replace(")", ", dtype=torch.bfloat16)")
        elif form == "int8":
            calls.insert(1, "torch.ao.quantization.quantize_dynamic(model, {Linear}, qint8)")
        return Made({"folder": str(model), "form": form}, ", ".join(calls), megabytes(*model.glob("*.safetensors")))

    def __init__(self, threads: int, folder: str, form: str) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        self._transformers = importlib.import_module("transformers")
        dtype = self._torch.bfloat16 if form == "bf16" else self._torch.float32
        load = self._transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(folder, dtype=dtype, attn_implementation="sdpa").eval()
        if form == "int8":
            linear = self._torch.nn.Linear
            quantize = self._torch.ao.quantization.quantize_dynamic
            self._model = quantize(self._model, {linear}, dtype=self._torch.qint8)

    def make_room(self, tokens: int) -> None:
        """Make an empty cache."""
        self._cache = self._transformers.StaticCache(config=self._model.config, max_cache_len=tokens)
        self._room = tokens

    def rewind(self, tokens: int) -> None:
        """Keep the first tokens of the cache."""
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(tokens)

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens and return the last logits."""
        return np.asarray(self._logits(ids, 1)[0])

    def feed_all(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens and return their logits."""
        return self._logits(ids, 0)

    def _logits(self, ids: Sequence[int], kept: int) -> np.ndarray:
        tokens = self._torch.tensor([list(ids)])
        with self._torch.inference_mode():
            found = self._model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=kept).logits
        return np.asarray(found[0].float().numpy())

    def fill(self, tokens: int) -> None:
        """Fill the cache with arbitrary tokens."""
        self.feed(any_ids(self._FILLED))
        with self._torch.inference_mode():
            for layer in self._cache.layers:
                for array in (layer.keys, layer.values):
                    for begin in range(self._FILLED, self._room, self._FILLED):
                        block = array[:, :, begin : begin + self._FILLED]
                        block.copy_(array[:, :, : block.shape[2]])


class CTranslate2(DecoderEngine):
    """CTranslate2 (ctranslate2). The model is a transformers folder, which transformers and torch convert."""

    packages = ("ctranslate2",)
    modules = ("ctranslate2",)

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Convert the folder. form: CTranslate2's name, such as "int8"."""
        form, target = options["form"], folder / "converted"
        converter = importlib.import_module("ctranslate2.converters").TransformersConverter(str(model))
        converter.convert(str(target), quantization=form)
        call = (
            f"TransformersConverter(folder).convert(quantization={form!r}), Generator; generate_tokens, forward_batch"
        )
        return Made({"folder": str(target), "form": form}, call, megabytes(*target.iterdir()))

    def __init__(self, threads: int, folder: str, form: str) -> None:
        generator = importlib.import_module("ctranslate2").Generator
        self._model = generator(folder, "cpu", compute_type=form, inter_threads=1, intra_threads=threads)
        self._words = json.loads(Path(folder, "vocabulary.json").read_text(encoding="utf-8"))

    def prepare(self, work: Mapping[str, Any]) -> list[Part]:
        """Return the parts. Windows are scored as a whole, because given tokens cannot be appended to the cache."""
        if "step" in work:
            raise ValueError("step-wise scoring needs a cache that takes tokens, which CTranslate2 lacks")
        return super().prepare(work)

    def fill(self, tokens: int) -> None:
        """Refuse, because the prompt would need a quadratic matrix of scores."""
        raise ValueError(f"a prompt of {tokens} tokens would take a score matrix of {tokens}^2 values per head")

    def make_room(self, tokens: int) -> None:
        """Do nothing: each call has its own cache."""

    def rewind(self, tokens: int) -> None:
        """Do nothing: each call has its own cache."""

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Return the token that CTranslate2 chose, because it does not return the logits of the last token alone."""
        return np.array([next(self._generate(ids, 1)).token_id])

    def feed_all(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens and return their logits."""
        return np.asarray(np.array(self._model.forward_batch([list(ids)]))[0])

    def set_up(self, part: Part) -> None:
        """Run the prompt before decoding."""
        if part.steps:
            self._tokens = self._generate(part.ids, part.steps + 1)
            next(self._tokens)  # returns when the prompt is done

    def run(self, part: Part) -> np.ndarray:
        """Run the prompt, or decode the steps."""
        if not part.steps:
            return super().run(part)
        return np.array([[one.token_id for one in self._tokens][-1:]])

    def _generate(self, ids: Sequence[int], tokens: int) -> Iterator[Any]:
        words = [self._words[token] for token in ids]
        found: Iterator[Any] = self._model.generate_tokens(words, max_length=tokens, min_length=tokens, sampling_topk=1)
        return found


class MistralRs(DecoderEngine):
    """mistral.rs through requests, its lowest interface (mistralrs). The model is a GGUF file."""

    packages = ("mistralrs",)
    modules = ("mistralrs",)
    _LONGEST = 512  # tokens in a prompt
    _NEVER = (0, 1, 2)  # end-of-text tokens of the vocabularies here

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Describe the file. Option `how`: the call that made it."""
        call = (
            f"{options['how']}; Runner(Which.GGUF, prefix_cache_n=0), requests of temperature 0; decoding by a stream"
        )
        call += "; perplexity: llama.cpp's, on the same file"
        return Made({"model": str(model)}, call, megabytes(model))

    def __init__(self, threads: int, model: str) -> None:
        os.environ |= dict.fromkeys(("CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"), str(threads))
        self._api = importlib.import_module("mistralrs")
        folder, file = os.path.split(model)
        which = self._api.Which.GGUF(quantized_model_id=folder, quantized_filename=file)
        self._runner = self._api.Runner(which, prefix_cache_n=0, max_seqs=1, token_source="none")

    def make_room(self, tokens: int) -> None:
        """Do nothing: the cache grows."""

    def rewind(self, tokens: int) -> None:
        """Do nothing: each request starts anew."""

    def feed_all(self, ids: Sequence[int]) -> np.ndarray:
        """Refuse: the runtime gives no logits of a prompt."""
        raise ValueError("mistral.rs gives no logits of a prompt")

    def fill(self, tokens: int) -> None:
        """Refuse, because filling the cache takes minutes."""
        raise ValueError(f"a prompt of {tokens} tokens takes minutes")

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Run a prompt. The logits are unknown."""
        if len(ids) > self._LONGEST:
            raise ValueError(f"a prompt of {len(ids)} tokens takes too long; expected at most {self._LONGEST}")
        request = self._api.CompletionRequest(self._text(ids), "default", max_tokens=1, temperature=0.0)
        usage = self._runner.send_completion_request(request).usage
        if usage.prompt_tokens != len(ids):
            raise ValueError(f"tokenization differs: {usage.prompt_tokens} tokens, expected {len(ids)}")
        return np.zeros(1)

    def set_up(self, part: Part) -> None:
        """Run the prompt before decoding."""
        if part.steps:
            self._chunks = self._runner.send_chat_completion_request(
                self._api.ChatCompletionRequest(
                    self._text(part.ids), "default", max_tokens=part.steps + 1, temperature=0.0, stream=True,
                    logit_bias=dict.fromkeys(self._NEVER, -100.0),
                )
            )  # fmt: skip
            next(self._chunks)  # returns when the prompt is done

    def run(self, part: Part) -> np.ndarray:
        """Run the prompt, or decode the steps."""
        if not part.steps:
            return super().run(part)
        found = sum(1 for _ in self._chunks)
        if found != part.steps:
            raise ValueError(f"decoded {found} tokens, expected {part.steps}")
        return np.zeros((1, 1))

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._runner.detokenize_text(list(ids), skip_special_tokens=False))


class Worker(EngineWorker):
    """The worker of decoders."""

    engines: ClassVar[Mapping[str, type[Engine]]] = {
        "onnxruntime": OnnxRuntime,
        "ortolan": Ortolan,
        "llama.cpp": LlamaCpp,
        "ik_llama.cpp": IkLlamaCpp,
        "onnxruntime-genai": GenAi,
        "openvino-genai": OpenVinoGenAi,
        "torch": Torch,
        "ctranslate2": CTranslate2,
        "mistralrs": MistralRs,
    }

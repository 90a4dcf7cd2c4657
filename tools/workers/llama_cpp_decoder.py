"""Decoders in llama.cpp and in its fork ik_llama.cpp, through their C interfaces. The model is a GGUF file."""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from .decoder_engine import DecoderEngine, any_ids
    from .engine import Made, megabytes
else:
    from decoder_engine import DecoderEngine, any_ids
    from engine import Made, megabytes

_CACHES: Mapping[str, int] = {"F16": 1, "Q8_0": 8}  # enum ggml_type


class LlamaCpp(DecoderEngine):
    """llama.cpp (llama-cpp-python)."""

    packages = ("llama-cpp-python",)
    modules = ("llama_cpp",)
    name: ClassVar[str] = "llama.cpp"
    _BATCH = 2048  # tokens per call, which llama.cpp splits into micro-batches of 512

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Quantize the file.

        Options: `form`, a format such as "Q4_K_M" for the runtime's quantizer, by default no quantization; `how`, the
        call that made the file, by default none; `cache`, the type of keys and values, by default F16; and those of
        `_settings`.
        """
        form, how = options.pop("form", None), options.pop("how", None)
        steps = [] if how is None else [how]
        if form is not None:
            source, model = model, folder / f"{form}.gguf"
            steps.append(cls._quantize(source, model, form))
        opened = {"cache": "F16", **options}
        steps += [f"llama_decode, n_batch={cls._BATCH}, n_ubatch=512", *cls._settings(**opened)]
        system = cls._load().llama_print_system_info().decode()
        steps.append(", ".join(re.findall(r"(\w+) = 1\b", system)))
        return Made({"model": str(model), **opened}, "; ".join(steps), megabytes(model))

    @classmethod
    def _load(cls) -> Any:
        """Return the functions of the C interface."""
        return importlib.import_module("llama_cpp")

    @classmethod
    def _settings(cls, **opened: Any) -> list[str]:
        """Return what to show of the settings. llama.cpp chooses whether to use flash attention."""
        return [f"flash_attn=auto, type_k = type_v = {opened['cache']}"]

    @classmethod
    def _quantize(cls, source: Path, target: Path, form: str) -> str:
        """Write the file in a format, and return the call to show."""
        api = cls._load()
        number = getattr(api, f"LLAMA_FTYPE_MOSTLY_{form}", None)
        if number is None:
            raise ValueError(f"unknown llama.cpp format {form!r}, expected one such as 'Q4_0' or 'Q4_K_M'")
        settings = api.llama_model_quantize_default_params()
        settings.ftype, settings.allow_requantize = number, True
        if api.llama_model_quantize(str(source).encode(), str(target).encode(), settings) != 0:
            raise ValueError(f"llama.cpp could not write {target.name} from {source.name}")
        return f"llama_model_quantize({source.name!r} to {form}, allow_requantize)"

    def __init__(self, threads: int, model: str, cache: str) -> None:
        self._api = self._load()
        self._threads = threads
        self._cache = _CACHES[cache]
        self._api.llama_backend_init()
        self._log = self._api.llama_log_callback(lambda level, text, data: None)
        self._api.llama_log_set(self._log, None)
        self._model = self._api.llama_model_load_from_file(model.encode(), self._model_settings())
        if not self._model:
            raise ValueError(f"{self.name} cannot read {model}")
        self._vocabulary = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._context: Any = None

    def _model_settings(self) -> Any:
        return self._api.llama_model_default_params()

    def make_room(self, tokens: int) -> None:
        """Make an empty cache."""
        self._make_context(tokens)

    def _make_context(self, tokens: int, sequences: int = 1, unified: bool = False) -> None:
        """Make an empty cache for `tokens` tokens of all sequences together.

        unified: Whether sequences share one cache, or else each has an equal part of it.
        """
        api = self._api
        if self._context:
            api.llama_free(self._context)
        settings = api.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = tokens, self._BATCH, 512
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = self._threads
        settings.type_k = settings.type_v = self._cache
        self._share_cache(settings, unified)
        self._context = api.llama_init_from_model(self._model, settings)
        if not self._context:
            raise ValueError(f"{self.name} cannot make a context of {tokens} tokens")
        self._length = 0  # tokens of the first sequence

    def _share_cache(self, settings: Any, unified: bool) -> None:
        settings.kv_unified = unified

    def rewind(self, tokens: int) -> None:
        """Keep the first tokens of the cache."""
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._context), 0, tokens, -1)
        self._length = tokens

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens and return the last logits."""
        for begin in range(0, len(ids), self._BATCH):
            given = ids[begin : begin + self._BATCH]
            tokens = (self._api.llama_token * len(given))(*given)  # the batch points to it
            self._decode(self._batch_of(tokens))
        return self._logits(-1)

    def _batch_of(self, tokens: Any) -> Any:
        """Return a batch that appends tokens and has the logits of the last one."""
        return self._api.llama_batch_get_one(tokens, len(tokens))

    def _logits(self, row: int) -> np.ndarray:
        """Return the logits of a row of the last batch; a later batch overwrites them."""
        return np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, row), (self._vocabulary,))

    def feed_all(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens and return their logits."""
        batch = self._api.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for index, token in enumerate(ids):
                batch.token[index], batch.pos[index], batch.logits[index] = token, self._length + index, True
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            self._decode(batch)
        finally:
            self._api.llama_batch_free(batch)
        pointer = self._api.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (len(ids), self._vocabulary)).copy()

    def fill(self, tokens: int) -> None:
        """Fill the cache with arbitrary tokens."""
        self.feed(any_ids(tokens))

    def _decode(self, batch: Any) -> None:
        if (status := self._api.llama_decode(self._context, batch)) != 0:
            raise ValueError(f"llama_decode failed with status {status}")
        self._length += batch.n_tokens


_POINTER, _INT, _BOOL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
_FLOATS, _INTS = ctypes.POINTER(ctypes.c_float), ctypes.POINTER(ctypes.c_int32)
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _POINTER)
# Maps a function that ik-llama-cpp-python does not declare to its result type, followed by its argument types.
_IK_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "llama_get_logits": (_FLOATS, _POINTER),
    "llama_kv_cache_seq_rm": (_BOOL, _POINTER, _INT, _INT, _INT),
    "llama_log_set": (None, _LOG, _POINTER),
    "llama_print_system_info": (ctypes.c_char_p,),
}


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp (ik-llama-cpp-python), with flash attention, its default."""

    packages = ("ik-llama-cpp-python",)
    modules = ("ik_llama_cpp._ctypes_api",)
    name = "ik_llama.cpp"

    @classmethod
    def _load(cls) -> Any:
        """Return the functions of the C interface, under the names of llama.cpp, which has renamed some of them."""
        api = importlib.import_module("ik_llama_cpp._ctypes_api")
        declared = {**_IK_FUNCTIONS, "llama_batch_get_one": (api.llama_batch, _INTS, _INT, _INT, _INT)}
        found = {name: getattr(api._lib, name) for name in declared}
        for name, (result, *arguments) in declared.items():
            found[name].restype, found[name].argtypes = result, arguments
        return SimpleNamespace(
            **{**vars(api), **found},
            llama_get_memory=lambda context: context,
            llama_log_callback=_LOG,
            llama_max_parallel_sequences=lambda: sys.maxsize,
            llama_memory_clear=lambda context, data: api.llama_kv_cache_clear(context),
            llama_memory_seq_rm=found["llama_kv_cache_seq_rm"],
        )

    @classmethod
    def _settings(cls, **opened: Any) -> list[str]:
        """Return what to show of the settings. Option `repacked`: whether reading the file interleaves rows."""
        return [f"repack_tensors={opened['repacked']}, flash_attn=True, type_k = type_v = {opened['cache']}"]

    @classmethod
    def _quantize(cls, source: Path, target: Path, form: str) -> str:
        """Write the file in a format, and return the call to show. The package declares no function for it."""
        program = importlib.import_module("ik_llama_cpp.quantize").find_quantize_bin()
        command = ["--allow-requantize", str(source), str(target), form, "1"]
        done = subprocess.run([program, *command], capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            raise ValueError(
                f"ik_llama.cpp could not write {target.name}: {(done.stdout + done.stderr).strip()[-200:]}"
            )
        return f"llama-quantize --allow-requantize {source.name} to {form}"

    def __init__(self, threads: int, model: str, cache: str, repacked: bool) -> None:
        self._repacked = repacked
        super().__init__(threads, model, cache)

    def _model_settings(self) -> Any:
        settings = super()._model_settings()
        settings.repack_tensors = self._repacked
        return settings

    def _share_cache(self, settings: Any, unified: bool) -> None:
        """Do nothing: sequences always share one cache."""

    def _batch_of(self, tokens: Any) -> Any:
        """Return a batch that appends tokens and has the logits of the last one."""
        return self._api.llama_batch_get_one(tokens, len(tokens), self._length, 0)

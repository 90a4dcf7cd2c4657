"""Decoders that serve many requests, in several runtimes, from token ids; greedy answers of equal length.

    python -P serve.py serving.py '{"threads": 1, "cpus": [0]}'

Work is a dict, of a kind of decoder_engine.py (only "score" is used) or one of these:

    {"kind": "serve", "prompts": [[…], …], "answer": 100, "arrivals": [0.0, …]}
        "arrivals" are the seconds from the start at which requests come; without them, all come at the start. The
        action "serve" replies with "times", [requests][answer]: the second of each token, and with "peak_megabytes" of
        the process during the run. Only "ortolan" and "llama.cpp" take two more keys: "temperature", by default 0, and
        "lookup", whether tokens that followed equal ones are drafts (by default what the engine does by default)
    {"kind": "prefix", "prefix": […], "tails": [[…], …], "answer": 100}
        the action "serve" runs the prefix with the first tail on an empty cache, then with the second one, then with
        all tails at once. It replies with "cold" and "warm", the seconds to the first token, and, if they are known,
        "blocks", the largest number of the cache's blocks in use, and "block_tokens"

Interpreters run this file as a script, without Ortolan except for the engines whose names begin with ortolan.
"""

from __future__ import annotations

import gc
import importlib
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

if TYPE_CHECKING:
    from .decoder_engine import DecoderEngine, Part
    from .decoders import GenAi, Ortolan
    from .engine import Engine, EngineWorker, Made, arguments, forget_peak, megabytes, peak_megabytes, with_data
    from .llama_cpp_decoder import IkLlamaCpp, LlamaCpp
    from .openvino_decoder import OpenVinoGenAi
else:
    from decoder_engine import DecoderEngine, Part
    from decoders import GenAi, Ortolan
    from engine import Engine, EngineWorker, Made, arguments, forget_peak, megabytes, peak_megabytes, with_data
    from llama_cpp_decoder import IkLlamaCpp, LlamaCpp
    from openvino_decoder import OpenVinoGenAi

# How an engine orders prompts and steps: "mixed", steps of some requests with prompts of other requests; "apart", all
# prompts first; "one by one", each request alone.
Order = Literal["mixed", "apart", "one by one"]


@dataclass(frozen=True)
class Serve:
    """Requests to serve.

    Attributes:
        arrivals: The seconds at which they come; [] if all come at the start.
        counts_blocks: Whether to count the used blocks at each token, which takes time.
        temperature: Of the answers; 0 takes the likeliest tokens.
        lookup: Whether prompt lookup drafts tokens; None for the engine's default.
    """

    prompts: Sequence[Sequence[int]]
    answer: int
    arrivals: Sequence[float] = ()
    counts_blocks: bool = False
    temperature: float = 0.0
    lookup: bool | None = None

    @property
    def lengths(self) -> list[int]:
        """The tokens of each request with its answer."""
        return [len(prompt) + self.answer for prompt in self.prompts]

    def coming(self) -> list[float]:
        """Return the second at which each request comes."""
        return list(self.arrivals) or [0.0] * len(self.prompts)


@dataclass(frozen=True)
class Prefix:
    """Requests that share a prefix."""

    prefix: Sequence[int]
    tails: Sequence[Sequence[int]]
    answer: int

    def requests(self) -> list[Serve]:
        """Return the three runs: the first and the second request alone, then all."""
        prompts = [[*self.prefix, *tail] for tail in self.tails]
        return [Serve(prompts[:1], 1), Serve(prompts[1:2], 1), Serve(prompts, self.answer, counts_blocks=True)]


@dataclass
class Served:
    """The seconds of each token of each request, from the start, and the blocks that were used at most."""

    times: list[list[float]]
    blocks: int | None = None


class ServingEngine(DecoderEngine):
    """A decoder that serves requests.

    Attributes:
        order: How prompts and steps are ordered.
        block_tokens: The tokens of a block of the cache, if the number of used blocks is known.
    """

    order: ClassVar[Order]
    block_tokens: ClassVar[int | None] = None

    def prepare(self, work: Mapping[str, Any]) -> list[Any]:
        """Return the work, with a cache that is large enough."""
        if work["kind"] == "serve":
            given = Serve(**{name: value for name, value in work.items() if name != "kind"})
            self.take_requests(given)
            return [given]
        if work["kind"] == "prefix":
            shared = Prefix(work["prefix"], work["tails"], work["answer"])
            self.share_prefix(shared)
            return [shared]
        return super().prepare(work)

    @abstractmethod
    def take_requests(self, given: Serve) -> None:
        """Make an empty cache for requests.

        Raises:
            ValueError: The engine cannot serve them.
        """

    def share_prefix(self, given: Prefix) -> None:
        """Make an empty cache that requests of equal beginnings share.

        Raises:
            ValueError: The engine has no such cache.
        """
        raise ValueError("requests do not find the prefixes of earlier requests in the cache")

    def forget(self) -> None:
        """Empty the cache, so that no request finds the tokens of an earlier run."""

    @abstractmethod
    def serve(self, given: Serve) -> Served:
        """Serve the requests. An answer has exactly `given.answer` tokens."""


class _OneByOne(ServingEngine):
    """Serves one request after the other, in the order in which they come."""

    order = "one by one"

    def take_requests(self, given: Serve) -> None:
        """Make a cache for the longest request."""
        self.make_room(max(given.lengths))

    def serve(self, given: Serve) -> Served:
        """Serve each request when it has come and the one before it has ended."""
        began, served = time.perf_counter(), []
        for prompt, coming in zip(given.prompts, given.coming(), strict=True):
            time.sleep(max(0.0, coming - (time.perf_counter() - began)))
            self.set_up(Part(prompt, steps=1))
            times = [time.perf_counter() - began]
            for _ in range(given.answer - 1):
                self.run(Part([], steps=1))
                times.append(time.perf_counter() - began)
            served.append(times)
        return Served(served)


class OrtolanDecoder(_OneByOne, Ortolan):
    """ortolan.generate.Decoder, one sequence at a time. The model is a GGUF file to import."""


class GenAiOneByOne(_OneByOne, GenAi):
    """ONNX Runtime GenAI, one sequence at a time. The model is a GenAI folder."""


class OrtolanEngine(ServingEngine):
    """ortolan.engine (ortolan). The model is a GGUF file to import, or an ONNX file to optimize."""

    packages = ("ortolan", "onnxruntime")
    modules = ("onnxruntime", "ortolan.engine", "ortolan.engine.model", "ortolan.engine.sampling")
    order = "mixed"
    block_tokens = 16

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Import or optimize the file. options: `cache_type` of keys and values, and arguments of optimize_onnx."""
        ortolan = importlib.import_module("ortolan")
        cache_type = options.pop("cache_type")
        made = folder / "made" / "model.onnx"
        if model.suffix == ".gguf":
            if options:
                raise ValueError(f"unknown options {', '.join(options)}; a GGUF file is imported as it is")
            ortolan.import_gguf(model, made.parent, serve=True)
            call = f"ortolan.import_gguf({model.name!r}, folder, serve=True)"
        else:
            made.parent.mkdir()
            ortolan.optimize_onnx(model, made, serve=True, **options)
            call = f"ortolan.optimize_onnx(model, out, serve=True, {arguments(options)})"
        call += f"; engine.Engine(PagedModel.open(out, cache_type={cache_type!r})).submit"
        return Made({"model": str(made), "cache_type": cache_type}, call, megabytes(*with_data(made)))

    def __init__(self, threads: int, model: str, cache_type: str) -> None:
        self._engines = importlib.import_module("ortolan.engine")
        paged = importlib.import_module("ortolan.engine.model").PagedModel
        # Its session has the options of `ort_options`.
        self._open = partial(paged.open, model, threads=threads, cache_type=cache_type)
        self._engine: Any = None
        self._make_pools([self.block_tokens])

    def _make_pools(self, lengths: Sequence[int]) -> None:
        self._close()
        self._blocks = [-(-length // self.block_tokens) for length in lengths]
        self._model: Any = None
        gc.collect()  # a closed engine is in a cycle of references; its model would count to the peak memory
        self._model = self._open(blocks=sum(self._blocks))

    def make_room(self, tokens: int) -> None:
        """Make an empty cache for one sequence."""
        self._make_pools([tokens])

    def rewind(self, tokens: int) -> None:
        """Keep the first tokens."""
        self._length = tokens

    def fill(self, tokens: int) -> None:
        """Refuse: only whole texts are scored."""
        raise ValueError("the engine has no cache to fill with arbitrary tokens")

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens and return the last logits."""
        return np.asarray(self.feed_all(ids)[-1])

    def feed_all(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens and return their logits."""
        first, self._length = self._length, self._length + len(ids)
        columns = -(-self._blocks[0] // 8) * 8
        table = np.zeros([1, columns], np.int64)
        table[0, : self._blocks[0]] = np.arange(self._blocks[0])
        rows = np.arange(len(ids))
        starts, past = np.array([0, len(ids)]), np.array([first])
        step = self._engines.Step(np.array(ids), first + rows, starts, past, table, rows)
        return np.asarray(self._model.run(step))

    def take_requests(self, given: Serve) -> None:
        """Make pools for all requests, or for 64 sequences if requests come one after the other."""
        lengths = sorted(given.lengths)
        self._make_pools(lengths[-64:] if given.arrivals else lengths)
        self._options = {} if given.lookup is None else {"speculation": "lookup" if given.lookup else None}

    def share_prefix(self, given: Prefix) -> None:
        """Make pools for all requests."""
        self.take_requests(given.requests()[-1])

    def forget(self) -> None:
        """Make a new engine, with an empty prefix cache, and run a request, which is not timed."""
        self._close()
        self._engine = self._engines.Engine(self._model, **self._options)
        for _ in self._engine.submit(self._request([1], 2)):
            pass

    def serve(self, given: Serve) -> Served:
        """Submit the requests when they come."""
        began, times = time.perf_counter(), [list[float]() for _ in given.prompts]
        failed: list[str] = []
        streams, blocks = [], [0]

        def note(index: int, output: Any) -> None:
            times[index] += [time.perf_counter() - began] * len(output.tokens)
            if given.counts_blocks:
                blocks.append(self._engine.stats().blocks_used)
            if output.finish_reason not in (None, "length"):
                failed.append(f"request {index} ended by {output.finish_reason}: {output.error}")

        for index, (prompt, coming) in enumerate(zip(given.prompts, given.coming(), strict=True)):
            if given.arrivals:
                time.sleep(max(0.0, coming - (time.perf_counter() - began)))
            stream = self._engine.submit(self._request(prompt, given.answer, given.temperature, seed=index))
            stream.on_output(lambda output, index=index: note(index, output))
            streams.append(stream)
        while not all(stream.finished for stream in streams):
            time.sleep(0.01)
        if failed:
            raise ValueError(failed[0])
        return Served(times, max(blocks))

    def _request(self, prompt: Sequence[int], tokens: int, temperature: float = 0.0, seed: int = 0) -> Any:
        options = self._engines.SamplingOptions(temperature=temperature, seed=seed)
        return self._engines.Request(tuple(prompt), tokens, options)

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


class LlamaCppBatch(ServingEngine, LlamaCpp):
    """llama.cpp with all sequences in one batch (llama-cpp-python). The model is a GGUF file.

    Option `unified`: whether sequences share one cache, by default so; else each has its own.
    """

    order = "apart"
    # Tokens of a draft: llama-cpp-python's advice for CPUs.
    _DRAFTED = 2

    @classmethod
    def _settings(cls, **opened: Any) -> list[str]:
        shared = f"kv_unified = {opened.pop('unified')}, " if "unified" in opened else ""
        return [
            *super()._settings(**opened),
            f"n_seq_max = requests, {shared}all sequences in one llama_batch",
        ]

    def __init__(self, threads: int, model: str, unified: bool = True, **opened: Any) -> None:
        super().__init__(threads, model, **opened)
        self._unified = unified
        self._sampler: Any = None

    def take_requests(self, given: Serve) -> None:
        """Make a cache for all requests."""
        if given.arrivals:
            raise ValueError(f"{self.packages[0]} has no scheduler for requests that come at any time: only batches")
        count, lengths = len(given.prompts), given.lengths
        if given.lookup and count > 1:
            raise ValueError("llama-cpp-python looks up drafts of one sequence only")
        most = self._api.llama_max_parallel_sequences()
        if count > most:
            raise ValueError(f"{count} sequences, expected at most {most}")
        self._make_context(sum(lengths) if self._unified else count * max(lengths), count, self._unified)
        self._make_sampler(given.temperature)

    def _make_sampler(self, temperature: float) -> None:
        api = self._api
        if self._sampler:
            api.llama_sampler_free(self._sampler)
        self._sampler = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        if temperature:
            api.llama_sampler_chain_add(self._sampler, api.llama_sampler_init_temp(temperature))
        last = api.llama_sampler_init_dist(0) if temperature else api.llama_sampler_init_greedy()
        api.llama_sampler_chain_add(self._sampler, last)

    def share_prefix(self, given: Prefix) -> None:
        """Refuse: callers copy the cache of one sequence to another by hand."""
        raise ValueError(f"{self.name} finds no prefixes: its callers copy sequences (llama_memory_seq_cp)")

    def forget(self) -> None:
        """Empty the cache."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def serve(self, given: Serve) -> Served:
        """Run all prompts, then steps of all sequences."""
        began = time.perf_counter()
        times, last = [list[float]() for _ in given.prompts], [0] * len(given.prompts)
        prompts = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(given.prompts)
            for position, token in enumerate(prompt)
        ]
        batch = self._api.llama_batch_init(self._BATCH, 0, 1)
        try:
            for begin in range(0, len(prompts), self._BATCH):
                self._run_batch(batch, prompts[begin : begin + self._BATCH], times, last, began)
            if given.lookup:
                self._look_up(batch, given, [*given.prompts[0], last[0]], times[0], began)
            for step in range(0 if given.lookup else given.answer - 1):
                rows = [(last[one], len(prompt) + step, one, True) for one, prompt in enumerate(given.prompts)]
                self._run_batch(batch, rows, times, last, began)
        finally:
            self._api.llama_batch_free(batch)
        return Served(times)

    def _look_up(self, batch: Any, given: Serve, tokens: list[int], times: list[float], began: float) -> None:
        """Complete an answer by steps that verify drafts of llama-cpp-python's prompt lookup."""
        speculative = importlib.import_module("llama_cpp.llama_speculative")
        draft_of = speculative.LlamaPromptLookupDecoding(num_pred_tokens=self._DRAFTED)
        while (left := given.answer - len(times)) > 0:
            draft = draft_of(np.array(tokens, np.intc))[: left - 1].tolist()
            rows = [(token, len(tokens) - 1 + row, 0, True) for row, token in enumerate([tokens[-1], *draft])]
            self._run_rows(batch, rows)
            for row, drafted in enumerate([*draft, None]):
                tokens.append(self._sample(row))
                times.append(time.perf_counter() - began)
                if tokens[-1] != drafted:
                    break
            self.rewind(len(tokens) - 1)

    def _run_batch(
        self,
        batch: Any,
        rows: Sequence[tuple[int, int, int, bool]],
        times: list[list[float]],
        last: list[int],
        began: float,
    ) -> None:
        """Run rows; note the next token of each sequence whose logits are wanted."""
        self._run_rows(batch, rows)
        for index, (_, _, sequence, wanted) in enumerate(rows):
            if wanted:
                last[sequence] = self._sample(index)
        now = time.perf_counter() - began
        for _, _, sequence, wanted in rows:
            if wanted:
                times[sequence].append(now)

    def _sample(self, row: int) -> int:
        """Return the next token after a row of the last batch."""
        return int(self._api.llama_sampler_sample(self._sampler, self._context, row))

    def _run_rows(self, batch: Any, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Run rows (token, position, sequence, whether its logits are wanted)."""
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        self._decode(batch)


class IkLlamaCppBatch(LlamaCppBatch, IkLlamaCpp):
    """ik_llama.cpp with all sequences in one batch and one cache (ik-llama-cpp-python). The model is a GGUF file."""

    def take_requests(self, given: Serve) -> None:
        """Make a cache for all requests."""
        if given.lookup or given.temperature:
            raise ValueError("ik-llama-cpp-python has no prompt lookup; only greedy answers without it are compared")
        super().take_requests(given)

    def _make_sampler(self, temperature: float) -> None:
        """Do nothing: `_sample` takes the likeliest token."""

    def _sample(self, row: int) -> int:
        return int(self._logits(row).argmax())


class OpenVinoServing(ServingEngine, OpenVinoGenAi):
    """ContinuousBatchingPipeline with many requests (openvino-genai). The model is a GGUF file."""

    order = "mixed"
    _shared: Sequence[int] = ()  # lengths of requests that share a prefix

    def take_requests(self, given: Serve) -> None:
        """Make a cache for all requests, or for 64 sequences if requests come one after the other."""
        lengths = sorted(given.lengths)
        self._shared = ()
        self._open(lengths[-64:] if given.arrivals else lengths)
        self.feed([1])  # compiles

    def share_prefix(self, given: Prefix) -> None:
        """Note the lengths; `forget` makes the cache."""
        self._shared = given.requests()[-1].lengths

    def forget(self) -> None:
        """Open the pipeline anew if it keeps prefixes: it has no call that empties its cache."""
        if self._shared:
            self._open(self._shared, prefix_cache=True)
            self.feed([1])

    def serve(self, given: Serve) -> Served:
        """Add the requests when they come, and run steps."""
        began, times = time.perf_counter(), [list[float]() for _ in given.prompts]
        waiting = list(zip(given.prompts, given.coming(), strict=True))[::-1]
        running: dict[int, Any] = {}
        while waiting or running:
            now = time.perf_counter() - began
            while waiting and waiting[-1][1] <= now:
                prompt, _ = waiting.pop()
                running[len(given.prompts) - len(waiting) - 1] = self._add(prompt, given.answer)
            if not running:
                time.sleep(max(0.0, waiting[-1][1] - now))
                continue
            found = self._step(list(running.values()))
            now = time.perf_counter() - began
            for index, tokens in zip(list(running), found, strict=True):
                times[index] += [now] * len(tokens)
                if len(times[index]) >= given.answer:
                    del running[index]
            if running and not self._pipeline.has_non_finished_requests():
                raise ValueError(f"{len(running)} requests ended before their answers were complete")
        return Served(times)


class Worker(EngineWorker):
    """The worker of decoders that serve requests."""

    engines: ClassVar[Mapping[str, type[Engine]]] = {
        "ortolan": OrtolanEngine,
        "ortolan-decoder": OrtolanDecoder,
        "llama.cpp": LlamaCppBatch,
        "ik_llama.cpp": IkLlamaCppBatch,
        "openvino-genai": OpenVinoServing,
        "onnxruntime-genai": GenAiOneByOne,
    }

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.actions = {**self.actions, "serve": self.serve}

    def serve(self) -> dict[str, Any]:
        """Run the work that was given; see the beginning of this file for the reply."""
        engine, (given,) = self._opened(), self._parts
        assert isinstance(engine, ServingEngine)
        engine.forget()
        if isinstance(given, Prefix):
            cold, warm, together = [engine.serve(one) for one in given.requests()]
            seconds = {"cold": cold.times[0][0], "warm": warm.times[0][0]}
            return {**seconds, "blocks": together.blocks, "block_tokens": engine.block_tokens}
        forget_peak()
        served = engine.serve(given)
        if any(len(times) != given.answer for times in served.times):
            lengths = sorted({len(times) for times in served.times})
            raise ValueError(f"answers have {lengths} tokens, expected {given.answer}")
        return {"times": served.times, "order": engine.order, "peak_megabytes": peak_megabytes()}

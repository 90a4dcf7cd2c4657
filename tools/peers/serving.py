"""Compare decoders that serve many requests: speeds, latencies, memory, and perplexity.

Requests have prompts of 100 to 400 tokens and greedy answers of 100 tokens; end tokens are ignored. They come all at
once (`--requests`) or at random times (`--arrivals`), at 80 % of the requests per second that the configuration served
at once. Requests with a shared prefix show what the cache of prefixes saves.

Answers to "edit" repeat their prompt, answers to "story" do not (benchmarks/speculation.py); both are computed plainly
and with prompt lookup. llama-cpp-python looks up drafts of one request only, and has no draft model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ortolan import import_gguf
from ortolan.benchmarks.speculation import make_requests
from ortolan.errors import OrtolanError
from ortolan.models.gguf import read_gguf_tokenizer

from ..workers.process import WorkerError
from . import decoders
from .comparison import Found, Job, Judge, LeaveOut, Work, compare, open_all, require_not_outrun
from .configuration import Configuration, Runner, speed_of
from .result import Measure, PeersResult, Row
from .serving_times import MIXED, ONE_BY_ONE, Run, percentile
from .verdict import ONE_AT_A_TIME, ONE_AT_A_TIME_ENGINE

SECTION, SCRIPT = "serving", "serving.py"
MODELS = (decoders.SMOLLM2,)
UNIT = "tokens/s"
LLAMA_CPP_FORMS = ("Q8_0",)  # also made from the file: its kernels for prompts are faster
PROMPT_TOKENS, ANSWER_TOKENS = (100, 400), 100
PREFIX_TOKENS, TAIL_TOKENS, SHARING = 1000, 32, 16  # tokens of a shared prefix and after it, and requests
LOAD = 0.8  # of the capacity, for requests that come at random times
ARRIVALS_WORK, PREFIX_WORK = f"arrivals at {LOAD:.0%}", f"prefix of {PREFIX_TOKENS}"
FIRST, BETWEEN, MEMORY, RATE = "to first token", "between tokens", "peak memory", "arrivals"
LOOKUP_TEXTS = ("edit", "story")
# The most requests at once for each engine that is compared there, without and with lookup.
LOOKUP_REQUESTS = {"ortolan": (16, 16), "llama.cpp": (16, 1)}
COLD, WARM, BLOCKS = "first token, cold", "first token, warm", "blocks / own blocks"
PERCENTILES = (50, 99)
_LEAST_ROUNDS = 2
_OPENING = 16  # tokens that are scored when a model is opened


@dataclass(frozen=True)
class Source:
    """A model to serve. `ids` are the tokens of its text; `windows` are scored. `decoder` is None without ONNX file."""

    model: str
    gguf: Path
    windows: Sequence[Sequence[int]]
    decoder: decoders.Source | None = None

    @property
    def ids(self) -> list[int]:
        """The tokens that prompts consist of."""
        return [token for window in self.windows for token in window]


def measure(job: Job, result: PeersResult) -> None:
    """Add the rows of every model."""
    for model in [*MODELS, *([] if job.gguf is None else [job.gguf.stem])]:
        if job.takes_model(SECTION, model):
            folder = job.folder / SECTION / f"{model}-source"
            folder.mkdir(parents=True)
            measure_model(job, make_source(job, model, folder), result)


def measure_model(job: Job, source: Source, result: PeersResult) -> None:
    """Add the rows of a model."""
    opening = Work("opening", {"kind": "score", "windows": [source.ids[:_OPENING]]}, 1, UNIT)

    def time_all(job: Job, found: Found, works: Sequence[Work], threads: int, leave_out: LeaveOut) -> None:
        opened = open_all(found, threads, works[0], leave_out)
        Serving(job, source, found, opened, threads, leave_out).measure()

    configurations = list(configurations_for(job, source))
    others = {
        "OpenVINO GenAI": decoders.openvino_genai(job, source.gguf),
        "ORT GenAI": genai_configurations(job, source),
    }
    for name, found in others.items():
        try:
            configurations += found
        except OrtolanError as error:
            result.left_out.append(f"{SECTION}, {source.model}: {name}: {error}")
    judge = judge_for(source)
    compare(job, SECTION, source.model, SCRIPT, configurations, [opening], judge, result, 0, time_all)


def make_source(job: Job, model: str, folder: Path) -> Source:
    """Write the model in every source format, and choose the text.

    Raises:
        OrtolanError: A GGUF file needs --text, and the text must be long enough.
    """
    if model in MODELS:
        found = decoders.make_source(job, model, folder)
        return Source(model, found.gguf, found.windows, found)
    assert job.gguf is not None
    if job.text is None:
        raise OrtolanError(f"--gguf {job.gguf.name} needs --text, a text to score")
    text = job.text.read_text(encoding="utf-8")[: 16 * decoders.SCORED]
    ids = read_gguf_tokenizer(job.gguf).encode(text).ids[: decoders.SCORED]
    if len(ids) < decoders.SCORED:
        raise OrtolanError(f"{job.text} holds {len(ids)} tokens, expected at least {decoders.SCORED}")
    return Source(model, job.gguf, decoders.windows_of(ids, decoders.WINDOW))


def configurations_for(job: Job, source: Source) -> Iterator[Configuration]:
    """Yield the configurations, Ortolan's engine first."""
    for cache_type in job.cache_types:
        name = "Ortolan, engine" if cache_type == "bfloat16" else f"Ortolan, engine, {cache_type} cache"
        yield Configuration(name, "ortolan", source.gguf, {"cache_type": cache_type}, ours=True)
    if source.decoder is not None:
        int8 = {"cache_type": "bfloat16", "weights": "int8"}
        yield Configuration("Ortolan, engine, int8", "ortolan", source.decoder.onnx, int8, ours=True)
    yield Configuration(ONE_AT_A_TIME, ONE_AT_A_TIME_ENGINE, source.gguf, ours=True)
    if (python := job.pythons.get("llama.cpp")) is not None:
        for form in (None, *LLAMA_CPP_FORMS):
            for name, unified in (("one cache", True), ("caches apart", False)):
                options = {"unified": unified, **({} if form is None else {"form": form})}
                label = f"llama.cpp, {'as it is' if form is None else form}, {name}"
                yield Configuration(label, "llama.cpp", source.gguf, options, python)
    for form in (None, *LLAMA_CPP_FORMS):
        yield from ik_llama_cpp(job, source.gguf, form)


def ik_llama_cpp(job: Job, gguf: Path, form: str | None = None) -> Iterator[Configuration]:
    """Yield ik_llama.cpp with a GGUF file or a form made from it, without and with its run-time repacking.

    Repacking speeds up only some formats and works, and copies the weights.
    """
    if (python := job.pythons.get("ik_llama.cpp")) is not None:
        name = f"ik_llama.cpp, {'as it is' if form is None else form}"
        for label, repacked in ((name, False), (f"{name}, repacked", True)):
            options = {"repacked": repacked, **({} if form is None else {"form": form})}
            yield Configuration(label, "ik_llama.cpp", gguf, options, python)


def genai_configurations(job: Job, source: Source) -> Iterator[Configuration]:
    """Yield ONNX Runtime GenAI with Ortolan's operators, and with models of ONNX Runtime's quantizer.

    Raises:
        OrtolanError: The file cannot be imported.
    """
    if (python := job.pythons.get("onnxruntime-genai")) is not None:
        folder = job.folder / SECTION / f"{source.model}-imported"
        import_gguf(source.gguf, folder)
        options = {"how": f"ortolan.import_gguf({source.gguf.name!r}, folder)"}
        yield Configuration("Ortolan in ORT GenAI", "onnxruntime-genai", folder, options, python, ours=True)
        if source.decoder is not None:
            yield from decoders.genai_configurations(job, source.decoder.onnx, source.decoder.gguf)


def judge_for(source: Source) -> Judge:
    """Return a function that measures the perplexity of a configuration."""
    work = {"kind": "score", "windows": source.windows}
    return lambda runner: {"perplexity": decoders.perplexity_of(runner, work)}


def requests_work(ids: Sequence[int], count: int, seed: int = 0) -> dict[str, Any]:
    """Return requests that come at once, whose prompts are tokens drawn from `ids`."""
    draw = np.random.default_rng((seed, count))
    lengths = draw.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1, count)
    prompts = [draw.choice(ids, length).tolist() for length in lengths]
    return {"kind": "serve", "prompts": prompts, "answer": ANSWER_TOKENS}


def arrivals_work(ids: Sequence[int], count: int, rate: float) -> dict[str, Any]:
    """Return requests that come at random: a Poisson process of `rate` requests per second."""
    gaps = np.random.default_rng(count).exponential(1 / rate, count)
    return {**requests_work(ids, count, seed=1), "arrivals": np.cumsum(gaps).tolist()}


def prefix_work(ids: Sequence[int], seed: int) -> dict[str, Any]:
    """Return requests that share a prefix."""
    draw = np.random.default_rng((seed, PREFIX_TOKENS))
    tails = [draw.choice(ids, TAIL_TOKENS).tolist() for _ in range(SHARING)]
    return {
        "kind": "prefix",
        "prefix": draw.choice(ids, PREFIX_TOKENS).tolist(),
        "tails": tails,
        "answer": ANSWER_TOKENS,
    }


def lookup_works(source: Source, text: str, count: int) -> dict[str, dict[str, Any]]:
    """Return works that serve requests of a kind of text, without and with prompt lookup, by their names."""
    encode = read_gguf_tokenizer(source.gguf).encode
    requests = make_requests(text, count, ANSWER_TOKENS, lambda prompt: encode(prompt).ids)
    work = {
        "kind": "serve",
        "prompts": [list(request.prompt) for request in requests],
        "answer": ANSWER_TOKENS,
        "temperature": requests[0].sampling.temperature,
    }
    ways = {"plain": False, "lookup": True}
    return {f"{text}, {work_name(count)}, {way}": {**work, "lookup": lookup} for way, lookup in ways.items()}


def work_name(count: int) -> str:
    """Return the name of the work that serves `count` requests at once."""
    return f"{count} request{'s' if count > 1 else ''}"


@dataclass(frozen=True)
class Serving:
    """The measurements of a model with one number of threads."""

    job: Job
    source: Source
    found: Found
    opened: Mapping[str, Runner]
    threads: int
    leave_out: LeaveOut
    orders: dict[str, str] = field(default_factory=dict)  # how configurations order prompts and steps, once known

    def measure(self) -> None:
        """Add speeds and measures to the rows."""
        capacity: dict[str, float] = {}
        before = None
        for count in self.job.requests:
            if self.job.takes_work(work_name(count)):
                for name, rate in self.requests(count, before).items():
                    capacity[name] = max(rate, capacity.get(name, 0.0))
                before = count
        for text in LOOKUP_TEXTS:
            for count in self.job.requests:
                self.lookup(text, count)
        if self.job.arrivals and self.job.takes_work(ARRIVALS_WORK):
            for name, rate in capacity.items():
                self.try_one(name, ARRIVALS_WORK, lambda name=name, rate=rate: self.arrivals(name, rate))
        if self.job.takes_work(PREFIX_WORK):
            for name in self.opened:
                self.try_one(name, PREFIX_WORK, lambda name=name: self.prefix(name))
        for runner in self.opened.values():
            runner.close()

    def try_one(self, name: str, work: str, run: Any) -> bool:
        """Run a function and return whether it succeeded; record why it did not."""
        try:
            run()
        except WorkerError as error:
            self.leave_out(f"{name}, {work}, {self.threads} threads", error)
            return False
        return True

    def requests(self, count: int, before: int | None) -> dict[str, float]:
        """Serve requests that come at once, in rounds of all configurations; return the requests per second of each.

        before: A smaller number of requests. Configurations that serve one after the other are skipped if another one
            outruns them there, since they do not gain by more requests.
        """
        work = work_name(count)
        left = [
            name
            for name in self.opened
            if before is None or self.try_one(name, work, lambda name=name: self.require_gain(name, before))
        ]
        runs = self.in_turns([(name, work) for name in left], {work: requests_work(self.source.ids, count)})
        return {name: max(count / run.seconds for run in found) for (name, _), found in runs.items()}

    def lookup(self, text: str, count: int) -> None:
        """Serve requests plainly and with prompt lookup, in rounds of both."""
        works = lookup_works(self.source, text, count)
        pairs = [
            (name, work)
            for name in self.opened
            for work, given in works.items()
            if self.job.takes_work(work)
            and count <= LOOKUP_REQUESTS.get(self.row(name).engine, (0, 0))[given["lookup"]]
        ]
        self.in_turns(pairs, works)

    def in_turns(
        self, pairs: Sequence[tuple[str, str]], works: Mapping[str, Mapping[str, Any]]
    ) -> dict[tuple[str, str], list[Run]]:
        """Serve works in rounds of all pairs (configuration, work); note the speeds and return the runs."""
        runs: dict[tuple[str, str], list[tuple[Run, Run]]] = {pair: [] for pair in pairs}
        end, rounds = perf_counter() + self.job.seconds, 0
        if runs:
            self.job.say(f"{SECTION}, threads: {self.threads}, {', '.join(dict.fromkeys(work for _, work in pairs))}")
        while runs and (rounds < _LEAST_ROUNDS or perf_counter() < end):
            for name, work in list(runs):

                def run_one(name: str = name, work: str = work) -> None:
                    runs[name, work].append(self.run_round(name, works[work]))

                if not self.try_one(name, work, run_one):
                    del runs[name, work]
            rounds += 1
        for (name, work), found in runs.items():
            self.note(self.row(name), work, found)
        return {pair: [run for run, _ in found] for pair, found in runs.items()}

    def require_gain(self, name: str, before: int) -> None:
        """Raise WorkerError if a configuration serves one after the other and is outrun with `before` requests."""
        if self.orders.get(name) == ONE_BY_ONE:
            rows = [self.row(other) for other in self.opened]
            require_not_outrun(self.row(name), rows, f"{work_name(before)}, whole", self.threads)

    def run_round(self, name: str, work: Mapping[str, Any]) -> tuple[Run, Run]:
        """Return a run, and a run whose prompts alone are timed, which is the same one if prompts are apart."""
        run = self.serve(name, work)
        if run.order != MIXED:
            return run, run
        return run, self.serve(name, {**work, "answer": 1})

    def serve(self, name: str, work: Mapping[str, Any]) -> Run:
        """Return a run of a configuration."""
        self.opened[name].give(work)
        run = Run.of(work, self.opened[name].serve())
        self.orders[name] = run.order
        return run

    def row(self, name: str) -> Row:
        """Return the row of a configuration."""
        return self.found[name][1]

    def note(self, row: Row, work: str, pairs: Sequence[tuple[Run, Run]]) -> None:
        """Add the speeds and measures of the rounds to a row."""
        speeds = {
            "prompts": [one.prompt_speed() for _, one in pairs],
            "decoding": [speed for run, _ in pairs if (speed := run.decode_speed()) is not None],
            "whole": [run.whole_speed() for run, _ in pairs],
        }
        for name, values in speeds.items():
            if values:
                inverse = [1 / value for value in values]
                row.speeds.append(speed_of(f"{work}, {name}", self.threads, 1, UNIT, inverse))
        self.note_latencies(row, work, [run for run, _ in pairs])

    def note_latencies(self, row: Row, work: str, runs: Sequence[Run]) -> None:
        """Add latencies and memory to a row."""
        found = {
            FIRST: [seconds for run in runs for seconds in run.to_first_token()],
            BETWEEN: [seconds for run in runs for seconds in run.between_tokens()],
        }
        for name, seconds in found.items():
            for percent in PERCENTILES if seconds else ():
                self.add(row, work, f"{name}, p{percent}", "ms", 1e3 * percentile(seconds, percent))
        if peaks := [run.peak_megabytes for run in runs if run.peak_megabytes is not None]:
            self.add(row, work, MEMORY, "MB", max(peaks))

    def add(self, row: Row, work: str, name: str, unit: str, value: float) -> None:
        """Add a measure to a row."""
        row.measures.append(Measure(work, self.threads, name, unit, value))

    def arrivals(self, name: str, capacity: float) -> None:
        """Serve requests that come at random times. This is one run, without turns."""
        rate = LOAD * capacity
        run = self.serve(name, arrivals_work(self.source.ids, self.job.arrivals, rate))
        self.add(self.row(name), ARRIVALS_WORK, RATE, "requests/s", rate)
        self.note_latencies(self.row(name), ARRIVALS_WORK, [run])

    def prefix(self, name: str) -> None:
        """Serve requests that share a prefix, in several rounds with prefixes of their own."""
        replies = []
        for seed in range(_LEAST_ROUNDS):
            self.opened[name].give(work := prefix_work(self.source.ids, seed))
            replies.append(self.opened[name].serve())
        for key, what in (("cold", COLD), ("warm", WARM)):
            seconds = statistics.median(reply[key] for reply in replies)
            self.add(self.row(name), PREFIX_WORK, what, "ms", 1e3 * seconds)
        if replies[-1]["blocks"] is not None:
            used = max(int(reply["blocks"]) for reply in replies)
            self.add(self.row(name), PREFIX_WORK, BLOCKS, "x", used / own_blocks(work, replies[-1]["block_tokens"]))


def own_blocks(work: Mapping[str, Any], block_tokens: int) -> int:
    """Return the blocks of one prefix and of the rest of each request."""
    prefix = len(work["prefix"]) // block_tokens
    lengths: list[int] = [len(work["prefix"]) + len(tail) + work["answer"] for tail in work["tails"]]
    return prefix + sum(math.ceil(length / block_tokens) - prefix for length in lengths)

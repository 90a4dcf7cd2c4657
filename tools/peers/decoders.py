"""Compare the speed of decoders on prompts, greedy decoding and decoding after long contexts, and their perplexity."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort

from ortolan.benchmarks.matmul_nbits import make_matmul_nbits
from ortolan.errors import OrtolanError
from ortolan.generate import read_context
from ortolan.last_logits import keep_last_logits
from ortolan.models import get_model
from ortolan.models.perplexity import sample_texts
from ortolan.models.tokenizer import load_tokenizer

from ..workers.process import Worker, WorkerError
from .comparison import Job, Judge, Work, compare
from .configuration import WORKERS, Configuration, Runner
from .decoder_source import write_checkpoint, write_genai_folder, write_gguf, write_onnx
from .result import PeersResult

SECTION, SCRIPT = "decoders", "decoders.py"
SMOLLM2, STORIES = "smollm2-135m-instruct", "stories15m"
MODELS = (SMOLLM2, STORIES)
UNIT = "tokens/s"
PROMPTS = (128, 1024)
DECODED = 64  # tokens after the shortest prompt
CONTEXTS, STEPS = (1024, 4096, 16384), 8  # tokens in the cache, and steps of a pass after them
SCORED, WINDOW = 4081, 256  # scored tokens of the text, and tokens in a window
SAMPLED = 2048  # tokens sampled from a model that is not scored on --text
CACHE_TOKENS = 512  # tokens that calibrate the scales of an int8 cache
_POSITIONS = CONTEXTS[-1] + 64  # the context length written into the model's file
_CALIBRATED, _LEAST_SENTENCE = 256, 60  # number of calibration sentences, and their smallest number of characters
_SAME_FILE = 0.01  # allowed relative difference in perplexity between llama.cpp and its fork: activations are rounded
_EXACT = 1e-3  # allowed relative difference in perplexity between fp32 configurations

# Settings of ONNX Runtime's quantizer, without zero points: the minima stored in SmolLM2's file are fractional, and
# rounding them to integer zero points lowers quality.
NBITS: Mapping[str, Mapping[str, Any]] = {
    "MatMulNBits g32": {"block_size": 32, "accuracy_level": 4},
    "MatMulNBits g128": {"block_size": 128, "accuracy_level": 4},
    "MatMulNBits 8 bit": {"block_size": 32, "accuracy_level": 4, "bits": 8},
}
INT8_CACHE = ("MatMulNBits g32", "MatMulNBits 8 bit")
FORMS: Mapping[str, Mapping[str, Any]] = {
    "int4": {"weights": "int4"},
    "int8": {"weights": "int8"},
    "int4, cache of codes": {"weights": "int4", "cache": "codes"},
}
GENAI = ("MatMulNBits g32", "MatMulNBits 8 bit")
MISTRALRS_FORMS = ("Q8_0", "Q4_0")
TORCH_FORMS = ("fp32", "bf16", "int8")
CTRANSLATE2_FORMS = ("int8",)
GGUF_FORMS = ("Q4_0", "Q4_1", "Q4_K_M", "Q8_0")
MIXED_FORMS = ("Q4_K_M",)
OPENVINO_FORMS = ("Q8_0",)
GGUF_LONG_FORMS = ("Q4_0", "Q8_0")
IK_FORMS = ("Q6_0", "IQ4_NL")  # by ik_llama.cpp's quantizer; its other formats need rows of a multiple of 256 weights


@dataclass(frozen=True)
class Source:
    """A model and the texts for it.

    `gguf` and `onnx` have the same weights. `last` is the ONNX file that returns only the last token's logits, as other
    runtimes do. `windows` are token ids to score, `texts` is a file of calibration texts.
    """

    model: str
    gguf: Path
    onnx: Path
    last: Path
    context: int
    windows: Sequence[Sequence[int]]
    texts: Path | None
    tokenizer: Path | None

    @property
    def form(self) -> str | None:
        """The format of the GGUF file, if it is one of `GGUF_FORMS`."""
        return "Q4_1" if self.model == SMOLLM2 else None

    @property
    def ids(self) -> list[int]:
        """Token ids for prompts."""
        return [token for window in self.windows for token in window]

    def checkpoint(self) -> Path:
        """Return a transformers folder with the same weights, made on first use."""
        folder = self.gguf.with_name("checkpoint")
        if not folder.exists():
            write_checkpoint(self.gguf, folder)
        return folder

    @property
    def is_long(self) -> bool:
        """True if the model has enough positions for the long contexts."""
        return self.context >= _POSITIONS


def measure(job: Job, result: PeersResult) -> None:
    """Add the rows of every model."""
    for model in MODELS:
        if job.takes_model(SECTION, model):
            folder = job.folder / SECTION / f"{model}-source"
            folder.mkdir(parents=True)
            source = make_source(job, model, folder)
            works = [work for work in works_for(source) if job.takes_work(work.name)]
            configurations = list(configurations_for(job, source))
            others = {
                "ik_llama.cpp": _ik_llama_cpp(job, source),
                "mistral.rs": _mistralrs(job, source),
                "Ortolan 4 to 8 bits": _mixed_bits(job, source),
                "OpenVINO GenAI": openvino_genai(job, gguf=source.gguf),
            }
            for name, found in others.items():
                try:
                    configurations += found
                except WorkerError as error:
                    result.left_out.append(f"{SECTION}, {model}: {name}: {error}")
            compare(job, SECTION, model, SCRIPT, configurations, works, judge_for(source), result)


def make_source(job: Job, model: str, folder: Path) -> Source:
    """Write the model in every source format and choose the texts.

    Raises:
        OrtolanError: The text of --text is too short.
    """
    files = get_model(model, progress=job.say)
    long = model == SMOLLM2 and any(job.takes_work(step_name(context)) for context in CONTEXTS)
    gguf, onnx = write_gguf(model, folder, _POSITIONS if long else 0), folder / "model.onnx"
    write_onnx(gguf, onnx)
    last = folder / "last" / "model.onnx"
    last.parent.mkdir()
    keep_last_logits(onnx, last)
    context = read_context(onnx)
    assert files.tokenizer is not None and context is not None
    tokenizer = load_tokenizer(files.tokenizer)
    if job.text is None or model != SMOLLM2:  # stories15M predicts only stories
        session = ort.InferenceSession(str(onnx), providers=["CPUExecutionProvider"])
        windows: Sequence[Sequence[int]] = sample_texts(session, tokenizer.start, SAMPLED, WINDOW)
        return Source(model, gguf, onnx, last, context, windows, None, files.tokenizer)
    ids = tokenizer.encode(job.text.read_text(encoding="utf-8")[: 16 * SCORED])[:SCORED]
    if len(ids) < SCORED:
        raise OrtolanError(f"{job.text} holds {len(ids)} tokens, expected at least {SCORED}; give a longer text")
    texts = folder / "calibration.txt"
    texts.write_text("\n".join(sentences_of(job.text)), encoding="utf-8")
    return Source(model, gguf, onnx, last, context, windows_of(ids, WINDOW), texts, files.tokenizer)


def windows_of(ids: Sequence[int], window: int) -> list[list[int]]:
    """Return windows that score each token but the first once; each starts with the last token of the previous one."""
    return [list(ids[begin : begin + window]) for begin in range(0, len(ids) - 1, window - 1)]


def sentences_of(text: Path) -> list[str]:
    """Return sentences for calibration, from lines of the text's second half that are not headings.

    Raises:
        OrtolanError: No sentence is long enough.
    """
    lines = [line.strip() for line in text.read_text(encoding="utf-8").splitlines()]
    found = [
        sentence.strip()
        for line in lines[len(lines) // 2 :]
        if not line.startswith("=")
        for sentence in line.split(" . ")
        if len(sentence) >= _LEAST_SENTENCE
    ]
    if not found:
        raise OrtolanError(f"{text} has no sentence of {_LEAST_SENTENCE} characters in its second half; give another")
    return found[:_CALIBRATED]


def step_name(context: int) -> str:
    """Return the name of the work that decodes after `context` tokens."""
    return f"step at {context}"


def works_for(source: Source) -> list[Work]:
    """Return the works that fit the model's context."""
    ids = source.ids
    works = [
        Work(f"prompt {tokens}", {"kind": "prompt", "ids": ids[:tokens]}, tokens, UNIT)
        for tokens in PROMPTS
        if tokens <= source.context
    ]
    decode = {"kind": "decode", "ids": ids[: PROMPTS[0]], "steps": DECODED}
    works.append(Work("decode", decode, DECODED, UNIT))
    for context in CONTEXTS if source.is_long else ():
        step = {"kind": "step", "context": context, "steps": STEPS}
        # Filling the longest cache takes minutes, so slow configurations skip it.
        after = step_name(CONTEXTS[-2]) if context == CONTEXTS[-1] else None
        works.append(Work(step_name(context), step, STEPS, UNIT, after))
    return works


def configurations_for(job: Job, source: Source) -> Iterator[Configuration]:
    """Yield the configurations. The first one, ONNX Runtime in fp32, is the reference."""
    yield Configuration("ORT fp32", "onnxruntime", source.onnx, exact=True)
    for name, nbits in NBITS.items():
        yield Configuration(f"ORT {name}", "onnxruntime", source.last, {"nbits": nbits})
    for name in INT8_CACHE if source.is_long else ():
        options = {"nbits": NBITS[name], "cache_ids": source.ids[:CACHE_TOKENS]}
        yield Configuration(f"ORT {name}, int8 cache", "onnxruntime", source.last, options)
    for name, form in FORMS.items():
        if "cache" not in form:
            yield Configuration(f"Ortolan {name}", "ortolan", source.last, form, ours=True)
        elif source.texts is not None:  # calibration texts exist
            data = {"calibration": str(source.texts), "tokenizer": str(source.tokenizer)}
            yield Configuration(f"Ortolan {name}", "ortolan", source.last, {**form, **data}, ours=True)
    if source.model == SMOLLM2:
        yield Configuration("Ortolan, the Q4_1 file imported", "ortolan", source.gguf, ours=True)
    yield from _llama_cpp(job, source)
    yield from genai_configurations(job, source.onnx, source.gguf)
    yield from _torch(job, source)
    yield from _ctranslate2(job, source)


def _llama_cpp(job: Job, source: Source) -> Iterator[Configuration]:
    if (python := job.pythons.get("llama.cpp")) is None:
        return
    for form in GGUF_FORMS:
        options: dict[str, Any] = {} if form == source.form else {"form": form}
        yield Configuration(f"llama.cpp {form}", "llama.cpp", source.gguf, options, python)
    for form in GGUF_LONG_FORMS if source.is_long else ():
        options = {"form": form, "cache": "Q8_0"}
        yield Configuration(f"llama.cpp {form}, Q8_0 cache", "llama.cpp", source.gguf, options, python)


def _ik_llama_cpp(job: Job, source: Source) -> Iterator[Configuration]:
    """Yield ik_llama.cpp with its own formats, and with the files of llama.cpp, so that their perplexities must agree.

    Raises:
        WorkerError: llama.cpp does not take part or cannot make a file.
    """
    if (python := job.pythons.get("ik_llama.cpp")) is None:
        return

    def configurations(name: str, model: Path, **options: Any) -> Iterator[Configuration]:
        for label, repacked in ((name, False), (f"{name}, repacked", True)):
            given = {**options, "repacked": repacked}
            yield Configuration(f"ik_llama.cpp {label}", "ik_llama.cpp", model, given, python)

    for form in IK_FORMS:
        yield from configurations(form, source.gguf, form=form)
    if source.form is not None:
        yield from configurations(source.form, source.gguf)
    forms = [form for form in GGUF_FORMS if form != source.form]
    for form, made in files_of_llama_cpp(job, source.gguf, forms, "ik "):
        model, how = Path(made["opened"]["model"]), made["call"].partition(";")[0]
        yield from configurations(form, model, how=how)
        if source.is_long and form in GGUF_LONG_FORMS:
            yield from configurations(f"{form}, Q8_0 cache", model, how=how, cache="Q8_0")


def genai_configurations(job: Job, onnx: Path, gguf: Path) -> Iterator[Configuration]:
    """Yield ONNX Runtime GenAI with models that ONNX Runtime's quantizer makes of a float file.

    Args:
        job: The settings.
        onnx: The float32 model.
        gguf: The same model, whose tokenizer the folders describe.
    """
    if (python := job.pythons.get("onnxruntime-genai")) is None:
        return
    for name in GENAI:
        folder = onnx.parent / f"genai {name}"
        folder.mkdir()
        make_matmul_nbits(onnx, folder / "model.onnx", **NBITS[name])
        write_genai_folder(gguf, folder / "model.onnx", folder)
        told = ", ".join(f"{key}={value}" for key, value in NBITS[name].items())
        options = {"how": f"MatMulNBitsQuantizer({told})"}
        yield Configuration(f"ORT GenAI {name}", "onnxruntime-genai", folder, options, python)


def openvino_genai(job: Job, gguf: Path) -> Iterator[Configuration]:
    """Yield OpenVINO GenAI with a GGUF file, and with the same weights in 8 bits.

    It rounds the minima of Q4_1 to integer zero points, so that file loses quality. llama.cpp makes the other one.

    Raises:
        WorkerError: llama.cpp does not take part or cannot make the file.
    """
    if (python := job.pythons.get("openvino-genai")) is not None:
        yield from openvino_genai_as_it_is(job, gguf)
        for form, made in files_of_llama_cpp(job, gguf, OPENVINO_FORMS, "openvino "):
            model = Path(made["opened"]["model"])
            yield Configuration(f"OpenVINO GenAI, {form}", "openvino-genai", model, python=python)


def openvino_genai_as_it_is(job: Job, gguf: Path) -> Iterator[Configuration]:
    """Yield OpenVINO GenAI with a GGUF file."""
    if (python := job.pythons.get("openvino-genai")) is not None:
        yield Configuration("OpenVINO GenAI, as it is", "openvino-genai", gguf, python=python)


def _torch(job: Job, source: Source) -> Iterator[Configuration]:
    if (python := job.pythons.get("torch")) is not None:
        for form in TORCH_FORMS:
            yield Configuration(
                f"torch {form}", "torch", source.checkpoint(), {"form": form}, python, exact=form == "fp32"
            )


def _ctranslate2(job: Job, source: Source) -> Iterator[Configuration]:
    if (python := job.pythons.get("ctranslate2")) is not None:
        for form in CTRANSLATE2_FORMS:
            yield Configuration(f"CTranslate2 {form}", "ctranslate2", source.checkpoint(), {"form": form}, python)


def _mistralrs(job: Job, source: Source) -> Iterator[Configuration]:
    """Yield configurations of mistral.rs. llama.cpp makes their GGUF files and measures the perplexity.

    Raises:
        WorkerError: llama.cpp does not take part or cannot make a file.
    """
    python = job.pythons.get("mistralrs")
    if python is None:
        return
    for form, made in files_of_llama_cpp(job, source.gguf, MISTRALRS_FORMS, "mistralrs "):
        options = {"how": made["call"].partition(";")[0]}
        yield Configuration(f"mistral.rs {form}", "mistralrs", Path(made["opened"]["model"]), options, python)


def _mixed_bits(job: Job, source: Source) -> Iterator[Configuration]:
    """Yield layers in 4 to 8 bits, with as many bytes as a file of llama.cpp that mixes bits as well.

    Weights that come from a GGUF file of 4 bits gain nothing by more, so the file would be the one of "int4".

    Raises:
        WorkerError: llama.cpp does not take part or cannot make the file.
    """
    if source.form is not None:
        return
    for form, made in files_of_llama_cpp(job, source.gguf, MIXED_FORMS, "bytes of "):
        options = {"weights": "int4", "max_bytes": os.path.getsize(made["opened"]["model"])}
        yield Configuration(f"Ortolan 4 to 8 bits, bytes of {form}", "ortolan", source.last, options, ours=True)


def files_of_llama_cpp(
    job: Job, gguf: Path, forms: Sequence[str], prefix: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield formats, and what llama.cpp's worker answers for the file that it makes in a folder named after each.

    Raises:
        WorkerError: llama.cpp does not take part or cannot make a file.
    """
    if (maker := job.pythons.get("llama.cpp")) is None:
        raise WorkerError("llama.cpp, which makes its files, does not take part")
    with Worker(WORKERS / SCRIPT, {"threads": 1, "cpus": []}, python=maker) as worker:
        for form in forms:
            folder = gguf.with_name(f"{prefix}{form}")
            folder.mkdir()
            options = {"form": form}
            yield (
                form,
                worker.ask("make", engine="llama.cpp", model=str(gguf), folder=str(folder), options=options),
            )


def perplexity_of(runner: Runner, work: Mapping[str, Any]) -> float:
    """Return the perplexity of a configuration on a work of kind "score".

    Raises:
        WorkerError: The engine cannot do this work.
    """
    total, tokens = runner.answer(work).sum(axis=0, dtype=float).tolist()
    return math.exp(total / tokens)


def judge_for(source: Source) -> Judge:
    """Return a function that measures the perplexity of a configuration."""
    original: list[float] = []
    by_format: dict[str, float] = {}  # perplexities of llama.cpp's formats

    def judge(runner: Runner) -> Mapping[str, float]:
        form = runner.configuration.name.partition(",")[0].split()[-1]
        if runner.configuration.engine == "mistralrs":
            if form not in by_format:
                raise WorkerError(
                    f"perplexity is unknown: the engine gives no logits, and llama.cpp did not measure {form}"
                )
            return {"perplexity": by_format[form]}
        rounded = not {"cache", "cache_ids"}.isdisjoint(runner.configuration.options)
        # A rounded cache affects only later steps, so the text is scored one token at a time.
        by_steps = rounded or runner.configuration.model == source.last
        work = {"kind": "score", "windows": source.windows, **({"step": 1} if by_steps else {})}
        perplexity = perplexity_of(runner, work)
        original.append(perplexity)
        if runner.configuration.engine == "llama.cpp" and not rounded:
            by_format[form] = perplexity
        same = by_format.get(form, perplexity)
        forked = runner.configuration.engine == "ik_llama.cpp" and not rounded
        if forked and abs(perplexity / same - 1) > _SAME_FILE:
            raise WorkerError(f"perplexity is {perplexity:.4f}, expected llama.cpp's {same:.4f} with the same file")
        if runner.configuration.exact and abs(perplexity / original[0] - 1) > _EXACT:
            raise WorkerError(f"perplexity is {perplexity:.4f}, expected the original's {original[0]:.4f}")
        return {"perplexity": perplexity}

    return judge

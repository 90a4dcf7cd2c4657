"""optimize_onnx: from a model and a form or recipe to an optimized model and a report. search: to the best recipe."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from ortolan.graph_passes.auto.bits import BitSearch, BitSettings
from ortolan.graph_passes.auto.budget import DEFAULT_COSINE, MADE_UP_COSINE, Budget
from ortolan.graph_passes.auto.other_model import for_other_model
from ortolan.graph_passes.auto.search import AutoSettings, Search, Shapes
from ortolan.graph_passes.auto.trials import Made, finish
from ortolan.graph_passes.files.genai_folder import GenaiConfig
from ortolan.graph_passes.files.mapped_pages import bounded_pages
from ortolan.graph_passes.files.model_file import (
    ModelFile,
    check_output,
    data_path,
    load_model,
    move_into_place,
    tensor_slots,
    to_proto,
    write_model,
)
from ortolan.graph_passes.files.model_folder import (
    check_output_folder,
    copy_others,
    find_genai_config,
    find_others,
    move_folder_into_place,
    parts_in,
)
from ortolan.graph_passes.files.spill import TensorSpill
from ortolan.graph_passes.files.work_folder import work_folder
from ortolan.graph_passes.find.bfloat16 import widen_bfloat16
from ortolan.graph_passes.forms import AUTO, CHOICES
from ortolan.graph_passes.measure.evidence import Evidence
from ortolan.graph_passes.measure.feeds import Calibration, Feeds, read_calibration, read_prompt
from ortolan.graph_passes.measure.finite import check_weights
from ortolan.graph_passes.measure.sessions import check_threads, quiet_options, threads_of_sessions
from ortolan.graph_passes.options import HEADS
from ortolan.graph_passes.passes.context import PassContext
from ortolan.graph_passes.passes.normalize import optimized_with
from ortolan.graph_passes.recipe import Recipe
from ortolan.graph_passes.report.optimization import OptimizationReport
from ortolan.graph_passes.run import run_recipe
from ortolan.graph_passes.text.text_input import add_text_input, check_text_model, plan_text_input
from ortolan.graph_passes.text.text_plan import TextInput, TextPlan
from ortolan.graph_passes.text.texts import Tokenizer, count_tokens, feeds_of_texts, find_tokenizer, read_texts

from .choice import Choice, default_recipe, read_choice
from .errors import CalibrationError, ModelError, NothingToReplaceError, OutputError
from .library import LIBRARY_NAME
from .optimize_parts import PartFeeds, check_caches, optimize_parts, refuse_for_parts
from .progress import Progress, Stage, logger, no_progress, told
from .provider import why_no_provider
from .session import create_session, known_cpu, package_versions
from .text_encoder import ask_probes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import onnx
    import onnx_ir as ir

_PROTOBUF_LIMIT = 2**31 - 2**20
_MOST_PROBES = 1000  # texts of calibration that the tokenizer in the graph is compared on
_RESULT = "result"  # in the work folder


def optimize_onnx(
    model: str | os.PathLike[str] | onnx.ModelProto,
    output: str | os.PathLike[str] | None = None,
    *,
    recipe: str | os.PathLike[str] | Recipe | None = None,
    weights: str | None = None,
    group_size: int | None = None,
    sparsity: float | None = None,
    pattern: str | None = None,
    method: str | Sequence[str] | None = None,
    cache: str | None = None,
    ignore: str | Sequence[str] = HEADS,
    budget: Budget | None = None,
    calibration: Calibration | None = None,
    tokenizer: Tokenizer | None = None,
    prompt: str | os.PathLike[str] | npt.ArrayLike | None = None,
    texts_in: bool | TextInput = False,
    options: Mapping[str, Any] | None = None,
    portable: bool = True,
    allow_different: bool = False,
    threads: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> OptimizationReport:
    """Optimizes a model and verifies it against the original.

    Without a recipe and without a form (weights, sparsity, pattern, cache), weights that the model stores in few bits
    are kept exactly. In other models, each layer takes the dense form that is fastest on this machine while every
    output keeps a cosine of 0.99. Nothing is pruned. If nothing is faster, the model stays as it is, and the report
    notes it.

    model: a path, or an onnx.ModelProto; never changed. A folder stands for its only ONNX file, or its model.onnx.
    output: the file to write; large weights go to `<output>.data`. None: the result is in `report.model`.
        Of a folder, the folder to write: the new model under the name of the old one, and copies of all other files;
        links that lead out of the folder, and hidden files, are left out. An encoder and its decoders, as Optimum
        writes them, are all optimized; calibration inputs are the encoder's then, and the report has one of each in
        `report.parts`. If it holds a genai_config.json, the new
        one names our library, which is put beside it, and compressed caches take the shape that GenAI supports.
    recipe: a preset ("int8", "int4", "sparse-encoder", "long-context", "cached-prompt", "activation-sparse"), whose
        form the arguments below change; "auto", which is ortolan.search with its defaults; the path of a TOML file; or
        a Recipe.
    weights: what the weights of linear layers become: "bf16", "int8" or "int4". None: "int8" with pattern "4x1", "bf16"
        with another sparsity, else they stay.
    group_size: of int4, the inputs that share a scale: 32, 64 or 128. None: 32, or 128 with a sparsity or pattern.
    sparsity: the share of weights to prune, above 0 and below 1. None: nothing is pruned.
    pattern: what is pruned: "unstructured" (None), single weights; "4x1", blocks of four outputs, which become int8,
        attention being fused as well; or all but N of M inputs, such as "2:4", whose sparsity must be given too. "4x1"
        and "2:4" without sparsity prune nothing: they are for weights that have such zeros already.
    method: how weights are rounded: "rtn", to nearest (None with int8), "mse", to the nearest of the best scales
        (None with int4), "gptq", "awq" or "hqq"; and pruned: by "magnitude" (None), "wanda" or "sparsegpt"; or one of
        each: ("wanda", "gptq"). "sparsegpt" alone also rounds int8 and int4 weights, making up for both errors at once.
        gptq, awq, wanda and sparsegpt want calibration data.
    cache: of attention with a KV cache: "codes", 4-bit codes of keys and int8 values (needs calibration), or "float32".
    ignore: patterns of names of layers, or of their weights, that are neither pruned nor rounded to the form; "heads"
        stands for the usual names of heads. They become int8 where the others are dense int8 or int4 (in groups of 64)
        or of pattern "4x1", else bf16. (): none.
    budget: with weights="int4": which layers take 8 bits in place of 4 is found by measurement, so that the model keeps
        within it. What ortolan.search takes: a cosine, "perplexity:0.01", a function; the model gets as small as it
        allows. Or "bytes:100MB", the size of the files; then the errors are as small as it allows.
    calibration: texts, or a .txt file of one text a line; or an .npz file, a dict of arrays, or an iterable of such
        dicts, named like the model's inputs: run to verify the result, to measure the error of layers, and by passes
        that fit weights or ranges to inputs. None: inputs are made up, where that will do. Beside input_ids, an empty
        cache, a full attention_mask, position_ids and token_type_ids of 0 may be left out.
    tokenizer: for texts: the path of a tokenizer.json, or of an ONNX graph of onnxruntime-extensions' tokenizers (its
        first input takes strings, its output input_ids, or the first one, has the ids); or an object whose encode(text)
        gives token ids. None: the tokenizer.json beside the model. With texts_in, a tokenizer.json goes into the model.
    prompt: token ids [tokens], or an .npy file of them: a system prompt or knowledge that all sequences begin with. Its
        keys and values become part of the model (preset "cached-prompt", or any form: `cache` is "float32" then, if
        not given), which then is given what follows; attention_mask and position_ids count the prompt's tokens too.
    texts_in: the optimized model takes strings [batch] as input "text" and gives "sentence_embedding" [batch, hidden];
        or, a reranker, strings "text" and "text_pair" and gives "score" [batch]. Its session must know
        onnxruntime-extensions, as create_session makes it. True: as the files of sentence-transformers beside the model
        say (tokenizer.json, modules.json and what it names, config.json); a TextInput says it otherwise.
    options: for experts, of passes of the recipe that results: {"prune.scope": "sensitivity"}.
    portable: keeps in the file what each operator does in standard ONNX, so that it also runs without our library.
    allow_different: for models whose stored few-bit weights are kept because no recipe or form was given: save the
        result even if an output has another shape than the original's, or agrees with it less than the default budget
        allows; otherwise that is a VerificationError. With a recipe or form, the result is always saved, with a
        warning. A form that is found by measurement never differs so much.
    threads: intra-op threads of the original and the optimized model while they are timed. None: one for each core that
        this process may use, by its CPU affinity and the CPU limit of its cgroup.
    dry_run: changes and writes nothing; the report tells what would be replaced, and why the rest would not.
    progress: called as progress(stage, done, total), stage being a Stage. What it raises ends the run and reaches the
        caller as it is.

    Raises an OrtolanError. After any error or interrupt the output is as it was before: absent, or the older model.
    """
    check_threads(threads)
    ids = None if prompt is None else read_prompt(prompt)
    form = (weights, group_size, sparsity, pattern, method, cache, ignore)
    choice = read_choice(recipe, dict(zip(CHOICES, form, strict=True)), options, ids is not None, budget)
    if isinstance(model, str | os.PathLike) and (files := parts_in(Path(model))):
        refuse_for_parts(Path(model), output, dry_run, prompt=prompt, texts_in=texts_in or None, budget=budget)
        how = _PartSettings(calibration, tokenizer, portable, dry_run, allow_different)
        with threads_of_sessions(threads):
            return _optimize_parts(Path(model), files, output, choice, how, progress or no_progress)
    source = _load(model)
    text = None
    if not isinstance(texts_in, bool | TextInput):
        raise ModelError(f"texts_in is a {type(texts_in).__name__}, expected True or a TextInput")
    if texts_in:
        file = tokenizer if isinstance(tokenizer, str | os.PathLike) and str(tokenizer).endswith(".json") else None
        text = plan_text_input(
            source.model, texts_in if isinstance(texts_in, TextInput) else TextInput(), source.path, file
        )
    run = _Run(
        source,
        _check_target(output, source),
        default_recipe(source, choice),
        text=text,
        genai=find_genai_config(source),
        prompt_ids=ids,
        portable=portable,
        dry_run=dry_run,
        allow_different=allow_different,
    )
    run.read_calibration(calibration, tokenizer)
    with told(progress or no_progress) as tell, threads_of_sessions(threads):
        run.execute(tell)
    return run.report


@dataclass(frozen=True)
class _PartSettings:
    """Arguments of optimize_onnx that are the same for all models of a folder."""

    calibration: Calibration | None
    tokenizer: Tokenizer | None
    portable: bool
    dry_run: bool
    allow_different: bool


def _optimize_parts(
    folder: Path,
    files: Sequence[Path],
    output: str | os.PathLike[str] | None,
    choice: Choice,
    how: _PartSettings,
    progress: Progress,
) -> OptimizationReport:
    check_caches(choice.recipe)
    sources = {file.name: _load(file) for file in files}
    if widened := [name for name, source in sources.items() if source.widened]:
        raise ModelError(
            f"{', '.join(widened)} in {str(folder)!r} compute in bfloat16, which ONNX Runtime's CPU provider has no "
            "operators for, so feeds of the decoders cannot be made; export the folder in float32"
        )
    target = None if how.dry_run or output is None else Path(output)
    if target is not None:
        check_output_folder(target, folder)
    feeds = None
    if how.calibration is not None:
        encoder = sources[files[0].name]
        given, beside = _read_texts(how.calibration), find_tokenizer(encoder.path)
        feeds, _ = _read_feeds(given, how.tokenizer, beside, encoder)
    with told(progress) as tell:

        def run_part(source: ModelFile, written: Path | None, own: Choice, known: PartFeeds) -> OptimizationReport:
            run = _Run(
                source,
                written,
                default_recipe(source, own),
                text=None,
                genai=None,
                prompt_ids=None,
                portable=how.portable,
                dry_run=how.dry_run,
                allow_different=how.allow_different,
            )
            run.use(known)
            run.execute(tell)
            return run.report

        return optimize_parts(folder, sources, target, choice, feeds, run_part, tell)


def search(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    budget: Budget | None = None,
    shapes: Shapes | None = None,
    sparsity: float | None = None,
    calibration: Calibration | None = None,
    tokenizer: Tokenizer | None = None,
    portable: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Recipe:
    """Finds, by measurement on this machine, the recipe that makes a model fastest within a budget of error.

    Each layer gets the form that is fastest; `optimize_onnx(model, output, recipe=found)` makes the model, `to_toml()`
    a file of it. `found.search` holds what was measured. Where nothing is faster, the recipe has no passes, and its
    description says so.

    model, calibration, tokenizer, portable, threads, progress: as optimize_onnx takes them.
    budget: the smallest cosine of each output against the original's (0.99 if None); "perplexity:0.02", by what share
        a decoder's perplexity may rise; or a function(run of the original, run of the optimized model) -> bool, each of
        which takes feeds and gives outputs by name. Of four feeds (texts) or more, every fourth is kept from what fits
        weights to inputs, and the budget is judged on these.
    shapes: the (batch, tokens) pairs to be fast at. None: (1, 128) and (1, 16), or (1, 1) for a decoder with a cache.
    sparsity: forms that are pruned to this share are tried too. None: nothing is pruned.

    Raises an OrtolanError.
    """
    check_threads(threads)
    settings = AutoSettings.read(budget, shapes, sparsity)
    source = _load(model)
    feeds, description = None, None
    if calibration is not None:
        feeds, description = _read_feeds(_read_texts(calibration), tokenizer, find_tokenizer(source.path), source)
    with (
        told(progress or no_progress) as tell,
        threads_of_sessions(threads),
        work_folder(None) as work,
        Evidence(source, work, feeds, description, portable=portable, keeps_fits=True) as evidence,
        bounded_pages(source.data_files if source.is_large else (), work),
    ):
        check_weights(evidence)
        return _search(evidence, settings, "model.onnx", tell)[0]


def _log(report: OptimizationReport) -> None:
    for layer in report.layers:
        logger.debug("%s: %s", layer.name, layer.new_op or layer.reason or layer.status)
    for note in report.notes:
        logger.info("%s", note)
    logger.info("%d of %d layers replaced", len(report.replaced), len(report.layers))


def _search(
    evidence: Evidence, settings: AutoSettings | BitSettings, name: str, progress: Progress
) -> tuple[Recipe, Made | None]:
    """The recipe that is found, and its model, which lies in the evidence's folder; without passes, and none, where the
    original is the best. name: of the model's file."""
    search: Search | BitSearch
    if isinstance(settings, BitSettings):
        search = BitSearch(evidence, settings, name, progress)
    else:
        search = Search(evidence, settings, name, progress=progress)
    made = search.run()
    logger.info("%s", search.report.outcome)
    if made is None:
        return Recipe(AUTO, search.report.outcome, (), search.report), None
    return replace(made.recipe, search=search.report), made


class _Run:
    """One call, of which all arguments are checked."""

    def __init__(
        self,
        source: ModelFile,
        target: Path | None,
        choice: Choice,
        *,
        text: TextPlan | None,
        genai: GenaiConfig | None,
        prompt_ids: np.ndarray | None,
        portable: bool,
        dry_run: bool,
        allow_different: bool,
    ) -> None:
        self.source, self.target, self.choice = source, target, choice
        self.text, self.genai = text, genai
        self.prompt_ids, self.portable, self.dry_run = prompt_ids, portable, dry_run
        self.allow_different = allow_different
        self.feeds: list[Feeds] | None = None
        self._made_up = False
        self._probes: Sequence[str] = ()  # texts that the tokenizer in the graph is compared on
        recipe = None if choice.recipe is None else self._for_host(choice.recipe)
        # Counted before the passes run: they change the model in place.
        self.report = OptimizationReport(
            recipe={"name": AUTO} if recipe is None else recipe.to_dict(),
            input=None if source.path is None else str(source.path),
            output=None if target is None or dry_run else str(target),
            dry_run=dry_run,
            portable=portable,
            file_size_before=source.size,
            versions=package_versions(),
            cpu=known_cpu(),
        )
        self.report.notes += [note for note in (choice.note, why_no_provider()) if note]
        if source.widened:
            self.report.notes.append(
                "the model computes in bfloat16, which ONNX Runtime's CPU provider has no operators for: it was "
                "converted to float32, and answers are compared with those of the float32 model"
            )

    def _for_host(self, recipe: Recipe) -> Recipe:
        return recipe if self.genai is None else recipe.for_equal_caches("onnxruntime-genai")

    def read_calibration(self, calibration: Calibration | None, tokenizer: Tokenizer | None) -> None:
        """Raises CalibrationError."""
        if calibration is None:
            return
        given = _read_texts(calibration)
        beside = find_tokenizer(self.source.path) if self.text is None else self.text.file.path
        if self.text is not None and not _are_texts(given):  # it was given for the model
            tokenizer = None
        self.feeds, self.report.feeds = _read_feeds(given, tokenizer, beside, self.source)
        self.report.tokens = count_tokens(self.feeds)
        self._probes = given[:_MOST_PROBES] if _are_texts(given) else ()

    def use(self, given: PartFeeds) -> None:
        """Feeds that are read already."""
        self.feeds, self.report.feeds = given.feeds, given.description
        self._made_up = given.made_up and given.feeds is not None
        self.report.tokens = None if given.feeds is None or given.made_up else count_tokens(given.feeds)

    def execute(self, progress: Progress) -> None:
        """Finds the recipe where that is left open, runs it, and puts the result in its place."""
        source, searches = self.source, self.choice.recipe is None
        with (
            work_folder(None if self.dry_run else self.target) as work,
            TensorSpill(work) as spill,
            Evidence(
                source, work, self.feeds, self.report.feeds, portable=self.portable, keeps_fits=searches
            ) as evidence,
            bounded_pages(source.data_files if source.is_large else (), work),
        ):
            context = PassContext(
                evidence,
                source,
                self.report,
                _candidate(work, source, self.target),
                spill,
                portable=self.portable,
                dry_run=self.dry_run,
                may_differ=self.allow_different or self.choice.is_named,
                optional_may_fail=not self.choice.by_name,
                progress=progress,
            )
            context.caches.prompt_ids = self.prompt_ids
            evidence.made_up = evidence.made_up or self._made_up
            if not self.dry_run:
                check_weights(evidence)
                context.release()
            if self.choice.keeps or self.choice.is_named:
                context.least_cosine = MADE_UP_COSINE if evidence.made_up else DEFAULT_COSINE
            recipe, context = self._searched(context) if searches else self._transformed(context)
            self.report.feeds = evidence.description
            if not self.dry_run:
                self._add_tokenizer(context)
                original = not recipe.passes and self.text is None
                _finish(source, context, self.target, self.genai, original)
        _log(self.report)

    def _searched(self, context: PassContext) -> tuple[Recipe, PassContext]:
        """The recipe that is found by measurement, and the run that has made its model."""
        settings = AutoSettings.read(None, None, None) if self.choice.bits is None else self.choice.bits
        found, made = _search(context.evidence, settings, context.candidate.name, context.progress)
        self.report.auto = found.search
        if made is None:
            self.report.recipe = found.to_dict()
            return found, context
        # Options are of the verification alone.
        made = replace(made, recipe=made.recipe.with_options(self.choice.options))
        self.report.recipe = made.recipe.to_dict()
        if self.dry_run:
            run_recipe(made.recipe, context)
            return made.recipe, context
        return made.recipe, finish(made, context)

    def _transformed(self, context: PassContext) -> tuple[Recipe, PassContext]:
        """The given recipe, and its run; one without passes where there was nothing to do, and the model may stay."""
        assert self.choice.recipe is not None
        recipe = self._for_host(self.choice.recipe)
        if self.choice.of_other and recipe.passes:
            recipe = for_other_model(recipe, context.evidence)
            self.report.recipe = recipe.to_dict()
            if not recipe.passes:
                context.note("the model stays as it is: it has none of the layers that the recipe found changes")
        self.report.auto = self.choice.recipe.search
        logger.info("recipe %s: %s", recipe.name, recipe.description)
        logger.debug("%s", recipe.to_toml())
        if not recipe.passes:
            return recipe, context
        try:
            run_recipe(recipe, context)
        except NothingToReplaceError as error:
            if not self.choice.may_stay:
                raise
            context.note(f"the model stays as it is: {error}")
            recipe = Recipe(recipe.name, "nothing to take over: the model stays as it is", ())
            self.report.recipe = recipe.to_dict()
            # Without what the passes have done to it.
            context = replace(
                context, source=_load(self.source.proto if self.source.path is None else self.source.path)
            )
        return recipe, context

    def _add_tokenizer(self, context: PassContext) -> None:
        """Puts the tokenizer into the model, if one was given, and writes it."""
        if self.text is None:
            return
        context.progress(Stage.TOKENIZER, 0, 1)
        changed = context.candidate.exists()
        verified = create_session(context.candidate, quiet_options()) if changed else context.evidence.open_original()
        expected = ask_probes(verified, self.text)
        del verified
        add_text_input(context.source.model, self.text, self._probes)
        # Its weights may lie in the file that it takes the place of.
        written = context.evidence.new_folder() / context.candidate.name
        write_model(context.source.model, written, context.telling(Stage.WRITE))
        context.release()
        for new, old in ((written, context.candidate), (data_path(written), data_path(context.candidate))):
            old.unlink(missing_ok=True)
            if new.exists():
                os.replace(new, old)
        context.source.model = load_model(context.candidate).model
        check_text_model(context.candidate, self.text, expected)
        context.note(self.text.description)


def _read_texts(calibration: Calibration | None) -> Any:
    """The lines of a text file, or what was given, which may now be gone through twice."""
    if isinstance(calibration, str | os.PathLike) and os.fspath(calibration).endswith(".txt"):
        return read_texts(calibration)
    if not isinstance(calibration, str | os.PathLike | Mapping) and isinstance(calibration, Iterable):
        return list(calibration)
    return calibration


def _are_texts(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and isinstance(given[0], str)


def _read_feeds(
    given: Any, tokenizer: Tokenizer | None, beside: Tokenizer | None, source: ModelFile
) -> tuple[list[Feeds], str]:
    """The feeds, and what they are, for people.

    given: what _read_texts has made of the calibration. beside: the tokenizer to use if none was given.
    """
    texts = _are_texts(given)
    if tokenizer is not None and not texts:
        raise CalibrationError(
            "a tokenizer was given, but calibration holds no texts; give a list of texts or a .txt file of one text a "
            "line, or leave the tokenizer out"
        )
    what = "given feed(s)"
    if texts:
        what = f"feed(s) of {len(given)} text(s)"
        given = feeds_of_texts(given, tokenizer or beside, source.model)
    feeds = read_calibration(given, source.model)
    tokens = count_tokens(feeds)
    return feeds, f"{len(feeds)} {what}" + (f", {tokens} tokens" if tokens is not None else "")


def _load(model: Any) -> ModelFile:
    """Raises ModelError, for a model that is optimized already as well."""
    source = load_model(model)
    made_by = optimized_with(source.model)
    if made_by is not None:
        raise ModelError(
            f"{source.name} was already optimized by Ortolan ({made_by}); use it as it is, or start "
            "from the original model"
        )
    widen_bfloat16(source)
    return source


def _check_target(output: str | os.PathLike[str] | None, source: ModelFile) -> Path | None:
    """Raises OutputError for an output that cannot be written."""
    if output is None:
        return None
    try:
        target = Path(output)
    except TypeError:
        raise OutputError(f"output is a {type(output).__name__}, expected a path or None") from None
    # The file behind a link is written, and the link stays.
    target = Path(os.path.realpath(target)) if target.is_symlink() else target
    if source.folder is not None:
        check_output_folder(target, source.folder)
    else:
        check_output(target, source)
    return target


def _candidate(work: Path, source: ModelFile, target: Path | None) -> Path:
    """Where the new model is written: in a folder of its own if that is what becomes the output."""
    if source.folder is None or source.path is None:
        return work / (target.name if target is not None else "model.onnx")
    candidate = work / _RESULT / source.path.relative_to(source.folder)
    candidate.parent.mkdir(parents=True)
    return candidate


def _finish(
    source: ModelFile, context: PassContext, target: Path | None, genai: GenaiConfig | None, original: bool
) -> None:
    """Puts the candidate, or the original as it is, in its place, or into the report."""
    report = context.report
    if target is None:
        if original and source.proto is not None and not source.widened:
            report.model = source.proto
        else:
            report.model = _in_memory(context.source.model)
        report.file_size_after = report.model.ByteSize()
        return
    if original and source.path is not None and not source.data_files and not source.widened:
        shutil.copyfile(source.path, context.candidate)
    if not context.candidate.exists():  # a recipe without verify, or the original
        _write(context)
    files = [context.candidate, data_path(context.candidate)]
    report.file_size_after = sum(os.path.getsize(file) for file in files if file.exists())
    if source.folder is None:
        context.progress(Stage.SAVE, 0, 1)
        move_into_place(context.candidate, target)
    else:
        _finish_folder(source, context, target, genai)
    context.progress(Stage.SAVE, 1, 1)


def _write(context: PassContext) -> None:
    model, progress = context.source.model, context.progress
    write_model(model, context.candidate, lambda done, total: progress(Stage.WRITE, done, total))


def _in_memory(model: ir.Model) -> onnx.ModelProto:
    """Raises OutputError where it does not fit."""
    total = sum(tensor.nbytes for tensor, _ in tensor_slots(model))
    if total > _PROTOBUF_LIMIT:
        raise OutputError(
            f"the optimized model has {total} bytes of weights, more than a ModelProto can hold (2 GiB); "
            "give an output path"
        )
    return to_proto(model)


def _finish_folder(source: ModelFile, context: PassContext, target: Path, genai: GenaiConfig | None) -> None:
    """The candidate's folder, with what else lies in the original's, becomes the output."""
    assert source.path is not None and source.folder is not None
    result = context.candidate
    for _ in source.path.relative_to(source.folder).parts:
        result = result.parent
    others = find_others(source.folder, [source])
    if others.left_out:
        context.note(f"not copied, as they lead out of the folder or are no files: {', '.join(others.left_out)}")
    copy_others(others, result, lambda done, total: context.progress(Stage.COPY, done, total))
    if genai is not None:
        genai.write(result)
        context.note(f"{genai.path.name} names {LIBRARY_NAME}, which lies in the folder")
    context.progress(Stage.SAVE, 0, 1)
    move_folder_into_place(result, target)

"""optimize_onnx, which writes an optimized model, and search, which finds the fastest recipe."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

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
    parts_in,
)
from ortolan.graph_passes.files.output import move_folder_into_place
from ortolan.graph_passes.files.spill import TensorSpill
from ortolan.graph_passes.files.work_folder import work_folder
from ortolan.graph_passes.find.bfloat16 import widen_bfloat16
from ortolan.graph_passes.measure.decoding import longest_text
from ortolan.graph_passes.measure.evidence import Evidence
from ortolan.graph_passes.measure.feeds import Calibration, Feeds, read_calibration, read_prompt
from ortolan.graph_passes.measure.finite import check_weights
from ortolan.graph_passes.measure.sessions import quiet_options, threads_of_sessions
from ortolan.graph_passes.names import AUTO
from ortolan.graph_passes.passes.context import PassContext
from ortolan.graph_passes.passes.normalize import optimized_with
from ortolan.graph_passes.recipe import Recipe
from ortolan.graph_passes.report.lines import count
from ortolan.graph_passes.report.optimization import OptimizationReport
from ortolan.graph_passes.run import run_recipe
from ortolan.graph_passes.serve.check import make_serving_form
from ortolan.graph_passes.serve.form import check_decoder
from ortolan.graph_passes.serve.genai import engine_config
from ortolan.graph_passes.text.text_input import add_text_input, check_text_model, plan_text_input
from ortolan.graph_passes.text.text_plan import TextInput, TextPlan
from ortolan.graph_passes.text.texts import Tokenizer, count_tokens, feeds_of_texts, find_tokenizer, read_texts

from .choice import Choice, default_recipe, read_choice
from .errors import CalibrationError, ModelError, NothingToReplaceError, OutputError, wrong_type
from .library import LIBRARY_NAME
from .optimize_options import OptimizeArguments, OptimizeOptions, read_options, with_options
from .optimize_parts import PartFeeds, check_caches, optimize_parts, refuse_for_parts
from .progress import Progress, Stage, logger, no_progress, told
from .session import create_session, known_cpu, package_versions
from .text_encoder import ask_probes

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import onnx_ir as ir

_PROTOBUF_LIMIT = 2**31 - 2**20
_MOST_PROBES = 1000  # largest number of calibration texts on which the tokenizer in the graph is checked
_RESULT = "result"  # name of a folder in the work folder


@with_options
def optimize_onnx(
    model: str | os.PathLike[str] | onnx.ModelProto,
    output: str | os.PathLike[str] | None = None,
    settings: OptimizeOptions | None = None,
    **options: Unpack[OptimizeArguments],
) -> OptimizationReport:
    """Optimize a model, verify it against the original, and return a report.

    Without a recipe and without a target format (weights, sparsity, pattern, cache), weights that the model stores in 4
    or 8 bits are kept exactly. In other models, each layer gets the dense format that is fastest on this machine, while
    every output keeps a cosine similarity of at least 0.99 to the original's. If no format is faster, the model is
    unchanged, and the report has a note.

    If `model` is a folder, it holds one ONNX file or a model.onnx, or an encoder and its decoders as Optimum writes
    them. `output` is then a new folder with the optimized models and copies of all other files, except hidden files and
    links out of the folder. For an encoder with decoders, `report.parts` has the report of each file. If the folder has
    a genai_config.json, the copy names Ortolan's library, which is copied too, and compressed caches get the shape that
    onnxruntime-genai supports.

    After an error or an interrupt, the output is as it was before.

    Args:
        model: The path of an ONNX file or of its folder, or a ModelProto; it is not changed.
        output: The file or folder to write. Large weights are written to `<output>.data`. None: the result is in
            `report.model`.
        settings: Options to start from; keyword arguments replace single ones.
        options: The fields of `OptimizeOptions` as keyword arguments.

    Returns:
        What was replaced, how much the outputs differ, and how fast both models are.

    Raises:
        ArgumentTypeError: An option is unknown or has the wrong type.
        RecipeError: An option has a bad value, or options contradict each other.
        CalibrationError: The calibration data does not fit the model, or is needed and missing.
        ModelError: The model cannot be read, or is already optimized.
        OutputError: The output cannot be written.
        NothingToReplaceError: The recipe found no layer to work on.
        VerificationError: The result differs too much from the original.
    """
    chosen = read_options("optimize_onnx", settings, options)
    ids = None if chosen.prompt is None else read_prompt(chosen.prompt)
    choice = read_choice(chosen)
    if isinstance(model, str | os.PathLike) and (files := parts_in(Path(model))):
        refuse_for_parts(Path(model), output, chosen)
        with threads_of_sessions(chosen.threads):
            return _optimize_parts(Path(model), files, output, choice, chosen)
    source = _load(model)
    text = None
    if not isinstance(chosen.texts_in, bool | TextInput):
        raise wrong_type("texts_in", chosen.texts_in, "True or a TextInput")
    if chosen.texts_in:
        tokenizer = chosen.tokenizer
        file = tokenizer if isinstance(tokenizer, str | os.PathLike) and str(tokenizer).endswith(".json") else None
        wanted = chosen.texts_in if isinstance(chosen.texts_in, TextInput) else TextInput()
        text = plan_text_input(source.model, wanted, source.path, file)
    choice = default_recipe(source, choice, chosen.serve)
    if chosen.serve:
        check_decoder(source.model, source.name)
    genai = find_genai_config(source)
    if genai is not None and chosen.serve:
        genai = engine_config(genai)
    run = _Run(
        source,
        _check_target(output, source),
        choice,
        chosen,
        text=text,
        genai=genai,
        prompt_ids=ids,
    )
    run.read_calibration(chosen.calibration, chosen.tokenizer)
    with told(chosen.progress or no_progress) as tell, threads_of_sessions(chosen.threads):
        run.execute(tell)
    return run.report


def _optimize_parts(
    folder: Path,
    files: Sequence[Path],
    output: str | os.PathLike[str] | None,
    choice: Choice,
    options: OptimizeOptions,
) -> OptimizationReport:
    check_caches(choice.recipe)
    sources = {file.name: _load(file) for file in files}
    if widened := [name for name, source in sources.items() if source.widened]:
        raise ModelError(
            f"{', '.join(widened)} in {str(folder)!r} compute in bfloat16, which ONNX Runtime cannot run on CPUs, so "
            "inputs of the decoders cannot be computed; export the folder in float32"
        )
    target = None if options.dry_run or output is None else Path(output)
    if target is not None:
        check_output_folder(target, folder)
    feeds = None
    if options.calibration is not None:
        encoder = sources[files[0].name]
        given, beside = _read_texts(options.calibration), find_tokenizer(encoder.path)
        feeds, _ = _read_feeds(given, options.tokenizer, beside, encoder)
    with told(options.progress or no_progress) as tell:

        def run_part(source: ModelFile, written: Path | None, own: Choice, known: PartFeeds) -> OptimizationReport:
            run = _Run(
                source,
                written,
                default_recipe(source, own),
                options,
                text=None,
                genai=None,
                prompt_ids=None,
            )
            run.use(known)
            run.execute(tell)
            return run.report

        return optimize_parts(folder, sources, target, choice, feeds, run_part, tell)


def search(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    budget: Budget | None = None,
    max_perplexity_increase: float | None = None,
    shapes: Shapes | None = None,
    sparsity: float | None = None,
    calibration: Calibration | None = None,
    tokenizer: Tokenizer | None = None,
    portable: bool = True,
    reproducible: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Recipe:
    """Measure formats on this machine, and return the recipe that makes a model fastest within an error budget.

    Each layer gets its fastest format. `optimize_onnx(model, output, recipe=found)` creates the model, and
    `found.to_toml()` returns the recipe as a file. If no format is faster, the recipe has no passes. `found.search`
    holds the measurements.

    If there are at least four calibration inputs (such as texts), every fourth is held out from calibration, and the
    budget is checked on these.

    Args:
        model: As for `optimize_onnx`.
        budget: The smallest allowed cosine similarity of each output to the original's, or a function
            `accepts(run_original, run_optimized) -> bool` whose arguments map feeds to outputs by name. Default: 0.99
            (0.9925 without calibration data); for decoders, perplexity may rise by 1 % instead.
        max_perplexity_increase: The largest allowed relative increase of a decoder's perplexity, such as 0.01 for 1 %;
            excludes `budget`.
        shapes: The (batch, tokens) pairs to optimize for. Default: (1, 128) and (1, 16), or (1, 1) for a decoder with a
            KV cache.
        sparsity: Also try formats that are pruned to this fraction of zeros. Default: no format is pruned.
        calibration: As for `optimize_onnx`.
        tokenizer: As for `optimize_onnx`.
        portable: As for `optimize_onnx`.
        reproducible: As for `optimize_onnx`.
        threads: As for `optimize_onnx`.
        progress: As for `optimize_onnx`.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ArgumentError: An argument is out of range.
        CalibrationError: The calibration data does not fit the model.
        ModelError: The model cannot be read, or is already optimized.
    """
    given = {"budget": budget, "max_perplexity_increase": max_perplexity_increase, "portable": portable}
    more = {"reproducible": reproducible, "threads": threads, "progress": progress}
    read_options("search", None, {**given, **more})
    settings = AutoSettings.read(budget, shapes, sparsity, max_perplexity_increase, reproducible)
    source = _load(model)
    feeds, description = None, None
    if calibration is not None:
        feeds, description = _read_feeds(_read_texts(calibration), tokenizer, find_tokenizer(source.path), source)
    with (
        told(progress or no_progress) as tell,
        threads_of_sessions(threads),
        work_folder(None) as work,
        Evidence(source, work, feeds, description, portable=portable, keeps_fits=True) as evidence,
        bounded_pages(source.data_files if source.is_large else (), work, source.largest),
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
    """Return the recipe that a search found, and its model in the evidence's folder.

    If the original is the best, the recipe has no passes, and there is no model. `name` is the file name of the model.
    """
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
    """A call of optimize_onnx with checked arguments."""

    def __init__(
        self,
        source: ModelFile,
        target: Path | None,
        choice: Choice,
        options: OptimizeOptions,
        *,
        text: TextPlan | None,
        genai: GenaiConfig | None,
        prompt_ids: np.ndarray | None,
    ) -> None:
        self.source, self.target, self.choice, self.options = source, target, choice, options
        self.text, self.genai, self.prompt_ids = text, genai, prompt_ids
        self.feeds: list[Feeds] | None = None
        self._made_up = False
        self._probes: Sequence[str] = ()  # texts on which the tokenizer in the graph is checked
        recipe = None if choice.recipe is None else self._for_host(choice.recipe)
        # The report is made before the passes run, because passes change the model in place.
        self.report = OptimizationReport(
            recipe={"name": AUTO} if recipe is None else recipe.to_dict(),
            input=None if source.path is None else str(source.path),
            output=None if target is None or options.dry_run else str(target),
            dry_run=options.dry_run,
            portable=options.portable,
            file_size_before=source.size,
            versions=package_versions(),
            cpu=known_cpu(),
        )
        self.report.notes += [choice.note] if choice.note else []
        if source.widened:
            self.report.notes.append(
                "the model computes in bfloat16, which ONNX Runtime cannot run on CPUs: it was converted to float32, "
                "and outputs are compared with those of the float32 model"
            )

    def _for_host(self, recipe: Recipe) -> Recipe:
        return recipe if self.genai is None else recipe.for_equal_caches("onnxruntime-genai")

    def read_calibration(self, calibration: Calibration | None, tokenizer: Tokenizer | None) -> None:
        """Read the calibration data. Raises CalibrationError if it does not fit the model."""
        if calibration is None:
            return
        given = _read_texts(calibration)
        beside = find_tokenizer(self.source.path) if self.text is None else self.text.file.path
        if self.text is not None and not _are_texts(given):  # the tokenizer was given for texts_in only
            tokenizer = None
        self.feeds, self.report.feeds = _read_feeds(given, tokenizer, beside, self.source)
        self.report.tokens = count_tokens(self.feeds)
        self._probes = given[:_MOST_PROBES] if _are_texts(given) else ()

    def use(self, given: PartFeeds) -> None:
        """Use these feeds, which are already read, for one file of a folder."""
        self.feeds, self.report.feeds = given.feeds, given.description
        self._made_up = given.made_up and given.feeds is not None
        self.report.tokens = None if given.feeds is None or given.made_up else count_tokens(given.feeds)

    def execute(self, progress: Progress) -> None:
        """Find the recipe if none was given, run it, and move the result to the output."""
        source, searches = self.source, self.choice.recipe is None
        with (
            work_folder(None if self.options.dry_run else self.target) as work,
            TensorSpill(work) as spill,
            Evidence(
                source, work, self.feeds, self.report.feeds, portable=self.options.portable, keeps_fits=searches
            ) as evidence,
            bounded_pages(source.data_files if source.is_large else (), work, source.largest),
        ):
            context = PassContext(
                evidence,
                source,
                self.report,
                _candidate(work, source, self.target),
                spill,
                portable=self.options.portable,
                dry_run=self.options.dry_run,
                may_differ=self.options.allow_different or self.choice.is_named,
                optional_may_fail=not self.choice.by_name,
                progress=progress,
            )
            context.caches.prompt_ids = self.prompt_ids
            evidence.made_up = evidence.made_up or self._made_up
            if not self.options.dry_run:
                check_weights(evidence)
                context.release()
            if self.choice.keeps or self.choice.is_named:
                context.min_cosine = MADE_UP_COSINE if evidence.made_up else DEFAULT_COSINE
            recipe, context = self._searched(context) if searches else self._transformed(context)
            self.report.feeds = evidence.description
            if not recipe.passes and self.choice.reproducible is not None:
                context.note(
                    "the model is unchanged, so its bytes depend on the CPU, although reproducible is "
                    f"{self.choice.reproducible!r}"
                )
            if not self.options.dry_run:
                self._add_tokenizer(context)
                self._make_serving_form(context)
                original = not recipe.passes and self.text is None and not self.options.serve
                _finish(source, context, self.target, self.genai, original)
        _log(self.report)

    def _searched(self, context: PassContext) -> tuple[Recipe, PassContext]:
        """Search for a recipe; return it and the context of the run that made its model."""
        settings = self.choice.bits or AutoSettings.read(reproducible=self.choice.reproducible)
        found, made = _search(context.evidence, settings, context.candidate.name, context.progress)
        self.report.auto = found.search
        if made is None:
            self.report.recipe = found.to_dict()
            return found, context
        # These are options of pass verify: `Choice.measuring` refuses all others.
        made = replace(made, recipe=made.recipe.with_options(self.choice.options))
        self.report.recipe = made.recipe.to_dict()
        if self.options.dry_run:
            run_recipe(made.recipe, context)
            return made.recipe, context
        return made.recipe, finish(made, context)

    def _transformed(self, context: PassContext) -> tuple[Recipe, PassContext]:
        """Run the given recipe; return it and its context, or a recipe without passes if the model stays unchanged."""
        assert self.choice.recipe is not None
        recipe = self._for_host(self.choice.recipe)
        if self.choice.of_other and recipe.passes:
            recipe = for_other_model(recipe, context.evidence)
            self.report.recipe = recipe.to_dict()
            if not recipe.passes:
                context.note("the model is unchanged: it has no layer that the recipe changes")
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
            context.note(f"the model is unchanged: {error}")
            recipe = Recipe(recipe.name, "no weights to keep: the model is unchanged", ())
            self.report.recipe = recipe.to_dict()
            # The passes may have changed the model.
            context = replace(
                context, source=_load(self.source.proto if self.source.path is None else self.source.path)
            )
        return recipe, context

    def _add_tokenizer(self, context: PassContext) -> None:
        """Put the tokenizer into the model, if texts_in was given, and write it."""
        if self.text is None:
            return
        context.progress(Stage.TOKENIZER, 0, 1)
        changed = context.candidate.exists()
        verified = create_session(context.candidate, quiet_options()) if changed else context.evidence.open_original()
        expected = ask_probes(verified, self.text)
        del verified
        add_text_input(context.source.model, self.text, self._probes)
        context.write_again()
        check_text_model(context.candidate, self.text, expected)
        context.note(self.text.description)

    def _make_serving_form(self, context: PassContext) -> None:
        """Change the optimized decoder into its form for serving, if `serve` was given, and write it."""
        if not self.options.serve:
            return
        ids, _ = longest_text(context.evidence.feeds())
        make_serving_form(context, ids)


def _read_texts(calibration: Calibration | None) -> Any:
    """Return the lines of a text file, or the given data, iterators as a list."""
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
    """Return the feeds and their description for the report.

    given: The result of `_read_texts`. beside: The tokenizer file beside the model, which is used if the user gave no
        tokenizer.
    """
    texts = _are_texts(given)
    if tokenizer is not None and not texts:
        raise CalibrationError(
            "tokenizer was given, but calibration holds no texts; give a list of texts or a .txt file with one text a "
            "line, or leave the tokenizer out"
        )
    what, origin = "given input", ""
    if texts:
        what, origin = "input", f" from {count(len(given), 'text')}"
        given = feeds_of_texts(given, tokenizer or beside, source.model)
    feeds = read_calibration(given, source.model)
    tokens = count_tokens(feeds)
    return feeds, f"{count(len(feeds), what)}{origin}" + (f", {tokens} tokens" if tokens is not None else "")


def _load(model: Any) -> ModelFile:
    """Load the original. Raises ModelError if it cannot be read or is already optimized."""
    source = load_model(model)
    made_by = optimized_with(source.model)
    if made_by is not None:
        raise ModelError(
            f"{source.name} was already optimized by Ortolan ({made_by}); use it unchanged, or start "
            "from the original model"
        )
    widen_bfloat16(source)
    return source


def _check_target(output: str | os.PathLike[str] | None, source: ModelFile) -> Path | None:
    """Return the checked output path. Raises ArgumentTypeError for other types, OutputError if it cannot be written."""
    if output is None:
        return None
    try:
        target = Path(output)
    except TypeError:
        raise wrong_type("output", output, "a path or None") from None
    # If the output is a link, the file that it points to is written.
    target = Path(os.path.realpath(target)) if target.is_symlink() else target
    if source.folder is not None:
        check_output_folder(target, source.folder)
    else:
        check_output(target, source)
    return target


def _candidate(work: Path, source: ModelFile, target: Path | None) -> Path:
    """Return the path for the new model; if the output is a folder, the path is inside a separate folder."""
    if source.folder is None or source.path is None:
        return work / (target.name if target is not None else "model.onnx")
    candidate = work / _RESULT / source.path.relative_to(source.folder)
    candidate.parent.mkdir(parents=True)
    return candidate


def _finish(
    source: ModelFile, context: PassContext, target: Path | None, genai: GenaiConfig | None, original: bool
) -> None:
    """Move the candidate, or a copy of the original, to the output, or put it into the report."""
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
    if not context.candidate.exists():  # pass verify, which writes the candidate, did not run
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
    """Return the model with all weights inside. Raises OutputError if it is larger than 2 GiB."""
    total = sum(tensor.nbytes for tensor, _ in tensor_slots(model))
    if total > _PROTOBUF_LIMIT:
        raise OutputError(
            f"the optimized model has {total} bytes of weights, more than a ModelProto can hold (2 GiB); "
            "give an output path"
        )
    return to_proto(model)


def _finish_folder(source: ModelFile, context: PassContext, target: Path, genai: GenaiConfig | None) -> None:
    """Move the candidate's folder to the output, with the other files of the original's folder."""
    assert source.path is not None and source.folder is not None
    result = context.candidate
    for _ in source.path.relative_to(source.folder).parts:
        result = result.parent
    others = find_others(source.folder, [source])
    if others.left_out:
        context.note(f"not copied, because they are not files or point out of the folder: {', '.join(others.left_out)}")
    copy_others(others, result, lambda done, total: context.progress(Stage.COPY, done, total))
    if genai is not None:
        genai.write(result)
        context.note(f"{genai.path.name} names {LIBRARY_NAME}, which was copied to the folder")
    context.progress(Stage.SAVE, 0, 1)
    move_folder_into_place(result, target)

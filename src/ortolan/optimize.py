"""optimize_onnx: from a model and a recipe to an optimized model and a report."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortolan.graph_passes.auto.budget import Budget
from ortolan.graph_passes.auto.candidates import NAME as AUTO
from ortolan.graph_passes.auto.search import AutoSettings, Search, Shapes
from ortolan.graph_passes.auto.trials import finish
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
)
from ortolan.graph_passes.files.spill import TensorSpill
from ortolan.graph_passes.find.linear import linears_in
from ortolan.graph_passes.find.stored_int4 import StoredInt4
from ortolan.graph_passes.measure.evidence import Evidence
from ortolan.graph_passes.measure.feeds import Calibration, Feeds, read_calibration, read_prompt
from ortolan.graph_passes.passes.context import PassContext
from ortolan.graph_passes.passes.normalize import optimized_with
from ortolan.graph_passes.recipe import Recipe
from ortolan.graph_passes.report.optimization import OptimizationReport
from ortolan.graph_passes.run import run_recipe
from ortolan.graph_passes.text.text_input import TextInput, add_text_input, check_text_input, check_text_model
from ortolan.graph_passes.text.texts import Tokenizer, count_tokens, feeds_of_texts, find_tokenizer, read_texts

from .errors import CalibrationError, LibraryError, ModelError, OutputError, RecipeError
from .progress import Progress, no_progress, raising_unchanged
from .session import LIBRARY_NAME, cpu_info, package_versions

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx

_PROTOBUF_LIMIT = 2**31 - 2**20
_STALE_SECONDS = 24 * 3600
_DEFAULT, _ADOPT, _CACHED_PROMPT = "sparse-bf16", "adopt", "cached-prompt"  # recipes
_MOST_PROBES = 1000  # texts of calibration that the tokenizer in the graph is compared on
_RESULT = "result"  # in the work folder


def optimize_onnx(
    model: str | os.PathLike[str] | onnx.ModelProto,
    output: str | os.PathLike[str] | None = None,
    *,
    recipe: str | os.PathLike[str] | Recipe | None = None,
    options: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
    tokenizer: Tokenizer | None = None,
    prompt: str | os.PathLike[str] | npt.ArrayLike | None = None,
    with_tokenizer: str | os.PathLike[str] | TextInput | None = None,
    budget: Budget | None = None,
    shapes: Shapes | None = None,
    portable: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> OptimizationReport:
    """Optimizes a model by a recipe and verifies it against the original.

    model: a path, or an onnx.ModelProto; never changed. A folder stands for its only ONNX file, or its model.onnx.
    output: the file to write; large weights go to `<output>.data`. None: the result is in `report.model`.
        Of a folder, the folder to write: the new model under the name of the old one, and copies of all other files;
        links that lead out of the folder, and hidden files, are left out. If it holds a genai_config.json, the new
        one names our library, which is put beside it, and compressed caches take the shape that GenAI supports.
    recipe: a name ("sparse-bf16"), the path of a TOML file, or a Recipe. None: "cached-prompt" with a prompt, "adopt"
        for a model that stores 4-bit weights, else "sparse-bf16".
        "auto": chooses for each layer the operator that is fastest on this machine within the budget, by measurement;
        where nothing is faster, the result is the original. Its only option is the sparsity to prune to; without it,
        nothing is pruned. report.recipe holds the recipe that was chosen: Recipe.from_dict(report.recipe).
    options: overrides the recipe's values: {"sparsity": 0.7}, or {"prune.exclude": […]} where passes share a name.
    calibration: texts, or a .txt file of one text a line; or an .npz file, a dict of arrays, or an iterable of such
        dicts, named like the model's inputs: run to verify the result, to measure the error of layers, and by passes
        that fit weights or ranges to inputs. None: inputs are made up, where that will do. Beside input_ids, an empty
        cache, a full attention_mask, position_ids and token_type_ids of 0 may be left out.
    tokenizer: for texts: the path of a tokenizer.json, or of an ONNX graph of onnxruntime-extensions' tokenizers (its
        first input takes strings, its output input_ids, or the first one, has the ids); or an object whose encode(text)
        gives token ids. None: the one of with_tokenizer, or the tokenizer.json beside the model.
    prompt: token ids [tokens], or an .npy file of them: a system prompt or knowledge that all sequences begin with. Its
        keys and values become part of the model (recipe "cached-prompt", or any with a pass compress_cache), which
        then is given what follows; attention_mask and position_ids count the prompt's tokens too.
    with_tokenizer: the path of a tokenizer.json, or a TextInput (which also says how to pool): the optimized encoder
        takes strings [batch] as input "text" and gives "sentence_embedding" [batch, hidden], in a session that knows
        onnxruntime-extensions, as create_session makes it.
    budget: for "auto": the smallest cosine of each output against the original's (0.99 if None); "perplexity:0.02", by
        what share a decoder's perplexity may rise; or a function(run of the original, run of the optimized model) ->
        bool, each of which takes feeds and gives outputs by name. Of four feeds (texts) or more, every fourth is kept
        from what fits weights to inputs, and the budget is judged on these.
    shapes: for "auto": the (batch, tokens) pairs to be fast at. None: (1, 128) and (1, 16), or (1, 1) for a decoder
        with a cache.
    portable: keeps in the file what each operator does in standard ONNX, so that it also runs without our library.
    dry_run: changes and writes nothing; the report tells what would be replaced, and why the rest would not.
    progress: called as progress(stage, done, total). What it raises ends the run and reaches the caller as it is.

    Raises an OrtolanError. After any error or interrupt the output is as it was before: absent, or the older model.
    """
    ids = None if prompt is None else read_prompt(prompt)
    if ids is not None and recipe is None:
        recipe = _CACHED_PROMPT
    settings = None
    if isinstance(recipe, str) and recipe == AUTO:
        if ids is not None:
            raise RecipeError(f"a prompt was given, which recipe {AUTO!r} does not take; give recipe 'cached-prompt'")
        settings = AutoSettings.read(budget, shapes, options)
    elif budget is not None or shapes is not None:
        name = "budget" if budget is not None else "shapes"
        raise RecipeError(f"{name} was given, which only recipe {AUTO!r} has; leave it out, or give that recipe")
    chosen = None if recipe is None or settings is not None else _load_recipe(recipe, options, ids is not None)
    source = load_model(model)
    _refuse_optimized(source)
    text = TextInput(with_tokenizer) if isinstance(with_tokenizer, str | os.PathLike) else with_tokenizer
    wordpiece = None if text is None else check_text_input(source.model, text)
    stored = _count_stored_int4(source) if recipe is None else 0
    if recipe is None:
        chosen = _chosen_recipe(stored, options)
    genai = find_genai_config(source)
    if genai is not None and chosen is not None:
        chosen = chosen.for_equal_caches("onnxruntime-genai")
    target = _target(output)
    if target is not None and source.folder is not None:
        check_output_folder(target, source.folder)
    elif target is not None:
        check_output(target, source)
    # Counted before the passes run: they change the model in place.
    report = OptimizationReport(
        recipe={"name": AUTO} if chosen is None else chosen.to_dict(),
        input=None if source.path is None else str(source.path),
        output=None if target is None or dry_run else str(target),
        dry_run=dry_run,
        portable=portable,
        file_size_before=source.size,
        versions=package_versions(),
        cpu=_cpu(),
    )
    beside = find_tokenizer(source.path) if text is None else text.tokenizer
    given = _read_texts(calibration)
    feeds = None if calibration is None else _read_feeds(given, tokenizer, beside, source, report)
    with (
        raising_unchanged(progress or no_progress) as tell,
        _work_folder(None if dry_run else target) as work,
        TensorSpill(work) as spill,
        Evidence(source, work, feeds, report.feeds, portable=portable, keeps_fits=settings is not None) as evidence,
        bounded_pages(source.data_files if source.is_large else (), work),
    ):
        context = PassContext(
            evidence,
            source,
            report,
            _candidate(work, source, target),
            spill,
            prompt_ids=ids,
            portable=portable,
            dry_run=dry_run,
            progress=tell,
        )
        if settings is not None:
            context, chosen = _search(settings, context)
        elif chosen is not None:
            run_recipe(chosen, context)
        if stored:
            context.note(f"no recipe was given; {_ADOPT!r} was chosen, as {stored} layers store 4-bit weights")
        report.feeds = evidence.description
        if text is not None and wordpiece is not None and not dry_run:
            tell("tokenizer", 0, 1)
            add_text_input(context.source.model, text, wordpiece, given[:_MOST_PROBES] if _are_texts(given) else ())
            for file in (context.candidate, data_path(context.candidate)):  # of the model without a tokenizer
                file.unlink(missing_ok=True)
            write_model(context.source.model, context.candidate, lambda done, total: tell("write", done, total))
            context.release()
            check_text_model(context.candidate, text, wordpiece)
        if not dry_run:
            original = report.auto is not None and not report.auto.changed and text is None
            _finish(source, context, target, genai, original)
    return report


def _search(settings: AutoSettings, context: PassContext) -> tuple[PassContext, Recipe | None]:
    """The run of the recipe that "auto" chooses; None: the original is the best. The report holds what was measured."""
    search = Search(context.evidence, settings, context.candidate.name, progress=context.progress)
    made = search.run()
    context.report.auto = search.report
    if made is None:
        return context, None
    context.report.recipe = made.recipe.to_dict()
    return finish(made, context), made.recipe


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
    given: Any,
    tokenizer: Tokenizer | None,
    beside: Tokenizer | None,
    source: ModelFile,
    report: OptimizationReport,
) -> list[Feeds]:
    """The feeds, with a word on them in the report.

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
    report.tokens = count_tokens(feeds)
    report.feeds = f"{len(feeds)} {what}" + (f", {report.tokens} tokens" if report.tokens is not None else "")
    return feeds


def _load_recipe(
    recipe: str | os.PathLike[str] | Recipe, options: Mapping[str, Any] | None, prompt: bool = False
) -> Recipe:
    chosen = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    if prompt:
        chosen = chosen.with_prompt()
    return chosen.with_options({} if options is None else options)


def _chosen_recipe(stored: int, options: Mapping[str, Any] | None) -> Recipe:
    """For a model with so many layers that are stored in 4 bits, where the caller has named none."""
    name = _ADOPT if stored else _DEFAULT
    try:
        return _load_recipe(name, options)
    except RecipeError as error:
        why = f"as {stored} layers store 4-bit weights" if stored else "the default"
        raise RecipeError(f"no recipe was given; {name!r} was chosen, {why}: {error}; or give another recipe") from None


def _count_stored_int4(source: ModelFile) -> int:
    """The layers whose 4-bit weights can be taken over as they are."""
    try:
        return sum(isinstance(linear.int4, StoredInt4) for linear in linears_in(source.model))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # What a malformed model trips over. No recipe may be chosen for a model that could not be read.
        raise ModelError(f"{source.name} is not a well-formed ONNX model: {error!r}") from error


def _target(output: str | os.PathLike[str] | None) -> Path | None:
    if output is None:
        return None
    try:
        target = Path(output)
    except TypeError:
        raise OutputError(f"output is a {type(output).__name__}, expected a path or None") from None
    # The file behind a link is written, and the link stays.
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def _candidate(work: Path, source: ModelFile, target: Path | None) -> Path:
    """Where the new model is written: in a folder of its own if that is what becomes the output."""
    if source.folder is None or source.path is None:
        return work / (target.name if target is not None else "model.onnx")
    (work / _RESULT).mkdir()
    return work / _RESULT / source.path.name


def _finish(
    source: ModelFile, context: PassContext, target: Path | None, genai: GenaiConfig | None, original: bool
) -> None:
    """Puts the candidate, or the original as it is, in its place, or into the report."""
    report = context.report
    if target is None and source.proto is not None and original:
        report.model, report.file_size_after = source.proto, source.size
        return
    if target is None:
        total = sum(tensor.nbytes for tensor, _ in tensor_slots(context.source.model))
        if total > _PROTOBUF_LIMIT:
            raise OutputError(
                f"the optimized model has {total} bytes of weights, more than a ModelProto can hold (2 GiB); "
                "give an output path"
            )
        report.model = to_proto(context.source.model)
        report.file_size_after = report.model.ByteSize()
        return
    if original and source.path is not None and not source.data_files:
        shutil.copyfile(source.path, context.candidate)
    if not context.candidate.exists():  # a recipe without verify, or the original
        write_model(context.source.model, context.candidate, lambda done, total: context.progress("write", done, total))
    files = [context.candidate, data_path(context.candidate)]
    report.file_size_after = sum(os.path.getsize(file) for file in files if file.exists())
    if source.folder is None:
        context.progress("save", 0, 1)
        move_into_place(context.candidate, target)
    else:
        result = context.candidate.parent
        others = find_others(source)
        if others.left_out:
            context.note(f"not copied, as they lead out of the folder or are no files: {', '.join(others.left_out)}")
        copy_others(others, result, lambda done, total: context.progress("copy", done, total))
        if genai is not None:
            genai.write(result)
            context.note(f"{genai.path.name} names {LIBRARY_NAME}, which lies in the folder")
        context.progress("save", 0, 1)
        move_folder_into_place(result, target)
    context.progress("save", 1, 1)


def _refuse_optimized(source: ModelFile) -> None:
    made_by = optimized_with(source.model)
    if made_by is not None:
        raise ModelError(f"{source.name} was already optimized by Ortolan ({made_by}); start from the original model")


@contextmanager
def _work_folder(target: Path | None) -> Iterator[Path]:
    """A folder for unfinished files, beside the output so that a finished one can be renamed; it always goes away."""
    parent = None if target is None else target.absolute().parent
    prefix = "ortolan-" if target is None else f".{target.name}.ortolan-"
    if parent is not None:
        _remove_stale(parent, prefix)
    try:
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise OutputError(
            f"cannot create a temporary folder in {str(parent or tempfile.gettempdir())!r}: {error.strerror}"
        ) from error
    with folder as name:
        yield Path(name)


def _remove_stale(parent: Path, prefix: str) -> None:
    """Removes what a killed run left behind: a folder in which nothing was written for a day."""
    with suppress(OSError):
        for folder in parent.iterdir():
            if folder.name.startswith(prefix):
                written = max(file.stat().st_mtime for file in (folder, *folder.rglob("*")))
                if time.time() - written > _STALE_SECONDS:
                    shutil.rmtree(folder)


def _cpu() -> dict[str, Any]:
    try:
        return cpu_info()
    except LibraryError:
        return {}

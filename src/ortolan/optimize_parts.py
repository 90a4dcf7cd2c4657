"""optimize_onnx for a folder with an encoder and its decoders, which are all optimized with one recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortolan.graph_passes.files.model_file import ModelFile
from ortolan.graph_passes.files.model_folder import DECODER, ENCODER, copy_others, find_others
from ortolan.graph_passes.files.output import move_folder_into_place
from ortolan.graph_passes.files.work_folder import work_folder
from ortolan.graph_passes.measure.encoder_decoder import feeds_of_decoders
from ortolan.graph_passes.measure.evidence import make_up_feeds
from ortolan.graph_passes.measure.feeds import Feeds, has_past
from ortolan.graph_passes.measure.sessions import open_quietly
from ortolan.graph_passes.recipe import Recipe
from ortolan.graph_passes.report.lines import count
from ortolan.graph_passes.report.optimization import OptimizationReport

from .choice import Choice
from .errors import NothingToReplaceError, OutputError, RecipeError
from .optimize_options import OptimizeOptions
from .progress import Progress, Stage

_CACHES = "compress_cache"


@dataclass(frozen=True)
class PartFeeds:
    """The feeds of one file.

    Attributes:
        feeds: The feeds; None: random inputs are generated later.
        description: Their description for the report.
        made_up: The feeds do not come from the user's calibration data.
    """

    feeds: list[Feeds] | None
    description: str | None
    made_up: bool


# Optimizes one file. Arguments: the source, the output path, the choice of a recipe, the feeds.
RunPart = Callable[[ModelFile, Path | None, Choice, PartFeeds], OptimizationReport]


def refuse_for_parts(folder: Path, output: Any, options: OptimizeOptions) -> None:
    """Refuse options that a folder with several models does not support.

    Raises:
        RecipeError: An option is for one model only.
        OutputError: The output folder is missing.
    """
    for name in ("prompt", "texts_in", "serve", "budget", "max_perplexity_increase", "max_bytes"):
        value = getattr(options, name)
        if value is not None and value is not False:
            raise RecipeError(
                f"{name} is for a single model, but {str(folder)!r} holds an encoder and decoders; give the path of "
                "one of its files"
            )
    if output is None and not options.dry_run:
        raise OutputError(f"{str(folder)!r} holds several models; give an output folder")


def check_caches(recipe: Recipe | None) -> None:
    """Refuse recipes that compress caches (RecipeError), because the decoders of a folder pass caches to each other."""
    for step in () if recipe is None else recipe.passes:
        options: Any = step.options
        if step.name == _CACHES and (options.keys, options.values) != ("float32", "float32"):
            raise RecipeError(
                f"recipe {recipe.name if recipe else ''!r} compresses caches, but the files of an encoder-decoder "
                'model pass caches to each other; give cache="float32"'
            )


def optimize_parts(
    folder: Path,
    sources: Mapping[str, ModelFile],
    target: Path | None,
    choice: Choice,
    encoder_feeds: list[Feeds] | None,
    run_part: RunPart,
    progress: Progress,
) -> OptimizationReport:
    """Optimize all files and return one report.

    Args:
        folder: The original's folder.
        sources: The models by file name.
        target: The output folder; None in a dry run.
        choice: The recipe of each model, or how to find it.
        encoder_feeds: The user's calibration data, or None.
        run_part: Optimizes one file.
        progress: The progress callback.

    Raises:
        NothingToReplaceError: The recipe found no layer in any file.
    """
    made_up, description = (
        encoder_feeds is None,
        None if encoder_feeds is None else count(len(encoder_feeds), "given input"),
    )
    if encoder_feeds is None:
        encoder = sources[ENCODER]
        assert encoder.path is not None
        encoder_feeds, description = make_up_feeds(encoder.model, open_quietly(encoder.path, encoder))
    feeds = {ENCODER: encoder_feeds} | feeds_of_decoders(folder, sources, encoder_feeds)
    with work_folder(target) as work:
        result = work / "result"
        result.mkdir()
        parts: dict[str, OptimizationReport] = {}
        for name, source in sources.items():
            known = feeds.get(name)
            given = PartFeeds(known, _describe(known, name, made_up, description), made_up)
            written = None if target is None else result / name
            own = choice if name == ENCODER or DECODER not in parts else _as_found(choice, parts[DECODER])
            parts[name] = run_part(source, written, _for_part(own, source), given)
            parts[name].output = None if target is None else str(target / name)
        if choice.recipe is not None and not any(part.recipe.get("pass") for part in parts.values()):
            reasons = "; ".join(note for part in parts.values() for note in part.notes)
            raise NothingToReplaceError(f"the models in {str(folder)!r} have no layer to replace: {reasons}")
        report = _joined(folder, target, parts)
        if target is not None:
            _finish(folder, sources, result, target, report, progress)
    return report


def _as_found(choice: Choice, decoder: OptimizationReport) -> Choice:
    """Return the choice for the remaining decoders: the recipe that was found for the first decoder.

    The first decoder has all layers. The layers of a merged decoder cannot be measured alone, because each layer is in
    both branches, and a decoder with a cache lacks some layers.
    """
    if choice.recipe is not None:
        return choice
    searched = decoder.auto is not None
    return replace(
        choice,
        recipe=Recipe.from_dict(decoder.recipe),
        bits=None,
        measured=False,
        of_other=searched,
        keeps=not searched,
    )


def _for_part(choice: Choice, source: ModelFile) -> Choice:
    """Return the choice for one file. The file may stay unchanged; if it has no cache, compress_cache is left out."""
    recipe = choice.recipe
    if recipe is not None and not has_past(source.model):
        recipe = recipe.without_pass(_CACHES)
    return replace(choice, recipe=recipe, may_stay=True)


def _describe(feeds: list[Feeds] | None, name: str, made_up: bool, description: str | None) -> str | None:
    if feeds is None or name == ENCODER:
        return description
    return f"{count(len(feeds), 'input')} decoded from {'synthetic inputs' if made_up else 'the inputs'} of the encoder"


def _joined(folder: Path, target: Path | None, parts: dict[str, OptimizationReport]) -> OptimizationReport:
    """Return one report with the layers of all files and the report of each file."""
    first = next(iter(parts.values()))
    before, after = ([getattr(part, f"file_size_{when}") for part in parts.values()] for when in ("before", "after"))
    return OptimizationReport(
        recipe=first.recipe,
        input=str(folder),
        output=None if target is None else str(target),
        dry_run=first.dry_run,
        portable=all(part.portable for part in parts.values()),
        layers=[layer for part in parts.values() for layer in part.layers],
        file_size_before=sum(before),
        file_size_after=None if None in after else sum(after),
        notes=[f"{name}: {note}" for name, part in parts.items() for note in part.notes],
        versions=first.versions,
        cpu=first.cpu,
        parts=parts,
    )


def _finish(
    folder: Path,
    sources: Mapping[str, ModelFile],
    result: Path,
    target: Path,
    report: OptimizationReport,
    progress: Progress,
) -> None:
    others = find_others(folder, list(sources.values()))
    if others.left_out:
        report.notes.append(
            f"not copied, because they are not files or point out of the folder: {', '.join(others.left_out)}"
        )
    copy_others(others, result, lambda done, total: progress(Stage.COPY, done, total))
    progress(Stage.SAVE, 0, 1)
    move_folder_into_place(result, target)
    progress(Stage.SAVE, 1, 1)

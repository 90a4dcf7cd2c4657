"""optimize_onnx for the folder of an encoder and its decoders: all models by one recipe, into a folder like it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortolan.graph_passes.files.model_file import ModelFile
from ortolan.graph_passes.files.model_folder import DECODER, ENCODER, copy_others, find_others, move_folder_into_place
from ortolan.graph_passes.files.work_folder import work_folder
from ortolan.graph_passes.measure.encoder_decoder import feeds_of_decoders
from ortolan.graph_passes.measure.evidence import make_up_feeds
from ortolan.graph_passes.measure.feeds import Feeds, has_past
from ortolan.graph_passes.measure.sessions import open_quietly
from ortolan.graph_passes.recipe import Recipe
from ortolan.graph_passes.report.optimization import OptimizationReport

from .choice import Choice
from .errors import NothingToReplaceError, OutputError, RecipeError
from .progress import Progress, Stage

_CACHES = "compress_cache"


@dataclass(frozen=True)
class PartFeeds:
    """Of one file. None: it makes up its own."""

    feeds: list[Feeds] | None
    description: str | None
    made_up: bool  # not the user's


# Optimizes one file: source, where to write it, what to make of it, and its feeds.
RunPart = Callable[[ModelFile, Path | None, Choice, PartFeeds], OptimizationReport]


def refuse_for_parts(folder: Path, output: Any, dry_run: bool, **given: Any) -> None:
    """Raises what a folder of several models does not take. given: arguments that are for one model."""
    for name, value in given.items():
        if value is not None:
            raise RecipeError(
                f"{name} was given, but {str(folder)!r} holds an encoder and decoders; give it with the path of one of "
                "its files"
            )
    if output is None and not dry_run:
        raise OutputError(f"{str(folder)!r} holds several models; give an output folder")


def check_caches(recipe: Recipe | None) -> None:
    """Raises RecipeError for caches that not all decoders of a folder have: one file gives what another one takes."""
    for step in () if recipe is None else recipe.passes:
        options: Any = step.options
        if step.name == _CACHES and (options.keys, options.values) != ("float32", "float32"):
            raise RecipeError(
                f"recipe {recipe.name if recipe else ''!r} compresses caches, but decoders of an encoder-decoder "
                'model hand them from file to file, and keep those of the encoder; give cache="float32"'
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
    """sources: by file name. target: None in a dry run. encoder_feeds: the user's, or None."""
    made_up, description = (
        encoder_feeds is None,
        None if encoder_feeds is None else f"{len(encoder_feeds)} given feed(s)",
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
            raise NothingToReplaceError(f"nothing of the models in {str(folder)!r} can be replaced: {reasons}")
        report = _joined(folder, target, parts)
        if target is not None:
            _finish(folder, sources, result, target, report, progress)
    return report


def _as_found(choice: Choice, decoder: OptimizationReport) -> Choice:
    """What was found for the decoder that begins a text, which has all layers, is for the others too: of merged ones
    layers could not be measured one by one, as each stands in both branches. One behind a cache lacks some of them."""
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
    """Without caches where the model has none; what finds nothing in one file may find something in another."""
    recipe = choice.recipe
    if recipe is not None and not has_past(source.model):
        recipe = recipe.without_pass(_CACHES)
    return replace(choice, recipe=recipe, may_stay=True)


def _describe(feeds: list[Feeds] | None, name: str, made_up: bool, description: str | None) -> str | None:
    if feeds is None or name == ENCODER:
        return description
    return f"{len(feeds)} feed(s) decoded from {'made-up inputs' if made_up else 'the inputs'} of the encoder"


def _joined(folder: Path, target: Path | None, parts: dict[str, OptimizationReport]) -> OptimizationReport:
    """One report of all: the layers of all files, and each file's own."""
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
        report.notes.append(f"not copied, as they lead out of the folder or are no files: {', '.join(others.left_out)}")
    copy_others(others, result, lambda done, total: progress(Stage.COPY, done, total))
    progress(Stage.SAVE, 0, 1)
    move_folder_into_place(result, target)
    progress(Stage.SAVE, 1, 1)

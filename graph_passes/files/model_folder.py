"""A model's folder, as Optimum and ONNX Runtime GenAI write it: one ONNX file, its data, tokenizer and configuration;
or the files of an encoder and its decoders.

The result is a folder like it, with the optimized models under the same names. It appears at once, when it is complete.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ortolan.errors import ModelError, OutputError

from .genai_folder import CONFIG_NAME, GenaiConfig, read_genai_config
from .model_file import MODEL_SUFFIX, ModelFile, data_path, load_model
from .output import check_new_folder

ENCODER = f"encoder_model{MODEL_SUFFIX}"
# What begins a text, and what goes on with it by the caches that the first gave; one file of both.
DECODER, DECODER_WITH_PAST, MERGED_DECODER = (
    f"decoder_{name}{MODEL_SUFFIX}" for name in ("model", "with_past_model", "model_merged")
)


@dataclass(frozen=True)
class OtherFiles:
    """What lies in a folder beside the model and its weights."""

    copied: list[tuple[Path, Path]]  # where a file is, and its place in the folder
    left_out: list[str]  # that may not be read, by name


def check_output_folder(output: Path, folder: Path) -> None:
    """Refuses an output that cannot become a folder beside the input, which is not touched."""
    check_new_folder(
        output, "the input is a folder", MODEL_SUFFIX, ", or the ONNX file inside of the input as the model"
    )
    if Path(os.path.realpath(output)).is_relative_to(os.path.realpath(folder)):
        raise OutputError(
            f"output {str(output)!r} lies in the input folder, which is not changed; choose another place"
        )


def parts_in(folder: Path) -> list[Path]:
    """The files of an encoder and its decoders, the encoder first; none in a folder of another kind."""
    names = (ENCODER, DECODER, DECODER_WITH_PAST, MERGED_DECODER)
    found = [folder / name for name in names if (folder / name).is_file()]
    whole = len(found) > 1 and found[0].name == ENCODER and not (folder / f"model{MODEL_SUFFIX}").exists()
    return found if whole else []


def find_others(folder: Path, sources: Sequence[ModelFile]) -> OtherFiles:
    """What to copy beside the new models: all but the old ones, their weights, and hidden files.

    A folder is untrusted: links are followed only to where a model's own data may lie, inside of the folder or in the
    one that the model's link leads to (download caches link them), and only regular files are read.
    """
    paths = [source.path for source in sources if source.path is not None]
    written = {str(file.relative_to(folder)) for path in paths for file in (path, data_path(path))}
    copied, left_out = [], []
    files = list(_walk(folder))
    weights = _weights(sources, [file for file in files if file.suffix == MODEL_SUFFIX and file not in paths])
    for file in files:
        place = file.relative_to(folder)
        real = Path(os.path.realpath(file))
        if str(place) in written or real in weights:
            continue
        if _may_be_read(folder, paths, real):
            copied.append((real, place))
        else:
            left_out.append(str(place))
    return OtherFiles(copied, left_out)


def find_genai_config(source: ModelFile) -> GenaiConfig | None:
    """The folder's genai_config.json, made ready for the new model. Raises ModelError."""
    if source.folder is None or source.path is None:
        return None
    path = source.folder / CONFIG_NAME
    real = Path(os.path.realpath(path))
    return read_genai_config(path, source.path.name) if _may_be_read(source.folder, [source.path], real) else None


def copy_others(others: OtherFiles, into: Path, on_file: Callable[[int, int], None]) -> None:
    """Raises OutputError."""
    total = len(others.copied)
    for number, (file, place) in enumerate(others.copied):
        on_file(number, total)
        try:
            (into / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, into / place)
        except OSError as error:
            raise OutputError(f"cannot copy {str(file)!r} beside the new model: {error.strerror or error}") from error
    on_file(total, total)


def _walk(folder: Path) -> Iterator[Path]:
    """All files and links below the folder, in order, but for hidden ones: notes of download tools and git."""

    def fail(error: OSError) -> None:
        raise ModelError(f"{str(error.filename)!r} cannot be read: {error.strerror}") from error

    for root, folders, files in os.walk(folder, onerror=fail):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in links)
        yield from (Path(root, name) for name in sorted([*files, *links]) if not name.startswith("."))


def _may_be_read(folder: Path, models: Sequence[Path], real: Path) -> bool:
    """Whether this is a regular file inside of the folder, or of one that a model's link leads to."""
    roots = [Path(os.path.realpath(folder)), *(Path(os.path.realpath(path)).parent for path in models)]
    try:
        return stat.S_ISREG(os.stat(real).st_mode) and any(real.is_relative_to(root) for root in roots)
    except OSError:
        return False


def _weights(sources: Sequence[ModelFile], other_models: list[Path]) -> set[Path]:
    """The data files that only these models have."""
    weights = {file for source in sources for file in source.data_files}
    for path in other_models:
        with suppress(ModelError):  # what cannot be read is copied as it is
            weights -= set(load_model(path).data_files)
    return weights

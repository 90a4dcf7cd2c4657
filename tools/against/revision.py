"""Check out another revision and build its library in the cache folder."""

from __future__ import annotations

import io
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ortolan.cache_folder import default_cache_dir
from ortolan.errors import OrtolanError
from ortolan.library import LIBRARY_NAME
from ortolan.models.fetch import working_folder

# Build requirements. If they are installed, pip need not fetch them.
_BUILD_MODULES = ("scikit_build_core", "pybind11", "pip")
_NATIVE = ("CMakeLists.txt", "ops", "src")
_LINES_OF_ERROR = 30


def resolve_commit(repository: Path, revision: str) -> str:
    """Return the full hash of a revision.

    Raises:
        OrtolanError: The repository has no such commit.
    """
    return _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()


def find_repository(folder: Path) -> Path:
    """Return the top of the source tree that contains the folder.

    Raises:
        OrtolanError: The folder is not in a source tree of Ortolan.
    """
    top = Path(_git(folder, "rev-parse", "--show-toplevel").strip())
    if not (top / "ops" / "operators.inc").is_file():
        raise OrtolanError(f"{top} is not a source tree of Ortolan; run this in one")
    return top


def describe_tree(repository: Path) -> str:
    """Return the checked-out commit, and whether files differ from it."""
    commit = _git(repository, "rev-parse", "--short=12", "HEAD").strip()
    return f"{commit} with changes" if _git(repository, "status", "--porcelain").strip() else commit


def newer_sources(repository: Path, library: Path) -> list[str]:
    """Return the native sources that changed after the library was built."""
    built = library.stat().st_mtime
    listed = _git(repository, "ls-files", "-co", "--exclude-standard", "--", *_NATIVE).splitlines()
    return [
        name
        for name in listed
        if name.endswith((".cc", ".h", ".inc", ".txt", ".cmake"))
        and (repository / name).is_file()
        and (repository / name).stat().st_mtime > built
    ]


def built_library(repository: Path, commit: str, say: Callable[[str], None], cache: Path | None = None) -> Path:
    """Return the library of a commit; build it if it is not in the cache.

    The folder also contains the commit's Python package, for use with PYTHONPATH.

    Raises:
        OrtolanError: The commit does not build.
    """
    cache = (cache or default_cache_dir()) / "against"
    site = cache / f"{commit[:12]}-{sysconfig.get_config_var('SOABI') or sys.implementation.cache_tag}"
    library = site / "ortolan" / LIBRARY_NAME
    if library.is_file():
        return library
    with working_folder(cache) as work:
        _check_out(repository, commit, work / "source")
        say(f"building {commit[:12]}: this takes minutes, once")
        _build(work)
        if not (work / "site" / "ortolan" / LIBRARY_NAME).is_file():
            raise OrtolanError(f"revision {commit[:12]} was built, but has no {LIBRARY_NAME}")
        if not library.is_file():  # another process may have built it meanwhile
            (work / "site").rename(site)
    return library


def _check_out(repository: Path, commit: str, folder: Path) -> None:
    archive = subprocess.run(["git", "archive", commit], cwd=repository, capture_output=True, check=False)
    if archive.returncode != 0:
        raise OrtolanError(f"git archive {commit[:12]} failed: {archive.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")


def _build(work: Path) -> None:
    """Install work/source into work/site, with the options of an ordinary installation."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if all(find_spec(name) is not None for name in _BUILD_MODULES):
        command.append("--no-build-isolation")
    command += ["--target", str(work / "site"), f"--config-settings=build-dir={work / 'build'}", str(work / "source")]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode != 0:
        last = "\n".join((result.stdout + result.stderr).strip().splitlines()[-_LINES_OF_ERROR:])
        raise OrtolanError(f"the revision does not build (status {result.returncode}):\n{last}")


def _git(folder: Path, *arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        raise OrtolanError("git is not on PATH; install it, or pass the other revision's --library") from None
    if result.returncode != 0:
        reason = result.stderr.strip() or f"nothing found in {folder}"
        raise OrtolanError(f"git {' '.join(arguments)}: {reason}")
    return result.stdout

"""The fenced blocks of README.md and docs/*.md, and how tests run them.

Tests run bash blocks, except lines that install packages, and python blocks. sh blocks, which install software, are not
run. console blocks need servers, other packages or hours; separate tests run them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[str]:
    """Return the names of README.md and the pages in docs/."""
    return ["README.md", *sorted(path.name for path in DOCS.glob("*.md"))]


def blocks(page: str) -> list[tuple[str, str]]:
    """Return (language, code) of each block in page order."""
    path = ROOT / page if page == "README.md" else DOCS / page
    return _BLOCK.findall(path.read_text(encoding="utf-8"))


def run_bash(code: str, folder: Path, **variables: str) -> None:
    """Run each line of a bash block except installations."""
    lines = [line for line in code.splitlines() if not line.startswith(("pip install", "make wheel"))]
    _run(["bash", "-euo", "pipefail", "-c", "\n".join(lines)], code, folder, variables)


def run_python(code: str, folder: Path, **variables: str) -> None:
    """Run the block in a separate process."""
    _run([sys.executable, "-c", code], code, folder, variables)


def _run(command: Sequence[str], code: str, folder: Path, variables: dict[str, str]) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"

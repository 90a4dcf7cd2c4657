"""What the pages of docs/ tell to copy and paste runs: each page in a folder of its own, with small models.

```bash and ```python blocks run, in order; ```sh blocks install packages and do not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .folders import TEXTS, write_bert, write_llama

DOCS = Path(__file__).parents[2] / "docs"
NEEDS = {
    "optimum.md": ["optimum.onnxruntime"],
    "genai.md": ["onnxruntime_genai", "torch", "transformers"],
    "transformers.md": ["transformers.exporters", "torch", "onnxscript"],
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, code) of each fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", NEEDS)
def test_blocks_are_run_or_install(name: str) -> None:
    found = blocks(DOCS / name)
    assert {language for language, _ in found} <= {"sh", "bash", "python"}
    assert any(language == "python" for language, _ in found)
    for language, code in found:
        if language == "sh":
            assert "pip install" in code


@pytest.mark.parametrize("name", NEEDS)
def test_the_page_runs(name: str, tmp_path: Path) -> None:
    for module in NEEDS[name]:
        pytest.importorskip(module)
    write_bert(tmp_path / "bert", "BertForSequenceClassification")
    write_llama(tmp_path / "llama")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 4))
    programs = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    for language, code in blocks(DOCS / name):
        if language == "sh":
            continue
        command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"

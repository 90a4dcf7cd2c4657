"""The code of docs pages about other packages runs with small models.

Each page has its own folder; its blocks run in order, each in a separate process.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ..hooks.folders import WORDS, write_bert, write_llama, write_sentence_encoder, write_t5
from ..hooks.gliner_models import make_gliner
from .other_packages import NEEDS
from .pages import blocks, run_bash, run_python


@pytest.mark.parametrize("name", NEEDS)
def test_blocks_are_run_or_install(name: str) -> None:
    found = blocks(name)
    assert {language for language, _ in found} <= {"sh", "bash", "python"}
    assert any(language == "python" for language, _ in found)
    for language, code in found:
        if language == "sh":
            assert "pip install" in code


@pytest.mark.parametrize("name", NEEDS)
def test_the_page_runs(name: str, tmp_path: Path) -> None:
    for module, version in NEEDS[name].items():
        pytest.importorskip(module, version)
    write_bert(tmp_path / "bert", "BertForSequenceClassification")
    write_llama(tmp_path / "llama")
    write_t5(tmp_path / "t5")
    write_sentence_encoder(tmp_path / "model")
    if name == "gliner.md":
        make_gliner(tmp_path / "backbone", "deberta-v2").save_pretrained(tmp_path / "gliner")
    rng = np.random.default_rng(0)
    (tmp_path / "texts.txt").write_text("\n".join(" ".join(rng.choice(WORDS, 12)) for _ in range(60)))
    run = {"bash": run_bash, "python": run_python}
    for language, code in blocks(name):
        if language != "sh":
            run[language](code, tmp_path, HF_HUB_OFFLINE="1")

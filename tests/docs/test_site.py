"""The menu of the site, and pictures that are made from the code."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from .pages import ROOT

yaml = pytest.importorskip("yaml")

MOST_ENTRIES = 15


class _Loader(yaml.SafeLoader):
    """A loader for mkdocs.yml that ignores its tags for Python names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def _config() -> dict[str, Any]:
    found: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
    return found


def test_the_menu_opens_with_few_entries():
    config = _config()
    assert len(config["nav"]) <= MOST_ENTRIES
    assert not {"navigation.sections", "navigation.expand", "navigation.tabs"} & set(config["theme"]["features"])


def test_the_map_of_the_code_is_current():
    command = [sys.executable, str(ROOT / ".ci" / "code_map.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 120

"""The folders that the hooks' benchmark writes and reuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortolan.benchmarks.hooks import _made


def test_an_interrupted_folder_is_made_anew(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _made(tmp_path / "made", interrupted)

    def whole(folder: Path) -> None:
        folder.mkdir()
        (folder / "whole").touch()

    assert [file.name for file in _made(tmp_path / "made", whole).iterdir()] == ["whole"]
    _made(tmp_path / "made", interrupted)  # is there

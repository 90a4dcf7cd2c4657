"""A model and its data file replace older files, in a process that is killed between two steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ortolan.graph_passes.files.model_file import load_model, move_into_place, write_model

from .small_models import matmul_model, run

# Move a model and its data file in each folder. The process is killed one step later in each folder.
KILLED = """
import os, signal, sys
from pathlib import Path
from ortolan.graph_passes.files.model_file import move_into_place

def counted(call, left):
    def step(*arguments, **options):
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left.pop()
        return call(*arguments, **options)
    return step

for steps, folder in enumerate(map(Path, sys.argv[1:])):
    child = os.fork()
    if child == 0:
        left = [None] * steps
        for name in ("replace", "link", "unlink"):
            setattr(os, name, counted(getattr(os, name), left))
        move_into_place(folder / "work" / "model.onnx", folder / "model.onnx")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print("killed" if os.WIFSIGNALED(status) else "done")
"""
X = np.ones((1, 2, 20), np.float32)
STEPS = 9


def put(path: Path, seed: int, outside: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # 400 x 20 floats: large enough for a data file.
    w = np.random.default_rng(seed).standard_normal((20, 400)).astype(np.float32)
    write_model(load_model(matmul_model(20, 400, weight=w)).model, path, lambda *_: None, 0 if outside else None)


def answer(path: Path) -> np.ndarray:
    load_model(path)  # fails if the model refers to several data files
    return run(str(path), {"x": X})[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize(("old", "new"), [(True, True), (True, False), (False, True)])
def test_the_old_pair_is_there_or_the_new_one(old: bool, new: bool, tmp_path: Path) -> None:
    folders = [tmp_path / str(step) for step in range(STEPS)]
    for folder in folders:
        put(folder / "model.onnx", 1, old)
        put(folder / "work" / "model.onnx", 2, new)
    before, after = answer(folders[0] / "model.onnx"), answer(folders[0] / "work" / "model.onnx")
    command = [sys.executable, "-P", "-c", KILLED, *map(str, folders)]
    ends = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert ends[0] == "killed" and ends[-1] == "done"
    found = [answer(folder / "model.onnx") for folder in folders]
    is_new = [np.array_equal(one, after) for one in found]
    assert all(new or np.array_equal(one, before) for new, one in zip(is_new, found, strict=True))
    assert not is_new[0] and is_new[-1] and is_new == sorted(is_new)
    for folder in folders:  # a later run must clean up
        put(folder / "again" / "model.onnx", 3, new)
        move_into_place(folder / "again" / "model.onnx", folder / "model.onnx")
        expected = ["model.onnx", "model.onnx.data"] if new else ["model.onnx"]
        left = sorted(path.name for path in folder.iterdir() if path.is_file())
        assert left == expected or (not new and old and left[:-1] == expected)
        assert not np.array_equal(answer(folder / "model.onnx"), after)


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    put(tmp_path / "model.onnx", 1, True)
    put(tmp_path / "work" / "model.onnx", 2, True)
    expected = answer(tmp_path / "work" / "model.onnx")
    move_into_place(tmp_path / "work" / "model.onnx", tmp_path / "model.onnx")
    np.testing.assert_array_equal(answer(tmp_path / "model.onnx"), expected)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["model.onnx", "model.onnx.data"]

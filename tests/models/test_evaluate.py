"""The arguments of python -m tools.evaluate."""

import subprocess
import sys

import pytest

from tests.benchmarks.checkout import ENVIRONMENT


@pytest.mark.parametrize(
    ("option", "message"), [(("--text", "none.txt"), "'none.txt'"), (("--variant", "x=none.onnx"), "'x=none.onnx'")]
)
def test_files_must_exist(option, message):
    command = [sys.executable, "-P", "-m", "tools.evaluate", *option]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert f"error: {option[0]}" in result.stderr and message in result.stderr

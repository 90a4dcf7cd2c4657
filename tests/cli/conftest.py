"""Small model files, and helpers that run commands in this process or in a separate one."""

import logging
import subprocess
import sys

import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from ortolan.cli import app
from ortolan.models import tiny


@pytest.fixture(autouse=True)
def quiet_logger():
    """Restore the logger after tests that use option -v."""
    logger = logging.getLogger("ortolan")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def mlp_path(tmp_path):
    path = tmp_path / "mlp.onnx"
    ir.save(tiny.mlp(), path)
    return path


@pytest.fixture
def bert_path(tmp_path):
    path = tmp_path / "bert.onnx"
    ir.save(tiny.tiny_bert(), path)
    return path


@pytest.fixture
def invoke():
    """Return a function that runs a command, such as invoke("optimize", path).

    It returns exit_code, stdout and stderr.
    """
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run_cli(tmp_path):
    """Return a function that runs a command in a separate process with piped output."""

    def run(*arguments, **environment):
        import os

        command = [sys.executable, "-m", "ortolan.cli", *map(str, arguments)]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture
def assert_one_line():
    """Return a function that checks for one error line with all `words`, an empty stdout and no traceback."""

    def check(result, *words):
        code = result.exit_code if hasattr(result, "exit_code") else result.returncode
        assert code == 1, result.stderr
        assert result.stdout == ""
        assert result.stderr.startswith("ortolan: ")
        assert result.stderr.count("\n") == 1, result.stderr
        assert "Traceback" not in result.stderr
        for word in words:
            assert word in result.stderr

    return check

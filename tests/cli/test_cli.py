"""Every command on a small model, its error messages, and its output in a pipe."""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import ortolan
import ortolan.benchmarks
import ortolan.cli
from ortolan.benchmarks.matmul_nbits import make_matmul_nbits
from ortolan.benchmarks.result import BenchOptions, BenchResult
from ortolan.cli_output import progress_lines
from ortolan.generate import Decoder
from ortolan.graph_passes.recipe import Recipe
from ortolan.graph_passes.report import page as report_page
from ortolan.models import tiny


def test_version_and_help_are_quick_and_plain(run_cli):
    version = run_cli("--version")
    assert (version.returncode, version.stdout) == (0, f"ortolan {importlib.metadata.version('ortolan')}\n")
    text = run_cli("--help")
    assert text.returncode == 0
    assert "\x1b" not in text.stdout
    for command in (
        "optimize",
        "search",
        "distill",
        "import",
        "inspect",
        "embed",
        "rerank",
        "serve",
        "chat",
        "generate",
        "bench",
        "doctor",
        "times",
        "demo",
    ):
        assert command in text.stdout


def test_the_help_names_every_preset():
    (recipe,) = (one for one in fields(ortolan.OptimizeOptions) if one.name == "recipe")
    assert [name for name in Recipe.names() if name not in recipe.metadata["option"].help] == []


def test_help_of_optimize_is_whole_at_80_columns(run_cli):
    text = run_cli("optimize", "--help", COLUMNS="80").stdout
    assert "max_error" in text and "\N{HORIZONTAL ELLIPSIS}" not in text


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from ortolan.cli import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        "print([name for name in ('numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'onnxscript') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_wrong_usage_exits_with_2(invoke, mlp_path):
    for arguments in ((), ("optimise",), ("optimize",), ("optimize", mlp_path, "--fast"), ("demo", "--threads", "0")):
        result = invoke(*arguments)
        assert result.exit_code == 2, arguments
        assert "Traceback" not in result.stderr


STEP_BESIDE_A_BAR = """
from ortolan.cli_output import print_step, progress_bar
with progress_bar() as progress:
    progress("stage", 0, 2)
    print_step("a step [of two]")
    progress("stage", 1, 2)
"""


def test_a_step_has_a_line_of_its_own_above_the_progress_bar():
    terminal, end = os.openpty()
    with subprocess.Popen([sys.executable, "-P", "-c", STEP_BESIDE_A_BAR], stderr=end):
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # Linux raises OSError when the other end is closed
            while more := os.read(terminal, 4096):
                shown += more
    os.close(terminal)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    lines = [line.strip() for line in re.split(r"[\r\n]+", plain)]
    assert "a step [of two]" in lines
    assert any("stage" in line and "1/2" in line for line in lines)


# --- import -----------------------------------------------------------------------------------------------------------


def test_import(invoke, tmp_path):
    gguf_file = pytest.importorskip("tests.models.gguf_file")
    gguf_file.write(tmp_path / "model.gguf", table="Q8_0")
    result = invoke("import", tmp_path / "model.gguf", "-o", tmp_path / "folder")
    assert result.exit_code == 0, result.stderr
    words = " ".join(result.stdout.split())
    assert "14 matrices of Q4_1" in words and "in groups of 32, exact" in words
    assert "W4A8MatMul" in {node.op_type for node in onnx.load(tmp_path / "folder/model.onnx").graph.node}
    again = invoke("import", tmp_path / "model.gguf", "-o", tmp_path / "folder", "--json")
    assert again.exit_code == 1
    assert "is not empty" in json.loads(again.stdout)["error"]
    (tmp_path / "model.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:5000])
    short = invoke("import", tmp_path / "model.gguf", "-o", tmp_path / "other")
    assert short.exit_code == 1 and "cannot be read as a GGUF file" in short.stderr
    assert not (tmp_path / "other").exists()


# --- optimize ---------------------------------------------------------------------------------------------------------


def test_optimize_writes_next_to_the_model(run_cli, mlp_path):
    before = mlp_path.read_bytes()
    result = run_cli("optimize", mlp_path, "--weights", "bf16", "--sparsity", "0.5")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "replaced 3 of 3" in result.stdout
    assert "\x1b" not in result.stdout
    session = ortolan.create_session(mlp_path.with_name("mlp.ortolan.onnx"))
    assert session.run(None, {"x": np.ones((2, 24), np.float32)})[0].shape == (2, 16)
    assert mlp_path.read_bytes() == before


COMMANDS_IN_TURN = """
import json, sys
from ortolan import cli
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["ortolan", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
"""


def test_names_that_the_terminal_cannot_show(mlp_path):
    path = str(mlp_path.rename(mlp_path.with_name("gr\N{LATIN SMALL LETTER O WITH DIAERESIS}\N{SNOWMAN}.onnx")))
    commands = [
        ("inspect", path),
        ("optimize", path, "--weights", "bf16", "--dry-run"),
        ("bench", "--help"),
        ("doctor",),
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMANDS_IN_TURN, json.dumps(commands)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    for words in ("Gemm", "would replace", "--sparsity", "onnxruntime"):
        assert words in done.stdout


def test_optimize_takes_output_settings_and_prints_only_json(invoke, bert_path, tmp_path):
    output = tmp_path / "small.onnx"
    result = invoke("optimize", bert_path, "-o", output, "--sparsity", "0.25", "--no-portable", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert output.is_file()
    assert not report["portable"]
    replaced = [layer for layer in report["layers"] if layer["status"] == "replaced"]
    assert replaced
    assert all(layer["sparsity"] == pytest.approx(0.25, abs=0.02) for layer in replaced if layer["k"])


def test_optimize_reads_calibration_data(invoke, mlp_path, tmp_path):
    feeds = tmp_path / "feeds.npz"
    np.savez(feeds, x=np.random.default_rng(0).standard_normal((5, 24), dtype=np.float32))
    result = invoke("optimize", mlp_path, "--weights", "bf16", "--calibration", feeds, "--json")
    assert result.exit_code == 0, result.stderr
    assert "1 given" in json.loads(result.stdout)["feeds"]


def test_optimize_takes_a_prompt(invoke, tmp_path):
    model, prompt, output = (tmp_path / name for name in ("llama.onnx", "ids.npy", "prompted.onnx"))
    ir.save(tiny.tiny_llama(head_dim=16), model)
    np.save(prompt, np.arange(20))
    result = invoke("optimize", model, "-o", output, "--prompt", prompt, "--set", "keys_sparsity=0.4", "--json")
    assert result.exit_code == 0, result.stderr
    assert any("keys 40% and values 50% sparse" in note for note in json.loads(result.stdout)["notes"])
    assert Decoder(ortolan.create_session(output)).prompt_tokens == 20


def test_quiet_prints_nothing_but_json_and_errors(invoke, run_cli, mlp_path, tmp_path):
    done = run_cli("optimize", mlp_path, "--weights", "bf16", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert mlp_path.with_name("mlp.ortolan.onnx").is_file()
    as_json = invoke("optimize", mlp_path, "--weights", "bf16", "--quiet", "--json", "--dry-run")
    assert json.loads(as_json.stdout)["dry_run"]
    failed = invoke("optimize", tmp_path / "none.onnx", "--quiet")
    assert failed.exit_code == 1 and "none.onnx" in failed.stderr


def test_dry_run_writes_nothing(invoke, mlp_path, tmp_path):
    result = invoke("optimize", mlp_path, "--weights", "bf16", "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "would replace" in result.stdout
    assert list(tmp_path.iterdir()) == [mlp_path]


def test_optimize_reads_calibration_texts(invoke, bert_path):
    tokenizers = pytest.importorskip("tokenizers")
    folder = bert_path.parent
    words = tokenizers.models.WordLevel({"[UNK]": 1, "one": 2, "two": 3}, unk_token="[UNK]")
    tokenizers.Tokenizer(words).save(str(folder / "words.json"))
    (folder / "texts.txt").write_text("one\ntwo\n", encoding="utf-8")
    arguments = [
        "optimize",
        bert_path,
        "--weights",
        "int8",
        "--sparsity",
        "0.5",
        "--method",
        "sparsegpt",
        "--set",
        "may_grow=true",
        "--set",
        "verify.seconds=0",
    ]
    texts = ["--calibration", folder / "texts.txt", "--tokenizer", folder / "words.json"]
    result = invoke(*arguments, *texts, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"] == 2
    for given, message in ((texts[:2], "no tokenizer was given"), ((), "needs calibration inputs")):
        result = invoke(*arguments, *given)
        assert result.exit_code == 1 and message in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--recipe", "sparse-encodr"), ("sparse-encodr", "sparse-encoder")),
        (("--weights", "bf16", "--method", "gptq"), ("method", "gptq", "int4")),
        (("--weights", "int4", "--method", "gptq", "--method", "awq"), ("method", "gptq", "awq")),
        (("--group-size", "32"), ("group_size", "int4")),
        (("--pattern", "2:4"), ("sparsity", "0.5")),
        (("--ignore", ""), ("ignore", "target format")),
        (("--recipe", "no/such.toml"), ("no/such.toml",)),
        (("--sparsity", "1.5"), ("sparsity", "1.5")),
        (("--weights", "bf16", "--set", "min_sparsty=0.5"), ("min_sparsty", "min_sparsity")),
        (("--set", "sparsity"), ("sparsity", "=")),
        (("--calibration", "none.npz"), ("none.npz",)),
        (("--prompt", "none.npy"), ("prompt file 'none.npy' does not exist",)),
        (("-o", "no/such/folder/out.onnx"), ("no/such/folder",)),
    ],
)
def test_optimize_refuses_in_one_line(invoke, assert_one_line, mlp_path, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert_one_line(invoke("optimize", mlp_path, *arguments), *words)
    assert list(tmp_path.iterdir()) == [mlp_path]


@pytest.mark.parametrize(
    ("command", "option", "value", "choice"),
    [
        ("optimize", "--weights", "int3", "'bf16'"),
        ("optimize", "--group-size", "48", "'128'"),
        ("optimize", "--method", "obq", "'sparsegpt'"),
        ("optimize", "--pooling", "median", "'lasttoken'"),
        ("inspect", "--precision", "int4", "'float32'"),
        ("inspect", "--claims", "some", "'faster'"),
    ],
)
def test_other_choices_are_wrong_usage(invoke, mlp_path, command, option, value, choice):
    result = invoke(command, mlp_path, option, value)
    assert result.exit_code == 2
    assert option in result.stderr and f"'{value}'" in result.stderr and choice in result.stderr


def test_a_model_that_cannot_be_read_is_refused_in_one_line(invoke, run_cli, assert_one_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_one_line(invoke("optimize", "missing.onnx"), "missing.onnx")
    assert_one_line(invoke("inspect", "missing.onnx"), "missing.onnx")
    (tmp_path / "text.onnx").write_text("not a model [bold]at all")
    assert_one_line(run_cli("optimize", "text.onnx"), "text.onnx")
    assert_one_line(invoke("inspect", "text.onnx"), "text.onnx")


@pytest.mark.parametrize("name", [".", ""])
def test_a_folder_without_a_model(invoke, assert_one_line, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert_one_line(invoke("optimize", name), "folder '.' holds no ONNX file")


@pytest.fixture
def model_folder(tmp_path):
    """A model folder with 4-bit weights and a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    ir.save(tiny.mlp((64, 96, 32), "matmul"), tmp_path / "float.onnx")
    make_matmul_nbits(tmp_path / "float.onnx", folder / "model.onnx", 32, 4)
    (tmp_path / "float.onnx").unlink()
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_folder_becomes_a_folder(invoke, model_folder, tmp_path, monkeypatch):
    result = invoke("optimize", f"{model_folder}/")
    assert result.exit_code == 0, result.stderr
    words = " ".join(result.stdout.split())
    assert "recipe weights as stored" in words and "layers replaced 2 of 2" in words
    assert "2 layers store quantized weights, which are kept exactly" in words and "adopt" not in words
    fast = tmp_path / "model.ortolan"
    assert sorted(path.name for path in fast.iterdir()) == ["model.onnx", "tokenizer.json"]
    assert invoke("optimize", model_folder, "-o", tmp_path / "other").exit_code == 0
    shown = invoke("inspect", tmp_path / "other").stdout
    assert "int4, groups of 32" in shown and "W4A8MatMul" not in shown
    assert "W4A8MatMul" in invoke("inspect", tmp_path / "other", "-v").stdout
    monkeypatch.chdir(model_folder)
    assert invoke("optimize", ".", "--dry-run").exit_code == 0


def test_folders_are_refused_in_one_line(invoke, assert_one_line, model_folder, tmp_path, monkeypatch):
    (tmp_path / "model.ortolan").mkdir()
    (tmp_path / "model.ortolan" / "mine").write_text("x")
    assert_one_line(invoke("optimize", model_folder), "model.ortolan' is not empty")
    assert_one_line(invoke("optimize", model_folder, "-o", model_folder / "fast"), "is inside the input folder")
    monkeypatch.chdir(model_folder)
    assert_one_line(invoke("optimize", "."), "model.ortolan' is not empty")
    monkeypatch.chdir(tmp_path / "model.ortolan")
    assert_one_line(invoke("optimize", ".."), "folder '..' has no name from which to make the output's; give --output")


def test_errors_as_json(invoke, mlp_path):
    for arguments in (("optimize", mlp_path, "--recipe", "none"), ("inspect", "none.onnx"), ("bench", "conv")):
        result = invoke(*arguments, "--json")
        assert result.exit_code == 1
        message = json.loads(result.stdout)["error"]
        assert "none" in message or "conv" in message
        assert result.stderr == f"ortolan: {message}\n"


def test_only_optimize_says_that_nothing_was_written(invoke, mlp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(ortolan, "inspect_onnx", interrupt)
    result = invoke("inspect", mlp_path)
    assert (result.exit_code, result.stderr) == (130, "ortolan: interrupted\n")


def test_long_names_are_not_broken_in_a_pipe(run_cli, tmp_path):
    model = tiny.mlp()
    name = "/encoder" + "/a_long_name" * 20
    next(iter(model.graph.all_nodes())).name = name
    ir.save(model, tmp_path / "long.onnx")
    for arguments in (("inspect", "long.onnx"), ("optimize", "long.onnx", "--weights", "bf16", "--dry-run")):
        assert name in run_cli(*arguments, "-v", COLUMNS="").stdout  # pytest-xdist sets it


def test_python_m_ortolan():
    command = [sys.executable, "-P", "-m", "ortolan", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("ortolan ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_and_exits_with_130(mlp_path, tmp_path, number):
    code = (
        "import time, ortolan, ortolan.cli\n"
        "def slow(*arguments, **options):\n"
        "    print('started', flush=True); time.sleep(60)\n"
        "ortolan.optimize_onnx = slow\n"
        "ortolan.cli.main()\n"
    )
    command = [sys.executable, "-P", "-c", code, "optimize", str(mlp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"
        time.sleep(0.1)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stdout) == (130, "")
    assert stderr == "ortolan: interrupted, nothing was written\n"
    assert list(tmp_path.iterdir()) == [mlp_path]


def test_without_a_terminal_long_work_prints_a_line_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("ortolan.cli_output.time.monotonic", lambda: now[0])
    tell = progress_lines()
    for second in range(60):
        now[0] = second
        tell("timing layers", second, 60)
    tell("verifying", 0, 0)
    now[0] = 80
    tell("verifying", 0, 0)
    assert capsys.readouterr().err == "timing layers: 10 of 60\ntiming layers: 40 of 60\nverifying\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_sees_a_progress_bar(mlp_path):
    import pty

    parent, child = pty.openpty()
    command = [sys.executable, "-P", "-m", "ortolan.cli", "optimize", str(mlp_path), "--weights", "bf16"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=child, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(child)
        seen = b""
        try:
            while chunk := os.read(parent, 65536):
                seen += chunk
        except OSError:  # Linux raises OSError when the other end is closed
            pass
        process.communicate(timeout=300)
    os.close(parent)
    assert process.returncode == 0
    assert b"\x1b" in seen


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_prints_a_table_or_json(invoke, mlp_path):
    result = invoke("inspect", mlp_path)
    assert result.exit_code == 0, result.stderr
    assert "Gemm" in result.stdout
    result = invoke("inspect", mlp_path, "--json")
    assert isinstance(json.loads(result.stdout), dict)


def test_inspect_knows_an_optimized_model(invoke, mlp_path):
    assert invoke("optimize", mlp_path, "--weights", "bf16").exit_code == 0
    result = invoke("inspect", mlp_path.with_name("mlp.ortolan.onnx"))
    assert result.exit_code == 0, result.stderr
    assert "bf16" in result.stdout and "SparseAMXMatMul" not in result.stdout
    assert "SparseAMXMatMul" in invoke("inspect", mlp_path.with_name("mlp.ortolan.onnx"), "-v").stdout


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_models(invoke, bert_path, kind):
    arguments = ("optimize", bert_path, "--weights", kind, "--sparsity", "0.5", "--set", "seconds=0")
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert "replaced 16 of 16" in result.stdout and kind in result.stdout
    details = invoke(*arguments, "-v").stdout
    assert "2 gelu" in details and "4 residual" in details and "/encoder/layer.0/attention/self/query" in details
    optimized = bert_path.with_name("bert.ortolan.onnx")
    shown = invoke("inspect", optimized)
    assert shown.exit_code == 0, shown.stderr
    assert f"bitmap + {kind}" in shown.stdout and "gelu" in shown.stdout and "residual" in shown.stdout
    table = json.loads(invoke("inspect", optimized, "--json").stdout)
    assert table["optimized"] == f"weights={kind}, sparsity=0.5"
    assert sum(layer["fused"] == ["gelu"] for layer in table["linears"]) == 2


@pytest.mark.parametrize("change", ["quantize.group_size=48", "bits=5"])
def test_quantization_that_there_is_none_of(invoke, assert_one_line, mlp_path, change):
    result = invoke("optimize", mlp_path, "--weights", "int4", "--sparsity", "0.5", "--set", change)
    assert_one_line(result, "quantize", change.partition("=")[0].rpartition(".")[2])
    assert not mlp_path.with_name("mlp.ortolan.onnx").exists()


# --- bench ------------------------------------------------------------------------------------------------------------


class FakeResult:
    def __init__(self, interrupted=False):
        self.interrupted = interrupted

    def to_json(self):
        return '{"rows": []}'

    def __rich__(self):
        return "a table"


@pytest.fixture
def fake_benchmark(monkeypatch):
    """Replace the benchmark, and return the list of options that it was called with."""
    calls = []

    def run(options, progress):
        progress("measure", 1, 2)
        calls.append(options)
        return FakeResult()

    monkeypatch.setattr(ortolan.benchmarks, "BENCHMARKS", {"sparse_amx_matmul": run})
    return calls


@pytest.mark.parametrize("name", ["sparse_amx_matmul", "SparseAMXMatMul", "sparse-amx-matmul"])
def test_bench_finds_the_benchmark(invoke, fake_benchmark, name):
    assert invoke("bench", name).stdout == "a table\n"
    assert fake_benchmark == [BenchOptions()]


def test_bench_prints_its_tables(invoke, monkeypatch):
    result = BenchResult(notes=["one note"])
    monkeypatch.setattr(ortolan.benchmarks, "BENCHMARKS", {"sparse_amx_matmul": lambda options, progress: result})
    done = invoke("bench", "sparse_amx_matmul")
    assert done.exit_code == 0 and "one note" in done.stdout


def test_bench_passes_its_options_on(invoke, fake_benchmark):
    arguments = ("--threads", "1,4", "--quick", "--shape", "1x64x32", "--shape", "16x8x8",
                 "--sparsity", "0.5", "--sparsity", "0.7")  # fmt: skip
    result = invoke("bench", "sparse_amx_matmul", "--json", *arguments)
    assert json.loads(result.stdout) == {"rows": []}
    assert fake_benchmark == [BenchOptions((1, 4), True, ((1, 64, 32), (16, 8, 8)), (0.5, 0.7))]


def test_bench_takes_layers_by_name(invoke, fake_benchmark):
    arguments = ("--shape", "q,up", "--shape", "DOWN", "--batch", "1,16", "--kind", "int8,INT4", "--group-size", "64")
    assert invoke("bench", "sparse_amx_matmul", *arguments).exit_code == 0
    layers = ("q", "up", "down")
    assert fake_benchmark == [BenchOptions(layers=layers, batch=(1, 16), kinds=("int8", "int4"), group_size=64)]
    assert invoke("bench", "sparse_amx_matmul", "--shape", "v", "--shape", "2x3x4", "--batch", "8").exit_code == 0
    assert fake_benchmark[1] == BenchOptions(cases=((2, 3, 4),), layers=("v",), batch=(8,))


def test_bench_takes_models_by_name(invoke, fake_benchmark):
    shapes = ["--shape", "SmolLM2:down", "--shape", "minilm", "--shape", "llama:up"]
    assert invoke("bench", "sparse_amx_matmul", *shapes).exit_code == 0
    layers = ("smollm2:down", *(f"minilm:{name}" for name in ("q", "k", "v", "o", "ffn_up", "ffn_down")), "up")
    assert fake_benchmark == [BenchOptions(layers=layers)]
    text = " ".join(invoke("bench", "sparse_amx_matmul", "--shape", "minilm:up").stderr.replace("│", "").split())
    for words in ("'minilm:up' is not a layer", "minilm:ffn_up", "(llama, smollm2, minilm)", "1x4096x14336"):
        assert words in text


def test_an_interrupted_bench_prints_what_it_has(invoke, monkeypatch):
    interrupted = {"sparse_amx_matmul": lambda options, progress: FakeResult(interrupted=True)}
    monkeypatch.setattr(ortolan.benchmarks, "BENCHMARKS", interrupted)
    result = invoke("bench", "sparse_amx_matmul")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "a table\n", "ortolan: interrupted\n")


def shared(path):
    document = json.loads(path.read_text())
    assert document["cpu"] == ortolan.cpu_info()
    assert document["cpu_model"].keys() == (
        {"family", "model", "stepping"} if (sys.platform, platform.machine()) == ("linux", "x86_64") else set()
    )
    assert document["versions"]["ortolan"] == ortolan.__version__
    assert (document["machine"], document["cores"]) == (platform.machine(), os.cpu_count())
    return document["benchmarks"]


def test_bench_shares_one_operator(invoke, tmp_path):
    path = tmp_path / "mine.json"
    result = invoke("bench", "lut_post_op", "--quick", "--threads", "1", "--share", path, "--json")
    assert json.loads(result.stdout) == json.loads(path.read_text())
    (name, measured), *others = shared(path).items()
    assert (name, others, measured["interrupted"]) == ("lut_post_op", [], False)
    assert "cpu" not in measured
    assert {row["op"] for row in measured["rows"]} == {"LutPostOp"}
    assert all(row["ours_ms"] > 0 and row["peer_ms"] > 0 for row in measured["rows"])


def test_bench_shares_every_operator_but_no_whole_models(invoke, monkeypatch, tmp_path):
    calls = []

    def run(name):
        return lambda options, progress: calls.append((name, options.quick)) or FakeResult(name == "nomad_attention")

    names = list(ortolan.benchmarks.BENCHMARKS)
    monkeypatch.setattr(ortolan.benchmarks, "BENCHMARKS", {name: run(name) for name in names})
    result = invoke("bench", "--share", tmp_path / "all.json")
    operators = [name for name in names if name not in ("auto", "zoo")]
    assert operators[-1] == "nomad_attention"  # the run was interrupted, and earlier measurements are kept
    assert (calls, result.exit_code) == ([(name, True) for name in operators], 130)
    assert shared(tmp_path / "all.json") == {name: {"rows": []} for name in operators}


def test_bench_shares_nothing_where_it_cannot_write(invoke, assert_one_line, fake_benchmark, tmp_path):
    assert_one_line(
        invoke("bench", "--share", tmp_path / "none" / "mine.json"), "does not exist; create it first", "mine.json"
    )
    assert fake_benchmark == []


def test_bench_names_the_kinds_it_knows(invoke, assert_one_line):
    assert_one_line(invoke("bench", "sparse_amx_matmul", "--kind", "fp8"), "'fp8'", "bf16, int8, int4")
    assert_one_line(
        invoke("bench", "w4a8_matmul", "--kind", "int8"), "'int8'", "symmetric, zero_points, fractions, minimums"
    )


def test_bench_without_enough_memory(invoke, assert_one_line):
    shape = "1x9000000x9000000"
    assert_one_line(
        invoke("bench", "sparse_amx_matmul", "--shape", shape, "--quick", "--kind", "bf16"),
        "not enough memory",
        "smaller",
    )


def test_an_interrupt_of_the_first_imports_has_no_traceback(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, "-c", "import sys; sys.path.insert(0, '.'); import ortolan.cli"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (result.returncode, result.stderr) == (130, "")


def test_an_interrupt_before_the_command_has_no_traceback(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(ortolan.cli, "app", interrupt)
    with pytest.raises(SystemExit, match="130"):
        ortolan.cli.main()


def test_bench_lists_what_it_knows(invoke, fake_benchmark, assert_one_line):
    assert "sparse_amx_matmul" in invoke("bench").stdout
    assert_one_line(invoke("bench", "conv"), "'conv'", "sparse_amx_matmul")
    assert fake_benchmark == []


@pytest.mark.parametrize(
    "arguments",
    [("--threads", "0"), ("--threads", "1,,2"), ("--threads", "two"), ("--shape", "1x2"), ("--shape", "1x0x3"),
     ("--shape", "axbxc"), ("--shape", "qkv"), ("--shape", ""), ("--batch", "0"), ("--batch", "1;2"),
     ("--batch", "2", "--shape", "1x2x3"), ("--sparsity", "1.5"), ("--sparsity", "half"), ("--sparsity", "nan")],
)  # fmt: skip
def test_bench_refuses_wrong_options(invoke, fake_benchmark, arguments):
    result = invoke("bench", "sparse_amx_matmul", *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
    assert fake_benchmark == []


def test_optimize_takes_a_form(invoke, monkeypatch):
    given = {}
    monkeypatch.setattr(ortolan, "optimize_onnx", lambda model, output, chosen: given.update(vars(chosen)) or "done")
    arguments = "--weights int4 --group-size 32 --sparsity 0.5 --pattern 2:4 --method wanda --method gptq --cache codes"
    assert invoke("optimize", "model.onnx", *arguments.split(), "--ignore", "heads", "--ignore", "a*").exit_code == 0
    form = {"weights": "int4", "group_size": 32, "sparsity": 0.5, "pattern": "2:4", "method": ["wanda", "gptq"]}
    form |= {"cache": "codes", "ignore": ["heads", "a*"]}
    assert {name: given[name] for name in form} == form
    given.clear()
    assert invoke("optimize", "model.onnx", "--weights", "int4", "--ignore", "").exit_code == 0
    assert given["ignore"] == [] and given["method"] is None


def test_search_takes_a_budget_and_shapes(invoke, assert_one_line, monkeypatch, tmp_path):
    given = {}
    found = ortolan.Recipe.of(weights="int8")
    monkeypatch.setattr(ortolan, "search", lambda *_, **arguments: given.update(arguments) or found)
    arguments = ["search", "model.onnx", "--budget", "0.98", "--shape", "1x128", "--shape", "2X16", "--sparsity", "0.5"]
    result = invoke(*arguments)
    assert result.exit_code == 0 and ortolan.Recipe.from_toml(result.stdout) == found
    assert (given["budget"], given["shapes"], given["sparsity"]) == (0.98, [(1, 128), (2, 16)], 0.5)
    assert ortolan.Recipe.from_toml(invoke(*arguments, "--quiet").stdout) == found
    assert invoke(*arguments, "--quiet", "-o", tmp_path / "found.toml").stdout == ""
    result = invoke(*arguments, "-o", tmp_path / "found.toml", "--json")
    assert json.loads(result.stdout) == found.to_dict() and ortolan.Recipe.load(tmp_path / "found.toml") == found
    assert_one_line(invoke(*arguments, "-o", tmp_path / "no" / "found.toml"), "no/found.toml", "does not exist")
    wrong = invoke("search", "model.onnx", "--shape", "1x0")
    assert wrong.exit_code == 2
    assert "BATCHxTOKENS" in wrong.output


def test_optimize_writes_an_html_report(invoke, monkeypatch, tmp_path):
    model, page = tmp_path / "model.onnx", tmp_path / "report.html"
    ir.save(tiny.mlp(), model)
    result = invoke("optimize", str(model), "--recipe", "int4", "--html", str(page), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["recipe"]["name"] == "int4"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    monkeypatch.setattr(report_page, "find_spec", lambda name: None)
    monkeypatch.setattr(ortolan, "optimize_onnx", lambda *_, **__: pytest.fail("it began without the packages"))
    missing = invoke("optimize", str(model), "--html", str(page))
    assert missing.exit_code == 1
    assert "pip install jinja2 matplotlib" in missing.output

"""The command line: `ortolan optimize | search | distill | import | inspect | embed | rerank | bench | doctor | demo |
triton`. It only calls the API.

Tables and JSON go to stdout; progress and errors go to stderr. Imports wait until a command needs them, so that
`ortolan --help` is quick.
"""

from __future__ import annotations

import sys

try:
    import json
    from collections.abc import Callable, Iterable
    from io import TextIOWrapper
    from pathlib import Path
    from typing import TYPE_CHECKING, Annotated, Any

    import typer
    from typer.core import TyperGroup

    from . import cli_options as options
    from . import cli_texts
    from .cli_output import print_error, print_result, print_step, progress_bar, text_width
    from .errors import OrtolanError
except KeyboardInterrupt:  # no command runs yet that could tell
    sys.exit(130)

if TYPE_CHECKING:
    from .benchmarks.result import BenchResult

_INTERRUPTED = {  # what an interrupt of a command leaves
    "optimize": ", nothing was written",
    "import": ", nothing was written",
    "search": ", nothing was written",
    "embed": ", nothing was written",
    "distill": "; the same command goes on from the last checkpoint",
}


class _Commands(TyperGroup):
    """Turns what a command raises on purpose into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (OrtolanError, MemoryError) as error:
            message = str(error)
            if isinstance(error, MemoryError):
                message = f"not enough memory: {message}; try a smaller model or shape"
            print_error(message)
            if ctx.meta.get(options.AS_JSON):
                typer.echo(json.dumps({"error": message}))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            print_error("interrupted" + (_INTERRUPTED.get(ctx.invoked_subcommand or "", "")))
            raise typer.Exit(130) from None


app = typer.Typer(
    name="ortolan",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The entry point `ortolan`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # The name of a file or a layer may hold letters that a C locale has not.
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except KeyboardInterrupt:  # before the command began
        sys.exit(130)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"ortolan {version('ortolan')}")
        raise typer.Exit()


@app.callback()
def ortolan(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Make transformer ONNX models smaller and faster on CPUs, inside stock ONNX Runtime."""


@app.command()
def optimize(
    model: options.Model,
    output: options.Output = None,
    recipe: options.RecipeName = None,
    weights: options.Weights = None,
    group_size: options.GroupSize = None,
    sparsity: options.Sparsity = None,
    pattern: options.Pattern = None,
    method: options.Method = None,
    cache: options.Cache = None,
    ignore: options.Ignore = None,
    budget: options.BitBudget = None,
    calibration: options.Calibration = None,
    tokenizer: options.Tokenizer = None,
    prompt: options.Prompt = None,
    texts_in: options.TextsIn = False,
    pooling: options.Pooling = None,
    normalize: options.Normalize = None,
    max_tokens: options.MaxTokens = None,
    prompt_name: options.PromptName = None,
    activation: options.Activation = None,
    settings: options.Settings = None,
    portable: options.Portable = True,
    allow_different: options.AllowDifferent = False,
    threads: options.TimingThreads = None,
    dry_run: options.DryRun = False,
    html: options.Html = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Write a smaller, faster copy of a model, and report what changed."""
    from ortolan.graph_passes.recipe import parse_setting
    from ortolan.graph_passes.report.page import check_place, require_packages

    from . import optimize_onnx

    if html is not None:
        require_packages()
        check_place(html)
    with progress_bar(verbose, quiet) as progress:
        report = optimize_onnx(
            model,
            _output_beside(model) if output is None and not dry_run else output,
            recipe=recipe,
            **options.form(weights, group_size, sparsity, pattern, method, cache, ignore),
            budget=budget,
            calibration=calibration,
            tokenizer=tokenizer,
            prompt=prompt,
            texts_in=options.texts_in(
                texts_in,
                pooling=pooling,
                normalize=normalize,
                max_tokens=max_tokens,
                prompt_name=prompt_name,
                activation=activation,
            ),
            options=dict(map(parse_setting, settings or [])),
            portable=portable,
            allow_different=allow_different,
            threads=threads,
            dry_run=dry_run,
            progress=progress,
        )
    if html is not None:
        report.save_html(html)
    if as_json or not quiet:
        print_result(report, as_json, verbose)


@app.command()
def search(
    model: options.Model,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.toml", help="Where to write the recipe; without it, it is shown."),
    ] = None,
    budget: options.Budget = None,
    shape: options.Shapes = None,
    sparsity: options.Sparsity = None,
    calibration: options.Calibration = None,
    tokenizer: options.Tokenizer = None,
    portable: options.Portable = True,
    threads: options.TimingThreads = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Find, by measurement, the recipe that makes a model fastest here; optimize takes it (--recipe FILE.toml)."""
    from ortolan.graph_passes.report.lines import lay_out

    from . import search as run

    if output is not None and not output.absolute().parent.is_dir():
        raise OrtolanError(f"cannot write {str(output)!r}: its folder does not exist")
    with progress_bar(verbose, quiet) as progress:
        found = run(
            model,
            budget=budget,
            shapes=[_read_batch_tokens(text) for text in shape] if shape else None,
            sparsity=sparsity,
            calibration=calibration,
            tokenizer=tokenizer,
            portable=portable,
            threads=threads,
            progress=progress,
        )
    if output is not None:
        _write_text(output, found.to_toml())
    if as_json:
        return typer.echo(json.dumps(found.to_dict(), indent=2))
    if found.search is not None and not quiet:
        facts = found.search.facts() + (found.search.trial_facts() if verbose else [])
        typer.echo(lay_out(facts, text_width()))
    if output is None:
        typer.echo(f"\n{found.to_toml()}" if not quiet else found.to_toml())


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OrtolanError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _check_writable(path: Path) -> None:
    """Leaves what is in it."""
    try:
        path.open("a").close()
    except OSError as error:
        raise OrtolanError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _read_batch_tokens(text: str) -> tuple[int, int]:
    numbers = text.lower().split("x")
    if len(numbers) != 2 or not all(part.isdecimal() and int(part) > 0 for part in numbers):
        raise typer.BadParameter(f"{text!r} is not of the form BATCHxTOKENS, as in 1x128", param_hint="--shape")
    return int(numbers[0]), int(numbers[1])


def _output_beside(model: Path) -> Path:
    if not model.is_dir():
        return model.with_name(f"{model.stem}.ortolan.onnx")
    folder = model.absolute()
    if not folder.name or model.name == "..":
        raise OrtolanError(f"folder {str(model)!r} has no name to call the new one after; give --output")
    return folder.with_name(f"{folder.name}.ortolan")


@app.command()
def distill(
    model: options.Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write the sparse model.")],
    texts: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="A .txt file of one text a line, like those to come. Repeatable."),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The model's tokenizer.json. Without it: the one beside MODEL."),
    ] = None,
    sparsity: Annotated[float, typer.Option(help="The share of blocks that go, of each layer.")] = 0.8,
    pattern: Annotated[str, typer.Option(help="4x1, blocks of four outputs, or unstructured.")] = "4x1",
    steps: Annotated[int, typer.Option(help="How often weights are changed.")] = 5000,
    batch_tokens: Annotated[int, typer.Option(help="Tokens that one step learns from.")] = 1024,
    max_tokens: Annotated[int, typer.Option(help="Longer texts are cut to pieces of so many tokens.")] = 64,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 5e-4,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The state of the training. Without it: OUTPUT.checkpoint."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Go on from the checkpoint, if any.")] = True,
    score: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Sentence pairs as in sts-dev.csv, to measure Spearman's correlation on while it learns.",
        ),
    ] = None,
    score_every: Annotated[
        int | None, typer.Option(help="Steps between scores; a twentieth of all unless told.")
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Make an encoder sparse and teach it, on texts alone, to give what it gave (needs the extra train)."""
    from ortolan.graph_passes.text.texts import read_texts

    from .train import distill as run

    evaluate = None if score is None else _sts_score(score, tokenizer, model)
    with progress_bar(quiet=quiet) as progress:
        report = run(
            model,
            output,
            texts=[text for path in texts for text in read_texts(path)],
            tokenizer=tokenizer,
            sparsity=sparsity,
            pattern=pattern,
            steps=steps,
            batch_tokens=batch_tokens,
            max_tokens=max_tokens,
            rate=rate,
            checkpoint=checkpoint,
            resume=resume,
            evaluate=evaluate,
            evaluate_every=score_every,
            progress=progress,
            tell=None if quiet else lambda point: print_step(str(point)),
        )
    if as_json or not quiet:
        print_result(report, as_json)


def _sts_score(pairs: Path, tokenizer: Path | None, model: Path) -> Callable[[Path], float]:
    """Spearman's correlation of a model file on sentence pairs."""
    from ortolan.graph_passes.text.texts import find_tokenizer

    from . import create_session
    from .embedding import spearman_on_sts
    from .text_encoder import TextEncoder

    found = tokenizer or find_tokenizer(model)
    if found is None:
        raise OrtolanError("--score needs the model's tokenizer.json; give --tokenizer")
    return lambda path: spearman_on_sts(TextEncoder(create_session(path), found), pairs)


@app.command("import")
def import_(
    model: Annotated[Path, typer.Argument(metavar="MODEL.gguf", help="A GGUF file of a Llama-like decoder.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="The new folder.")],
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Make a folder for onnxruntime-genai and Optimum of a GGUF file, its numbers as they are (extra decoder)."""
    from . import import_gguf

    with progress_bar(verbose, quiet) as progress:
        report = import_gguf(model, output, progress=progress)
    if as_json or not quiet:
        print_result(report, as_json, verbose)


@app.command()
def inspect(
    model: options.Model,
    provider: Annotated[
        bool, typer.Option("--provider", help="Show what the execution provider takes of it, and why not the rest.")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="With --provider: what layers of floats become: float32 (they stay), bf16 or int8.")
    ] = "float32",
    claims: Annotated[
        str, typer.Option(help="With --provider: faster (than ONNX Runtime on this CPU), or all that is known.")
    ] = "faster",
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
) -> None:
    """Show what a model holds: its layers, and which of them Ortolan has optimized."""
    from . import inspect_onnx, inspect_provider
    from .provider import checked_options

    if not provider:
        if (precision, claims) != ("float32", "faster"):
            raise typer.BadParameter("it is for --provider", param_hint="--precision, --claims")
        return print_result(inspect_onnx(model), as_json, verbose)
    try:
        checked_options(precision, claims)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--precision, --claims") from error
    print_result(inspect_provider(model, precision=precision, claims=claims), as_json)  # type: ignore[arg-type]


app.command()(cli_texts.embed)
app.command()(cli_texts.rerank)


@app.command()
def bench(
    op: Annotated[
        str | None, typer.Argument(metavar="OP", help="The operator; without one, the known ones are listed.")
    ] = None,
    threads: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of threads.")] = "1,2",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and runs.")] = False,
    shape: options.BenchShapes = None,
    batch: Annotated[
        str | None, typer.Option(metavar="M,M,...", help="Rows of input to measure the named layers with.")
    ] = None,
    sparsity: Annotated[str | None, typer.Option(metavar="S,S,...", help="Shares of zeros in the weights.")] = None,
    kind: options.BenchKinds = None,
    group_size: Annotated[int | None, typer.Option(help="int4 weights to a scale: 32, 64 or 128.")] = None,
    share: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write CPU, features, versions, times as JSON, for an issue. Without OP: every operator, --quick.",
        ),
    ] = None,
    device: options.BenchDevice = None,
    as_json: options.AsJson = False,
) -> None:
    """Time an operator of Ortolan, or the search on whole models, side by side with ONNX Runtime's own."""
    from .benchmarks import BENCHMARKS, OF_WHOLE_MODELS

    known = ", ".join(sorted(BENCHMARKS)) or "none"
    if op is not None:
        name = _find_benchmark(BENCHMARKS, op)
        if name is None:
            raise OrtolanError(f"there is no benchmark for {op!r}; known operators: {known}")
        names = [name]
    elif share is not None:
        names = [name for name in BENCHMARKS if name not in OF_WHOLE_MODELS]
    else:
        typer.echo(f"known operators: {known}")
        return

    from .benchmarks.result import BenchOptions
    from .benchmarks.share import share_json

    if device is not None and (device != "opencl" or names != ["w4a8_matmul"]):
        raise typer.BadParameter("the one device is opencl, of w4a8_matmul", param_hint="--device")
    layers, cases = _read_shapes(shape or [])
    if batch is not None and cases and not layers:
        raise typer.BadParameter(
            "the given shapes have their own rows, as M of MxKxN; --batch is for named layers", param_hint="--batch"
        )
    chosen = BenchOptions(
        threads=_read_numbers(threads, "--threads"),
        quick=quick or op is None,
        cases=cases or None,
        sparsity=_read_shares(sparsity) if sparsity is not None else None,
        layers=layers or None,
        batch=_read_numbers(batch, "--batch") if batch is not None else None,
        kinds=tuple(part.strip().lower() for part in kind.split(",")) if kind is not None else None,
        group_size=group_size,
        device=device,
    )
    if share is not None:
        _check_writable(share)  # it shows before minutes of measurements
    results: dict[str, BenchResult] = {}
    for name in names:
        with progress_bar() as progress:
            results[name] = BENCHMARKS[name](chosen, progress)
        if share is not None:
            _write_text(share, share_json(results))
        if share is None or not as_json:
            print_result(results[name], as_json)
        if results[name].interrupted:
            raise KeyboardInterrupt
    if share is not None:
        typer.echo(share_json(results) if as_json else f"written to {share}: attach it to an issue")


@app.command()
def triton(
    model: options.Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The model repository, a folder; created if it is not there.")
    ],
    name: Annotated[str | None, typer.Option(help="The model's name. Without it: the file's.")] = None,
    max_batch_size: Annotated[int, typer.Option(min=0, help="Requests that are joined to one batch at most.")] = 8,
    instances: Annotated[int, typer.Option(min=1, help="Copies of the model that run at the same time.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each instance.")] = None,
    path_on_server: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Where the server finds the repository, as /models. Without it: --output."),
    ] = None,
    extensions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For a model with a tokenizer: a libortextensions.so that needs no Python."),
    ] = None,
) -> None:
    """Write a model repository for NVIDIA's Triton Inference Server."""
    from .triton import write_repository

    folder = write_repository(
        model,
        output,
        name=name,
        max_batch_size=max_batch_size,
        instances=instances,
        threads=threads,
        path_on_server=path_on_server,
        extensions=extensions,
    )
    typer.echo(str(folder))


@app.command()
def doctor(as_json: options.AsJson = False) -> None:
    """Check that everything Ortolan needs works here, and say what to do where it does not."""
    from .doctor import run_doctor

    report = run_doctor()
    print_result(report, as_json)
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def demo(
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of ONNX Runtime, for all models; as many as it takes by itself.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Optimize all-MiniLM-L6-v2 (fetched once, 90 MB); compare it with the original and with dynamic int8."""
    from .demo import run_demo

    with progress_bar() as progress:
        result = run_demo(threads, progress=progress, say=print_step)
    print_result(result, as_json)


def _find_benchmark(names: Iterable[str], op: str) -> str | None:
    """By op type or room name, in any case: SparseAMXMatMul is sparse_amx_matmul."""

    def plain(name: str) -> str:
        return name.replace("_", "").replace("-", "").lower()

    return next((name for name in names if plain(name) == plain(op)), None)


def _read_numbers(text: str, option: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers from 1, as in 1,2", param_hint=option)
    return tuple(map(int, parts))


def _read_shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(map(float, text.split(",")))
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers from 0 to 1, as in 0.5,0.7", param_hint="--sparsity"
        )
    return shares


def _read_shapes(texts: list[str]) -> tuple[tuple[str, ...], tuple[tuple[int, int, int], ...]]:
    """Names of layers, and (m, k, n) triples."""
    from .benchmarks.shapes import LAYERS, MODELS, find_layers

    layers: list[str] = []
    cases = []
    for text in (part.strip().lower() for item in texts for part in item.split(",")):
        numbers = text.split("x")
        if found := find_layers(text):
            layers += found
        elif len(numbers) == 3 and all(part.isdecimal() and int(part) > 0 for part in numbers):
            m, k, n = map(int, numbers)
            cases.append((m, k, n))
        else:
            raise typer.BadParameter(
                f"{text!r} is neither a layer ({', '.join(LAYERS)}), nor a model with all its layers "
                f"({', '.join(MODELS)}), nor of the form MxKxN, as in 1x4096x14336",
                param_hint="--shape",
            )
    return tuple(layers), tuple(cases)


if __name__ == "__main__":
    main()

"""The command line. It only calls the Python API.

Results go to stdout, progress and errors to stderr. Imports wait until a command needs them, because `ortolan --help`
must be quick.
"""

from __future__ import annotations

import sys

try:
    import json
    import signal
    from collections.abc import Callable, Iterable, Sequence
    from io import TextIOWrapper
    from pathlib import Path
    from typing import TYPE_CHECKING, Annotated, Any

    import typer
    from typer.core import TyperGroup

    from . import cli_options as options
    from . import cli_serve, cli_texts
    from .cli_output import print_error, print_result, print_step, progress_bar, text_width
    from .errors import OrtolanError
except KeyboardInterrupt:  # interrupted during imports, before a command could report it
    sys.exit(130)

if TYPE_CHECKING:
    from .benchmarks.result import BenchResult

_INTERRUPTED = {  # maps a command to the end of the message after an interrupt
    "optimize": ", nothing was written",
    "import": ", nothing was written",
    "search": ", nothing was written",
    "embed": ", nothing was written",
    "distill": "; the same command continues from the last checkpoint",
}


class _Commands(TyperGroup):
    """A command group that turns errors of Ortolan into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
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
        except typer.BadParameter as error:
            error.message = _plain(error.message)
            raise
        except KeyboardInterrupt:
            print_error("interrupted" + (_INTERRUPTED.get(ctx.invoked_subcommand or "", "")))
            raise typer.Exit(130) from None


def _plain(message: str) -> str:
    """Return an error of an option without the wording of pydantic, with which new versions of typer check values."""
    message = message.removeprefix("Value error, ").partition(", unable to parse string")[0]
    return message.replace("Input should be", "expected")


app = typer.Typer(
    name="ortolan",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; the entry point `ortolan`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Names of files and layers may have characters that a C locale cannot print.
            stream.reconfigure(errors="backslashreplace")
    # Containers, systemd and `timeout` end a program by SIGTERM. It leaves no files, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except KeyboardInterrupt:  # interrupted before the command began
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
@options.with_optimize_options
def optimize(
    model: options.Model,
    output: options.Output = None,
    *,
    pooling: options.Pooling = None,
    normalize: options.Normalize = None,
    max_tokens: options.MaxTokens = None,
    prompt_name: options.PromptName = None,
    activation: options.Activation = None,
    html: options.Html = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
    **given: Any,
) -> None:
    """Write a smaller, faster copy of a model, and report what changed."""
    from ortolan.graph_passes.files.output import check_file
    from ortolan.graph_passes.report.page import require_packages

    from . import optimize_onnx
    from .optimize_options import from_command_line

    if html is not None:
        require_packages()
        check_file(html)
    given["texts_in"] = options.text_input(
        given["texts_in"],
        pooling=pooling,
        normalize=normalize,
        max_tokens=max_tokens,
        prompt_name=prompt_name,
        activation=activation,
    )
    with progress_bar(verbose, quiet) as progress:
        chosen = from_command_line({**given, "progress": progress})
        report = optimize_onnx(
            model, _output_beside(model) if output is None and not chosen.dry_run else output, chosen
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
        typer.Option("--output", "-o", metavar="FILE.toml", help="Where to write the recipe. Default: it is printed."),
    ] = None,
    budget: options.Budget = None,
    max_perplexity_increase: options.MaxPerplexityIncrease = None,
    shape: options.Shapes = None,
    sparsity: options.SearchSparsity = None,
    calibration: options.Calibration = None,
    tokenizer: options.Tokenizer = None,
    portable: options.Portable = True,
    reproducible: options.Reproducible = None,
    threads: options.TimingThreads = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Measure which recipe makes a model fastest on this machine; apply it with optimize --recipe FILE.toml."""
    from ortolan.graph_passes.files.output import check_file, write_text
    from ortolan.graph_passes.report.lines import lay_out

    from . import search as run

    if output is not None:
        check_file(output)
    with progress_bar(verbose, quiet) as progress:
        found = run(
            model,
            budget=budget,
            max_perplexity_increase=max_perplexity_increase,
            shapes=[_read_batch_tokens(text) for text in shape] if shape else None,
            sparsity=sparsity,
            calibration=calibration,
            tokenizer=tokenizer,
            portable=portable,
            reproducible=None if reproducible is None else str(reproducible),
            threads=threads,
            progress=progress,
        )
    if output is not None:
        write_text(output, found.to_toml())
    if as_json:
        return typer.echo(json.dumps(found.to_dict(), indent=2))
    if found.search is not None and not quiet:
        facts = found.search.facts() + (found.search.trial_facts() if verbose else [])
        typer.echo(lay_out(facts, text_width()))
    if output is None:
        typer.echo(f"\n{found.to_toml()}" if not quiet else found.to_toml())


def _read_batch_tokens(text: str) -> tuple[int, int]:
    numbers = text.lower().split("x")
    if len(numbers) != 2 or not all(part.isdecimal() and int(part) > 0 for part in numbers):
        raise typer.BadParameter(f"{text!r} is not of the form BATCHxTOKENS, such as 1x128", param_hint="--shape")
    return int(numbers[0]), int(numbers[1])


def _output_beside(model: Path) -> Path:
    if not model.is_dir():
        return model.with_name(f"{model.stem}.ortolan.onnx")
    folder = model.absolute()
    if not folder.name or model.name == "..":
        raise OrtolanError(f"folder {str(model)!r} has no name from which to make the output's; give --output")
    return folder.with_name(f"{folder.name}.ortolan")


@app.command()
def distill(
    model: options.Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write the sparse model.")],
    texts: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="A .txt file with one text a line, like later inputs. Repeatable."),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The model's tokenizer.json. Default: the one beside MODEL."),
    ] = None,
    sparsity: Annotated[float, typer.Option(help="The fraction of zeros in each layer.")] = 0.8,
    pattern: options.DistillPattern = "4x1",
    steps: Annotated[int, typer.Option(help="The number of training steps.")] = 5000,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 1024,
    max_tokens: Annotated[int, typer.Option(help="Split longer texts into pieces of this many tokens.")] = 64,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 5e-4,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to store the state of the training. Default: OUTPUT.checkpoint."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue from the checkpoint, if there is one.")
    ] = True,
    score: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Sentence pairs like sts-dev.csv, to measure Spearman's correlation during training.",
        ),
    ] = None,
    score_every: Annotated[int | None, typer.Option(help="Steps between scores. Default: a twentieth of all.")] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Prune an encoder and train it on texts to return the original's vectors (needs the extra train)."""
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
            pattern=str(pattern),
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
    """Return a function that computes Spearman's correlation of a model file on sentence pairs."""
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
    model: Annotated[Path, typer.Argument(metavar="MODEL.gguf", help="A GGUF file of a decoder like Llama.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="The new folder.")],
    requantize: options.Requantize = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Write the form for `ortolan serve`, for many requests at once.")
    ] = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Convert a GGUF file into a folder for onnxruntime-genai and Optimum, with its exact weights (extra decoder)."""
    from . import import_gguf

    with progress_bar(verbose, quiet) as progress:
        report = import_gguf(model, output, requantize=requantize, serve=serve, progress=progress)
    if as_json or not quiet:
        print_result(report, as_json, verbose)


@app.command()
def inspect(
    model: options.Model,
    provider: Annotated[
        bool, typer.Option("--provider", help="Show which nodes the execution provider claims, and why not the others.")
    ] = False,
    precision: options.Precision = "float32",
    claims: options.Claims = "faster",
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
) -> None:
    """Show the layers of a model, and which of them Ortolan has optimized."""
    from . import inspect_onnx, inspect_provider

    if not provider:
        if (precision, claims) != ("float32", "faster"):
            raise typer.BadParameter("needs --provider", param_hint="--precision, --claims")
        return print_result(inspect_onnx(model), as_json, verbose)
    found = inspect_provider(model, precision=str(precision), claims=str(claims))  # type: ignore[arg-type]
    print_result(found, as_json)


app.command()(cli_texts.embed)
app.command()(cli_texts.rerank)
app.command()(cli_serve.serve)
app.command()(cli_serve.chat)
app.command()(cli_serve.generate)


def _parts(values: Sequence[str] | None) -> list[str]:
    """Return the comma-separated parts of an option that may be given several times."""
    return [part.strip() for value in values or () for part in value.split(",")]


def _read_numbers(values: Sequence[str], option: str) -> tuple[int, ...]:
    parts = _parts(values)
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(
            f"expected positive numbers such as 1,2; found {','.join(values)!r}", param_hint=option
        )
    return tuple(map(int, parts))


def _read_fractions(values: Sequence[str]) -> tuple[float, ...]:
    try:
        fractions = tuple(map(float, _parts(values)))
    except ValueError:
        fractions = (-1.0,)
    if not all(0 <= fraction <= 1 for fraction in fractions):
        raise typer.BadParameter(
            f"expected fractions such as 0.5,0.8; found {','.join(values)!r}", param_hint="--sparsity"
        )
    return fractions


@app.command()
def bench(
    op: Annotated[
        str | None, typer.Argument(metavar="OP", help="The operator. Default: the known operators are listed.")
    ] = None,
    threads: options.BenchThreads = ["1,2"],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and runs.")] = False,
    shape: options.BenchShapes = None,
    batch: options.BenchBatch = None,
    sparsity: options.BenchSparsity = None,
    kind: options.BenchKinds = None,
    group_size: options.BenchGroupSize = None,
    share: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write CPU, features, versions and times as JSON for an issue. Without OP: all operators, --quick.",
        ),
    ] = None,
    device: options.BenchDevice = None,
    as_json: options.AsJson = False,
) -> None:
    """Time an operator of Ortolan, or the search on whole models, against ONNX Runtime."""
    from .benchmarks import BENCHMARKS, OF_WHOLE_MODELS

    known = ", ".join(sorted(BENCHMARKS)) or "none"
    if op is not None:
        name = _find_benchmark(BENCHMARKS, op)
        if name is None:
            raise OrtolanError(f"benchmark {op!r} does not exist; known operators: {known}")
        names = [name]
    elif share is not None:
        names = [name for name in BENCHMARKS if name not in OF_WHOLE_MODELS]
    else:
        typer.echo(f"known operators: {known}")
        return

    from ortolan.graph_passes.files.output import check_file, write_text

    from .benchmarks.result import BenchOptions
    from .benchmarks.share import share_json

    if device is not None and names != ["w4a8_matmul"]:
        raise typer.BadParameter("needs the operator w4a8_matmul", param_hint="--device")
    layers, cases = _read_shapes(_parts(shape))
    if batch is not None and cases and not layers:
        raise typer.BadParameter(
            "applies only to named layers, because shapes MxKxN already contain the rows M", param_hint="--batch"
        )
    chosen = BenchOptions(
        threads=_read_numbers(threads, "--threads"),
        quick=quick or op is None,
        cases=cases or None,
        sparsity=_read_fractions(sparsity) if sparsity else None,
        layers=layers or None,
        batch=_read_numbers(batch, "--batch") if batch else None,
        kinds=tuple(one.lower() for one in _parts(kind)) if kind else None,
        group_size=None if group_size is None else int(group_size),
        device=None if device is None else str(device),
    )
    if share is not None:
        check_file(share)  # fail now rather than after minutes of measurements
    results: dict[str, BenchResult] = {}
    for name in names:
        with progress_bar() as progress:
            results[name] = BENCHMARKS[name](chosen, progress)
        if share is not None:
            write_text(share, share_json(results))
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
        Path, typer.Option("--output", "-o", help="The model repository, a folder; created if it does not exist.")
    ],
    name: Annotated[str | None, typer.Option(help="The model's name. Default: the file's.")] = None,
    max_batch_size: Annotated[int, typer.Option(min=0, help="The largest number of requests in one batch.")] = 8,
    instances: Annotated[int, typer.Option(min=1, help="Copies of the model that run in parallel.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each instance.")] = None,
    path_on_server: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="The path of the repository on the server, such as /models. Default: --output."
        ),
    ] = None,
    extensions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For a model with a tokenizer: a libortextensions.so built without Python."),
    ] = None,
) -> None:
    """Write a model repository for NVIDIA Triton Inference Server."""
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
    """Check that Ortolan works on this machine, and print what to do if a check fails."""
    from .doctor import run_doctor

    report = run_doctor()
    print_result(report, as_json)
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def times(
    clear: Annotated[
        bool, typer.Option("--clear", help="Delete them, so that the next search measures again.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the times of layers that searches keep on this machine."""
    from .times_file import clear_times, kept_times

    if clear:
        clear_times()
    print_result(kept_times(), as_json)


@app.command()
def demo(
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of all models. Default: ONNX Runtime's choice.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Optimize all-MiniLM-L6-v2 (downloaded once, 90 MB); compare it with the original and with dynamic int8."""
    from .demo import run_demo

    with progress_bar() as progress:
        result = run_demo(threads, progress=progress, say=print_step)
    print_result(result, as_json)


def _find_benchmark(names: Iterable[str], op: str) -> str | None:
    """Find a benchmark by operator or folder name, ignoring case: SparseAMXMatMul is sparse_amx_matmul."""

    def plain(name: str) -> str:
        return name.replace("_", "").replace("-", "").lower()

    return next((name for name in names if plain(name) == plain(op)), None)


def _read_shapes(texts: list[str]) -> tuple[tuple[str, ...], tuple[tuple[int, int, int], ...]]:
    """Return names of layers, and (m, k, n) triples."""
    from .benchmarks.shapes import LAYERS, MODELS, find_layers

    layers: list[str] = []
    cases = []
    for text in (one.strip().lower() for one in texts):
        numbers = text.split("x")
        if found := find_layers(text):
            layers += found
        elif len(numbers) == 3 and all(part.isdecimal() and int(part) > 0 for part in numbers):
            m, k, n = map(int, numbers)
            cases.append((m, k, n))
        else:
            raise typer.BadParameter(
                f"{text!r} is not a layer ({', '.join(LAYERS)}), a model ({', '.join(MODELS)}) or a shape MxKxN such "
                "as 1x4096x14336",
                param_hint="--shape",
            )
    return tuple(layers), tuple(cases)


if __name__ == "__main__":
    main()

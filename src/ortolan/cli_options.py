"""Options that several commands share, and the command-line options of optimize_onnx."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ortolan.graph_passes.names import (
    BLOCKS,
    EVERYWHERE,
    FEW_BITS,
    GROUP_SIZES,
    POOLINGS,
    SCORE_ACTIVATIONS,
    UNSTRUCTURED,
)

from .errors import ArgumentError
from .optimize_options import OptimizeOptions, flag_of, info, options_of
from .provider import CLAIMS, PRECISIONS

if TYPE_CHECKING:
    from ortolan.graph_passes.text.text_plan import TextInput


class _Choice(StrEnum):
    """A choice of several strings, which the help lists and a shell completes."""

    __repr__ = str.__repr__  # for error messages


def _choice(values: Iterable[Any]) -> Any:
    return _Choice("Choice", {str(value): str(value) for value in values})  # type: ignore[call-arg]


def _help(name: str) -> str:
    """Return the help text of an option of optimize_onnx."""
    return next(info(option).help for option in fields(OptimizeOptions) if option.name == name)


if TYPE_CHECKING:
    _Pooling = str
    _Activation = str
    _GroupSize = str
    _Precision = str
    _Claims = str
    _Reproducible = str
    _Device = str
    _DistillPattern = str
    _FewBits = str
else:
    _Pooling, _Activation, _GroupSize = map(_choice, (POOLINGS, SCORE_ACTIVATIONS, GROUP_SIZES))
    _Precision, _Claims, _Reproducible = map(_choice, (PRECISIONS, CLAIMS, (EVERYWHERE,)))
    _Device, _DistillPattern = _choice(["opencl"]), _choice([BLOCKS, UNSTRUCTURED])
    _FewBits = _choice(FEW_BITS)

AS_JSON = "ortolan.json"  # key in the context's meta; its value is True with --json


def _remember_json(ctx: typer.Context, wanted: bool) -> bool:
    ctx.meta[AS_JSON] = wanted
    return wanted


def _tell_steps(times: int) -> int:
    """Print messages of the logger "ortolan" on stderr. times: how often -v was given."""
    if times:
        import logging

        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        logger = logging.getLogger("ortolan")
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO if times == 1 else logging.DEBUG)
    return times


AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.", callback=_remember_json)]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        callback=_tell_steps,
        help="Print a table of all layers in the report, and steps on stderr instead of a progress bar. Twice: also "
        "steps of each layer.",
        show_default=False,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", help="Print only errors, and with --json the result."),
]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="The ONNX file or its folder.", show_default=False)]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="The file to write, or a new folder if MODEL is a folder. Default: beside MODEL, with .ortolan.onnx "
        "or .ortolan after its name.",
    ),
]
_POOLING = f"How token vectors become one: {', '.join(POOLINGS)}. Default: from 1_Pooling, else mean."
_NORMALIZE = "Scale vectors to length 1. Default: from modules.json, else yes."
_ACTIVATION = "How a reranker's logit becomes a score. Default: from config.json, else sigmoid."
_TEXT_PANEL = "Text models"
Pooling = Annotated[
    _Pooling | None, typer.Option(metavar="NAME", help=_POOLING, show_default=False, rich_help_panel=_TEXT_PANEL)
]
Normalize = Annotated[
    bool | None,
    typer.Option("--normalize/--no-normalize", help=_NORMALIZE, show_default=False, rich_help_panel=_TEXT_PANEL),
]
VectorPooling = Annotated[_Pooling | None, typer.Option("--pooling", metavar="NAME", help=_POOLING, show_default=False)]
VectorNormalize = Annotated[
    bool | None, typer.Option("--normalize/--no-normalize", help=_NORMALIZE, show_default=False)
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Cut texts to this many tokens. Default: from the files beside MODEL.", rich_help_panel=_TEXT_PANEL
    ),
]
PromptName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The sentence-transformers prompt before texts, if a request names no prompt; empty: no prompt. "
        "Default: default_prompt_name.",
        rich_help_panel=_TEXT_PANEL,
    ),
]
Activation = Annotated[
    _Activation | None, typer.Option(help=_ACTIVATION, show_default=False, rich_help_panel=_TEXT_PANEL)
]
ScoreActivation = Annotated[_Activation | None, typer.Option("--activation", help=_ACTIVATION, show_default=False)]
Budget = Annotated[
    float | None,
    typer.Option(
        metavar="COSINE",
        help="The smallest allowed cosine similarity of each output to the original's. Default: 0.99 (0.9925 without "
        "calibration data); for decoders, perplexity may rise by 1 % instead.",
    ),
]
MaxPerplexityIncrease = Annotated[
    float | None,
    typer.Option(
        metavar="FRACTION",
        help="How much a decoder's perplexity may rise: 0.01 is 1 %. Instead of --budget.",
    ),
]
SearchSparsity = Annotated[
    float | None,
    typer.Option("--sparsity", metavar="FRACTION", help="Also try formats that are pruned to this fraction of zeros."),
]
Calibration = Annotated[Path | None, typer.Option(metavar="FILE", help=_help("calibration"))]
Tokenizer = Annotated[Path | None, typer.Option(metavar="FILE", help=_help("tokenizer"))]
Portable = Annotated[bool, typer.Option("--portable/--no-portable", help=_help("portable"), show_default=False)]
Reproducible = Annotated[
    _Reproducible | None, typer.Option("--reproducible", help=_help("reproducible"), show_default=False)
]
TimingThreads = Annotated[int | None, typer.Option("--threads", metavar="N", min=1, help=_help("threads"))]
Precision = Annotated[
    _Precision,
    typer.Option("--precision", help="With --provider: the type that float32 layers become."),
]
Claims = Annotated[
    _Claims,
    typer.Option(
        "--claims",
        help="With --provider: faster claims nodes that are faster than in ONNX Runtime on this CPU, all claims every "
        "supported node.",
    ),
]
Requantize = Annotated[
    _FewBits | None,
    typer.Option(
        help="Round weights of at least this many bits to this format: not exact, but faster for prompts. A word "
        "embedding and a head of more than 6 bits become Q6_K, also faster for single tokens.",
        show_default=False,
    ),
]
DistillPattern = Annotated[
    _DistillPattern, typer.Option("--pattern", help="Prune blocks of four outputs, or single weights.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="BATCHxTOKENS",
        help="A shape to optimize for. Repeatable. Default: 1x128 and 1x16, or 1x1 for a decoder with a KV cache.",
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write the report as one HTML page with plots; needs the extra html."),
]
Texts = Annotated[
    Path,
    typer.Argument(
        metavar="TEXTS",
        help="A UTF-8 file with one text a line, or with --field JSON lines. Default: standard input.",
        show_default=False,
    ),
]
TextField = Annotated[
    str | None, typer.Option("--field", metavar="KEY", help="Each line is a JSON object with its text under this key.")
]
TextTokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json. Default: the one beside MODEL."),
]
CutTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        min=1,
        help="Cut longer texts to this many tokens. Default: from the files beside MODEL.",
    ),
]
BatchTokens = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Tokens of one call of the session, with padding. Default: 1024.")
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Threads of the session. Default: ONNX Runtime's choice.")
]
BenchThreads = Annotated[list[str], typer.Option(metavar="N[,N…]", help="Numbers of threads.")]
BenchShapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME|MxKxN[,…]",
        help="What to measure instead of all layers: q, k, v, o, gate, up or down of Llama 3 8B; smollm2:… or "
        "minilm:…, such as smollm2:down; llama, smollm2 or minilm for all layers of a model; or a shape.",
    ),
]
BenchBatch = Annotated[
    list[str] | None,
    typer.Option(metavar="M[,M…]", help="Numbers of input rows for the named layers."),
]
BenchSparsity = Annotated[
    list[str] | None,
    typer.Option(metavar="FRACTION[,…]", help="Fractions of zeros in the weights."),
]
BenchKinds = Annotated[
    list[str] | None,
    typer.Option(
        "--kind",
        metavar="KIND[,KIND…]",
        help="sparse_amx_matmul: bf16, int8 or int4 weights. w4a8_matmul: symmetric, zero_points, fractions, minimums, "
        "int4, int5, int6, q4_k, q5_k, q6_k or q5_0. masked_matmul: square, numbers, deja_vu, decode or heat_map. auto "
        "and zoo: a model, such as all-minilm-l6-v2 or bert.",
    ),
]
BenchGroupSize = Annotated[
    _GroupSize | None,
    typer.Option(
        "--group-size",
        help="Inputs that share a scale, for int4. w4a8_matmul: for symmetric, zero_points, fractions and minimums.",
        show_default=False,
    ),
]
BenchDevice = Annotated[
    _Device | None,
    typer.Option(
        "--device",
        help="For w4a8_matmul: compare its kernels on an OpenCL device with those on the CPU.",
    ),
]
_Command = TypeVar("_Command", bound=Callable[..., Any])


def _annotation(option: Field[Any]) -> Any:
    """Return the typer annotation of an option of optimize_onnx."""
    about = info(option)
    kind: Any = about.kind
    more: dict[str, Any] = {}
    if about.choices:
        kind = _choice(about.choices)
    elif about.examples:
        more["autocompletion"] = lambda: list(about.examples)
    elif option.name == "recipe":
        more["autocompletion"] = _complete_recipe
    if option.name == "threads":
        more["min"] = 1
    if about.repeatable:
        kind = list[kind]
    flag = flag_of(option)
    if about.kind is bool and option.default:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    help_text = about.help + (" Repeatable." if about.repeatable else "")
    given = typer.Option(
        flag, metavar=about.metavar, help=help_text, show_default=False, rich_help_panel=about.group, **more
    )
    return Annotated[kind if about.kind is bool else kind | None, given]


def _complete_recipe() -> list[str]:
    from ortolan.graph_passes.names import AUTO
    from ortolan.graph_passes.recipe import Recipe

    return [*Recipe.names(), AUTO]


def _parameter(option: Field[Any]) -> inspect.Parameter:
    default = option.default if info(option).kind is bool else None
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_annotation(option)
    )


def with_optimize_options(command: _Command) -> _Command:
    """Add the options of optimize_onnx to a command that takes **options, before its own keyword-only options."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    first = [one for one in own if one.kind is one.POSITIONAL_OR_KEYWORD]
    last = [one for one in own if one.kind is one.KEYWORD_ONLY]
    options = [_parameter(option) for option in options_of("cli")]
    command.__signature__ = inspect.Signature([*first, *options, *last])  # type: ignore[attr-defined]
    return command


def text_input(wanted: bool, **given: Any) -> bool | TextInput:
    """Return the option texts_in of optimize_onnx.

    Args:
        wanted: --texts-in was given.
        given: Fields of TextInput; None: not given.

    Raises:
        ArgumentError: One of them was given without --texts-in.
    """
    from . import TextInput

    if not wanted:
        alone = [name for name, value in given.items() if value is not None]
        if alone:
            raise ArgumentError(f"--{alone[0].replace('_', '-')} needs --texts-in")
        return False
    return TextInput(**given)

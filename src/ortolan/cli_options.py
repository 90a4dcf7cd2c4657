"""The options that commands of the command line share, and those that choose what a model becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

AS_JSON = "ortolan.json"  # in the context's meta: whether JSON was asked for


def _remember_json(ctx: typer.Context, wanted: bool) -> bool:
    ctx.meta[AS_JSON] = wanted
    return wanted


def _tell_steps(times: int) -> int:
    """Shows what the logger "ortolan" is told."""
    if times:
        import logging

        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        logger = logging.getLogger("ortolan")
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO if times == 1 else logging.DEBUG)
    return times


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.", callback=_remember_json)]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        callback=_tell_steps,
        help="Print details: a table of all layers in the report, and steps and decisions on stderr instead of a "
        "progress bar. Twice: also those of each layer.",
        show_default=False,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", help="Print errors and, with --json, the result; no report and no progress bar."),
]
Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="The ONNX file, or the folder that it lies in.", show_default=False)
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Where to write: a file, or of a folder a new folder. Without it: next to MODEL, as its name with "
        ".ortolan.onnx, or .ortolan for a folder.",
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="A preset, whose form the options below change, or a TOML file; an unknown name lists the presets. "
        "Without a recipe or form, weights stored in few bits are kept exactly; in other models each layer "
        "takes the dense form that is fastest here, within a cosine of 0.99 (0.9925 without calibration).",
    ),
]
Weights = Annotated[str | None, typer.Option(help="What weights become: bf16, int8 or int4.")]
GroupSize = Annotated[int | None, typer.Option(help="int4 weights to a scale: 32, 64 or 128 (if not given).")]
Sparsity = Annotated[
    float | None, typer.Option(help="The share of weights to prune. Without it, nothing is pruned.", show_default=False)
]
Pattern = Annotated[
    str | None,
    typer.Option(
        help="What is pruned: unstructured (if not given), 4x1 (blocks; int8; for encoders), or N:M as 2:4. "
        "Alone, 4x1 and 2:4 take weights that have such zeros already."
    ),
]
Method = Annotated[
    list[str] | None,
    typer.Option(
        help="How weights are rounded: mse (int4, if not given), rtn (int8), gptq, awq, hqq; or pruned: magnitude "
        "(if not given), wanda, sparsegpt. Twice: one of each."
    ),
]
Cache = Annotated[
    str | None, typer.Option(help="Of attention with a KV cache: codes (4 bits a key number), or float32.")
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Layers, by name, that are not part of the form. Repeatable. Without it: heads, a word for the usual "
        'names of heads; "": none.',
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="For experts: an option of a pass, PASS.OPTION=VALUE, or max_error=0.1 to refuse a larger relative error "
        "of the outputs. Repeatable.",
    ),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A .txt file of one text a line, or an .npz file of arrays named like the model's inputs: to verify on, "
        "and for methods that fit weights to inputs.",
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="For calibration texts and --texts-in: the model's tokenizer.json; for the former, also an ONNX graph "
        "that tokenizes (.onnx). Without it: the one beside MODEL.",
    ),
]
TextsIn = Annotated[
    bool,
    typer.Option(
        "--texts-in",
        help="The model takes texts: its tokenizer goes in front of it, and behind it what makes a vector of each "
        "text, or of pairs a score (rerankers), as sentence-transformers' files beside MODEL say, or these options:",
    ),
]
_POOLING = (
    "mean of the tokens' vectors, cls (the first), lasttoken, max, mean_sqrt_len_tokens or weightedmean. Without it: "
    "as 1_Pooling says, else mean."
)
_NORMALIZE = "vectors of length 1. Without it: as modules.json says, else yes."
_ACTIVATION = "sigmoid or none. Without it: as config.json says, else sigmoid."
Pooling = Annotated[str | None, typer.Option(help=f"With --texts-in: {_POOLING}")]
Normalize = Annotated[
    bool | None, typer.Option("--normalize/--no-normalize", help=f"With --texts-in: {_NORMALIZE}", show_default=False)
]
VectorPooling = Annotated[str | None, typer.Option("--pooling", help=f"A text's vector: {_POOLING}")]
VectorNormalize = Annotated[
    bool | None,
    typer.Option("--normalize/--no-normalize", help=f"Make {_NORMALIZE}", show_default=False),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="With --texts-in: cut texts to so many tokens. Without it: as the files beside MODEL say."),
]
PromptName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --texts-in: the name of the sentence-transformers prompt to put before texts where a request "
        'names none; "": none. Without it: default_prompt_name.',
    ),
]
Activation = Annotated[str | None, typer.Option(help=f"With --texts-in, of rerankers: {_ACTIVATION}")]
ScoreActivation = Annotated[str | None, typer.Option("--activation", help=f"Of the scores: {_ACTIVATION}")]
Prompt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.npy",
        help="Token ids that all sequences begin with: their keys and values become part of the model, pruned.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="NUMBER",
        help="The smallest cosine of each output against the original's, 0.99 if not given; or perplexity:0.02, by "
        "what share a decoder's perplexity may rise.",
    ),
]
BitBudget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="LIMIT",
        help="With int4: which layers take 8 bits is measured, within a cosine, perplexity:0.01, or bytes:100MB.",
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="BATCHxTOKENS",
        help="What to be fast at. Repeatable. Without it: 1x128 and 1x16, or 1x1 for a decoder with a cache.",
    ),
]
Portable = Annotated[
    bool,
    typer.Option("--portable/--no-portable", help="Let the model run, slower, where Ortolan's library is not loaded."),
]
AllowDifferent = Annotated[
    bool,
    typer.Option(
        "--allow-different",
        help="For models whose stored few-bit weights are kept, without a recipe or form: save the result even if an "
        "output has another shape than the original's, or agrees with it less than the default budget allows.",
    ),
]
TimingThreads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Threads of both models while they are timed; default: one for each core that this process may use.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be replaced; write nothing.")]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write the report as one HTML page with plots; needs the extra html."),
]
Texts = Annotated[
    Path,
    typer.Argument(
        metavar="TEXTS",
        help="A file of UTF-8, one text a line, or with --field JSON lines; standard input where it is - or not given.",
        show_default=False,
    ),
]
Field = Annotated[
    str | None, typer.Option(metavar="KEY", help="Each line is a JSON object, and its text stands under this key.")
]
TextTokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json. Without it: the one beside MODEL."),
]
CutTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        min=1,
        help="Cut longer texts to so many tokens. Without it: as the files beside MODEL say.",
    ),
]
BatchTokens = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Of a call of the session, padding counted; 1024 if not given.")
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Threads of the session. Without it: as many as ONNX Runtime takes."),
]
BenchShapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME|MxKxN",
        help="What to measure instead of all layers: q, k, v, o, gate, up or down of Llama 3 8B; smollm2:… or "
        "minilm:…, as in smollm2:down; llama, smollm2 or minilm, all its layers; or a shape. Repeatable.",
    ),
]
BenchKinds = Annotated[
    str | None,
    typer.Option(
        "--kind",
        metavar="KIND,...",
        help="Kinds of weights: bf16, int8, int4 of sparse_amx_matmul; symmetric, zero_points, fractions, minimums of "
        "w4a8_matmul. Of masked_matmul: square, numbers, deja_vu, decode, heat_map. Of auto: names of models, such as "
        "all-minilm-l6-v2.",
    ),
]

BenchDevice = Annotated[
    str | None,
    typer.Option(metavar="opencl", help="Of w4a8_matmul: its kernels on an OpenCL device, against those on the CPU."),
]


def form(
    weights: str | None,
    group_size: int | None,
    sparsity: float | None,
    pattern: str | None,
    method: list[str] | None,
    cache: str | None,
    ignore: list[str] | None,
) -> dict[str, Any]:
    """The arguments of optimize_onnx that were given."""
    given = {
        "weights": weights,
        "group_size": group_size,
        "sparsity": sparsity,
        "pattern": pattern,
        "method": method or None,
        "cache": cache,
        "ignore": None if not ignore else [one for one in ignore if one],
    }
    return {name: value for name, value in given.items() if value is not None}


def texts_in(wanted: bool, **given: Any) -> Any:
    """The argument texts_in of optimize_onnx. given: options that need --texts-in."""
    from ortolan.errors import OrtolanError

    from . import TextInput

    if not wanted:
        lonely = [name for name, value in given.items() if value is not None]
        if lonely:
            raise OrtolanError(f"--{lonely[0].replace('_', '-')} is for models that take texts: give --texts-in, too")
        return False
    return TextInput(**given)

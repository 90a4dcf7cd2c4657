"""The options of optimize_onnx, in one list from which the command line, hooks and documentation are made."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar

from ortolan.graph_passes.names import CACHES, EVERYWHERE, FORMAT_GROUP_SIZES, FORMAT_OPTIONS, METHODS, WEIGHTS
from ortolan.graph_passes.options import HEADS

from .errors import ArgumentError, ArgumentTypeError, suggestion, wrong_type

if TYPE_CHECKING:
    import numpy.typing as npt

    from ortolan.graph_passes.auto.budget import Budget
    from ortolan.graph_passes.measure.feeds import Calibration
    from ortolan.graph_passes.recipe import Recipe
    from ortolan.graph_passes.text.text_plan import TextInput
    from ortolan.graph_passes.text.texts import Tokenizer

    from .progress import Progress

Group = Literal["Target format", "Accuracy", "Input data", "Text models", "Result"]
Host = Literal["cli", "optimum", "transformers"]
_EVERYWHERE: tuple[Host, ...] = ("cli", "optimum", "transformers")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class OptionInfo:
    """The metadata of a field of OptimizeOptions.

    Attributes:
        group: The heading under which help texts list the option.
        help: What the option does, for all hosts.
        kind: The type of one value on a command line.
        choices: All allowed values; empty if any value of the type is allowed.
        examples: Values that a shell completes, if not all allowed values can be listed.
        repeatable: The option takes several values; on a command line it is repeated.
        flag: The name on a command line.
        metavar: The placeholder for the value in help texts of a command line.
        python: A sentence for the reference about values that only Python callers can give.
        hosts: The interfaces besides Python that have the option.
    """

    group: Group
    help: str
    kind: type
    choices: tuple[Any, ...] = ()
    examples: tuple[str, ...] = ()
    repeatable: bool = False
    flag: str = ""
    metavar: str | None = None
    python: str = ""
    hosts: tuple[Host, ...] = _EVERYWHERE


def _about(group: Group, kind: type, help: str, **more: Any) -> dict[str, OptionInfo]:
    return {"option": OptionInfo(group, help, kind, **more)}


@dataclass(frozen=True, kw_only=True)
class OptimizeOptions:
    """The options of `optimize_onnx`, for callers that keep them or pass them on.

    Every option is also a keyword argument of `optimize_onnx`. The table of options in the documentation lists their
    types, defaults and meaning; `ortolan.optimize_options.rows` returns it.

    Raises:
        ArgumentTypeError: An option has the wrong type.
        ArgumentError: An option is out of range, or two options exclude each other.
    """

    recipe: str | os.PathLike[str] | Recipe | None = field(
        default=None,
        metadata=_about(
            "Target format",
            str,
            "A preset (int4, int8, sparse-encoder, activation-sparse, cached-prompt or long-context), which the options"
            " below change; auto, which measures each layer and gives it the fastest dense format on this machine; or "
            "a TOML file. Default: weights that the model stores in 4 or 8 bits are kept exactly; other models are "
            "optimized with auto. Each output then keeps a cosine similarity of at least 0.99 to the original's (0.9925"
            " without calibration data); a decoder's perplexity rises by at most 1 %.",
            metavar="NAME|FILE",
            python="Also a Recipe.",
        ),
    )
    weights: str | None = field(
        default=None,
        metadata=_about(
            "Target format",
            str,
            "The type of the weights of linear layers. Default: int8 with pattern 4x1, bf16 with any other sparsity, "
            "else unchanged.",
            choices=WEIGHTS,
        ),
    )
    group_size: int | None = field(
        default=None,
        metadata=_about(
            "Target format",
            int,
            "The number of inputs that share a scale, for int4, int5 and int6. 16 and 32: integer scales in groups of "
            "256. 64 and 128 (int4): floating-point scales. Default: 16; 128 with a sparsity or a pattern.",
            choices=FORMAT_GROUP_SIZES,
        ),
    )
    sparsity: float | None = field(
        default=None,
        metadata=_about(
            "Target format",
            float,
            "The fraction of weights to prune, above 0 and below 1. Default: nothing is pruned.",
            metavar="FRACTION",
        ),
    )
    pattern: str | None = field(
        default=None,
        metadata=_about(
            "Target format",
            str,
            "The pattern of pruned weights: unstructured (default), 4x1 (blocks of four outputs, int8, for encoders) "
            "or N:M such as 2:4, which keeps N of M inputs. Without a sparsity, 4x1 and 2:4 are for weights that "
            "already have such zeros.",
            examples=("unstructured", "4x1", "2:4"),
        ),
    )
    method: str | Sequence[str] | None = field(
        default=None,
        metadata=_about(
            "Target format",
            str,
            "A method to round weights: rtn (default for int8), mse (default for int4), gptq, awq or hqq; and a method "
            "to prune weights: magnitude (default), wanda or sparsegpt. wanda and sparsegpt need calibration data; "
            "gptq and awq are more accurate with it. sparsegpt without a rounding method also rounds int8 and int4 "
            "weights.",
            choices=METHODS,
            metavar="METHOD",
            repeatable=True,
        ),
    )
    cache: str | None = field(
        default=None,
        metadata=_about(
            "Target format",
            str,
            "How attention stores its KV cache: codes (4-bit keys, int8 values; needs calibration data) or float32. "
            "Default: unchanged.",
            choices=CACHES,
        ),
    )
    ignore: str | Sequence[str] | None = field(
        default=None,
        metadata=_about(
            "Target format",
            str,
            "Name patterns of layers or weights that keep a higher precision: int8 in dense int8 and int4 models, else "
            'bf16. "heads" stands for the usual names of heads. An empty pattern ignores no layer. Default: heads; '
            "with a limit of bytes only heads that share their weight with the word embeddings.",
            repeatable=True,
            metavar="PATTERN",
            python="An empty sequence ignores no layer.",
        ),
    )
    budget: Budget | None = field(
        default=None,
        metadata=_about(
            "Accuracy",
            float,
            "With weights int4: make the model as small as possible while each output keeps at least this cosine "
            "similarity to the original's; layers that need 8 bits get them.",
            metavar="COSINE",
            python="Also a function `accepts(run_original, run_optimized) -> bool`; both map feeds to outputs.",
        ),
    )
    max_perplexity_increase: float | None = field(
        default=None,
        metadata=_about(
            "Accuracy",
            float,
            "With weights int4: like budget, but limits how much a decoder's perplexity may rise: 0.01 is 1 %.",
            metavar="FRACTION",
        ),
    )
    max_bytes: int | str | None = field(
        default=None,
        metadata=_about(
            "Accuracy",
            str,
            "With weights int4: limit the size of the files, such as 100MB; layers get 4, 5, 6 or 8 bits so that "
            "the error is as small as possible.",
            metavar="SIZE",
        ),
    )
    allow_different: bool = field(
        default=False,
        metadata=_about(
            "Accuracy",
            bool,
            "If no recipe or format was given and stored weights are kept: save the result even if an output has "
            "another shape or a lower cosine than the default budget allows. Otherwise that is an error.",
        ),
    )
    options: Mapping[str, Any] | None = field(
        default=None,
        metadata=_about(
            "Target format",
            str,
            "For experts: options of the recipe's passes, such as prune.scope=sensitivity; max_error=0.1 refuses a "
            "larger relative error of the outputs.",
            repeatable=True,
            flag="--set",
            metavar="PASS.OPTION=VALUE",
            python='A mapping such as `{"prune.scope": "sensitivity"}`.',
        ),
    )
    calibration: Calibration | None = field(
        default=None,
        repr=False,
        metadata=_about(
            "Input data",
            Path,
            "A .txt file with one text a line, or an .npz file with arrays named like the model's inputs: to verify "
            "the result, and for methods that fit weights to inputs. Default: synthetic inputs, where these suffice.",
            metavar="FILE",
            python="Also a list of texts, a dict of arrays, or an iterable of such dicts. Beside input_ids, an empty "
            "cache, a full attention_mask, position_ids and token_type_ids of 0 may be left out. For an encoder with "
            "decoders, these are the encoder's inputs.",
        ),
    )
    tokenizer: Tokenizer | None = field(
        default=None,
        metadata=_about(
            "Input data",
            Path,
            "The tokenizer for calibration texts: a tokenizer.json, or an ONNX graph of onnxruntime-extensions. "
            "Default: the tokenizer.json beside the model.",
            metavar="FILE",
            python="Also an object whose encode(text) returns token ids.",
        ),
    )
    prompt: str | os.PathLike[str] | npt.ArrayLike | None = field(
        default=None,
        repr=False,
        metadata=_about(
            "Input data",
            Path,
            "Token ids that all sequences begin with. Their pruned keys and values become part of the model. Its "
            "input_ids then hold only the tokens after the prompt; attention_mask and position_ids also count the "
            "prompt's tokens.",
            metavar="FILE.npy",
            python="Also an array of integers [tokens].",
            hosts=("cli",),
        ),
    )
    texts_in: bool | TextInput = field(
        default=False,
        metadata=_about(
            "Text models",
            bool,
            "Put the tokenizer into the model, which then takes strings and returns sentence embeddings, or scores if "
            "it is a reranker. Pooling, normalization and length come from the files of Sentence Transformers beside "
            "the model.",
            python='The inputs are strings [batch] "text" (and "text_pair"), the output is "sentence_embedding" '
            '[batch, hidden] or "score" [batch]. A TextInput changes the settings.',
            hosts=("cli",),
        ),
    )
    serve: bool = field(
        default=False,
        metadata=_about(
            "Result",
            bool,
            "For a decoder: write its form for serving, which computes tokens of many sequences in one call and keeps "
            "their caches in pools of blocks, for `ortolan serve` and onnxruntime-genai's Engine. Without a target "
            "format, weights that the model stores in 4 or 8 bits are kept, and other weights become int8.",
            hosts=("cli",),
        ),
    )
    portable: bool = field(
        default=True,
        metadata=_about(
            "Result",
            bool,
            "Store a standard ONNX version of each operator, so that the model also runs, slower, without Ortolan's "
            "library.",
            hosts=("cli", "transformers"),
        ),
    )
    reproducible: str | None = field(
        default=None,
        metadata=_about(
            "Result",
            str,
            "everywhere: layers in int8, int6, int5 and int4, attention and norms give the same bytes on every CPU, "
            "which is slower for long texts and for decoding. Default: the fastest order of sums on the CPU that runs "
            "the model.",
            choices=(EVERYWHERE,),
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=_about(
            "Result",
            int,
            "Intra-op threads of both models while they are timed. Default: one for each core that this process may "
            "use.",
            metavar="N",
        ),
    )
    dry_run: bool = field(
        default=False,
        metadata=_about("Result", bool, "Report what would be replaced, and write nothing.", hosts=("cli",)),
    )
    progress: Progress | None = field(
        default=None,
        repr=False,
        metadata=_about(
            "Result",
            object,
            "Called as progress(stage, done, total); stage is a Stage. An exception that it raises ends the run.",
            hosts=(),
        ),
    )

    def __post_init__(self) -> None:
        """Check types and single values; choice.py checks how they fit together."""
        for name in ("serve", "portable", "allow_different", "dry_run"):
            if not isinstance(getattr(self, name), bool):
                raise wrong_type(name, getattr(self, name), "True or False")
        check_threads(self.threads)
        check_reproducible(self.reproducible)
        if self.options is not None and not isinstance(self.options, Mapping):
            raise wrong_type("options", self.options, 'a dict such as {"sparsity": 0.7}')
        if self.progress is not None and not callable(self.progress):
            raise wrong_type("progress", self.progress, "a function of stage, done and total")
        limits = [
            name for name in ("budget", "max_perplexity_increase", "max_bytes") if getattr(self, name) is not None
        ]
        others = {"texts_in": self.texts_in, "prompt": self.prompt is not None, "cache='codes'": self.cache == "codes"}
        if self.serve and (other := next((one for one, given in others.items() if given), None)):
            raise ArgumentError(f"serve cannot be combined with {other}; leave one of them out")
        if len(limits) > 1:
            raise ArgumentError(f"{limits[0]} and {limits[1]} exclude each other; give one of them")

    def target_format(self) -> dict[str, Any]:
        """Return the options of the target format that differ from their defaults."""
        values = {name: getattr(self, name) for name in FORMAT_OPTIONS}
        return {
            name: value
            for name, value in values.items()
            if value is not None and not (name == "ignore" and value in (HEADS, (HEADS,), [HEADS]))
        }


class OptimizeArguments(TypedDict, total=False):
    """The keyword arguments of optimize_onnx, for type checkers and editors: the fields of OptimizeOptions."""

    recipe: str | os.PathLike[str] | Recipe | None
    weights: str | None
    group_size: int | None
    sparsity: float | None
    pattern: str | None
    method: str | Sequence[str] | None
    cache: str | None
    ignore: str | Sequence[str] | None
    budget: Budget | None
    max_perplexity_increase: float | None
    max_bytes: int | str | None
    allow_different: bool
    options: Mapping[str, Any] | None
    calibration: Calibration | None
    tokenizer: Tokenizer | None
    prompt: str | os.PathLike[str] | npt.ArrayLike | None
    texts_in: bool | TextInput
    serve: bool
    portable: bool
    reproducible: str | None
    threads: int | None
    dry_run: bool
    progress: Progress | None


class OptionRow(NamedTuple):
    """One row of the table of options."""

    name: str
    type: str
    default: str
    help: str


def info(option: Field[Any]) -> OptionInfo:
    """Return the metadata of a field of OptimizeOptions."""
    found: OptionInfo = option.metadata["option"]
    return found


def options_of(host: Host) -> list[Field[Any]]:
    """Return the options that a host offers, in order."""
    return [option for option in fields(OptimizeOptions) if host in info(option).hosts]


def flag_of(option: Field[Any]) -> str:
    """Return the name of an option on a command line."""
    return info(option).flag or f"--{option.name.replace('_', '-')}"


def from_command_line(given: Mapping[str, Any]) -> OptimizeOptions:
    """Return the options of a command line.

    Args:
        given: Values by the name of the option; None or an empty list means that it was not given.

    Raises:
        RecipeError: A value of --set is not of the form name=value.
        ArgumentError: An option is out of range, or two options exclude each other.
    """
    from ortolan.graph_passes.recipe import parse_setting

    values = {name: value for name, value in given.items() if value is not None and value != []}
    for option in fields(OptimizeOptions):
        if option.name in values and info(option).choices:
            values[option.name] = _plain(values[option.name], info(option).kind)
    if "options" in values:
        values["options"] = dict(map(parse_setting, values["options"]))
    if "ignore" in values:
        values["ignore"] = [one for one in values["ignore"] if one]  # a single empty pattern means: ignore no layer
    return read_options("optimize", None, values)


def _plain(value: Any, kind: type) -> Any:
    """Return the plain value of a choice from a command line, or a list of plain values."""
    if isinstance(value, list):
        return [_plain(one, kind) for one in value]
    return kind(value.value if isinstance(value, Enum) else value)


def rows() -> list[OptionRow]:
    """Return the table of options for the documentation, one row for each field of OptimizeOptions."""
    found = []
    for option in fields(OptimizeOptions):
        about = info(option)
        kind = " or ".join(map(repr, about.choices)) if about.choices else str(option.type)
        if about.choices:
            kind += ", or a sequence of them" if about.repeatable else ""
            kind += ", or None" if option.default is None else ""
        help_text = f"{about.help} {about.python}".strip()
        found.append(OptionRow(option.name, kind, repr(option.default), help_text))
    return found


def read_options(
    function: str, settings: OptimizeOptions | None, arguments: Mapping[str, Any], reserved: Iterable[str] = ()
) -> OptimizeOptions:
    """Return the settings, with single options replaced by keyword arguments.

    Args:
        function: The name of the called function, for errors.
        settings: Options to start from; None: the defaults.
        arguments: Keyword arguments of the call.
        reserved: Options that this function does not take.

    Raises:
        ArgumentTypeError: A keyword is unknown, or an option has the wrong type.
        ArgumentError: An option is out of range.
    """
    if settings is not None and not isinstance(settings, OptimizeOptions):
        raise wrong_type("settings", settings, "OptimizeOptions; give a recipe as recipe=…")
    known = [option.name for option in fields(OptimizeOptions) if option.name not in set(reserved)]
    for name in arguments:
        if name not in known:
            raise ArgumentTypeError(
                f"{function}() got an unexpected keyword argument {name!r}{suggestion(name, known)}"
            )
    return replace(settings or OptimizeOptions(), **arguments)


def check_reproducible(where: str | None) -> None:
    """Check that the option is None or "everywhere". Raises ArgumentTypeError or ArgumentError."""
    if where is not None and not isinstance(where, str):
        raise wrong_type("reproducible", where, f"{EVERYWHERE!r}, or None")
    if where not in (None, EVERYWHERE):
        raise ArgumentError(f"reproducible is {where!r}, expected {EVERYWHERE!r}, or None")


def check_threads(threads: int | None) -> None:
    """Check that threads is None or a positive integer. Raises ArgumentTypeError or ArgumentError."""
    if threads is None:
        return
    if not isinstance(threads, int) or isinstance(threads, bool):
        raise wrong_type("threads", threads, "a positive integer, or None")
    if threads < 1:
        raise ArgumentError(f"threads is {threads}, expected a positive integer, or None")


def with_options(function: _Function) -> _Function:
    """Set the signature and docstring of a function that takes **arguments so that help() lists all options."""
    own = [one for one in inspect.signature(function).parameters.values() if one.kind is not one.VAR_KEYWORD]
    options = [
        inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=option.type)
        for option in fields(OptimizeOptions)
    ]
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*own, *options], return_annotation=inspect.signature(function).return_annotation
    )
    text = "\n".join(f"        {row.name}: {row.help}" for row in rows())
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions:\n{text}\n".replace("        ", "    ")
    return function

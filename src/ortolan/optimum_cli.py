"""Commands of optimum-cli: `optimum-cli ortolan optimize` and `optimum-cli export ortolan`.

Imported whenever optimum-cli is called, so that all that takes time is imported when a command runs. Raises ImportError
without Optimum.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand


def _add_recipe_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Ortolan")
    group.add_argument(
        "--recipe",
        help="A preset of Ortolan, whose form the options below change, or a TOML file; an unknown name lists the "
        "presets. Without a recipe or form, weights stored in few bits are kept exactly; in other models each layer "
        "takes the dense form that is fastest here.",
    )
    group.add_argument("--weights", help="What weights become: bf16, int8 or int4.")
    group.add_argument("--group-size", type=int, help="int4 weights to a scale: 32, 64 or 128.")
    group.add_argument("--sparsity", type=float, help="The share of weights to prune; without it, nothing is pruned.")
    group.add_argument("--pattern", help="What is pruned: unstructured, 4x1 or N:M.")
    group.add_argument(
        "--method",
        action="append",
        help="How weights are rounded (search, rtn, gptq, awq, hqq) or pruned (magnitude, wanda, sparsegpt). Twice: "
        "one of each.",
    )
    group.add_argument("--cache", help="Of attention with a KV cache: codes or float32.")
    group.add_argument(
        "--ignore",
        metavar="PATTERN",
        action="append",
        help='Layers, by name, that are not part of the form. Repeatable. Without it: heads; "": none.',
    )
    group.add_argument(
        "--set",
        dest="settings",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="For experts: an option of a pass, as in --set prune.scope=sensitivity. Repeatable.",
    )
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="A .txt file of one text a line, or an .npz file of arrays named like the model's inputs: to verify on, "
        "and for methods that fit weights to inputs.",
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="For calibration texts: a tokenizer.json. Without it: the one beside the model.",
    )
    group.add_argument(
        "--allow-different",
        action="store_true",
        help="For models whose stored few-bit weights are kept, without a recipe or form: save the result even if an "
        "output has another shape than the original's, or agrees with it less than the default budget allows.",
    )
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="Threads of both models while they are timed; default: one for each core that this process may use.",
    )
    group.add_argument("-v", "--verbose", action="store_true", help="Print a table of all layers in the report.")


def _optimize(folder: Path, output: Path, args: Any) -> None:
    """Optimizes and prints the report; an error of Ortolan ends the process with its message."""
    from ortolan.graph_passes.recipe import parse_setting

    from .errors import OrtolanError
    from .optimum import OrtolanOptimizer

    try:
        report = OrtolanOptimizer.from_pretrained(folder).optimize(
            output,
            args.recipe,
            options=dict(map(parse_setting, args.settings)),
            calibration=args.calibration,
            tokenizer=args.tokenizer,
            weights=args.weights,
            group_size=args.group_size,
            sparsity=args.sparsity,
            pattern=args.pattern,
            method=args.method,
            cache=args.cache,
            ignore=None if args.ignore is None else [one for one in args.ignore if one],
            allow_different=args.allow_different,
            threads=args.threads,
        )
    except OrtolanError as error:
        sys.exit(f"ortolan: {error}")
    print(report.details() if args.verbose else report)


class OptimizeCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    COMMAND = CommandInfo(name="optimize", help="Optimize the ONNX model of a folder.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        group = parser.add_argument_group("Required arguments")
        group.add_argument("--onnx_model", type=Path, required=True, help="The folder that the ONNX model lies in.")
        group.add_argument("-o", "--output", type=Path, required=True, help="The folder to write.")
        _add_recipe_arguments(parser)

    def run(self) -> None:
        _optimize(self.args.onnx_model, self.args.output, self.args)


class OrtolanCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    COMMAND = CommandInfo(name="ortolan", help="Prune, quantize and speed up ONNX models for CPUs with Ortolan.")
    SUBCOMMANDS = (CommandInfo(name="optimize", help=OptimizeCommand.COMMAND.help, subcommand_class=OptimizeCommand),)


COMMANDS: list[Any] = [OrtolanCommand]

try:
    from optimum.commands.export.onnx import ONNXExportCommand
except Exception as error:
    # Without the package optimum-onnx there is no export to add to, so no message is needed.
    if not (isinstance(error, ModuleNotFoundError) and (error.name or "") == "optimum.commands.export.onnx"):
        print(f"ortolan: `optimum-cli export ortolan` is missing: {type(error).__name__}: {error}", file=sys.stderr)
else:

    class OrtolanExportCommand(ONNXExportCommand):  # type: ignore[misc]
        """Optimum's own export, all its arguments included, and then `optimize`."""

        COMMAND = CommandInfo(name="ortolan", help="Export PyTorch to ONNX, optimized with Ortolan.")

        @staticmethod
        def parse_args(parser: ArgumentParser) -> None:
            ONNXExportCommand.parse_args(parser)
            _add_recipe_arguments(parser)

        def run(self) -> None:
            output = self.args.output
            try:
                output.absolute().parent.mkdir(parents=True, exist_ok=True)
                # Beside the output, which is a place for files of this size.
                work = tempfile.TemporaryDirectory(prefix=f".{output.name}.export-", dir=output.absolute().parent)
            except OSError as error:
                sys.exit(f"ortolan: cannot write beside {str(output)!r}: {error.strerror}")
            with work as folder:
                self.args.output = Path(folder) / output.name
                super().run()
                _optimize(self.args.output, output, self.args)

    COMMANDS.append((OrtolanExportCommand, ExportCommand))

"""Commands of optimum-cli: `optimum-cli ortolan optimize` and `optimum-cli export ortolan`.

Every call of optimum-cli imports this module, so that slow imports wait until a command runs. Without Optimum, the
import raises ImportError.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

from .optimize_options import flag_of, from_command_line, info, options_of


def _add_options(parser: ArgumentParser) -> None:
    """Add the options of optimize_onnx that Optimum offers."""
    group = parser.add_argument_group("Ortolan")
    for option in options_of("optimum"):
        about = info(option)
        if about.kind is bool:
            group.add_argument(flag_of(option), dest=option.name, action="store_true", help=_escaped(about.help))
            continue
        group.add_argument(
            flag_of(option),
            dest=option.name,
            type=about.kind,
            choices=about.choices or None,
            metavar=about.metavar,
            action="append" if about.repeatable else "store",
            help=_escaped(about.help),
        )
    group.add_argument("-v", "--verbose", action="store_true", help="Print a table of all layers in the report.")


def _escaped(text: str) -> str:
    return text.replace("%", "%%")  # argparse uses % for formatting


def _optimize(folder: Path, output: Path, args: Any) -> None:
    """Optimize and print the report; an error of Ortolan ends the process with its message."""
    from .errors import OrtolanError
    from .optimum import OrtolanOptimizer

    try:
        given = {option.name: getattr(args, option.name) for option in options_of("optimum")}
        report = OrtolanOptimizer.from_pretrained(folder).optimize(output, from_command_line(given))
    except OrtolanError as error:
        sys.exit(f"ortolan: {error}")
    print(report.details() if args.verbose else report)


class OptimizeCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    """The command `optimum-cli ortolan optimize`."""

    COMMAND = CommandInfo(name="optimize", help="Optimize the ONNX model of a folder.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Add the options of the command."""
        group = parser.add_argument_group("Required arguments")
        group.add_argument("--onnx_model", type=Path, required=True, help="The folder with the ONNX model.")
        group.add_argument("-o", "--output", type=Path, required=True, help="The folder to write.")
        _add_options(parser)

    def run(self) -> None:
        """Run the command."""
        _optimize(self.args.onnx_model, self.args.output, self.args)


class OrtolanCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    """The command `optimum-cli ortolan`."""

    COMMAND = CommandInfo(name="ortolan", help="Prune, quantize and speed up ONNX models for CPUs with Ortolan.")
    SUBCOMMANDS = (CommandInfo(name="optimize", help=OptimizeCommand.COMMAND.help, subcommand_class=OptimizeCommand),)


COMMANDS: list[Any] = [OrtolanCommand]

try:
    from optimum.commands.export.onnx import ONNXExportCommand
except Exception as error:
    # Without the package optimum-onnx, there is no `optimum-cli export onnx` to extend, so no message is printed.
    if not (isinstance(error, ModuleNotFoundError) and (error.name or "") == "optimum.commands.export.onnx"):
        print(
            "ortolan: `optimum-cli export ortolan` is unavailable, because Optimum's ONNX export cannot be imported: "
            f"{type(error).__name__}: {error}",
            file=sys.stderr,
        )
else:

    class OrtolanExportCommand(ONNXExportCommand):  # type: ignore[misc]
        """The command `optimum-cli export ortolan`: Optimum's export with all its options, then `optimize`."""

        COMMAND = CommandInfo(name="ortolan", help="Export PyTorch to ONNX, optimized with Ortolan.")

        @staticmethod
        def parse_args(parser: ArgumentParser) -> None:
            """Add the options of the command."""
            ONNXExportCommand.parse_args(parser)
            _add_options(parser)

        def run(self) -> None:
            """Run the command."""
            output = self.args.output
            try:
                output.absolute().parent.mkdir(parents=True, exist_ok=True)
                # Use a temporary folder beside the output, because large files may not fit into the system's.
                work = tempfile.TemporaryDirectory(prefix=f".{output.name}.export-", dir=output.absolute().parent)
            except OSError as error:
                sys.exit(f"ortolan: cannot write beside {str(output)!r}: {error.strerror}")
            with work as folder:
                self.args.output = Path(folder) / output.name
                super().run()
                _optimize(self.args.output, output, self.args)

    COMMANDS.append((OrtolanExportCommand, ExportCommand))

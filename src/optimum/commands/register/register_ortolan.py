"""Registers Ortolan's commands. Every optimum-cli call imports this module, so an error here would break all calls."""

import sys

try:
    from ortolan.optimum_cli import COMMANDS
except Exception as error:
    COMMANDS = []
    # If Optimum is not installed, no commands are needed. Any other error is a defect that users must see.
    if not (isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "optimum"):
        print(f"ortolan: optimum-cli has no Ortolan commands: {type(error).__name__}: {error}", file=sys.stderr)

REGISTER_COMMANDS = COMMANDS

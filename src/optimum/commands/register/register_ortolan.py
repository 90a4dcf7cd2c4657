"""The module that optimum-cli imports at each call, to find commands. An error here would end every command of it."""

import sys

try:
    from ortolan.optimum_cli import COMMANDS
except Exception as error:
    COMMANDS = []
    # Without Optimum, nobody needs its commands. Any other error is a defect that users must see.
    if not (isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "optimum"):
        print(f"ortolan: optimum-cli has no Ortolan commands: {type(error).__name__}: {error}", file=sys.stderr)

REGISTER_COMMANDS = COMMANDS

"""Found and imported by optimum-cli at each of its calls, by its place. What is raised here would end them all."""

import sys

try:
    from ortolan.optimum_cli import COMMANDS
except Exception as error:
    COMMANDS = []
    # Without Optimum nobody misses its commands. Any other error is a defect that users must see.
    if not (isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "optimum"):
        print(f"ortolan: optimum-cli has no Ortolan commands: {type(error).__name__}: {error}", file=sys.stderr)

REGISTER_COMMANDS = COMMANDS

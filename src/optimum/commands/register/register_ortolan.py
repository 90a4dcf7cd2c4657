"""Found and imported by optimum-cli at each of its calls, by its place. What is raised here would end them all."""

try:
    from ortolan.optimum_cli import COMMANDS
except Exception:  # another Optimum than the one that they were written for, or a broken one
    COMMANDS = []

REGISTER_COMMANDS = COMMANDS

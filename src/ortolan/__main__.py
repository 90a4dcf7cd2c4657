"""The command `python -m ortolan`, the same as `ortolan`."""

from .cli import main

main()

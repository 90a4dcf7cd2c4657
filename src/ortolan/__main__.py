"""`python -m ortolan` is the command `ortolan`."""

from .cli import main

main()

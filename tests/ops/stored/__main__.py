"""Add missing outputs to the stored ones: `python -m tests.ops.stored`, in the repository's root."""

from __future__ import annotations

import argparse
import sys

from .generate import joined, run_all, update
from .store import FOLDER, Store


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ops.stored",
        description="Add the answers of the installed package for cases and instruction sets without stored answers. "
        "Stored answers are not changed; differences are listed, and the exit status is 1.",
    )
    parser.add_argument(
        "--replace",
        action="append",
        default=[],
        metavar="PATTERN",
        help="replace the answers of the cases whose names match (with *, ? as in a shell); repeatable",
    )
    options = parser.parse_args()
    stored = Store.read()
    before = len(stored.records)
    stores = run_all()
    differences = update(stored, joined(stores), list(stores), options.replace)
    stored.write(FOLDER)
    print(f"{', '.join(stores)}: {len(stored.records)} cases, {before} before")
    for difference in differences:
        print(f"not changed: {difference}")
    return 1 if differences else 0


sys.exit(main())

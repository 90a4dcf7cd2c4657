"""Prints English texts for training, one per line: the definitions and example sentences of WordNet 3.1.

python -m ortolan.models.wordnet > texts.txt
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from .fetch import fetch

FILES = ("data.noun", "data.verb", "data.adj", "data.adv")
_EXAMPLE = re.compile(r'"([^"]+)"')
_MIN_WORDS = 3


def read_wordnet(folder: str | os.PathLike[str]) -> list[str]:
    """Return the distinct definitions and examples of at least three words, in the order of the database files."""
    texts: dict[str, None] = {}
    for name in FILES:
        for line in (Path(folder) / name).read_text(encoding="utf-8").split("\n"):
            _, bar, gloss = line.partition(" | ")
            if not bar:  # lines of the licence at the top
                continue
            definition = _EXAMPLE.sub("", gloss).strip(" ;")
            for text in (definition, *_EXAMPLE.findall(gloss)):
                if len(text.split()) >= _MIN_WORDS:
                    texts[text.strip()] = None
    return list(texts)


def main() -> None:
    """Run the command."""
    folder = fetch("wordnet", progress=lambda line: print(line, file=sys.stderr))
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    print("\n".join(read_wordnet(folder)))


if __name__ == "__main__":
    main()

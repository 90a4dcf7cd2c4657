"""Measure speculative decoding on a real model: speed with and without it, and that the tokens are the same.

python -m ortolan.benchmarks.speculation FOLDER [--texts copy edit story] [--requests 1 4 16] [--tokens 128]
    [--rounds 5] [--threads 2] [--draft-model FOLDER] [--json]

FOLDER has a decoder in the form for serving, with its tokenizer. Two engines, with and without speculation, answer the
same requests in turns: "copy" and "edit" lead to answers that repeat most of their prompt, "story" to other text, with
temperature 0.8. Prompts are in the prefix cache, so that the times are those of answers. Prints answer tokens a second
in the fastest round, their ratio, and how many drafted tokens were right. Drafts are from prompt lookup and, with
--draft-model, from a smaller decoder in the form for serving. Exits with 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ..engine import DraftModel, Engine, Request, SamplingOptions
from ..engine.model import PagedModel
from ..engine.step import BLOCK_TOKENS
from ..errors import OrtolanError
from ..models.tokenizer import load_tokenizer
from .result import versions_line

_MOST_PROMPT = 400  # tokens
_RECORD = """name: {name}
born: 18{number} in Harwich, as the second of five children
trade: builder of small boats, later keeper of the harbour light
letters: 4{number} are kept in the town hall; most are to a brother who sailed to Lisbon and never came back
notes: {name} wrote down the weather of each day for thirty years, and the names of all ships that came in
"""
_CODE = """def summary_{number}(orders, limit):
    \"\"\"Return the customers of {name} whose orders exceed a limit.\"\"\"
    totals = {{}}
    for order in orders:
        if order.cancelled or order.customer is None:
            continue
        totals[order.customer] = totals.get(order.customer, 0) + order.price * order.count
    found = [customer for customer, total in totals.items() if total > limit]
    return sorted(found, key=totals.get, reverse=True)
"""
_TEXTS = {
    "copy": f"This is a record.\n\n{_RECORD}\nThis is the same record again.\n\nname: {{name}}\nborn:",
    "edit": f"The code before:\n```python\n{_CODE}```\nThe code after `totals` was renamed to `sums`:\n```python\n"
    "def summary_{number}(orders, limit):",
    "story": "This is a story about {name}, who found {number} letters on the day when the harbour froze over.",
}
_NAMES = ("Ann Harper", "Tom Brill", "Ida Moss", "Karl Voss", "Mary Quill", "Peter Dunn", "Ruth Lane", "Otto Behr")


@dataclass(frozen=True)
class Row:
    """Speeds of one kind of text.

    Attributes:
        text: The kind.
        requests: Requests at a time.
        plain: Tokens a second without speculation.
        speculative: Tokens a second with speculation.
        ratio: speculative / plain.
        drafted: The drafted tokens for each token of the answers.
        accepted: The fraction of drafted tokens that were right.
        equal: True if all tokens were the same in all rounds.
    """

    text: str
    requests: int
    plain: float
    speculative: float
    ratio: float
    drafted: float
    accepted: float
    equal: bool


def make_requests(text: str, count: int, tokens: int, encode: Callable[[str], Sequence[int]]) -> list[Request]:
    """Return requests of one kind of text, for answers of a number of tokens."""
    requests = []
    for index in range(count):
        prompt = _TEXTS[text].format(name=_NAMES[index % len(_NAMES)], number=12 + index)
        options = SamplingOptions(temperature=0.8 if text == "story" else 0, seed=index)
        requests.append(Request(tuple(encode(prompt)), tokens, options))
    return requests


def answer(engine: Engine, requests: Sequence[Request]) -> tuple[list[list[int]], float]:
    """Return the answers to requests that arrive together, and the seconds until the last one ends."""
    began = time.perf_counter()
    streams = [engine.submit(request) for request in requests]
    answers = [[token for output in stream for token in output.tokens] for stream in streams]
    return answers, time.perf_counter() - began


def compare(plain: Engine, speculative: Engine, text: str, requests: Sequence[Request], rounds: int) -> Row:
    """Measure two engines in turns, after a round that is not counted."""
    seconds: dict[Engine, list[float]] = {plain: [], speculative: []}
    expected, _ = answer(plain, requests)
    equal = answer(speculative, requests)[0] == expected
    before = speculative.stats()
    for round_ in range(rounds):
        for engine in (plain, speculative) if round_ % 2 else (speculative, plain):
            answers, elapsed = answer(engine, requests)
            seconds[engine].append(elapsed)
            equal &= answers == expected
    after = speculative.stats()
    count = sum(map(len, expected))
    drafted = after.drafted_tokens - before.drafted_tokens
    return Row(
        text,
        len(requests),
        count / min(seconds[plain]),
        count / min(seconds[speculative]),
        min(seconds[plain]) / min(seconds[speculative]),
        drafted / (rounds * count),
        (after.accepted_tokens - before.accepted_tokens) / drafted if drafted else 0.0,
        equal,
    )


def measure(
    folder: Path,
    texts: Sequence[str],
    counts: Sequence[int],
    tokens: int,
    rounds: int,
    threads: int,
    draft_folder: Path | None = None,
) -> list[Row]:
    """Return a row for each kind of text and number of requests."""
    encode = load_tokenizer(folder).encode
    blocks = -(-max(counts) * (_MOST_PROMPT + tokens) // BLOCK_TOKENS)
    models = [PagedModel.open(folder, threads=threads, blocks=blocks) for _ in range(2)]
    source: DraftModel | Literal["lookup"] = "lookup"
    if draft_folder is not None:
        source = DraftModel(PagedModel.open(draft_folder, threads=threads, blocks=blocks))
    with Engine(models[0], speculation=None) as plain, Engine(models[1], speculation=source) as speculative:
        return [
            compare(plain, speculative, text, make_requests(text, count, tokens, encode), rounds)
            for text in texts
            for count in counts
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder with a decoder in the form for serving")
    parser.add_argument("--texts", nargs="+", choices=_TEXTS, default=list(_TEXTS), help="kinds of text")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16], help="requests at a time")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="threads of ONNX Runtime")
    parser.add_argument("--draft-model", type=Path, help="a folder with a smaller decoder in the form for serving")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    sizes = options.requests, options.tokens, options.rounds, options.threads, options.draft_model
    try:
        rows = measure(options.folder, options.texts, *sizes)
    except OrtolanError as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(versions_line())
        print("text   requests  tokens/s  speculative  ratio  drafted/token  accepted  tokens")
        for row in rows:
            print(
                f"{row.text:<6} {row.requests:>8}  {row.plain:>8.1f}  {row.speculative:>11.1f}  {row.ratio:>5.2f}  "
                f"{row.drafted:>13.2f}  {row.accepted:>8.2f}  {'equal' if row.equal else 'DIFFERENT'}"
            )
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

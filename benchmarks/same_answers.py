"""Check that the answer to each request does not depend on other requests, on a real model.

python -m ortolan.benchmarks.same_answers FOLDER [--requests 2000] [--threads 2] [--seed 0]
    [--cache-type bfloat16 | int8] [--draft-model FOLDER]

FOLDER has a decoder in the form for serving. Requests with random prompts (some share a prefix, some repeat themselves,
so that drafts are accepted), options, seeds and priorities arrive at random times from several threads, some are
cancelled, and the pools are so small that sequences are preempted. Then each request runs alone, with an empty cache
and without speculation. Tokens, and log probabilities bit by bit, must be equal. Prints the counts, and exits with 1 if
an answer differs, or if 2000 or more requests had no preemptions, no tokens from the prefix cache or no accepted
drafts, so that too little was checked.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from ..engine import DraftModel, Engine, Request, SamplingOptions, TokenLogprobs
from ..engine.model import CacheType, PagedModel
from ..engine.step import BLOCK_TOKENS

_REQUESTS = 2000  # the default; this number must lead to preemptions, shared tokens and accepted drafts
_CLIENTS = 8  # threads that submit requests
_CANCELLED = 0.1  # fraction of requests
_LONGEST = 200  # tokens of a prompt, without its prefix
_REPEATED = 0.3  # fraction of prompts that repeat their first tokens
_PIECE = 12  # tokens that such a prompt repeats
_PREFIX = 100
_MOST_TOKENS = 24  # of an answer
_POOL = 2 * (_PREFIX + _LONGEST + _MOST_TOKENS)  # tokens, so that few sequences fit

Answer = tuple[list[int], list[TokenLogprobs]]  # tokens of a choice, and their log probabilities


@dataclass
class Result:
    """Counts of a check.

    Attributes:
        compared: Answers that were compared.
        cancelled: Answers of cancelled requests: their tokens must be the beginning of the answer.
        different: Indices of requests with another answer than alone.
        preemptions: Sequences that lost their blocks and were computed again.
        shared_tokens: Tokens of prompts that came from the prefix cache.
        accepted_tokens: Tokens of answers that were drafted.
    """

    compared: int
    cancelled: int
    different: list[int]
    preemptions: int
    shared_tokens: int
    accepted_tokens: int


def make_requests(count: int, vocabulary: int, seed: int) -> list[Request]:
    """Return random requests."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(0, vocabulary, _PREFIX).tolist() for _ in range(4)]
    requests = []
    for _ in range(count):
        prefix = prefixes[rng.integers(4)][: rng.integers(_PREFIX + 1)] if rng.random() < 0.5 else []
        options = SamplingOptions(
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 40])),
            top_p=float(rng.choice([0.9, 1.0])),
            seed=int(rng.integers(1 << 30)),
            repetition_penalty=float(rng.choice([1.0, 1.2])),
            logprobs=None if rng.random() < 0.5 else 2,
        )
        text = rng.integers(0, vocabulary, rng.integers(1, _LONGEST)).tolist()
        if rng.random() < _REPEATED:
            text = (text[:_PIECE] * -(-_LONGEST // _PIECE))[: len(text)]
        requests.append(
            Request(
                prompt=(*prefix, *text),
                max_tokens=int(rng.integers(1, _MOST_TOKENS + 1)),
                sampling=options,
                n=int(rng.choice([1, 1, 1, 2])),
                priority=int(rng.integers(3)),
                client=str(rng.integers(3)),
            )
        )
    return requests


def together(engine: Engine, requests: Sequence[Request], seed: int) -> tuple[list[list[Answer]], list[bool]]:
    """Return the answers to requests that arrive at random, and which of them were cancelled."""
    answers: list[list[Answer]] = [[] for _ in requests]
    cancelled = [False] * len(requests)

    def client(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        for index in range(number, len(requests), _CLIENTS):
            time.sleep(float(rng.exponential(0.002)))
            cancelled[index] = rng.random() < _CANCELLED
            answers[index] = run(engine, requests[index], int(rng.integers(1, 9)) if cancelled[index] else None)

    with ThreadPoolExecutor(_CLIENTS) as pool:
        for done in [pool.submit(client, number) for number in range(_CLIENTS)]:
            done.result()  # raises the client's error
    return answers, cancelled


def run(engine: Engine, request: Request, cancel_after: int | None = None) -> list[Answer]:
    """Return the answer of each choice. cancel_after: cancel the request after this number of events."""
    found: list[Answer] = [([], []) for _ in range(request.n)]
    stream = engine.submit(request)
    for events, output in enumerate(stream, 1):
        if output.finish_reason == "error":
            raise RuntimeError(f"request failed: {output.error}")
        found[output.index][0].extend(output.tokens)
        found[output.index][1].extend(output.logprobs or ())
        if events == cancel_after:
            stream.cancel()
    return found


def check(
    folder: str | os.PathLike[str],
    count: int,
    threads: int,
    seed: int,
    cache_type: CacheType = "bfloat16",
    draft_folder: str | os.PathLike[str] | None = None,
) -> Result:
    """Compare `count` requests that run together with the same requests alone."""
    blocks = -(-_POOL // BLOCK_TOKENS)
    model = PagedModel.open(folder, threads=threads, blocks=blocks, cache_type=cache_type)
    requests = make_requests(count, model.vocabulary, seed)
    source: DraftModel | Literal["lookup"] = "lookup"
    if draft_folder is not None:
        source = DraftModel(PagedModel.open(draft_folder, threads=threads, blocks=blocks))
    with Engine(model, max_step_tokens=128, max_sequences=32, speculation=source) as engine:
        answers, cancelled = together(engine, requests, seed)
        stats = engine.stats()
    different = []
    for index, request in enumerate(requests):
        with Engine(model, speculation=None) as engine:
            alone = run(engine, request)
        cut = [(one[0][: len(two[0])], one[1][: len(two[1])]) for one, two in zip(alone, answers[index], strict=True)]
        if answers[index] != (cut if cancelled[index] else alone):
            different.append(index)
    return Result(
        len(requests),
        sum(cancelled),
        different,
        stats.preemptions,
        stats.prefix_hit_tokens,
        stats.accepted_tokens,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a folder with a decoder in the form for serving")
    parser.add_argument("--requests", type=int, default=_REQUESTS)
    parser.add_argument("--threads", type=int, default=2, help="threads of ONNX Runtime")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache-type", choices=get_args(CacheType), default="bfloat16", help="of keys and values")
    parser.add_argument("--draft-model", help="a folder with a smaller decoder in the form for serving")
    options = parser.parse_args(argv)
    began = time.monotonic()
    sizes = options.requests, options.threads, options.seed
    result = check(options.folder, *sizes, options.cache_type, options.draft_model)
    print(
        f"{result.compared} requests, {result.cancelled} of them cancelled; {result.preemptions} preemptions, "
        f"{result.shared_tokens} tokens from the prefix cache, {result.accepted_tokens} accepted draft tokens; "
        f"{time.monotonic() - began:.0f} s"
    )
    if result.different:
        print(f"{len(result.different)} answers differ from those of the request alone, such as {result.different[:5]}")
    else:
        print("every answer equals that of the request alone")
    is_weak = result.compared >= _REQUESTS and not (
        result.preemptions and result.shared_tokens and result.accepted_tokens
    )
    if is_weak:
        print(
            "too little was checked: expected preemptions, tokens from the prefix cache and accepted drafts; try "
            "another --seed"
        )
    return 1 if result.different or is_weak else 0


if __name__ == "__main__":
    sys.exit(main())

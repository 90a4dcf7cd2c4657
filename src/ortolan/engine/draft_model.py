"""Drafts from a smaller decoder of the same vocabulary."""

from __future__ import annotations

import time
from array import array
from bisect import bisect
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from .blocks import BlockPool
from .drafts import Draft
from .sequence import Sequence, State, blocks_of
from .step import BLOCK_TOKENS, COLUMNS, Model, pack_step
from .step_costs import MOST_ROWS, StepCosts

_CALL_TOKENS = 512  # of the sequences that a call catches up with; more would hold up the answers of others
# Guesses are told apart by the draft model's own probability. How often they are right is learned for each class.
_EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
_CHANCES = (0.05, 0.15, 0.25, 0.4, 0.55, 0.7, 0.85, 0.93, 0.98)  # at first
_ACCURACY = 0.7  # of first tokens, at first
_PRIOR = 4  # what the first values count, in guesses
_LEAST_RATE = 1 / 64  # of learning from a guess
_LEAST_CHANCE = 0.1  # a draft ends before its tokens become less likely, until costs are known
_LEAST_GAIN = 1.04  # the expected gain of drafting, because estimates err
_HORIZON = 128  # tokens of an answer that should repay what it takes to compute its prompt
_SHORT = BLOCK_TOKENS  # sequences that lack at most this many tokens are always computed
_TRIAL_SHARE = 0.005  # of the time, for drafts that should not pay, to find out whether they do
_REST = 16  # steps between decisions while drafts should not pay, because to decide takes time too
_NOTHING = Draft()


@dataclass(eq=False, slots=True)
class _Cache:
    """The blocks of one sequence in the draft model's pools, and its last draft.

    Attributes:
        blocks: The blocks, which first hold `length` tokens.
        length: The number of stored tokens, drafted ones included.
        known: The number of blocks that other sequences may find.
        start: The number of tokens of the sequence before the draft.
        draft: The drafted tokens.
        kinds: The class of each drafted token.
    """

    blocks: array[int] = field(default_factory=lambda: array("q"))
    length: int = 0
    known: int = 0
    start: int = 0
    draft: Items[int] = ()
    kinds: Items[int] = ()


@dataclass(eq=False, slots=True)
class _Job:
    """A draft in the making."""

    sequence: Sequence
    cache: _Cache
    limit: int
    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """The number of the sequence's tokens that are not stored."""
        return len(self.sequence.tokens) - self.cache.length

    @property
    def chance(self) -> float:
        """The chance that all tokens so far are right."""
        return self.chances[-1] if self.chances else 1.0


class DraftModel:
    """Guesses the next tokens of all sequences together, by a smaller decoder of the same vocabulary.

    The decoder has its own KV cache, whose prefixes are shared as the engine's are. A sequence without room in it gets
    no drafts. Drafts are the likeliest tokens; those of a sequence end when their chance no longer pays for the next
    call. If drafts do not pay at all, they are tried in half a percent of the time.

    Attributes:
        model: The decoder.
        accuracy: How often the first token of a draft was right of late.
    """

    def __init__(self, model: Model) -> None:
        """Use a decoder, which nobody else may call."""
        self.model = model
        self.accuracy = _ACCURACY
        self._guesses = 0
        self._chances = list(_CHANCES)
        self._counts = [0] * len(_CHANCES)
        self._pool = BlockPool(model.blocks)
        self._caches: dict[Sequence, _Cache] = {}
        self._costs = StepCosts()  # of short calls
        self._token_seconds = 0.0  # in long calls
        self._calls = 0
        self._rest = 0  # steps until the next decision
        self._credit = 0.0  # seconds that drafts which should not pay may take

    def rests(self) -> bool:
        """Count a step, and return whether it needs no call of `propose`, because drafts did not pay of late."""
        self._rest = max(self._rest - 1, 0)
        return self._rest > 0

    def propose(
        self, sequences: Items[Sequence], most: Items[int], rows: int = 0, steps: Items[float] = ()
    ) -> list[Draft]:
        """Guess what follows the tokens of each sequence.

        Args:
            sequences: The sequences.
            most: The most tokens of each draft.
            rows: The sequences of the engine's next step.
            steps: The seconds of that step with 0, 1, 2, … drafted tokens; empty if they are not known.

        Returns:
            A draft for each sequence, which may be empty.
        """
        self._drop_stopped()
        call = next(iter(self._costs.seconds(len(sequences), len(sequences))), 0.0)
        best, drafted = self._best_rate(len(sequences), call, rows, steps)
        is_trial = not drafted and bool(steps) and call > 0
        if is_trial:
            self._rest = _REST
            self._credit = min(self._credit + _REST * _TRIAL_SHARE * steps[0], steps[0])
            if self._credit <= 0:
                return [_NOTHING] * len(sequences)
        began = time.perf_counter()
        jobs = {}
        for sequence, count in zip(sequences, most, strict=True):
            limit = min(count, self.model.context - len(sequence.tokens))
            if limit > 0:
                jobs[sequence] = self._job(sequence, limit)
        if drafted:
            least = best * (call / len(sequences) + (steps[drafted] - steps[0]) / drafted)
            saved = steps[0] / rows - 1 / best
            self._draft([job for job in jobs.values() if self._is_repaid(job, saved)], least)
        elif not is_trial:
            self._draft(list(jobs.values()), _LEAST_CHANCE)
        elif jobs:
            trial = min(jobs.values(), key=lambda job: job.missing)
            trial.limit = 1
            self._draft([trial], 0.0)
        if is_trial:
            self._credit -= time.perf_counter() - began
        return [Draft(jobs[one].tokens, jobs[one].chances) if one in jobs else _NOTHING for one in sequences]

    def _job(self, sequence: Sequence, limit: int) -> _Job:
        """Return an empty draft, after what was learned from the last one."""
        cache = self._caches.setdefault(sequence, _Cache())
        self._compare(sequence, cache)
        self._adopt(sequence, cache)
        return _Job(sequence, cache, limit)

    def _draft(self, jobs: list[_Job], least: float) -> None:
        """Draft one token of each sequence in a call, while their chance is at least `least`."""
        running = self._catch_up(jobs)
        while running := [one for one in running if self._continues(one, least)]:
            self._guess(running, [one.tokens[-1:] for one in running])
        for job in jobs:
            job.cache.draft, job.cache.kinds = job.tokens, job.kinds

    # -- whether drafts pay

    def _best_rate(self, count: int, call: float, rows: int, steps: Items[float]) -> tuple[float, int]:
        """Return the most tokens a second that drafts should give, and the drafted tokens of all sequences for it.

        Without known costs, or if drafts should not pay, the number is 0.
        """
        if not steps or not call:
            return 0.0, 0
        best, drafted = _LEAST_GAIN * rows / steps[0], 0
        chance, expected = 1.0, float(rows)
        for calls in range(1, (len(steps) - 1) // count + 1):
            chance *= self.accuracy
            expected += count * chance
            rate = expected / (steps[calls * count] + calls * call)
            if rate > best:
                best, drafted = rate, calls * count
        return best, drafted

    def _is_repaid(self, job: _Job, saved: float) -> bool:
        """Return whether an answer will save the time of its missing tokens. saved: seconds for each token."""
        left = min(job.sequence.limit - len(job.sequence.tokens), _HORIZON)
        return job.missing <= _SHORT or job.missing * self._token_seconds <= left * saved

    def _continues(self, job: _Job, least: float) -> bool:
        """Return whether the next token of a draft should be guessed, and has a place."""
        return (
            len(job.tokens) < job.limit
            and job.chance * self.accuracy >= least
            and self._reserve(job.cache, job.cache.length + 1)
        )

    def _observe(self, tokens: int, seconds: float) -> None:
        """Learn the cost of a call."""
        self._calls += 1
        if self._calls == 1:  # it takes longer than others
            return
        if tokens <= MOST_ROWS:
            self._costs.observe(tokens, seconds)
        else:
            self._token_seconds = (self._token_seconds or seconds / tokens) / 2 + seconds / tokens / 2

    def _learn(self, kind: int, is_right: bool, is_first: bool) -> None:
        """Learn from a token of a draft whose earlier tokens were right."""
        if is_first:
            self._guesses += 1
            self.accuracy += (is_right - self.accuracy) * max(1 / (_PRIOR + self._guesses), _LEAST_RATE)
        self._counts[kind] += 1
        rate = max(1 / (_PRIOR + self._counts[kind]), _LEAST_RATE)
        self._chances[kind] += (is_right - self._chances[kind]) * rate

    # -- the decoder

    def _catch_up(self, jobs: list[_Job]) -> list[_Job]:
        """Store missing tokens in one call, and return the jobs that have a first token by it."""
        left = _CALL_TOKENS
        running, parts = [], []
        chunk: tuple[list[_Job], list[array[int]]] = [], []
        for job in sorted(jobs, key=lambda one: one.missing):
            cache, tokens = job.cache, job.sequence.tokens
            count = min(job.missing, left)
            if count == 0 or not self._reserve(cache, cache.length + count):
                continue
            left -= count
            cache.start = cache.length + count
            part = tokens[cache.length : cache.start]
            if cache.start == len(tokens):
                running.append(job)
                parts.append(part)
            else:
                chunk[0].append(job)
                chunk[1].append(part)
        if parts or chunk[0]:
            self._guess(running, parts, *chunk)
        return running

    def _guess(
        self,
        jobs: list[_Job],
        parts: Items[Items[int]],
        others: Items[_Job] = (),
        other_parts: Items[Items[int]] = (),
    ) -> None:
        """Store tokens of each job, and append the likeliest next one to its draft.

        Args:
            jobs: The jobs.
            parts: The tokens to store of each.
            others: Jobs whose tokens are only stored.
            other_parts: Their tokens.
        """
        began = time.perf_counter()
        caches = [one.cache for one in (*jobs, *others)]
        lengths = [*map(len, parts), *map(len, other_parts)]
        ids = [token for part in (*parts, *other_parts) for token in part]
        columns = -(-max(len(one.blocks) for one in caches) // COLUMNS) * COLUMNS
        table = np.zeros((len(caches), columns), np.int64)
        for line, cache in zip(table, caches, strict=True):
            line[: len(cache.blocks)] = cache.blocks
        past = [one.length for one in caches]
        rows = [end - 1 for end in accumulate(lengths[: len(jobs)])]
        best, chances = likeliest(self.model.run(pack_step(ids, lengths, past, table, rows)))
        for cache, length in zip(caches, lengths, strict=True):
            cache.length += length
        for job, token, chance in zip(jobs, best, chances, strict=True):
            kind = bisect(_EDGES, chance)
            job.chances.append(job.chance * self._chances[kind])
            job.tokens.append(token)
            job.kinds.append(kind)
        self._observe(len(ids), time.perf_counter() - began)

    # -- the cache

    def _compare(self, sequence: Sequence, cache: _Cache) -> None:
        """Learn how much of the last draft was right, and keep only that in the cache."""
        right = 0
        for drafted, kind, token in zip(cache.draft, cache.kinds, sequence.tokens[cache.start :], strict=False):
            self._learn(kind, drafted == token, right == 0)
            if drafted != token:
                break
            right += 1
        # The last token is computed again if it was stored, because the next one follows from its logits.
        cache.length = cache.start = min(cache.length, cache.start + right, len(sequence.tokens) - 1)
        cache.draft = cache.kinds = ()
        full = min(cache.length // BLOCK_TOKENS, len(sequence.hashes))
        for index in range(cache.known, full):
            cache.blocks[index] = self._pool.register(cache.blocks[index], sequence.hashes[index])
        cache.known = max(cache.known, full)

    def _adopt(self, sequence: Sequence, cache: _Cache) -> None:
        """Take blocks of other sequences that hold the next tokens."""
        while cache.length == len(cache.blocks) * BLOCK_TOKENS:
            index = len(cache.blocks)
            if index >= min(len(sequence.hashes), sequence.sharable_blocks):
                return
            block = self._pool.find(sequence.hashes[index])
            if block is None:
                return
            self._pool.acquire(block)
            cache.blocks.append(block)
            cache.known += 1
            cache.length += BLOCK_TOKENS

    def _reserve(self, cache: _Cache, length: int) -> bool:
        """Allocate blocks for this number of tokens; return False if there are too few."""
        needed = blocks_of(length) - len(cache.blocks)
        if needed > self._pool.available:
            return False
        cache.blocks.extend(self._pool.allocate() for _ in range(needed))
        return True

    def _drop_stopped(self) -> None:
        """Release the blocks of sequences that ended or wait. Full blocks stay in the prefix cache."""
        for sequence in [one for one in self._caches if one.state is not State.RUNNING]:
            cache = self._caches.pop(sequence)
            self._compare(sequence, cache)
            for block in reversed(cache.blocks):
                self._pool.release(block)


def likeliest(logits: NDArray[np.float32]) -> tuple[list[int], list[float]]:
    """Return the likeliest token of each row and its probability, which is 0 if logits are not finite."""
    best = logits.argmax(axis=1)
    with np.errstate(invalid="ignore"):
        chances = 1 / np.exp(logits - logits[np.arange(len(best)), best][:, None]).sum(axis=1)
    return best.tolist(), np.nan_to_num(chances, nan=0.0).tolist()

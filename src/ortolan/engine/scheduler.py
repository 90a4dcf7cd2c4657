"""Choice of the tokens that run in the next step, and allocation of their blocks."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from ..errors import ArgumentError
from .blocks import BlockHasher, BlockPool
from .sequence import Sequence, State, blocks_of
from .speculation import Speculation
from .step import BLOCK_TOKENS, COLUMNS, Step, pack_step
from .waiting import WaitingQueue

_MOST_DEFERRED = 16  # sequences that are looked at in a step though they wait for others
_LONG_STEPS = 4  # a prompt that fills more steps than this leaves half of each to other sequences
_HASHED = 32  # blocks of a prompt that are hashed at once


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """A step and the sequences in it.

    Attributes:
        step: The arrays for the model.
        counts: The sequences in the order of the step, and how many of their tokens run, drafts included.
        rows: The sequences whose last token runs. In the order of `step.logit_rows`, which has a row for the last token
            of a sequence and for each token of its draft.
        drafts: The drafts that the step verifies.
    """

    step: Step
    counts: dict[Sequence, int]
    rows: list[Sequence]
    drafts: dict[Sequence, Items[int]] = field(default_factory=dict)


class Scheduler:
    """Continuous batching with chunked prefill, a prefix cache, and preemption by recomputation.

    A step first holds one token of each sequence whose prompt is computed, then chunks of prompts, then drafts, up to a
    budget of tokens. A very long prompt leaves half of the budget to the sequences behind it. Full blocks are shared by
    their hash. A sequence whose next block is being computed for another sequence in the same step waits for it. When
    blocks run out, the sequence of the lowest priority that began last gives up its blocks; it is computed again later,
    with what the prefix cache still holds.

    No sequence starves among others of its priority: the oldest one can take the blocks of all others, and a
    sequence that does not fit keeps those behind it in the queue from starting.

    Attributes:
        pool: The blocks.
        waiting: Sequences that do not run.
        running: Sequences that own blocks, in the order of their rank.
        preemptions: How often a sequence gave up its blocks.
        prefix_queries: Tokens that were looked up in the prefix cache.
        prefix_hits: Tokens that were found there.
    """

    def __init__(
        self,
        blocks: int,
        context: int,
        max_step_tokens: int,
        max_sequences: int,
        speculation: Speculation | None = None,
    ) -> None:
        """Create a scheduler without sequences.

        Args:
            blocks: The number of blocks of the pools.
            context: The most tokens of a sequence.
            max_step_tokens: The most tokens of a step.
            max_sequences: The most sequences that run at the same time.
            speculation: Chooses drafts; None: steps have no drafts.
        """
        if max_sequences < 1:
            raise ArgumentError(f"max_sequences is {max_sequences}, expected at least 1")
        least = max(max_sequences, BLOCK_TOKENS)
        if max_step_tokens < least:
            raise ArgumentError(
                f"max_step_tokens is {max_step_tokens}, expected at least {least}: one token of each of max_sequences="
                f"{max_sequences} sequences, and one block"
            )
        self.pool = BlockPool(blocks)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.preemptions = self.prefix_queries = self.prefix_hits = 0
        self._speculation = speculation
        self._hasher = BlockHasher()
        self._budget = max_step_tokens
        width = -(-max(blocks_of(context), 1) // COLUMNS) * COLUMNS
        self._table = np.zeros((max_sequences, width), np.int64)
        self._slots = list(range(max_sequences - 1, -1, -1))
        self._tickets = 0
        # The fields below belong to the step that `schedule` plans.
        self._counts: dict[Sequence, int] = {}
        self._drafts: dict[Sequence, Items[int]] = {}
        self._left = 0
        self._has_chunk = False
        self._deferred = 0
        self._pending: set[bytes] = set()  # hashes of blocks that chunks of the step fill

    def blocks(self, sequence: Sequence) -> list[int]:
        """Return the blocks of a running sequence."""
        result: list[int] = self._table[sequence.slot, : sequence.blocks].tolist()
        return result

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. All its tokens, prompt and answer, must fit into the pool."""
        self.waiting.add(sequence)

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence, running or waiting. Its full blocks stay in the prefix cache."""
        if sequence.state is State.RUNNING:
            self._give_up(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = State.ENDED
        sequence.drafting = None

    def schedule(self) -> Plan | None:
        """Choose the tokens of the next step and allocate their blocks; None if there is no sequence."""
        self._counts, self._drafts = {}, {}
        self._left = self._budget
        self._pending = set()
        self._has_chunk = False
        self._deferred = 0
        self._schedule_decoding()
        self._schedule_prompts()
        if self._speculation is not None and self._counts:
            self._schedule_drafts(self._speculation)
        plan = self._plan() if self._counts else None
        self._counts, self._drafts = {}, {}  # the plan's from now on: it does not change when its sequences end
        return plan

    def complete(self, plan: Plan) -> None:
        """Count the tokens of a step as stored, and let other sequences find blocks that became full.

        Drafts are counted by `accept`. Sequences that ended since `schedule` are left out. After a failed step, do not
        call this; end or preempt its sequences.
        """
        drafts = plan.drafts
        for sequence, count in plan.counts.items():
            if sequence.state is State.RUNNING:
                self._store(sequence, count - len(drafts[sequence]) if sequence in drafts else count)

    def accept(self, sequence: Sequence) -> None:
        """Count the next token of a sequence's draft as stored, after it was appended to the tokens."""
        self._store(sequence, 1)

    def settle(self, plan: Plan) -> None:
        """Take back the blocks of drafts that were wrong, when the tokens of a step have been drawn."""
        for sequence in plan.drafts:
            if sequence.state is State.RUNNING:
                self._shrink(sequence, blocks_of(len(sequence.tokens)))

    # -- planning

    def _schedule_decoding(self) -> None:
        """Add one token of each sequence that lacks only one."""
        for sequence in self.running.copy():
            computed = sequence.computed
            if computed != len(sequence.tokens) - 1 or sequence.state is not State.RUNNING:
                continue
            if computed == sequence.blocks * BLOCK_TOKENS:
                # The last one in rank may be this sequence itself, and then loses its blocks.
                while not self.pool.available and sequence.state is State.RUNNING:
                    self._preempt(self.running[-1])
                if sequence.state is not State.RUNNING:
                    continue
                self._append_block(sequence, self.pool.allocate())
            self._counts[sequence] = 1
            self._left -= 1

    def _schedule_prompts(self) -> None:
        """Fill the budget with chunks of running sequences and of waiting ones, which start, by priority."""
        candidates = self.waiting.candidates() if self._has_place() else iter(())
        candidate = next(candidates, None)
        prompts = [one for one in self.running if one.computed < len(one.tokens) - 1]
        for sequence in prompts:
            while candidate is not None and candidate.priority < sequence.priority and self._has_budget():
                candidate = next(candidates, None) if self._start(candidate) else None
            # A waiting sequence may have taken the blocks of this one.
            if sequence.state is State.RUNNING and self._has_budget():
                self._add_chunk(sequence, candidate is not None or sequence is not prompts[-1])
        while candidate is not None and self._has_budget():
            candidate = next(candidates, None) if self._start(candidate) else None

    def _schedule_drafts(self, speculation: Speculation) -> None:
        """Add drafts of sequences whose next token is computed, as far as budget and blocks are left over.

        Drafts leave each running sequence the blocks that it needs soon, as new sequences do.
        """
        if self._left <= 0:
            return
        room = max(self._room([]), 0)
        most: dict[Sequence, int] = {}
        rows = 0
        for sequence, count in self._counts.items():
            length = len(sequence.tokens)
            if sequence.computed + count == length:
                rows += 1
                if count == 1:
                    # The step draws one token more than it accepts.
                    most[sequence] = min(sequence.limit - length - 1, (sequence.blocks + room) * BLOCK_TOKENS - length)
        used = self._budget - self._left
        for sequence, draft in speculation.choose(most, rows, used, self._left).items():
            length = len(sequence.tokens)
            needed = blocks_of(length + len(draft)) - sequence.blocks
            if needed > room:
                draft = draft[: sequence.blocks * BLOCK_TOKENS - length]
                needed = 0
            if not len(draft):
                continue
            for _ in range(needed):
                self._append_block(sequence, self.pool.allocate())
            room -= max(needed, 0)
            self._drafts[sequence] = draft
            self._counts[sequence] += len(draft)
            self._left -= len(draft)

    def _has_budget(self) -> bool:
        """Return whether another chunk fits: of a whole block, unless it is the first chunk of a prompt in the step."""
        return self._left >= BLOCK_TOKENS or (self._left > 0 and not self._has_chunk)

    def _has_place(self) -> bool:
        """Return whether the first waiting sequence could have a slot, so that a long queue costs nothing otherwise."""
        first = self.waiting.priority
        return first is not None and (bool(self._slots) or first < self.running[-1].priority)

    def _start(self, sequence: Sequence) -> bool:
        """Begin to compute a waiting sequence, unless it should wait for another one that computes its next block.

        Returns:
            Whether sequences behind it in the queue may start; False if slots or blocks are missing.
        """
        lower = [one for one in self.running if one.priority > sequence.priority]
        if not self._slots and not lower:
            return False
        hits = self._cached_blocks(sequence)
        if self._is_pending(sequence, len(hits)):
            self._deferred += 1
            return self._deferred < _MOST_DEFERRED
        needed = blocks_of(len(sequence.tokens)) - len(hits)
        missing = needed - self._room(hits)
        if missing > sum(one.blocks + _demand(one) for one in lower):
            return False
        while not self._slots or self._room(hits) < needed:
            if not lower:
                return False
            self._preempt(lower.pop())
        self.waiting.remove(sequence)
        self.waiting.started(sequence)
        is_new = sequence.ticket < 0
        if is_new:
            sequence.tokens = sequence.tokens[:]  # it was shared with other choices
            sequence.ticket = self._tickets
            self._tickets += 1
        sequence.state = State.RUNNING
        sequence.slot = self._slots.pop()
        insort(self.running, sequence, key=lambda one: one.rank)
        self._adopt(sequence, hits)
        if is_new:
            sequence.cached = sequence.computed
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += sequence.computed
        self._add_chunk(sequence, len(self.waiting) > 0)
        return True

    def _room(self, hits: list[int]) -> int:
        """Return the blocks that a new sequence may use, if it adopts cached blocks and leaves running ones theirs."""
        pool = self.pool
        adopted = sum(pool.references(block) == 0 for block in hits)
        return pool.available - adopted - sum(_demand(one) for one in self.running)

    def _add_chunk(self, sequence: Sequence, has_others: bool) -> None:
        """Add a chunk of a running sequence to the step, which ends at the end of a block if it is not the last one.

        The chunk is smaller, or missing, if older sequences have the blocks.

        Args:
            sequence: The sequence.
            has_others: Other sequences could use the rest of the budget.
        """
        if sequence.computed == sequence.blocks * BLOCK_TOKENS:
            self._adopt(sequence, self._cached_blocks(sequence))
            if self._is_pending(sequence, sequence.blocks):
                return
        computed = sequence.computed
        left = self._left
        if len(sequence.tokens) - computed > _LONG_STEPS * self._budget and left >= 2 * BLOCK_TOKENS and has_others:
            left = blocks_of(left // 2) * BLOCK_TOKENS
        end = min(len(sequence.tokens), computed + left)
        if end < len(sequence.tokens) and end // BLOCK_TOKENS * BLOCK_TOKENS > computed:
            end = end // BLOCK_TOKENS * BLOCK_TOKENS
        pool = self.pool
        needed = blocks_of(end) - sequence.blocks
        while pool.available < needed and self.running[-1] is not sequence:
            self._preempt(self.running[-1])
        end = min(end, (sequence.blocks + pool.available) * BLOCK_TOKENS)
        if end <= computed:
            return
        for _ in range(blocks_of(end) - sequence.blocks):
            self._append_block(sequence, pool.allocate())
        self._counts[sequence] = end - computed
        self._left -= end - computed
        self._has_chunk = True
        self._hasher.extend(sequence.hashes, sequence.tokens, end // BLOCK_TOKENS, sequence.salt)
        self._pending.update(sequence.hashes[computed // BLOCK_TOKENS : end // BLOCK_TOKENS])

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Return the blocks of the prefix cache that hold the next tokens of a sequence."""
        found: list[int] = []
        hashes, find = sequence.hashes, self.pool.find
        for index in range(sequence.blocks, sequence.sharable_blocks):
            if index == len(hashes):
                blocks = min(index + _HASHED, sequence.sharable_blocks)
                self._hasher.extend(hashes, sequence.tokens, blocks, sequence.salt)
            block = find(hashes[index])
            if block is None:
                break
            found.append(block)
        return found

    def _is_pending(self, sequence: Sequence, index: int) -> bool:
        """Return whether the step fills a block, for another sequence, that a sequence could share."""
        if index >= sequence.sharable_blocks or not self._pending:
            return False
        self._hasher.extend(sequence.hashes, sequence.tokens, index + 1, sequence.salt)
        return sequence.hashes[index] in self._pending

    # -- blocks of a sequence

    def _store(self, sequence: Sequence, count: int) -> None:
        """Count tokens of a sequence as stored, and let other sequences find blocks that became full."""
        full = sequence.computed // BLOCK_TOKENS
        sequence.computed += count
        now_full = sequence.computed // BLOCK_TOKENS
        if now_full > full:
            self._hasher.extend(sequence.hashes, sequence.tokens, now_full, sequence.salt)
            row = self._table[sequence.slot]
            for index in range(full, now_full):
                row[index] = self.pool.register(int(row[index]), sequence.hashes[index])

    def _shrink(self, sequence: Sequence, blocks: int) -> None:
        """Release the blocks of a sequence after the first ones."""
        row = self._table[sequence.slot, blocks : sequence.blocks]
        # The end of a prefix is of use only with its beginning, so the end is released, and later evicted, first.
        for block in row[::-1].tolist():
            self.pool.release(block)
        row[:] = 0
        sequence.blocks = min(sequence.blocks, blocks)

    def _adopt(self, sequence: Sequence, hits: list[int]) -> None:
        for block in hits:
            self.pool.acquire(block)
            self._append_block(sequence, block)
        sequence.computed += len(hits) * BLOCK_TOKENS

    def _append_block(self, sequence: Sequence, block: int) -> None:
        self._table[sequence.slot, sequence.blocks] = block
        sequence.blocks += 1

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks and queue it again."""
        self._give_up(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.add(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._left += self._counts.pop(sequence, 0)
        self._shrink(sequence, 0)
        self._slots.append(sequence.slot)
        sequence.slot = -1
        sequence.computed = 0
        self.waiting.stopped(sequence)

    def _plan(self) -> Plan:
        counts, drafts = self._counts, self._drafts
        sequences = list(counts)
        ids = array("q")
        rows: list[Sequence] = []
        row_indices: list[int] = []
        widest = 1
        for sequence, count in counts.items():
            computed, tokens = sequence.computed, sequence.tokens
            if count == 1:
                ids.append(tokens[computed])
            else:
                ids += tokens[computed : computed + count]
            if computed + count >= len(tokens):
                rows.append(sequence)
                row_indices.append(len(ids) - 1)
                for token in drafts.get(sequence, ()):
                    row_indices.append(len(ids))
                    ids.append(token)
            if sequence.blocks > widest:
                widest = sequence.blocks
        columns = -(-widest // COLUMNS) * COLUMNS
        # take copies: the table may change while a caller still holds the step
        table = self._table[:, :columns].take([one.slot for one in sequences], axis=0)
        past = [one.computed for one in sequences]
        return Plan(pack_step(ids, list(counts.values()), past, table, row_indices), counts, rows, drafts)


def _demand(sequence: Sequence) -> int:
    """Return the blocks to keep for a running sequence: those of its tokens, and another one that it needs soon.

    New sequences that took these would soon be preempted again.
    """
    ahead = len(sequence.tokens) + BLOCK_TOKENS // 2
    return blocks_of(ahead) - sequence.blocks

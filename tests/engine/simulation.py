"""Drives a scheduler with the small model, one step after the other, and checks what must hold at each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ortolan.engine import BLOCK_TOKENS, Request, RowState
from ortolan.engine.scheduler import Plan, Scheduler
from ortolan.engine.sequence import Sequence, State, blocks_of
from ortolan.engine.speculation import Speculation

from .small_model import SmallModel, draw


def check_step(scheduler: Scheduler, plan: Plan, budget: int) -> None:
    """No block of the step is written that another sequence uses or can find; none is left out of the table."""
    step = plan.step
    assert 0 < len(step.input_ids) <= budget
    assert scheduler._left == budget - len(step.input_ids)  # also after preemptions
    assert step.block_table.shape[1] % 8 == 0
    assert step.sequence_starts[-1] == len(step.input_ids)
    written: set[int] = set()
    for row, (sequence, count) in enumerate(plan.counts.items()):
        assert sequence.state is State.RUNNING and count > 0
        assert step.past_lengths[row] == sequence.computed
        draft = list(plan.drafts.get(sequence, ()))
        start, end = step.sequence_starts[row : row + 2].tolist()
        expected = list(sequence.tokens[sequence.computed :][: count - len(draft)]) + draft
        assert step.input_ids[start:end].tolist() == expected and sequence.computed + count < sequence.limit
        blocks = scheduler.blocks(sequence)
        first, last = sequence.computed // BLOCK_TOKENS, (sequence.computed + count - 1) // BLOCK_TOKENS
        assert step.block_table[row, : last + 1].tolist() == blocks[: last + 1]
        assert not step.block_table[row, len(blocks) :].any()
        for block in blocks[first : last + 1]:
            assert scheduler.pool.references(block) == 1 and not scheduler.pool.is_registered(block)
            assert block not in written
            written.add(block)
    if any(one.blocks > blocks_of(len(one.tokens)) for one in plan.drafts):  # blocks that nobody else needs soon
        ahead = {one: blocks_of(len(one.tokens) + BLOCK_TOKENS // 2) - one.blocks for one in scheduler.running}
        assert sum(max(count, 0) for count in ahead.values()) <= scheduler.pool.available


def check_pool(scheduler: Scheduler) -> None:
    """Each block is free, cached, or used as often as running sequences hold it."""
    pool = scheduler.pool
    held = Counter(block for one in scheduler.running for block in scheduler.blocks(one))
    assert all(pool.references(block) == held[block] for block in range(pool.blocks))
    assert pool.used == len(held) and pool.free + pool.cached + pool.used == pool.blocks
    ranks = [one.rank for one in scheduler.running]
    assert ranks == sorted(ranks) and len(set(ranks)) == len(ranks)
    assert len({one.slot for one in scheduler.running}) == len(scheduler.running)


def check_settled(scheduler: Scheduler) -> None:
    """Nothing is left of drafts: the tokens of a sequence are stored except the last, in blocks for no more."""
    check_pool(scheduler)
    for one in scheduler.running:
        assert one.computed < len(one.tokens) and one.blocks <= blocks_of(len(one.tokens))


@dataclass
class Simulation:
    """A scheduler, the small model, and answers that grow."""

    blocks: int
    budget: int = 64
    sequences: int = 8
    speculation: Speculation | None = None
    repeats: bool = False
    steps: int = 0
    computed: int = 0
    drafted: int = 0
    accepted: int = 0
    rows: dict[Sequence, tuple[Request, RowState]] = field(default_factory=dict)
    submitted: dict[Sequence, int] = field(default_factory=dict)
    ended: dict[Sequence, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = SmallModel(self.blocks, repeats=self.repeats)
        context = self.blocks * BLOCK_TOKENS
        self.scheduler = Scheduler(self.blocks, context, self.budget, self.sequences, self.speculation)

    def add(self, request: Request) -> Sequence:
        sequence = Sequence(request.prompt, len(request.prompt) + request.max_tokens, request.priority, request.client)
        self.rows[sequence] = request, RowState(request.sampling, request.prompt, [], 0, 0)
        self.submitted[sequence] = self.steps
        self.scheduler.add(sequence)
        return sequence

    def answer(self, sequence: Sequence) -> list[int]:
        return self.rows[sequence][1].answer

    def end(self, sequence: Sequence) -> None:
        self.scheduler.end(sequence)
        self.ended[sequence] = self.steps

    def step(self) -> bool:
        """Run a step; False if there was nothing to do."""
        plan = self.scheduler.schedule()
        check_pool(self.scheduler)
        if plan is None:
            assert not self.scheduler.running and not len(self.scheduler.waiting)
            return False
        check_step(self.scheduler, plan, self.budget)
        self.steps += 1
        self.computed += len(plan.step.input_ids)
        logits = self.model.run(plan.step)
        self.scheduler.complete(plan)
        row = 0
        for sequence in plan.rows:
            draft = plan.drafts.get(sequence, ())
            self._draw(sequence, logits[row : row + 1 + len(draft)], draft)
            row += 1 + len(draft)
            self.drafted += len(draft)
        assert row == len(logits)
        self.scheduler.settle(plan)
        check_settled(self.scheduler)
        return True

    def _draw(self, sequence: Sequence, logits: NDArray[np.float32], draft: Items[int]) -> None:
        """Append tokens to a sequence until one differs from its draft or ends the sequence."""
        request, row = self.rows[sequence]
        for index, line in enumerate(logits):
            token = draw(line, row).token
            row.answer.append(token)
            sequence.tokens.append(token)
            if token in request.end_tokens or len(row.answer) == request.max_tokens:
                self.end(sequence)
                break
            if index == len(draft) or token != draft[index]:
                break
            self.scheduler.accept(sequence)
            self.accepted += 1

    def run(self, most_steps: int = 100_000) -> None:
        """Run until all sequences have ended, and check that no block is lost."""
        for _ in range(most_steps):
            if not self.step():
                break
        else:
            raise AssertionError(f"{len(self.scheduler.running)} sequences still run after {most_steps} steps")
        pool = self.scheduler.pool
        assert pool.free + pool.cached == pool.blocks and pool.used == 0
        assert all(pool.references(block) == 0 for block in range(pool.blocks))

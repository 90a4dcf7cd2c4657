"""Drives a scheduler with the small model, one step after the other, and checks what must hold at each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ortolan.engine import BLOCK_TOKENS, Request, RowState
from ortolan.engine.scheduler import Plan, Scheduler
from ortolan.engine.sequence import Sequence, State

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
        blocks = scheduler.blocks(sequence)
        first, last = sequence.computed // BLOCK_TOKENS, (sequence.computed + count - 1) // BLOCK_TOKENS
        assert step.block_table[row, : last + 1].tolist() == blocks[: last + 1]
        assert not step.block_table[row, len(blocks) :].any()
        for block in blocks[first : last + 1]:
            assert scheduler.pool.references(block) == 1 and not scheduler.pool.is_registered(block)
            assert block not in written
            written.add(block)


def check_pool(scheduler: Scheduler) -> None:
    """Each block is free, cached, or used as often as running sequences hold it."""
    pool = scheduler.pool
    held = Counter(block for one in scheduler.running for block in scheduler.blocks(one))
    assert all(pool.references(block) == held[block] for block in range(pool.blocks))
    assert pool.used == len(held) and pool.free + pool.cached + pool.used == pool.blocks
    ranks = [one.rank for one in scheduler.running]
    assert ranks == sorted(ranks) and len(set(ranks)) == len(ranks)
    assert len({one.slot for one in scheduler.running}) == len(scheduler.running)


@dataclass
class Simulation:
    """A scheduler, the small model, and answers that grow."""

    blocks: int
    budget: int = 64
    sequences: int = 8
    steps: int = 0
    computed: int = 0
    rows: dict[Sequence, tuple[Request, RowState]] = field(default_factory=dict)
    submitted: dict[Sequence, int] = field(default_factory=dict)
    ended: dict[Sequence, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = SmallModel(self.blocks)
        self.scheduler = Scheduler(self.blocks, self.blocks * BLOCK_TOKENS, self.budget, self.sequences)

    def add(self, request: Request) -> Sequence:
        sequence = Sequence(
            request.prompt, len(request.prompt) + request.max_tokens, request.priority, request.client
        )
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
        for sequence, line in zip(plan.rows, logits, strict=True):
            request, row = self.rows[sequence]
            token = draw(line, row).token
            row.answer.append(token)
            sequence.tokens.append(token)
            if token in request.end_tokens or len(row.answer) == request.max_tokens:
                self.end(sequence)
        check_pool(self.scheduler)
        return True

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

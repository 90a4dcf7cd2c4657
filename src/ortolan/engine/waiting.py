"""The queue of sequences that do not run: by priority, and fair to clients."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from .sequence import Sequence, State

_Name = tuple[str, str]  # of a user: client and user


class _Turn:
    """Counts of a client or a user.

    Attributes:
        waiting: The sequences that wait.
        running: The sequences that run.
        served: When one of the sequences last began to run, or when the first one began to wait.
    """

    __slots__ = ("running", "served", "waiting")

    def __init__(self, served: int) -> None:
        self.waiting = self.running = 0
        self.served = served


class _Level:
    """The waiting sequences of one priority."""

    def __init__(self) -> None:
        self.preempted: list[Sequence] = []  # in the order in which they first ran
        self.users: dict[_Name, deque[Sequence]] = {}


class WaitingQueue:
    """Waiting sequences in the order in which they should run.

    Lower priorities first; among them sequences that ran before, the oldest first; then the client with the fewest
    running sequences, and among equals the client who waited longest since a sequence of theirs began to run; then, in
    the same way, the user of that client. Sequences of one user keep their order.

    Attributes:
        tokens: The tokens of all waiting sequences together.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        self._turns: dict[str | _Name, _Turn] = {}  # of clients and users who wait or run
        self._time = 0  # counts what `_Turn.served` compares
        self._count = self.tokens = 0

    def __len__(self) -> int:
        return self._count

    @property
    def priority(self) -> int | None:
        """The priority of the first sequence; None: the queue is empty."""
        return self._priorities[0] if self._priorities else None

    def add(self, sequence: Sequence) -> None:
        """Add a new or a preempted sequence."""
        level = self._levels.get(sequence.priority)
        if level is None:
            level = self._levels[sequence.priority] = _Level()
            insort(self._priorities, sequence.priority)
        if sequence.ticket >= 0:
            insort(level.preempted, sequence, key=lambda one: one.ticket)
        else:
            level.users.setdefault(_user(sequence), deque()).append(sequence)
        for turn in self._turns_of(sequence):
            turn.waiting += 1
        sequence.state = State.WAITING
        self._count += 1
        self.tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue, wherever it is."""
        level = self._levels[sequence.priority]
        if sequence.ticket >= 0:
            level.preempted.remove(sequence)
        else:
            line = level.users[_user(sequence)]
            if line[0] is sequence:
                line.popleft()
            else:
                line.remove(sequence)
            if not line:
                del level.users[_user(sequence)]
        self._count -= 1
        self.tokens -= len(sequence.tokens)
        if not level.preempted and not level.users:
            del self._levels[sequence.priority]
            self._priorities.remove(sequence.priority)
        for turn in self._turns_of(sequence):
            turn.waiting -= 1
        self._forget(sequence)

    def started(self, sequence: Sequence) -> None:
        """Count a sequence that was removed as running, and end the turn of its client and user."""
        for turn in self._turns_of(sequence):
            turn.running += 1
            turn.served = self._next_time()

    def stopped(self, sequence: Sequence) -> None:
        """Count a sequence as no longer running."""
        for turn in self._turns_of(sequence):
            turn.running -= 1
        self._forget(sequence)

    def candidates(self) -> Iterator[Sequence]:
        """Yield sequences in the order in which they should run, of each user only the first.

        The sequence that was yielded may start; its user's next one is then a candidate too.
        """
        for priority in list(self._priorities):
            level = self._levels.get(priority)
            if level is None:
                continue
            yield from list(level.preempted)
            line = [(self._order_of(user), user) for user in level.users]
            heapify(line)
            while line:
                order, user = line[0]
                waiting = level.users.get(user)
                if waiting is None:
                    heappop(line)
                elif order != (now := self._order_of(user)):  # a sequence of the client began meanwhile
                    heapreplace(line, (now, user))
                else:
                    first = waiting[0]
                    yield first
                    if first.state is State.WAITING:
                        heappop(line)

    def _turns_of(self, sequence: Sequence) -> list[_Turn]:
        """Return the counts of a sequence's client and user, which begin to exist."""
        found = []
        for name in (sequence.client, _user(sequence)):
            if name not in self._turns:
                self._turns[name] = _Turn(self._next_time())
            found.append(self._turns[name])
        return found

    def _next_time(self) -> int:
        self._time += 1
        return self._time

    def _order_of(self, user: _Name) -> tuple[int, int, int, int]:
        of_client, of_user = self._turns[user[0]], self._turns[user]
        return of_client.running, of_client.served, of_user.running, of_user.served

    def _forget(self, sequence: Sequence) -> None:
        """Forget a client and user without sequences, so that memory does not grow with the clients ever seen."""
        for name in (sequence.client, _user(sequence)):
            turn = self._turns[name]
            if not turn.waiting and not turn.running:
                del self._turns[name]


def _user(sequence: Sequence) -> _Name:
    return sequence.client, sequence.user

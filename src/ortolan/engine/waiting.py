"""The queue of sequences that do not run: by priority, and fair to clients."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from .sequence import Sequence, State


class _Level:
    """The waiting sequences of one priority."""

    def __init__(self) -> None:
        self.preempted: list[Sequence] = []  # in the order in which they first ran
        self.clients: dict[str, deque[Sequence]] = {}


class WaitingQueue:
    """Waiting sequences in the order in which they should run.

    Lower priorities first; among them sequences that ran before, the oldest first; then the client with the fewest
    running sequences, and among equals the client who waited longest since a sequence of theirs began to run.
    Sequences of one client keep their order.

    Attributes:
        tokens: The tokens of all waiting sequences together.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        self._running: dict[str, int] = {}
        self._served: dict[str, int] = {}  # of clients who wait or run, when they last got a turn
        self._turn = 0
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
            client = sequence.client
            if client not in self._served:
                self._turn += 1
                self._served[client] = self._turn
            level.clients.setdefault(client, deque()).append(sequence)
        sequence.state = State.WAITING
        self._count += 1
        self.tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue, wherever it is."""
        level = self._levels[sequence.priority]
        if sequence.ticket >= 0:
            level.preempted.remove(sequence)
        else:
            line = level.clients[sequence.client]
            if line[0] is sequence:
                line.popleft()
            else:
                line.remove(sequence)
            if not line:
                del level.clients[sequence.client]
        self._count -= 1
        self.tokens -= len(sequence.tokens)
        if not level.preempted and not level.clients:
            del self._levels[sequence.priority]
            self._priorities.remove(sequence.priority)
        self._forget(sequence.client)

    def started(self, sequence: Sequence) -> None:
        """Count a sequence that was removed as running, and end its client's turn."""
        client = sequence.client
        self._running[client] = self._running.get(client, 0) + 1
        self._turn += 1
        self._served[client] = self._turn

    def stopped(self, sequence: Sequence) -> None:
        """Count a sequence as no longer running."""
        client = sequence.client
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._forget(client)

    def candidates(self) -> Iterator[Sequence]:
        """Yield sequences in the order in which they should run, of each client only the first.

        The sequence that was yielded may start; its client's next one is then a candidate too.
        """
        for priority in list(self._priorities):
            level = self._levels.get(priority)
            if level is None:
                continue
            yield from list(level.preempted)
            line = [(*self._turn_of(client), client) for client in level.clients]
            heapify(line)
            while line:
                client = line[0][2]
                first = level.clients[client][0]
                yield first
                if first.state is State.WAITING or client not in level.clients:
                    heappop(line)
                else:
                    heapreplace(line, (*self._turn_of(client), client))

    def _turn_of(self, client: str) -> tuple[int, int]:
        return self._running.get(client, 0), self._served.get(client, 0)

    def _forget(self, client: str) -> None:
        """Forget a client without sequences, so that memory does not grow with the clients ever seen."""
        if client not in self._running and not any(client in level.clients for level in self._levels.values()):
            self._served.pop(client, None)

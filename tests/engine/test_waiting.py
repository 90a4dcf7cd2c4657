from __future__ import annotations

from ortolan.engine.sequence import Sequence, State
from ortolan.engine.waiting import WaitingQueue


def add(queue: WaitingQueue, client: str, count: int = 1, priority: int = 0) -> list[Sequence]:
    found = [Sequence((1,), 9, priority, client) for _ in range(count)]
    for one in found:
        queue.add(one)
    return found


def start(queue: WaitingQueue, sequence: Sequence) -> Sequence:
    queue.remove(sequence)
    queue.started(sequence)
    sequence.state = State.RUNNING
    return sequence


def clients(queue: WaitingQueue, most: int = 100) -> str:
    return "".join(start(queue, one).client for one, _ in zip(queue.candidates(), range(most), strict=False))


def test_clients_take_turns_by_what_they_run() -> None:
    queue = WaitingQueue()
    add(queue, "a", 5)
    add(queue, "b", 3)
    add(queue, "c", 1)
    assert clients(queue) == "abcababaa"
    assert len(queue) == 0 and queue.priority is None


def test_a_client_with_fewer_running_sequences_goes_first() -> None:
    queue = WaitingQueue()
    running = [start(queue, one) for one in add(queue, "a", 3)]
    add(queue, "a", 2)
    add(queue, "b", 4)
    assert clients(queue, 3) == "bbb"
    for one in running[:2]:
        queue.stopped(one)
    assert clients(queue) == "aab"


def test_users_take_turns_within_their_client() -> None:
    """A client does not get more turns by naming more users."""
    queue = WaitingQueue()
    for user in "xyz":
        for _ in range(2):
            queue.add(Sequence((1,), 9, 0, "a", user))
    add(queue, "b", 6)
    found = [(start(queue, one).client, one.user) for one in queue.candidates()]
    assert found == [turn for user in "xyzxyz" for turn in (("a", user), ("b", ""))]
    assert not queue._levels


def test_users_of_different_clients_are_different_users() -> None:
    queue = WaitingQueue()
    for client in "aab":
        queue.add(Sequence((1,), 9, 0, client, "x"))
    assert clients(queue) == "aba"


def test_priorities_and_preempted_sequences_go_first() -> None:
    queue = WaitingQueue()
    old, older = add(queue, "b", 2)
    for ticket, one in ((1, older), (2, old)):
        start(queue, one).ticket = ticket
    plain, (low,), (urgent,) = add(queue, "a", 2), add(queue, "a", priority=1), add(queue, "a", priority=-1)
    for one in (old, older):
        queue.stopped(one)
        queue.add(one)
    assert queue.priority == -1
    found = []
    for one in queue.candidates():
        found.append(start(queue, one))
    assert found == [urgent, older, old, *plain, low]


def test_only_the_first_sequence_of_a_client_is_a_candidate_until_it_starts() -> None:
    queue = WaitingQueue()
    first, _ = add(queue, "a", 2)
    (other,) = add(queue, "b")
    assert list(queue.candidates()) == [first, other]


def test_remove_anywhere() -> None:
    queue = WaitingQueue()
    first, second, third = add(queue, "a", 3)
    queue.remove(second)
    assert len(queue) == 2 and list(queue.candidates()) == [first]
    queue.remove(first)
    assert list(queue.candidates()) == [third]
    queue.remove(third)
    assert list(queue.candidates()) == [] and len(queue) == 0


def test_clients_are_forgotten() -> None:
    queue = WaitingQueue()
    for number in range(50):
        (one,) = add(queue, str(number))
        queue.stopped(start(queue, one))
        queue.remove(*add(queue, f"cancelled {number}"))
    assert not queue._turns and not queue._levels

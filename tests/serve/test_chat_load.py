"""The load test of the server: its requests and its counts."""

from __future__ import annotations

from ortolan.benchmarks.chat_load import Load, make_chats


def test_lost_requests_are_neither_answered_nor_refused() -> None:
    load = Load()
    load.outcomes.update({"answered": 5, "refused": 3, "status 500": 2, "ReadError": 1})
    load.first, load.between = [0.1, 0.3], []
    assert load.lost == 3
    found = load.to_dict()
    assert found["first_token_seconds"]["p50"] == 0.2
    assert found["between_tokens_seconds"] == {}


def test_chats_differ_and_are_the_same_each_time() -> None:
    chats = make_chats()
    assert chats == make_chats() != make_chats(1)
    assert len({chat["messages"][0]["content"] for chat in chats}) == len(chats)

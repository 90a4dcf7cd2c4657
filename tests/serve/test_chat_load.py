"""The load test of the server: its requests and its counts."""

from __future__ import annotations

from ortolan.benchmarks.chat_load import Load, make_chat


def test_lost_requests_are_neither_answered_nor_refused() -> None:
    load = Load()
    load.outcomes.update({"answered": 5, "refused": 3, "status 500": 2, "ReadError": 1})
    load.first, load.between = [0.1, 0.3], []
    assert load.lost == 3
    found = load.to_dict()
    assert found["first_token_seconds"]["p50"] == 0.2
    assert found["between_tokens_seconds"] == {}


def test_chats_differ_and_are_the_same_each_time() -> None:
    assert make_chat(3) == make_chat(3)
    prompts = [make_chat(number)["messages"][0]["content"] for number in range(50)]
    assert len({prompt.split()[0] for prompt in prompts}) == 50
    assert all(90 <= len(prompt.split()) - 1 < 380 for prompt in prompts)

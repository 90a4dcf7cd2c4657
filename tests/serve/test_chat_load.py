"""The load test of the server: its requests and its counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ortolan.benchmarks.chat_load import Load, make_chats, running_server


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


def test_a_server_that_logs_is_not_stopped_by_a_full_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "server"
    server.write_text("#!/bin/sh\necho serving on http://127.0.0.1:1\nyes a line of its log | head -c 300000\n")
    server.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(server))
    with running_server("folder", []) as (process, address):
        assert address == "http://127.0.0.1:1"
        assert process.wait(20) == 0  # it wrote all lines

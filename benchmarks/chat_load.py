"""Load test of `ortolan serve`: chats that arrive at random, at a multiple of the server's capacity.

python -m ortolan.benchmarks.chat_load FOLDER [--load 2] [--seconds 1800] [--threads 2] [--max-queue 128]
    [--cache-memory 512M] [--cache-type bfloat16 | int8] [--json]

Starts the server on a free port of the loopback interface. First measures its capacity: answers a second to clients
that wait for their answers. Then chats arrive as a Poisson process, at `--load` times the capacity, with prompts of 100
to 400 tokens and streamed answers of 100. Prints the outcome of the requests, time to the first token, time between
tokens, and the server's memory over time. A request that ends neither with a whole answer nor with 429 and Retry-After
is lost; exits with 1 if there is one, or if two answers to one chat differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, get_args

import numpy as np

from ..engine.model import CacheType
from .result import versions_line

_TOKENS = 100  # of an answer
_REPEATED = 16  # chats that come again and again, one arrival in 8: their answers must be equal
_REPEAT = 1 / 8
_CLIENTS = 32  # that measure the capacity
_WARM_SECONDS, _CAPACITY_SECONDS = 5.0, 30.0
_MEMORY_SECONDS = 10.0
_TEXT = "the old ship sailed over a calm sea while people on shore watched it go and thought about their lives"


@dataclass
class Load:
    """Counts and times that clients measured.

    Attributes:
        outcomes: Requests by outcome: "answered", "refused" (429 with Retry-After), or a symptom.
        first: Seconds to the first token.
        between: Seconds between tokens.
        retry_after: Seconds of Retry-After.
        different: Answers that differ from an earlier one to the same chat.
        megabytes: Resident memory of the server, every few seconds.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    retry_after: list[float] = field(default_factory=list)
    different: int = 0
    megabytes: list[int] = field(default_factory=list)
    answers: dict[int, str] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Requests that were neither answered nor refused."""
        return sum(self.outcomes.values()) - self.outcomes["answered"] - self.outcomes["refused"]

    def to_dict(self) -> dict[str, Any]:
        """Return counts and percentiles."""

        def spread(seconds: list[float]) -> dict[str, float]:
            return {f"p{at}": round(float(np.percentile(seconds, at)), 4) for at in (50, 99)} if seconds else {}

        return {
            "outcomes": dict(self.outcomes),
            "lost": self.lost,
            "different": self.different,
            "first_token_seconds": spread(self.first),
            "between_tokens_seconds": spread(self.between),
            "retry_after_seconds": spread(self.retry_after),
            "megabytes": self.megabytes,
        }


def make_chat(number: int) -> dict[str, Any]:
    """Return the body of a request. Prompts differ from their first words on, so that they share no prefix."""
    rng = np.random.default_rng(number)
    text = " ".join(rng.choice(_TEXT.split(), rng.integers(90, 380)))
    return {
        "model": "any",
        "messages": [{"role": "user", "content": f"{number}: {text}"}],
        "max_tokens": _TOKENS,
        "temperature": 0.8,
        "seed": number,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }


@contextmanager
def running_server(folder: str, options: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `ortolan serve`, and yield its process and address. The server ends with the context."""
    command = [sys.executable, "-P", "-m", "ortolan", "serve", folder, "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "http://" in line:
                # A full pipe would stop a server that logs.
                threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
                yield process, "http://" + line.split("http://", 1)[1].split()[0].strip("/ ")
                return
        raise RuntimeError(f"the server did not start: {''.join(lines)}")
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


class _Client:
    def __init__(self, address: str, load: Load) -> None:
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(base_url=address, timeout=600, limits=limits)
        self._load = load

    async def ask(self, number: int) -> None:
        """Send a chat, and note what happens."""
        try:
            outcome = await self._ask(number)
        except Exception as error:
            outcome = type(error).__name__
        self._load.outcomes[outcome] += 1

    async def _ask(self, number: int) -> str:
        load, began, last, text, tokens = self._load, time.perf_counter(), 0.0, [], 0
        async with self._http.stream("POST", "/v1/chat/completions", json=make_chat(number)) as response:
            if response.status_code == 429 and "retry-after" in response.headers:
                load.retry_after.append(float(response.headers["retry-after"]))
                return "refused"
            if response.status_code != 200:
                return f"status {response.status_code}"
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    return f"error: {event['error']['message'][:60]}"
                now, tokens = time.perf_counter(), (event.get("usage") or {}).get("completion_tokens", 0)
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        text.append(piece)
                        (load.between if last else load.first).append(now - (last or began))
                        last = now
            else:
                return "stream without [DONE]"
        if tokens != _TOKENS:
            return "cut by the time limit"
        if number < _REPEATED:
            load.different += load.answers.setdefault(number, "".join(text)) != "".join(text)
        return "answered"


async def measure_capacity(address: str, load: Load) -> float:
    """Return the answers a second to clients that send the next request after an answer."""
    client, end, warm = _Client(address, load), time.monotonic() + _CAPACITY_SECONDS, [0, 0.0]
    numbers = count(_REPEATED)

    async def again() -> None:
        while time.monotonic() < end:
            await client.ask(next(numbers))

    async def note() -> None:
        await asyncio.sleep(_WARM_SECONDS)
        warm[:] = [load.outcomes["answered"], time.monotonic()]

    await asyncio.gather(note(), *(again() for _ in range(_CLIENTS)))
    return (load.outcomes["answered"] - warm[0]) / (time.monotonic() - warm[1])


async def run_load(address: str, load: Load, rate: float, seconds: float, pid: int) -> None:
    """Send chats as a Poisson process, `rate` a second on average."""
    rng, numbers = np.random.default_rng(1), count(1_000_000)
    client, end, tasks = _Client(address, load), time.monotonic() + seconds, set()

    async def memory() -> None:
        while True:
            load.megabytes.append(_resident_megabytes(pid))
            await asyncio.sleep(_MEMORY_SECONDS)

    watch = asyncio.create_task(memory())
    while time.monotonic() < end:
        number = int(rng.integers(_REPEATED)) if rng.random() < _REPEAT else next(numbers)
        task = asyncio.create_task(client.ask(number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(float(rng.exponential(1 / rate)))
    await asyncio.gather(*tasks)
    watch.cancel()
    load.megabytes.append(_resident_megabytes(pid))


def _resident_megabytes(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmRSS"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a folder or a GGUF file, as for `ortolan serve`")
    parser.add_argument("--load", type=float, default=2.0, help="arrivals as a multiple of the capacity")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-queue", type=int, default=128)
    parser.add_argument(
        "--cache-memory", default="512M", help="of the server: it fills, and memory is flat from then on"
    )
    parser.add_argument("--cache-type", choices=get_args(CacheType), default="bfloat16", help="of the server")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    options = ["--threads", str(arguments.threads), "--max-queue", str(arguments.max_queue)]
    options += ["--cache-memory", arguments.cache_memory, "--cache-type", arguments.cache_type]
    before, load = Load(), Load()
    with running_server(arguments.folder, options) as (process, address):
        capacity = asyncio.run(measure_capacity(address, before))
        rate = arguments.load * capacity
        asyncio.run(run_load(address, load, rate, arguments.seconds, process.pid))
    result = {"capacity": round(capacity, 2), "rate": round(rate, 2), "seconds": arguments.seconds, **load.to_dict()}
    if arguments.json:
        print(json.dumps(result))
    else:
        print(versions_line())
        for name, value in result.items():
            print(f"{name:<24}{value}")
    return 1 if before.lost or load.lost or load.different else 0


if __name__ == "__main__":
    sys.exit(main())

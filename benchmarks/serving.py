"""Load test of the server under Ray Serve: clients that continuously request embeddings over the loopback interface.

python -m ortolan.benchmarks.serving [MODEL.onnx] [--replicas 2] [--clients 16]
    [--seconds 60] [--kill 30] [--retries 1] [--overload 2] [--json]

Without MODEL, all-MiniLM-L6-v2 is fetched, and its weights become int8. --kill N: kill a replica N seconds after the
start. --retries: how many times a client repeats a failed request.

--overload N: first measure how many texts a second the library embeds with one session, then send N times that rate, as
requests with 8 texts of 8 to 256 tokens. Prints both rates, the outcome of the requests, whether each vector equals the
library's, and the memory of Ray Serve's processes over time.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..engines import serving_options
from ..models import get_model
from ..optimize import optimize_onnx
from ..text_encoder import TextEncoder
from .encoder import SENTENCES
from .result import versions_line

_OBJECT_STORE = 80 << 20  # bytes; no large objects are stored there
_TIMEOUT = 120  # seconds
_TEXTS_OF_A_REQUEST = 8
_MEMORY_SECONDS = 5
_BAD = {  # maps the name of a request that the server must refuse to its body and status
    "malformed": (b'{"input": [', 400),
    "not UTF-8": (b'{"input": ["\xff\xfe"]}', 400),
    "half a character": (b'{"input": ["\\ud800"]}', 400),
    "wrong type": (b'{"input": {}}', 400),
    "no texts": (b'{"input": []}', 400),
    "too many texts": (json.dumps({"input": ["one"] * 2049}).encode(), 413),
    "long text": (json.dumps({"input": ["x" * 20_001]}).encode(), 413),
    "large body": (b'{"input": ["' + b"x" * (4 << 20) + b'"]}', 413),
}


@dataclass
class LoadResult:
    """The result of all clients.

    Attributes:
        seconds: Duration of the test.
        milliseconds: Latencies of answered requests, including retries.
        failures: Requests that failed after all retries, by symptom.
        retried: Requests that were repeated, by symptom.
    """

    seconds: float
    milliseconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        """Return counts, rate and percentiles."""
        spread = np.percentile(self.milliseconds, [50, 95, 99]) if self.milliseconds else [float("nan")] * 3
        return {
            "requests": len(self.milliseconds) + sum(self.failures.values()),
            "failed": sum(self.failures.values()),
            "failures": dict(self.failures),
            "retried": dict(self.retried),
            "requests_per_second": round(len(self.milliseconds) / self.seconds, 2),
            **{f"p{percentile}_ms": round(float(ms), 2) for percentile, ms in zip((50, 95, 99), spread, strict=True)},
        }


def post(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, bytes]:
    """Send a JSON request and return status and body."""
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read()


def run_load(port: int, clients: int, seconds: float, retries: int) -> LoadResult:
    """Run clients that each request one sentence after the other."""
    result, lock = LoadResult(seconds), threading.Lock()
    end = time.monotonic() + seconds

    def ask(client: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
        number = client
        while time.monotonic() < end:
            body = json.dumps({"input": [SENTENCES[number % len(SENTENCES)]]}).encode()
            number += 1
            start, seen = time.perf_counter(), ""
            for attempt in range(retries + 1):
                try:
                    status, _ = post(connection, "/v1/embeddings", body)
                    seen = "" if status == 200 else f"status {status}"
                except (OSError, http.client.HTTPException) as error:
                    connection.close()
                    seen = type(error).__name__
                if not seen:
                    break
                if attempt < retries:
                    with lock:
                        result.retried[seen] += 1
            with lock:
                if seen:
                    result.failures[seen] += 1
                else:
                    result.milliseconds.append((time.perf_counter() - start) * 1e3)
        connection.close()

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result


@dataclass
class OverloadResult:
    """The result of an overload test.

    Attributes:
        seconds: Time until the last answer.
        texts: Answered texts.
        answered: Answered requests.
        refused: Requests with status 429 and Retry-After.
        different: Vectors whose bytes differ from the library's.
        lost: Requests with any other outcome, by symptom.
        megabytes: Resident memory of Ray Serve's processes, every few seconds.
    """

    seconds: float = 0.0
    texts: int = 0
    answered: int = 0
    refused: int = 0
    different: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    megabytes: list[int] = field(default_factory=list)


def mixed_texts(count: int, shortest: int = 8, longest: int = 256, seed: int = 0) -> list[str]:
    """Return texts of shortest to longest tokens, approximately, including special tokens: most words are one token."""
    rng = np.random.default_rng(seed)
    words = sorted({word for sentence in SENTENCES for word in sentence.lower().split()})
    return [" ".join(rng.choice(words, length - 2)) for length in rng.integers(shortest, longest, count, endpoint=True)]


def library_speed(encoder: TextEncoder, texts: list[str], seconds: float) -> float:
    """Return the library's rate, in texts a second."""
    encoder.encode(texts[:32])
    done, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        encoder.encode(texts)
        done += len(texts)
    return done / (time.perf_counter() - begun)


def run_overload(
    port: int, texts: list[str], expected: np.ndarray, rate: float, clients: int, seconds: float
) -> OverloadResult:
    """Send `rate` texts a second in total; a client whose answer is late sends its next request at once."""
    result, lock = OverloadResult(), threading.Lock()
    wanted = [base64.b64encode(vector.tobytes()).decode() for vector in expected]
    begun = time.monotonic()
    pause = clients * _TEXTS_OF_A_REQUEST / rate

    def ask(client: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
        rng = np.random.default_rng(client)
        due = begun + pause * client / clients
        while due < begun + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due + pause, time.monotonic())
            chosen = rng.integers(len(texts), size=_TEXTS_OF_A_REQUEST)
            asked = {"input": [texts[index] for index in chosen], "model": "", "encoding_format": "base64"}
            try:
                connection.request("POST", "/v1/embeddings", json.dumps(asked))
                response = connection.getresponse()
                said = response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                with lock:
                    result.lost[type(error).__name__] += 1
                continue
            with lock:
                if response.status == 200:
                    found = [one["embedding"] for one in json.loads(said)["data"]]
                    result.different += sum(one != wanted[index] for one, index in zip(found, chosen, strict=True))
                    result.answered += 1
                    result.texts += len(found)
                    result.seconds = time.monotonic() - begun
                elif response.status == 429 and int(response.getheader("Retry-After", "0")) > 0:
                    result.refused += 1
                else:
                    result.lost[f"status {response.status}"] += 1
        connection.close()

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        result.megabytes.append(serve_megabytes())
        time.sleep(_MEMORY_SECONDS)
    return result


def serve_megabytes() -> int:
    """Return the resident memory of replicas and proxies on this machine."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith((b"ray::ServeReplica", b"ray::ProxyActor")):
                found = (process / "status").read_text().split("VmRSS:")[1].split()[0]
                total += int(found)
        except (OSError, IndexError):  # the process has ended
            continue
    return total // 1024


def check_refusals(port: int, prefix: str = "") -> dict[str, str]:
    """Return the status of each request that must be refused, with the expected status if it differs.

    prefix: the path of the application.
    """
    found = {}
    for name, (body, expected) in _BAD.items():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
        status, _ = post(connection, f"{prefix}/v1/embeddings", body)
        connection.close()
        found[name] = f"{status}" if status == expected else f"{status}, expected {expected}"
    return found


def kill_replica(application: str = "default") -> str:
    """Kill one of an application's replicas, simulating a crash, and return its name."""
    import ray

    replicas = [
        actor
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(f"SERVE_REPLICA::{application}#Server#")
    ]
    chosen = min(replicas, key=lambda actor: str(actor["name"]))
    ray.kill(ray.get_actor(chosen["name"], namespace=chosen["namespace"]))
    return str(chosen["name"])


def free_port() -> int:
    """Return an unused TCP port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def make_model(folder: Path) -> Path:
    """Make all-MiniLM-L6-v2 in int8, with its tokenizer beside it."""
    files = get_model("all-minilm-l6-v2")
    assert files.tokenizer is not None
    model = folder / "minilm.onnx"
    optimize_onnx(files.onnx, model, weights="int8")
    shutil.copy(files.tokenizer, folder / "tokenizer.json")
    return model


def read_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kill", type=float)
    parser.add_argument("--retries", type=int, default=0)
    parser.add_argument("--overload", type=float)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def print_overload(arguments: argparse.Namespace, port: int, config: Any) -> None:
    """Run the overload test and print its result."""
    import ray
    from ray import serve

    from ..server.ray_app import application

    encoder = TextEncoder(config.model, session_options=serving_options(config.threads))
    texts = mixed_texts(512)
    expected = encoder.encode(texts)
    alone = library_speed(encoder, texts, arguments.seconds / 6)
    serve.run(application(config))
    rate = alone * arguments.overload * arguments.replicas
    result = run_overload(port, texts, expected, rate, arguments.clients, arguments.seconds)
    found = {
        "versions": f"{versions_line()} · ray {ray.__version__}",
        "clients": arguments.clients,
        "replicas": arguments.replicas,
        "library, texts/s": round(alone, 1),
        "sent, texts/s": round(rate, 1),
        "served, texts/s": round(result.texts / max(result.seconds, 1e-9), 1),
        "requests answered": result.answered,
        "refused with Retry-After": result.refused,
        "lost": dict(result.lost),
        "different vectors": result.different,
        "megabytes, every 5 s": result.megabytes,
    }
    print_result(found, arguments.json)


def print_result(found: dict[str, Any], as_json: bool) -> None:
    """Print a result as text or JSON."""
    print(json.dumps(found) if as_json else "\n".join(f"{name:24} {value}" for name, value in found.items()))


def main() -> None:
    """Run the command."""
    arguments = read_arguments()
    import ray
    from ray import serve

    from ..server.ray_app import RayConfig, application

    port = free_port()
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.model or make_model(Path(temporary))
        ray.init(
            num_cpus=arguments.replicas + 2,
            object_store_memory=_OBJECT_STORE,
            include_dashboard=False,
            logging_level="warning",
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            config = RayConfig(model=str(model.absolute()), replicas=arguments.replicas)
            if arguments.overload is not None:
                print_overload(arguments, port, config)
                return
            serve.run(application(config))
            refused = check_refusals(port)
            killed: list[str] = []
            if arguments.kill is not None:
                timer = threading.Timer(arguments.kill, lambda: killed.append(kill_replica()))
                timer.start()
            result = run_load(port, arguments.clients, arguments.seconds, arguments.retries)
        finally:
            serve.shutdown()
            ray.shutdown()
    found = {
        "versions": f"{versions_line()} · ray {ray.__version__}",
        "clients": arguments.clients,
        "replicas": arguments.replicas,
        "killed": killed,
        **result.to_dict(),
        "refused": refused,
    }
    print_result(found, arguments.json)


if __name__ == "__main__":
    main()

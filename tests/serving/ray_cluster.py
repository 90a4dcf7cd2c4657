"""A Ray cluster of a test, on this machine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest
import ray
from ray import serve

from ortolan.benchmarks.serving import free_port

# For Ray's processes, which get the environment of the one that starts them.
_ENVIRONMENT = {
    # Serve kills a proxy that is not ready after three times 5 s, and serve.start fails with ActorDiedError: on a busy
    # machine its process takes longer to import what it needs.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    # Processes of Ray are not ended for what other programs take of the machine's memory.
    "RAY_memory_monitor_refresh_ms": "0",
}


@contextmanager
def ray_cluster(**options: object) -> Generator[int]:
    """The port of its proxy. It counts 8 CPUs, one for each replica of a test, whatever the machine has."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        try:
            ray.init(
                num_cpus=8,
                object_store_memory=80 << 20,
                include_dashboard=False,
                logging_level="warning",
                **options,
            )
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield port
        finally:
            serve.shutdown()
            ray.shutdown()

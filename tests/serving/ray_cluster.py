"""A Ray cluster on this machine, for tests."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest
import ray
from ray import serve

from ortolan.benchmarks.serving import free_port

# Environment variables that Ray's processes inherit.
_ENVIRONMENT = {
    # By default, Serve kills a proxy that is not ready after 15 s, which is too short on a busy machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "240",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    # Ray must not kill its processes if other programs use much memory.
    "RAY_memory_monitor_refresh_ms": "0",
}
_PROXY_SECONDS = 300


@contextmanager
def ray_cluster(**options: object) -> Generator[int]:
    """Start a cluster and yield the port of its proxy.

    The cluster has 8 logical CPUs on any machine, one for each replica.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        # `serve.start` waits 60 s for its proxy, which is too short on a busy machine, and has no option for it.
        for module in ("api", "client"):
            patch.setattr(f"ray.serve._private.{module}.HTTP_PROXY_TIMEOUT", _PROXY_SECONDS, raising=False)
        try:
            ray.init(
                num_cpus=8,
                object_store_memory=80 << 20,
                include_dashboard=False,
                logging_level="warning",
                **options,
            )
            port = free_port()
            # As docs/serving.md recommends, requests have a timeout: on a busy machine, Serve may lose a request that
            # it sends to a replica at the moment in which the replica dies.
            serve.start(http_options={"host": "127.0.0.1", "port": port, "request_timeout_s": 60})
            yield port
        finally:
            serve.shutdown()
            ray.shutdown()

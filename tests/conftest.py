"""Options of the whole test suite, and what its last lines say."""

from __future__ import annotations

import os
import signal

# A shell that starts the tests with & lets them ignore this signal, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each worker of pytest-xdist has a core: BLAS and torch that take all of them take turns. Before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections import defaultdict
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from . import instructions

# Machines may be slow, busy or emulated. Before test modules are imported, as their settings build on this.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--parameter-sets",
        type=int,
        metavar="N",
        help="run each test with at most N of its parameter sets, evenly spread (the sanitizer run does, to save time)",
    )
    parser.addoption(
        "--stored-bits",
        action="store_true",
        help="hold float answers to the stored bits too, not to the documented bounds alone (test_stored_answers)",
    )


@pytest.hookimpl(trylast=True)  # of those that -k leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most: int | None = config.getoption("--parameter-sets")
    if most is None:
        return
    sets: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        sets[str(item.path), getattr(item, "originalname", item.name)].append(item)
    kept = {some[i * len(some) // most] for some in sets.values() if len(some) > most for i in range(most)}
    kept |= {item for some in sets.values() if len(some) <= most for item in some}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(autouse=True, scope="session")
def brief_measurements() -> Generator[None]:
    """Times are taken in as many rounds as ever, but of few calls: no test asserts what they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ortolan.graph_passes.passes.verify.TIMED_SECONDS", 0.02)
        patch.setattr("ortolan.graph_passes.measure.timing._WARM_UP_SECONDS", 0.002)
        patch.setattr("ortolan.graph_passes.auto.layer_times._SECONDS", 0.01)
        patch.setattr("ortolan.graph_passes.auto.layer_times._MOST_COPIES", 4)
        patch.setattr("ortolan.graph_passes.auto.trials._SECONDS", 0.05)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    yield  # to the list of all that was skipped
    skipped = terminalreporter.stats.get("skipped", [])
    for line in instructions.summary(str(report.longrepr[2]) for report in skipped):
        terminalreporter.write_line(line)
    if (most := terminalreporter.config.getoption("--parameter-sets")) is not None:
        terminalreporter.write_line(f"of each test, at most {most} parameter sets were run")

"""Options of the test suite, and the summary at the end of a run."""

from __future__ import annotations

import os
import signal

# If a shell starts the tests with `&`, they ignore SIGINT. Subprocesses that tests interrupt would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Set before numpy is imported: each pytest-xdist worker has one core, so BLAS and torch get one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Generator

import pytest

from . import instructions, sampling


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        type=int,
        metavar="N",
        help="run at most N parameter sets of each test, and at most 10 N examples of each hypothesis test",
    )
    parser.addoption(
        "--sample-seed",
        metavar="TEXT",
        help="choose the parameter sets of --sample as a run with this seed did (default: the commit)",
    )
    parser.addoption(
        "--stored-bits",
        action="store_true",
        help="compare float answers with the stored bits too, not only with documented bounds (test_stored_answers)",
    )


def pytest_configure(config: pytest.Config) -> None:
    sampling.configure_hypothesis(config.getoption("--sample"))
    if config.getoption("--sample-seed") is None:
        config.option.sample_seed = sampling.current_commit()


@pytest.hookimpl(trylast=True)  # after -k has deselected tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most: int | None = config.getoption("--sample")
    if most is not None:
        items[:], left_out = sampling.take_sample(items, most, config.getoption("--sample-seed"))
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True, scope="session")
def brief_measurements() -> Generator[None]:
    """Shorten each timed round. Safe, because no test asserts a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ortolan.graph_passes.passes.verify.verify.TIMED_SECONDS", 0.02)
        patch.setattr("ortolan.graph_passes.measure.timing._WARM_UP_SECONDS", 0.002)
        patch.setattr("ortolan.graph_passes.auto.layer_times._SECONDS", 0.01)
        patch.setattr("ortolan.graph_passes.auto.layer_times.is_busy", lambda: False)
        patch.setattr("ortolan.graph_passes.auto.layer_times._MOST_COPIES", 4)
        patch.setattr("ortolan.graph_passes.auto.trials._SECONDS", 0.05)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    yield  # pytest prints the list of skipped tests first
    skipped = terminalreporter.stats.get("skipped", [])
    for line in instructions.summary(str(report.longrepr[2]) for report in skipped):
        terminalreporter.write_line(line)
    config = terminalreporter.config
    if (most := config.getoption("--sample")) is not None:
        terminalreporter.write_line(
            f"a sample: at most {most} parameter sets of each test, --sample-seed {config.getoption('--sample-seed')}"
        )

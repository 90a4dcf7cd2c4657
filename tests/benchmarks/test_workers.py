"""Workers: the protocol with a fake engine, and timing in turns."""

import numpy as np
import pytest

from tools.peers.configuration import WORKERS, Configuration, Runner, interleave, speed_of
from tools.workers.process import Worker, WorkerError, cpus_to_use

# Source of a worker that can print to stdout, fail and exit on request.
FAKE = """
import os
import sys

sys.path.append(WORKERS)

import numpy as np
from engine import Engine, EngineWorker, Made


class MadeUp(Engine):
    packages = ("made-up",)
    environment = {"MADE_UP": "set"}

    @classmethod
    def make(cls, model, folder, threads, **options):
        print("making", model)
        os.write(1, b"and more")
        if options["precision"] == "none":
            raise ImportError("No module\\nnamed none")
        (folder / "made").write_text(options["precision"])
        return Made({"path": str(folder / "made")}, f"threads {threads}, {options}", 2.5)

    def __init__(self, threads, path):
        assert os.environ["MADE_UP"] == "set"
        self.made = open(path).read()

    def prepare(self, work):
        self.compiled = []
        return work["numbers"]

    def get_ready(self, parts):
        self.compiled = parts

    def set_up(self, part):
        self.ready = part

    def run(self, part):
        assert self.ready == part
        return np.array([[part * 2.0, part in self.compiled]])


class Worker(EngineWorker):
    engines = {"made-up": MadeUp}

    def __init__(self, threads):
        super().__init__(threads)
        self.actions = dict(self.actions) | {"pinned": self.pinned, "end": self.end}

    def pinned(self):
        return {"cpus": sorted(os.sched_getaffinity(0)), "omp": os.environ["OMP_NUM_THREADS"]}

    def end(self):
        print("out of luck", file=sys.stderr)
        os._exit(3)
"""


@pytest.fixture
def fake(tmp_path):
    """Return a function (engine, precision) that makes a runner."""
    script, made = tmp_path / "fake.py", []
    script.write_text(FAKE.replace("WORKERS", repr(str(WORKERS))))

    def make(engine="made-up", precision="f32"):
        configuration = Configuration("a form", engine, tmp_path / "model", {"precision": precision})
        made.append(Runner(configuration, str(script), tmp_path / f"folder{len(made)}"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def opened(runner, numbers=(1, 2, 3)):
    runner.make("section", "model", 1)
    runner.open(1, {"numbers": numbers})
    return runner


def test_a_form_is_made_opened_given_work_and_timed(fake):
    runner = fake()
    row = runner.make("section", "model", 1)
    assert row.versions == {"made-up": "source tree"} and row.megabytes == 2.5 and not row.ours
    assert (row.section, row.model, row.name, row.call) == (
        "section",
        "model",
        "a form",
        "threads 1, {'precision': 'f32'}",
    )
    seconds, peak = runner.open(1, {"numbers": [1, 2, 3]})
    assert 0 < seconds < 5 and (peak is None or peak > 1)
    assert all(one > 0 for one in runner.time(3, 0.0))
    np.testing.assert_array_equal(runner.answer({"numbers": [5, 6]}), [[10, 1], [12, 1]])


def test_they_are_timed_in_turns(fake):
    runners = {"one": opened(fake()), "two": opened(fake())}
    for runner in runners.values():
        runner.give({"numbers": [1]})
    speeds = interleave(runners, "work", 1, 8, "texts/s", 0.0)
    assert list(speeds) == ["one", "two"]
    for speed in speeds.values():
        assert (speed.work, speed.threads, speed.unit) == ("work", 1, "texts/s") and speed.best >= speed.median > 0


def test_a_speed_is_of_the_shortest_time_and_of_the_median():
    speed = speed_of("work", 2, 10, "texts/s", [1.0, 2.0, 5.0])
    assert (speed.best, speed.median, speed.spread) == (10, 5, 1)
    assert speed_of("work", 2, 10, "texts/s", [2.0]).spread == 0


def test_a_peer_is_pinned(fake):
    runner = opened(fake())
    assert runner._running().ask("pinned") == {"cpus": cpus_to_use(1), "omp": "1"}


def test_what_is_not_known_or_fails_is_told_and_the_process_goes_on(fake):
    runner = opened(fake())
    with pytest.raises(WorkerError, match="unknown request 'fly'; expected make, open, give"):
        runner._running().ask("fly")
    with pytest.raises(WorkerError, match="unexpected keyword argument"):
        runner._running().ask("give", nothing=1)
    assert len(runner.time(1, 0.0)) == 1
    with pytest.raises(WorkerError, match=r"^No module named none$"):
        fake(precision="none").make("section", "model", 1)
    with pytest.raises(WorkerError, match=r"^unknown engine 'none'; expected made-up$"):
        fake("none").make("section", "model", 1)


def test_a_process_that_ends_says_why_and_others_go_on(fake):
    gone, stays = opened(fake()), opened(fake())
    with pytest.raises(WorkerError, match="the process ended with status 3: out of luck"):
        gone._running().ask("end")
    found = interleave({"gone": gone, "stays": stays}, "work", 1, 1, "texts/s", 0.0)
    assert isinstance(found["gone"], WorkerError) and "open a model first" in str(found["gone"])
    assert found["stays"].best > 0


def test_work_before_a_model_is_refused(fake):
    with pytest.raises(WorkerError, match="the process has ended; open it again"):
        fake().give({"numbers": [1]})


def test_an_interpreter_that_is_none(tmp_path):
    worker = Worker(tmp_path / "none.py", {}, python=str(tmp_path / "python"))
    with pytest.raises(WorkerError, match=r"cannot start .*python: No such file"):
        worker.ask("load")


def test_a_script_that_is_none(tmp_path):
    with (
        Worker(tmp_path / "none.py", {}) as worker,
        pytest.raises(WorkerError, match=r"ended with status 1: .*none\.py"),
    ):
        worker.ask("load")

"""verify_padding on sessions whose answers are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortolan.errors import VerificationError
from ortolan.graph_passes.passes.verify.padding import verify_padding

FEEDS = {"input_ids": np.arange(1, 7)[None], "attention_mask": np.ones((1, 6), np.int64)}


class Session:
    """Returns each token's id and their mean.

    shift: error that is added in padded batches. sizes: declared dimensions of the inputs.
    """

    def __init__(self, shift: float = 0.0, sizes: tuple[Any, Any] = ("batch", "tokens")) -> None:
        self._shift, self._sizes = shift, sizes
        self.asked: list[dict[str, np.ndarray]] = []

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name=name, shape=self._sizes) for name in FEEDS]

    def run(self, _: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        self.asked.append(feeds)
        ids, kept = (feeds[name].astype(np.float32) for name in FEEDS)
        rows = ids * kept + (self._shift if len(ids) > 1 else 0)
        mean = (rows * kept).sum(1, keepdims=True) / kept.sum(1, keepdims=True)
        return [rows[:, :, None], mean, np.argmax(rows, axis=1)]


def notes_of(session: Session, feeds: dict[str, np.ndarray] | None = None) -> list[str]:
    notes: list[str] = []
    context: Any = SimpleNamespace(note=notes.append, layers=SimpleNamespace(pad_token_id=None))
    verify_padding(context, session, FEEDS if feeds is None else feeds, ["rows", "mean", "place"])
    return notes


def test_a_sequence_is_run_alone_and_padded_in_a_batch() -> None:
    session = Session()
    assert notes_of(session) == ["padding check: 4 tokens alone and padded in a batch give equal bits"]
    alone, together = session.asked
    assert alone["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert together["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 0, 0]]
    assert together["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0]]


def test_small_differences_are_told() -> None:
    assert notes_of(Session(shift=1e-3)) == [
        "padding check: 4 tokens alone and padded in a batch differ by relative error 0.0004"
    ]


@pytest.mark.parametrize("shift", [0.5, np.nan])
def test_answers_that_depend_on_the_batch_are_refused(shift: float) -> None:
    with pytest.raises(
        VerificationError, match=r"output 'rows' of a sequence of 4 tokens, padded in a batch, has relative error"
    ):
        notes_of(Session(shift=shift))


@pytest.mark.parametrize(
    "session, feeds",
    [
        (Session(sizes=(1, "tokens")), None),
        (Session(), FEEDS | {"pixel_values": np.zeros((1, 3))}),
        (Session(), {"attention_mask": FEEDS["attention_mask"]}),
        (Session(), {name: array[:, :1] for name, array in FEEDS.items()}),
        (Session(), FEEDS | {"attention_mask": np.zeros((1, 6), np.int64)}),
    ],
)
def test_what_cannot_be_asked(session: Session, feeds: dict[str, np.ndarray] | None) -> None:
    assert notes_of(session, feeds) == [] and not session.asked


def test_outputs_that_are_not_one_a_sequence_are_not_compared() -> None:
    class WithWeights(Session):
        def run(self, _: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
            return [*super().run(_, feeds), np.ones(5, np.float32), np.float32(3) * np.ones(()), np.eye(2)]

    notes: list[str] = []
    context: Any = SimpleNamespace(note=notes.append, layers=SimpleNamespace(pad_token_id=None))
    verify_padding(context, WithWeights(), FEEDS, ["rows", "mean", "place", "weight", "scalar", "matrix"])
    assert notes == ["padding check: 4 tokens alone and padded in a batch give equal bits"]


def test_inputs_of_other_shapes_are_not_asked() -> None:
    session = Session()
    assert notes_of(session, FEEDS | {"token_type_ids": np.zeros((1, 1), np.int64)}) == []
    assert not session.asked

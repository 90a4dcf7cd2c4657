"""Sources of drafts for the small model, by name."""

from __future__ import annotations

from collections.abc import Callable

from ortolan.engine.draft_model import DraftModel
from ortolan.engine.drafts import LookupDrafter
from ortolan.engine.speculation import Speculation

from .chain_drafter import ChainDrafter
from .small_model import SmallModel

SPECULATIONS: dict[str, Callable[[], Speculation | None]] = {
    "none": lambda: None,
    "lookup": lambda: Speculation(LookupDrafter()),
    "chain": lambda: Speculation(ChainDrafter()),
    "model": lambda: Speculation(LookupDrafter(), DraftModel(SmallModel(200, repeats=True))),
    "model with few blocks": lambda: Speculation(LookupDrafter(), DraftModel(SmallModel(9, repeats=True))),
    "model of a short context": lambda: Speculation(LookupDrafter(), DraftModel(SmallModel(60, 50, repeats=True))),
    "model of another text": lambda: Speculation(LookupDrafter(), DraftModel(SmallModel(60))),
}

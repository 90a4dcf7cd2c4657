"""Drafts: guesses of the next tokens of a sequence, which one call of the model verifies."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from .sequence import Sequence

_LONG, _SHORT = 3, 2  # tokens of the n-grams that are looked up, the longer ones first
_LEAST_SLOTS = 256  # of a table of n-grams
_MOST_MATCH = 32  # longer matches count as this long
# Matches of these lengths and more have a chance of their own. At first, it is that of texts which repeat little.
_CLASSES = ((2, 0.3), (3, 0.4), (4, 0.5), (6, 0.6), (9, 0.7), (16, 0.8))
_CLASS_OF = tuple(sum(length >= least for least, _ in _CLASSES) - 1 for length in range(_MOST_MATCH + 1))
_PRIOR = 2  # weight of a sequence's initial chances, in guesses
_LEAST_RATE = 1 / 8  # of learning from the guesses of a sequence
# The first guesses of a sequence, in each class, update the initial chances of later sequences at this rate.
_FIRST, _COMMON_RATE = 8, 1 / 32
_LEAST_CHANCE = 0.02  # a draft ends before its tokens become less likely


class Draft(NamedTuple):
    """Guessed tokens.

    Attributes:
        tokens: Token ids below the model's vocabulary.
        chances: For each token, the estimated probability that it and all tokens before it are right.
    """

    tokens: Items[int] = ()
    chances: Items[float] = ()


class Drafter(Protocol):
    """A source of drafts. Bad drafts cost time; they never change an answer."""

    def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[Draft]:
        """Guess what follows the tokens of each sequence.

        Whether earlier drafts were right can be seen in `Sequence.tokens`. `Sequence.drafting` is free for what a
        drafter keeps about a sequence, and is dropped when the sequence ends.

        Args:
            sequences: The sequences.
            most: The most tokens of each draft, at least 1.
        """
        ...


class LookupDrafter:
    """Prompt lookup: guesses that a sequence continues as it did after the latest equal n-gram in it.

    Needs no second model. Gains where an answer repeats its prompt or itself, as in extraction and edits. The chance of
    a guess is learned from each token, also while no draft is verified, so that nothing must be tried to find out
    whether drafts would be right.

    Reference: Saxena, "Prompt Lookup Decoding".
    """

    def __init__(self) -> None:
        self._common = [chance for _, chance in _CLASSES]

    def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[Draft]:
        """Guess what follows the tokens of each sequence. Arguments as for `Drafter`."""
        return [self._propose(sequence, limit) for sequence, limit in zip(sequences, most, strict=True)]

    def _propose(self, sequence: Sequence, most: int) -> Draft:
        history = sequence.drafting
        if not isinstance(history, _History):
            history = sequence.drafting = _History(self._common)
        history.read(sequence.tokens, self._common)
        return history.draft(sequence.tokens, most)


class _History:
    """Guesses of the next tokens of one sequence from its earlier ones.

    Attributes:
        seen: The number of tokens that were read.
        match: The place of the token that should come next; 0: there is no guess.
        length: The number of equal tokens before that place and before the end.
        chances: For each class of lengths, how often the guess was right of late.
        counts: The guesses of each class that were compared with their token.
        table: For a hash of an n-gram, the place after its latest occurrence. Other n-grams may have the same hash.
    """

    __slots__ = ("chances", "counts", "length", "match", "seen", "table")

    def __init__(self, chances: list[float]) -> None:
        self.seen = self.match = self.length = 0
        self.chances = chances.copy()
        self.counts = [0] * len(chances)
        self.table = array("i")

    def read(self, tokens: array[int], common: list[float]) -> None:
        """Read the tokens since the last call. common: the chances of new sequences, which are updated too."""
        if 4 * len(tokens) > len(self.table):
            self._grow(tokens)
        is_prompt = self.seen == 0  # it tells little about the chances of its answer
        for place in range(self.seen, len(tokens)):
            match = self.match
            if match:
                is_right = tokens[match] == tokens[place]
                if not is_prompt:
                    self._learn(is_right, common)
                self.match = match + 1 if is_right else 0
                self.length = min(self.length + 1, _MOST_MATCH)
            self._add(tokens, place + 1)
        self.seen = len(tokens)

    def _learn(self, is_right: bool, common: list[float]) -> None:
        kind = _CLASS_OF[self.length]
        self.counts[kind] = count = self.counts[kind] + 1
        rate = max(1 / (_PRIOR + count), _LEAST_RATE)
        self.chances[kind] += (is_right - self.chances[kind]) * rate
        if count <= _FIRST:
            common[kind] += (is_right - common[kind]) * _COMMON_RATE

    def draft(self, tokens: array[int], most: int) -> Draft:
        """Return a draft of at most this number of tokens. It may run past the end and repeat itself."""
        match, length, chances = self.match, self.length, self.chances
        if not match:
            return _NOTHING
        found = tokens[match : match + most]
        chance, result = 1.0, array("d")
        for index in range(most):
            chance *= chances[_CLASS_OF[min(length + index, _MOST_MATCH)]]
            if chance < _LEAST_CHANCE:
                break
            result.append(chance)
            if index == len(found):
                found.append(found[index - (len(tokens) - match)])
        return Draft(found[: len(result)], result)

    def _add(self, tokens: array[int], end: int) -> None:
        """Look up the last n-grams of the first `end` tokens, unless there is a match, and add them to the table."""
        table, mask = self.table, len(self.table) - 1
        for size in (_LONG, _SHORT):
            if end < size:
                continue
            gram = tuple(tokens[end - size : end])
            slot = hash(gram) & mask
            if not self.match and 0 < table[slot] < end:  # `end`: the longer n-gram has the same hash
                self._match(tokens, table[slot], end)
            table[slot] = end

    def _match(self, tokens: array[int], place: int, end: int) -> None:
        """Take the token at a place as the guess after the first `end` tokens, if the same tokens precede both."""
        length = 0
        while length < min(place, _MOST_MATCH) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        if length >= _SHORT:
            self.match, self.length = place, length

    def _grow(self, tokens: array[int]) -> None:
        """Make a larger table, of 8 or more slots a token, which is filled again."""
        slots = _LEAST_SLOTS
        while slots < 8 * len(tokens):
            slots *= 2
        match, self.match = self.match, -1  # no look-ups
        self.table = array("i", bytes(4 * slots))
        for end in range(1, self.seen + 1):
            self._add(tokens, end)
        self.match = match


_NOTHING = Draft()

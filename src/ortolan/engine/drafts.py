"""Drafts: guesses of the next tokens of a sequence, which one call of the model verifies."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from .sequence import Sequence

_LONG, _SHORT = 3, 2  # tokens of the n-grams that are looked up, the longer ones first
_LEAST_SLOTS = 256  # of a table of n-grams
# Tokens that a call reads, so that it takes about 10 ms. Long prompts have no drafts until later calls have read them.
_MOST_READ = 4096
_FEW_NEW = 16  # new tokens of a sequence that are always read: the most that a step adds
_MOST_MATCH = 32  # longer matches count as this long
# Matches of these lengths and more have a chance of their own. At first, it is that of texts which repeat little.
_CLASSES = ((2, 0.25), (3, 0.45), (4, 0.5), (6, 0.6), (9, 0.8), (16, 0.9))
_CLASS_OF = tuple(sum(length >= least for least, _ in _CLASSES) - 1 for length in range(_MOST_MATCH + 1))
_PRIOR = 3  # weight of a sequence's initial chances, in guesses
_LEAST_RATE = 1 / 8  # of learning from the guesses of a sequence
# The first guesses of a sequence, in each class, update the initial chances of later sequences at this rate, never
# above those of _CLASSES: after copies, each text that does not repeat would begin with long drafts that are wrong.
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
        drafts, left = [], _MOST_READ
        for sequence, limit in zip(sequences, most, strict=True):
            history = sequence.drafting
            if not isinstance(history, _History):
                history = sequence.drafting = _History(self._common, len(sequence.tokens))
            if left > 0 or len(sequence.tokens) - history.seen <= _FEW_NEW:
                left -= history.read(sequence.tokens, self._common, max(left, _FEW_NEW))
            drafts.append(history.draft(sequence.tokens, limit))
        return drafts


class _History:
    """Guesses of the next tokens of one sequence from its earlier ones.

    Attributes:
        prompt: The number of tokens at the first look. They tell little about the chances of the answer.
        seen: The number of tokens that were read.
        match: The place of the token that should come next; 0: there is no guess.
        length: The number of equal tokens before that place and before the end.
        chances: For each class of lengths, how often the guess was right of late.
        counts: The guesses of each class that were compared with their token.
        tables: For a hash of an n-gram, the place after its latest occurrence, the newest table first. Other n-grams
            may have the same hash. Full tables stay as they are, since filling a larger one again would take long.
        slots: The slots of all tables.
    """

    __slots__ = ("chances", "counts", "length", "match", "prompt", "seen", "slots", "tables")

    def __init__(self, chances: list[float], prompt: int) -> None:
        self.prompt = prompt
        self.seen = self.match = self.length = 0
        self.chances = chances.copy()
        self.counts = [0] * len(chances)
        self.tables: list[array[int]] = []
        self.slots = 0

    def read(self, tokens: array[int], common: list[float], most: int) -> int:
        """Read up to `most` of the tokens since the last call, and return their number.

        `common` has the chances of new sequences, which are updated too.
        """
        if 4 * len(tokens) > self.slots:
            self._grow(len(tokens))
        first, self.seen = self.seen, min(len(tokens), self.seen + most)
        for place in range(first, self.seen):
            match = self.match
            if match:
                is_right = tokens[match] == tokens[place]
                if place >= self.prompt:
                    self._learn(is_right, common)
                self.match = match + 1 if is_right else 0
                self.length = min(self.length + 1, _MOST_MATCH)
            self._add(tokens, place + 1)
        return self.seen - first

    def _learn(self, is_right: bool, common: list[float]) -> None:
        kind = _CLASS_OF[self.length]
        self.counts[kind] = count = self.counts[kind] + 1
        rate = max(1 / (_PRIOR + count), _LEAST_RATE)
        self.chances[kind] += (is_right - self.chances[kind]) * rate
        if count <= _FIRST:
            common[kind] = min(common[kind] + (is_right - common[kind]) * _COMMON_RATE, _CLASSES[kind][1])

    def draft(self, tokens: array[int], most: int) -> Draft:
        """Return a draft of at most this number of tokens. It may run past the end and repeat itself."""
        match, length, chances = self.match, self.length, self.chances
        if not match or self.seen < len(tokens):
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
        """Look up the last n-grams of the first `end` tokens, unless there is a match, and add them to a table."""
        newest = self.tables[0]
        for size in (_LONG, _SHORT):
            if end < size:
                continue
            key = hash(tuple(tokens[end - size : end]))
            if not self.match:
                for table in self.tables:
                    place = table[key & (len(table) - 1)]
                    if 0 < place < end and self._match(tokens, place, end):  # `end`: the longer n-gram has this hash
                        break
            newest[key & (len(newest) - 1)] = end

    def _match(self, tokens: array[int], place: int, end: int) -> bool:
        """Take the token at a place as the guess after the first `end` tokens, if the same tokens precede both.

        Return True if they do.
        """
        length = 0
        while length < min(place, _MOST_MATCH) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        if length < _SHORT:
            return False
        self.match, self.length = place, length
        return True

    def _grow(self, tokens: int) -> None:
        """Begin a larger table, of 8 or more slots for each of this number of tokens."""
        slots = _LEAST_SLOTS
        while slots < 8 * tokens:
            slots *= 2
        self.tables.insert(0, array("i", [0]) * slots)
        self.slots += slots


_NOTHING = Draft()

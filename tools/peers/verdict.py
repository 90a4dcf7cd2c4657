"""Compare Ortolan's best configuration on each work with the fastest peer of equal quality.

Rows without a measured quality are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log

from .result import PeersResult, Row, Speed, works_of

ENCODERS, SPARSE_ENCODERS, DECODERS, LAYERS = "encoders", "sparse encoders", "decoders", "layers"
SERVING, SIZES = "serving", "sizes"
SECTIONS = (ENCODERS, SPARSE_ENCODERS, DECODERS, LAYERS, SERVING, SIZES)

LONG_STEP = "step at 16384"
COSINE = 0.99  # to the fp32 vectors: encoders at or above it count as equal; Ortolan rows below it are not compared
ONE_AT_A_TIME = "Ortolan, one by one"  # a row of section "serving"
ONE_AT_A_TIME_ENGINE = "ortolan-decoder"
_PERPLEXITY = 1.01  # largest ratio to Ortolan's perplexity that counts as equal
_ERROR = 1.1  # largest ratio to Ortolan's error that counts as equal
_CHANGED = 0.05  # smallest relative change of a speed that `changes` reports


@dataclass(frozen=True)
class Rule:
    """The way a section judges quality.

    Attributes:
        quality: The measure.
        good: Whether one of Ortolan's rows is accurate enough to be compared.
        equal: Whether the first row is as accurate as the second, within a tolerance.
        less_is_better: Whether smaller values of the measure are better.
    """

    quality: str
    good: Callable[[Row], bool]
    equal: Callable[[Row, Row], bool]
    less_is_better: bool = False


def _equal_encoders(peer: Row, ours: Row) -> bool:
    """Return whether the peer's cosine to fp32 is high enough, or its Spearman correlation is at least Ortolan's."""
    cosine = peer.quality["cosine"] >= min(ours.quality["cosine"], COSINE)
    return cosine or peer.quality.get("Spearman", -1.0) >= ours.quality.get("Spearman", 1.0)


_ENCODER_RULE = Rule("cosine", lambda ours: ours.quality["cosine"] >= COSINE, _equal_encoders)
_DECODER_RULE = Rule(
    "perplexity",
    lambda ours: True,
    lambda peer, ours: peer.quality["perplexity"] <= _PERPLEXITY * ours.quality["perplexity"],
    less_is_better=True,
)
# With random weights, the rounding of many layers changes the perplexity by some percent, and its logarithm by little.
_SIZES_RULE = Rule(
    "perplexity",
    lambda ours: True,
    lambda peer, ours: log(peer.quality["perplexity"]) <= _PERPLEXITY * log(ours.quality["perplexity"]),
    less_is_better=True,
)
RULES: Mapping[str, Rule] = {
    ENCODERS: _ENCODER_RULE,
    SPARSE_ENCODERS: _ENCODER_RULE,
    DECODERS: _DECODER_RULE,
    SERVING: _DECODER_RULE,
    SIZES: _SIZES_RULE,
    LAYERS: Rule(
        "error",
        lambda ours: True,
        lambda peer, ours: peer.quality["error"] <= _ERROR * ours.quality["error"],
        less_is_better=True,
    ),
}


def goal_of(section: str, work: str) -> float:
    """Return the speedup over the best peer that Ortolan aims for."""
    if section == ENCODERS:
        return 2.5 if work.startswith("mixed") else 1.5
    if section == SPARSE_ENCODERS:
        return 2.5
    if section in (DECODERS, SIZES):
        return 3.0 if work == LONG_STEP else 2.0 if work.startswith("prompt") else 1.5 if "requests" in work else 1.4
    if section == SERVING:
        return 1.5 if work.endswith("whole") else 1.0
    return 1.0


@dataclass(frozen=True)
class Verdict:
    """A comparison at one work.

    Values are in `unit`; for "s" and "MB" less is better. `peer` and `peer_value` are None without a peer of equal
    quality; `threads` is None for load time and file size. Speeds are by the shortest times. `by_medians` is the ratio
    by the median times.
    """

    section: str
    model: str
    work: str
    threads: int | None
    ours: Row
    peer: Row | None
    our_value: float
    peer_value: float | None
    unit: str
    goal: float
    by_medians: float | None = None

    @property
    def ratio(self) -> float | None:
        """The ratio, above 1 if Ortolan is better; None without a peer."""
        if self.peer_value is None:
            return None
        less_is_better = self.unit in ("s", "MB")
        return self.peer_value / self.our_value if less_is_better else self.our_value / self.peer_value

    @property
    def missed(self) -> bool:
        """True if the ratio is below the goal."""
        return self.ratio is not None and self.ratio < self.goal


def verdicts(result: PeersResult) -> list[Verdict]:
    """Return all comparisons, those below their goal first, in the order of measurement."""
    found = [one for (section, model), rows in result.groups().items() for one in _of_group(section, model, rows)]
    return sorted(found, key=lambda one: not one.missed)


def _of_group(section: str, model: str, rows: Sequence[Row]) -> Iterator[Verdict]:
    ours = [row for row in rows if row.ours and _judged(row) and RULES[section].good(row)]
    best: dict[str, Row] = {}
    for work, threads in works_of(rows):
        chosen = [row for row in ours if _counts_for(row, work)]
        compared = [one for row in chosen if (one := _speed_verdict(row, rows, work, threads))]
        if compared:
            # A work with a peer is preferred to one without.
            one = max(compared, key=lambda verdict: (verdict.ratio is not None, verdict.ratio or verdict.our_value))
            best[one.ours.name] = one.ours
            yield one
    sizes = {row.megabytes: row for row in reversed(best.values())}  # several rows may share one file
    for row in best.values():
        peers = _peers(row, rows)
        if sizes[row.megabytes] is row:
            yield _least(row, peers, "file size", "MB", lambda one: one.megabytes)
        if row.load_seconds is not None:
            timed = [peer for peer in peers if peer.load_seconds is not None]
            yield _least(row, timed, "load time", "s", lambda one: one.load_seconds or 0.0)


def _counts_for(row: Row, work: str) -> bool:
    """Return whether a row is compared at a work. One by one, only single requests are: the engine joins others."""
    return row.engine != ONE_AT_A_TIME_ENGINE or work.startswith("1 request,")


def _judged(row: Row) -> bool:
    return RULES[row.section].quality in row.quality


def is_no_worse(row: Row, other: Row) -> bool:
    """Return whether the row's quality is at least as good as the other row's; False if either is unknown."""
    rule = RULES[row.section]
    if not (_judged(row) and _judged(other)):
        return False
    its, others = row.quality[rule.quality], other.quality[rule.quality]
    return its <= others if rule.less_is_better else its >= others


def counts_beside(peer: Row, ours: Row) -> bool:
    """Return whether the peer is as accurate as `ours`, within a tolerance; False if either quality is unknown."""
    return _judged(peer) and _judged(ours) and RULES[ours.section].equal(peer, ours)


def _peers(ours: Row, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not row.ours and counts_beside(row, ours)]


def _speed_verdict(ours: Row, rows: Sequence[Row], work: str, threads: int) -> Verdict | None:
    speed = ours.speed(work, threads)
    if speed is None:
        return None
    timed = [(row, found) for row in _peers(ours, rows) if (found := row.speed(work, threads))]
    peer, its = max(timed, key=lambda pair: pair[1].best, default=(None, None))
    return Verdict(
        ours.section, ours.model, work, threads, ours, peer, speed.best, None if its is None else its.best, speed.unit,
        goal_of(ours.section, work), None if its is None else speed.median / its.median,
    )  # fmt: skip


def _least(ours: Row, peers: Sequence[Row], work: str, unit: str, value: Callable[[Row], float]) -> Verdict:
    """Compare with the peer that has the smallest value. The goal is 1."""
    peer = min(peers, key=value) if peers else None
    its = None if peer is None else value(peer)
    return Verdict(ours.section, ours.model, work, None, ours, peer, value(ours), its, unit, 1.0)


@dataclass(frozen=True)
class Change:
    """A difference of one row between two runs. `what` is a work with its threads, a quality, or the file size."""

    section: str
    model: str
    name: str
    what: str
    before: float
    after: float


def changes(before: PeersResult, after: PeersResult) -> list[Change]:
    """Return speeds that differ by 5 % or more, and all other qualities and sizes, for rows that both results have."""
    old = {(row.section, row.model, row.name): row for row in before.rows}
    found = []
    for row in after.rows:
        one = old.get((row.section, row.model, row.name))
        if one is None:
            continue
        pairs = [(speed, one.speed(speed.work, speed.threads)) for speed in row.speeds]
        compared = [(_speed_name(now), then.best, now.best) for now, then in pairs if then and _differ(then, now)]
        compared += [(name, one.quality[name], value) for name, value in row.quality.items() if name in one.quality]
        compared.append(("file, MB", one.megabytes, row.megabytes))
        found += [
            Change(row.section, row.model, row.name, what, then, now)
            for what, then, now in compared
            if f"{then:.5g}" != f"{now:.5g}"
        ]
    return found


def _differ(then: Speed, now: Speed) -> bool:
    return abs(now.best / then.best - 1) >= _CHANGED


def _speed_name(speed: Speed) -> str:
    return f"{speed.work}, {speed.threads} thread{'s' if speed.threads > 1 else ''}, {speed.unit}"

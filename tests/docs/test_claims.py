"""Each claim about speed or size in README.md and docs/*.md has a command or a link to measurements beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from .pages import DOCS, ROOT, pages

# results.md is written from the measurements that it links.
_WRITTEN = {"results.md"}
_RATIO = re.compile(
    r"\d ?x\b(?! \d)|\b(?:\d|two|three|four|five|ten|half|twice)(?: to (?:[\d.]+|four))? ?(?:times|as fast)\b"
    r"|\d % (?:less|more|faster|smaller|of)\b|tokens/s|tokens per second",
    re.IGNORECASE,
)
_SUBJECT = re.compile(r"fast|slow|speed|smaller|less (?:time|memory)|tokens (?:/|per )s", re.IGNORECASE)
_EVIDENCE = re.compile(r"measurements/|results\.md|/README\.md#|`?(?:python -m|ortolan|make) ")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the text's paragraphs. A fenced block is one of them."""
    for part in re.split(r"^(```.*?^```)$", text, flags=re.MULTILINE | re.DOTALL):
        yield from [part] if part.startswith("```") else filter(str.strip, re.split(r"\n\s*\n", part))


def claims_without_evidence(text: str) -> list[str]:
    """Return sentences with a ratio whose paragraph and its neighbours have neither command nor link."""
    found, missing = list(paragraphs(text)), []
    for index, paragraph in enumerate(found):
        beside = "\n".join(found[max(0, index - 1) : index + 2])
        sentences = re.split(r"(?<=[.:;|])\s", paragraph)
        claims = [one for one in sentences if _RATIO.search(one) and _SUBJECT.search(one)]
        missing += [" ".join(one.split()) for one in claims if not _EVIDENCE.search(beside)]
    return missing


@pytest.mark.parametrize("page", [name for name in pages() if name not in _WRITTEN])
def test_claims_have_a_command_or_a_link(page: str) -> None:
    path = (ROOT if page == "README.md" else DOCS) / page
    assert claims_without_evidence(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "claim",
    ["It is 3.5x faster.", "Texts run 2 to 4 times as fast.", "It takes 10 % less time.", "Twice as fast as fp32."],
)
def test_a_claim_alone_is_found(claim: str) -> None:
    assert claims_without_evidence(f"Text.\n\n{claim}\n\nText.") == [claim]
    assert claims_without_evidence(f"{claim}\n\n[table](measurements/one.md)") == []
    assert claims_without_evidence(f"{claim}\n\n```console\npython -m tools.peers\n```") == []
    assert claims_without_evidence("Five more layers, 9 times the rounding error, 128 x 768.") == []

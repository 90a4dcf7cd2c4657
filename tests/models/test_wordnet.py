"""Definitions and examples from WordNet's database files."""

from __future__ import annotations

from ortolan.models.wordnet import FILES, read_wordnet


def test_each_text_comes_once_and_short_ones_not_at_all(tmp_path):
    for name in FILES:
        (tmp_path / name).write_text("", encoding="utf-8")
    (tmp_path / "data.noun").write_text(
        "  1 This software is provided to you by the licence\n"
        '00006269 03 n 01 life 0 002 @ 00004258 n 0000 | living things collectively; "the sea teems with life"; "no"\n'
        "00006270 03 n 01 again 0 002 @ 00004258 n 0000 | living things collectively  \n",
        encoding="utf-8",
    )
    assert read_wordnet(tmp_path) == ["living things collectively", "the sea teems with life"]

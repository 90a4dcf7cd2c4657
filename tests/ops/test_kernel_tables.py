"""Test properties that every kernel table must have."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from ortolan import _native, _testing

TABLES = [name for name in dir(_testing) if name.endswith("_kernels")]
each_table = pytest.mark.parametrize("table", TABLES)


def rows_of(table: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = getattr(_testing, table)()
    return rows


def test_the_tables_are_found() -> None:
    assert "epilogue_kernels" in TABLES and len(TABLES) > 5


@each_table
def test_a_name_means_one_kernel(table: str) -> None:
    """A kernel may have two rows in a table, if another kernel is better for some sizes in between."""
    features: dict[str, str] = {}
    for row in rows_of(table):
        assert features.setdefault(row["name"], row["isa"]) == row["isa"]


@each_table
def test_kernels_run_where_their_features_are(table: str) -> None:
    detected = _native.cpu_info()["detected_features"]
    assert [row["runs_here"] for row in rows_of(table)] == [row["isa"] in detected for row in rows_of(table)]


@each_table
def test_table_is_best_first_and_ends_with_the_portable_kernel(table: str) -> None:
    def sizes(row: dict[str, Any]) -> tuple[int, ...]:
        return row.get("index_bytes", 0), row.get("entry_bytes", 0), row.get("precision", 0)

    # Rows for different element sizes form separate tables.
    for _, rows in groupby(sorted(rows_of(table), key=sizes), sizes):
        places = [_testing.feature_sets().index(row["isa"]) for row in rows]
        assert places == sorted(places, reverse=True)
        assert places[-1] == 0

"""Find the integers in a compiled model's file (ops/provider/README.md), for int8 and 4-bit linear layers."""

from __future__ import annotations

import struct
from collections.abc import Iterator

HEADER = 64
LAYERS, ATTENTION, COPY, NORM = 0, 1, 2, 3  # kinds of steps
_ARRAYS = {
    0: ("weights", "scales", "zero points", "minimums"),
    1: ("masks", "values", "offsets", "scales", "column sums", "zero points"),
    3: ("values", "indices", "starts", "scales"),
}


class _Walk:
    """Read consecutive integers, and store the position of each by its name."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, HEADER
        self.positions: dict[str, int] = {}

    def integer(self, name: str) -> int:
        self.positions[name] = self.at
        (found,) = struct.unpack_from("<q", self.content, self.at)
        self.at += 8
        return int(found)

    def integers(self, prefix: str, *names: str) -> None:
        for name in names:
            self.integer(prefix + name)

    def text(self) -> str:
        size = self.integer("text")
        found = self.content[self.at : self.at + size].decode()
        self.at += -size % 8 + size
        return found

    def array(self, name: str) -> None:
        self.integers(name, ".first", ".bytes")

    def layers(self, name: str) -> None:
        kind = self.integer(name)
        self.integers(name, ".k", ".n", *((".bits", ".group", ".half") if kind == 0 else ()))
        for array in (*_ARRAYS[kind], "bias"):
            self.array(f"{name}.{array}")
        self.positions[f"{name} end"] = self.at

    def bounds(self, name: str) -> None:
        if self.integer(name):
            self.integers(name, ".least", ".most")

    def input(self, name: str) -> int:
        slot = self.integer(name)
        self.text()
        return slot

    def mask(self, name: str) -> None:
        self.integer(f"{name}.kind")
        if self.input(f"{name}.input") == -1:
            self.tensor(name)
        self.integers(name, ".hides", ".fill", ".scale", ".heads", ".windows", ".truncated")

    def tensor(self, name: str) -> None:
        for i in range(self.integer(f"{name}.axes")):
            self.integer(f"{name}.axis{i}")
        self.array(f"{name}.numbers")

    def norm(self) -> None:
        self.text()
        self.integers("", "y", "epsilon")
        self.array("weight")
        self.array("shift")
        for i in range(self.integer("operands")):
            self.text()
            if self.integer(f"operand{i}") == -1:
                self.tensor(f"operand{i}")

    def attention(self) -> None:
        self.text()
        roles = ("query", "key", "value")
        for role in roles:
            self.input(role)
        self.integers("", *(f"{role}.layout" for role in roles))
        for role in roles:
            self.array(f"{role}.bias")
        self.integers("", "heads", "kv_heads", "head_dim", "scale", "softcap")
        self.integers("", "causal", "zero_hidden_rows", "window")
        self.array("sinks")
        self.integers("", "is_precise", "is_beside_cache", "reproducible")
        self.input("zero_rows")
        for i in range(self.integer("masks")):
            self.mask(f"mask{i}")
        self.integers("", "y.layout", "y")
        if self.integer("has_cache"):
            for name in ("past_key", "past_value", "cos", "sin", "lengths", "total"):
                self.input(name)
            self.integers("", "present_key", "present_value", "interleaved")
        for i in range(self.integer("parts")):
            self.layers(f"part{i}")

    def step(self) -> None:
        kind = self.integer("kind")
        if kind == NORM:
            return self.norm()
        if kind == ATTENTION:
            return self.attention()
        if kind != COPY:
            self.text()
            self.text()
        self.integers("", "x", "y")
        if kind == COPY:
            return self.bounds("bounds")
        self.integer("residual")
        self.layers("part0")
        self.integers("", "activation", "gated")
        if self.integer("norm"):
            self.integer("epsilon")
            self.array("weight")
            self.array("shift")
        self.bounds("x_bounds")
        self.bounds("y_bounds")


def steps(content: bytes) -> Iterator[dict[str, int]]:
    """Yield, for each step of each group, a map from the names of its integers to their positions in the file."""
    walk = _Walk(content)
    for _ in range(walk.integer("groups")):
        walk.text()
        end = walk.integer("bytes") + walk.at
        for _ in range(walk.integer("steps")):
            walk.positions = {}
            walk.step()
            yield walk.positions
        assert walk.at == end

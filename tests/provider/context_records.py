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
        self.places: dict[str, int] = {}

    def number(self, name: str) -> int:
        self.places[name] = self.at
        (found,) = struct.unpack_from("<q", self.content, self.at)
        self.at += 8
        return int(found)

    def numbers(self, prefix: str, *names: str) -> None:
        for name in names:
            self.number(prefix + name)

    def text(self) -> str:
        size = self.number("text")
        found = self.content[self.at : self.at + size].decode()
        self.at += -size % 8 + size
        return found

    def array(self, name: str) -> None:
        self.numbers(name, ".first", ".bytes")

    def layers(self, name: str) -> None:
        kind = self.number(name)
        self.numbers(name, ".k", ".n", *((".bits", ".group", ".half") if kind == 0 else ()))
        for array in (*_ARRAYS[kind], "bias"):
            self.array(f"{name}.{array}")
        self.places[f"{name} end"] = self.at

    def bounds(self, name: str) -> None:
        if self.number(name):
            self.numbers(name, ".least", ".most")

    def target(self, name: str) -> None:
        self.number(f"{name}.copies")
        for i in range(self.number(f"{name}.sizes")):
            self.numbers(f"{name}.{i}", ".kind", ".number", ".input")

    def mask(self, name: str) -> None:
        self.number(f"{name}.kind")
        given = self.number(f"{name}.input")
        self.numbers(name, ".hides", ".fill", ".is_cut")
        if given == -1:
            self.tensor(name)

    def tensor(self, name: str) -> None:
        for i in range(self.number(f"{name}.axes")):
            self.number(f"{name}.axis{i}")
        self.array(f"{name}.numbers")

    def norm(self) -> None:
        self.text()
        self.numbers("", "y", "epsilon")
        self.array("weight")
        self.array("shift")
        for i in range(self.number("operands")):
            self.text()
            if self.number(f"operand{i}") == -1:
                self.tensor(f"operand{i}")

    def attention(self) -> None:
        for i in range(self.number("parts")):
            self.layers(f"part{i}")
        self.numbers("", "heads", "head_dim", "scale", "causal", "zero_hidden_rows", "zero_rows")
        for name in ("query", "key", "value"):
            self.target(name)
        for i in range(self.number("views")):
            self.target(f"view{i}")
        self.target("merge")
        for i in range(self.number("masks")):
            self.mask(f"mask{i}")

    def step(self) -> None:
        kind = self.number("kind")
        if kind == NORM:
            return self.norm()
        if kind != COPY:
            self.text()
            self.text()
        self.numbers("", "x", "y")
        if kind == ATTENTION:
            return self.attention()
        if kind == COPY:
            return self.bounds("bounds")
        self.number("residual")
        self.layers("part0")
        self.numbers("", "activation", "gated")
        if self.number("norm"):
            self.number("epsilon")
            self.array("weight")
            self.array("shift")
        self.bounds("x_bounds")
        self.bounds("y_bounds")


def steps(content: bytes) -> Iterator[dict[str, int]]:
    """Yield, for each step of each group, a map from the names of its integers to their positions in the file."""
    walk = _Walk(content)
    for _ in range(walk.number("groups")):
        walk.text()
        end = walk.number("bytes") + walk.at
        for _ in range(walk.number("steps")):
            walk.places = {}
            walk.step()
            yield walk.places
        assert walk.at == end

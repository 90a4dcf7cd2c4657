"""Check that every function of the vector API is tested."""

from __future__ import annotations

import re
from pathlib import Path

from ortolan import _testing

from .targets import each_target

ROOT = Path(__file__).parents[2]
# Maps a function to the function whose test also covers it.
PARTS = {
    "Exp2OfProduct": "Exp2",
    "Polynomial": "Exp2",
    "DealBytes": "InterleaveBytes",
    "FirstLanes": "LoadFirst",
    "SomeLanes": "LoadSome",
    "DeinterleaveRows": "InterleaveRows",
    "DotQuadWeights": "InterleaveRows",
    "TokenAt": "DotRows",
    "PackWords": "DotRows",
    "StoreInputs": "DotRows",
    "EndRowSums": "DotRows",
    "EndFewSums": "DotRows",
    "StartNibbleSums": "DotNibbles",
    "EndNibbleSums": "DotNibbles",
    "RepeatEight": "PickBytes",
    "RepeatFour": "PickFloats",
}


def own_functions(target: str) -> set[str]:
    """Return the names of public functions in the target's header and in the shared header vectors.h."""
    functions = set()
    for struct, header in ((target, target), ("Vectors", "vectors")):
        text = (ROOT / "ops" / "simd" / f"{header}.h").read_text()
        start = re.search(rf"^struct {struct}\b", text, re.MULTILINE).start()
        vectors = re.split(r"\n (?:private|protected):", text[start:])[0]
        function = r"^  (?:\[\[.*\]\] )?static (?!constexpr)[\w:<> ]*[ &](\w+)\("
        functions |= set(re.findall(function, vectors, re.MULTILINE))
    return functions


@each_target
def test_every_function_can_be_called(target: str) -> None:
    calls = re.findall(r'ORTOLAN_TRY\(\s*"(\w+)"', (ROOT / "src" / "testing" / "simd_kernels.cc").read_text())
    assert len(calls) > 50
    there = {name for name in calls if _testing.simd(target, name, number=1) is not None}
    functions = {PARTS.get(name, name) for name in own_functions(target)}
    assert not sorted(name for name in functions if not any(call.startswith(name) for call in there))


def test_every_call_is_compared() -> None:
    calls = re.findall(r'ORTOLAN_TRY\(\s*"(\w+)"', (ROOT / "src" / "testing" / "simd_kernels.cc").read_text())
    compared = "".join(path.read_text() for path in Path(__file__).parent.glob("test_[!e]*.py"))
    assert not [call for call in calls if f'"{call}"' not in compared]

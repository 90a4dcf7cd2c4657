"""Test NoMADAttention with a prompt in the model: with many queries, its matrix products run on AMX."""

from __future__ import annotations

from .emulated import check

# Query rows per key head: 3 or 12 with batch 1, and 69 (64 and 5) with batch 23. The last chunk of 530 tokens is
# shorter than the first.
CHECK_CALLS = """
from ortolan import _native
from tests.ops.cached_attention import Decoder, Setup, node_model
from tests.ops.single_node import session
assert _native.cpu_info()["isa"] == "amx"
for sparsity in ((0.0, 0.0), (0.3, 0.5)):
    for tokens, batch in ((33, 23), (530, 1)):
        setup = Setup(6, 2, 32, prompt=tokens, prompt_sparsity=sparsity, positions=1024, rotary="half")
        ours, decoder = session(node_model(setup), threads=2), Decoder(setup, batch)
        for queries in (1, 4) if batch == 1 else (1,):
            call = decoder.call(queries)
            call.check(ours.run(None, call.feeds))
"""


def test_calls_behind_a_prompt() -> None:
    check(CHECK_CALLS)

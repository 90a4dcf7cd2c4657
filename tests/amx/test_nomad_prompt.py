"""NoMADAttention behind a prompt in the model: its products are SparseAMXMatMul's, on AMX for many queries."""

from __future__ import annotations

from .emulated import check

# Rows of a call: 3 and 12 of one sequence, 69 (64 and 5) of 23; the last chunk of 530 tokens is shorter than the other.
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

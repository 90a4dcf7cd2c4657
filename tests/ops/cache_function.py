"""Compare the kernel and the ONNX function of NoMADAttention with a cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from ortolan.graph_passes.operators.nomad_cache_function import CacheUses, nomad_cache_function

from .cached_attention import Call, Setup, node_model
from .single_node import session


def uses_of(setup: Setup) -> CacheUses:
    """Return the function features that this node alone needs."""
    return CacheUses(
        d_sub=setup.d_sub if setup.codes else 0,
        int8_values=setup.int8_values,
        packed=setup.packed,
        by_heads=setup.by_heads,
        mask=setup.mask,
        grouped=setup.heads != setup.kv_heads,
        causal=setup.causal,
        zero_hidden_rows=setup.zero_hidden_rows,
        lengths=setup.lengths,
        rotary=bool(setup.rotary),
        equal_rows=setup.width > 0,
        exact_keys=setup.slots > 0,
        prompt=setup.prompt > 0,
        sinks=setup.head_sink,
        window=setup.local_window > 0,
    )


def all_uses_of(setup: Setup) -> CacheUses:
    """Return the function features for a model that has all kinds of nodes, with one kind of cache."""
    return dataclasses.replace(
        uses_of(setup),
        d_sub=4 if setup.codes else 0,
        mask=True,
        grouped=True,
        causal=True,
        zero_hidden_rows=True,
        lengths=True,
    )


class Both:
    """Two sessions on one model: with Ortolan's kernel, and with the body of the ONNX function."""

    def __init__(self, setup: Setup, uses: CacheUses | None = None, opset: int = 17) -> None:
        self.setup = setup
        self.model = node_model(setup, [ir.to_proto(nomad_cache_function(opset, uses or uses_of(setup)))], opset=opset)
        self.kernel = session(self.model)
        self.body = session(self.model, library=False)

    def check(self, call: Call, exact: bool = False) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Check both sessions' outputs against their bounds, and that the caches are equal.

        exact: for the kernel's output, as in Call.check.
        """
        ours, body = (one.run(None, call.feeds) for one in (self.kernel, self.body))
        call.check(ours, exact)
        call.check(body, exact=True)
        return ours, body

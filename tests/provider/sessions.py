"""Sessions with the execution provider, and the nodes that it runs."""

from __future__ import annotations

from typing import Literal

import onnx
import onnxruntime as ort
import pytest

import ortolan
from ortolan.graph_passes.measure.sessions import open_quietly
from ortolan.provider import PROVIDER

ORT_VERSION = tuple(int(part) for part in ort.__version__.split(".")[:2])
_RECORD = "session.record_ep_graph_assignment_info"

needs_provider = pytest.mark.skipif(
    not hasattr(ort.InferenceSession, "get_provider_graph_assignment_info"),
    reason="onnxruntime is older than 1.24",
)


def provider_session(
    model: onnx.ModelProto | str,
    threads: int = 1,
    log: int = 4,
    *,
    claims: Literal["faster", "all"] = "all",
    **entries: str,
) -> ort.InferenceSession:
    """Open a session with the provider, by default one that claims all supported nodes, whatever the CPU.

    log: severity level. entries: session configuration; two underscores in a name become a dot.
    """
    options = ortolan.session_options(claims=claims)
    options.intra_op_num_threads = threads
    options.log_severity_level = log
    options.add_session_config_entry(_RECORD, "1")
    for name, value in entries.items():
        options.add_session_config_entry(name.replace("__", "."), value)
    return ort.InferenceSession(model if isinstance(model, str) else model.SerializeToString(), options)


def plain_session(model: onnx.ModelProto, fuses: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    if not fuses:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def exact_session(model: onnx.ModelProto) -> ort.InferenceSession:
    """Open a session of ONNX Runtime, if possible one whose int8 sums do not saturate on CPUs without VNNI."""
    return open_quietly(model.SerializeToString())


def claimed(session: ort.InferenceSession) -> list[str]:
    """Return the names of the nodes that the provider runs."""
    assigned = session.get_provider_graph_assignment_info()
    return sorted(node.name for part in assigned if part.ep_name == PROVIDER for node in part.get_nodes())

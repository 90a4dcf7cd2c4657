"""inspect_provider: what the execution provider takes of a model and what it leaves, as the provider itself says."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ortolan.graph_passes.report.lines import as_text

from .errors import SessionError
from .provider import CLAIMS_FILE, PROVIDER, checked_options, options_with
from .session import create_session

if TYPE_CHECKING:
    import onnx
    import onnxruntime
    from rich.console import Group

_RECORD = "session.record_ep_graph_assignment_info"


@dataclass
class ProviderNode:
    """A node of an operator that the provider knows, as ONNX Runtime shows it: with the names and types that its own
    optimizations have made."""

    node: str
    op: str
    taken: bool
    what: str  # of a node that is taken: shape, bits
    reason: str  # why a node is left


@dataclass
class ProviderInspection:
    """What inspect_provider found. `print` it, or take `to_json()`."""

    model: str
    nodes: list[ProviderNode] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        if not self.nodes:
            text = "no node is of an operator that the provider takes; layers of floats are taken with a precision"
            return Group(Text(f"{self.model}: {text}"))
        taken = sum(node.taken for node in self.nodes)
        table = Table()
        table.add_column("node", overflow="fold")
        for column in ("operator", "", "what, or why not"):
            table.add_column(column)
        for node in self.nodes:
            row = (node.node, node.op, "taken" if node.taken else "left", node.what if node.taken else node.reason)
            table.add_row(*(Text(cell) for cell in row))
        return Group(Text(f"{self.model}: the provider takes {taken} of {len(self.nodes)} nodes that it knows"), table)


def inspect_provider(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    precision: Literal["float32", "bf16", "int8"] = "float32",
    claims: Literal["faster", "all"] = "faster",
) -> ProviderInspection:
    """What `OrtolanExecutionProvider` takes of a model, and what it leaves to ONNX Runtime and why.

    Makes a session with the provider and lets it go: it needs the time and memory that sessions do. Nodes of operators
    that the provider does not know are not listed. precision and claims: as for `session_options`.

    Raises ValueError for other values, LibraryError where there is no provider (see `register_provider`), SessionError
    if the model cannot be opened.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "claims.jsonl"
        options = options_with({**checked_options(precision, claims), CLAIMS_FILE: str(file)})
        options.log_severity_level = 3
        options.add_session_config_entry(_RECORD, "1")
        session = create_session(model, options)
        # Names are what the model's file says, UTF-8 or not.
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    name = str(model) if isinstance(model, str | os.PathLike) else "the given ModelProto"
    found = ProviderInspection(name, [ProviderNode(**json.loads(line)) for line in lines if line])
    _check(found, session)
    return found


def _check(found: ProviderInspection, session: onnxruntime.InferenceSession) -> None:
    """Where a provider fails while it claims, ONNX Runtime logs that and goes on without the provider's nodes."""
    if not hasattr(session, "get_provider_graph_assignment_info"):  # before onnxruntime 1.24
        return
    parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name == PROVIDER]
    assigned, taken = sum(len(part.get_nodes()) for part in parts), sum(node.taken for node in found.nodes)
    if assigned < taken:
        raise SessionError(
            f"of {found.model} the provider takes {taken}, and ONNX Runtime gives it {assigned} nodes; the errors that "
            "ONNX Runtime has logged say why"
        )

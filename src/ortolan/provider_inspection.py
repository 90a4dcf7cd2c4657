"""inspect_provider: lists the nodes of a model that the execution provider claims, as reported by the provider."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ortolan.graph_passes.report.lines import as_text, count

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
    """A node whose operator the provider supports.

    Attributes:
        node: The node's name after ONNX Runtime's own optimizations.
        op: The node's operator.
        taken: Whether the provider claims the node.
        what: Shape and bits of a claimed node.
        reason: Why the node is not claimed.
    """

    node: str
    op: str
    taken: bool
    what: str
    reason: str


@dataclass
class ProviderInspection:
    """The result of `inspect_provider`, to print or to convert."""

    model: str
    nodes: list[ProviderNode] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return dataclasses.asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the result as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> Group:
        """Return the table that `print` shows."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        if not self.nodes:
            text = "no supported nodes; --precision bf16 or int8 also claims float layers"
            return Group(Text(f"{self.model}: {text}"))
        taken = sum(node.taken for node in self.nodes)
        table = Table()
        table.add_column("node", overflow="fold")
        for column in ("operator", "", "shape, or why not"):
            table.add_column(column)
        for node in self.nodes:
            row = (node.node, node.op, "claimed" if node.taken else "left", node.what if node.taken else node.reason)
            table.add_row(*(Text(cell) for cell in row))
        return Group(Text(f"{self.model}: the provider claims {taken} of {len(self.nodes)} supported nodes"), table)


def inspect_provider(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    precision: Literal["float32", "bf16", "int8"] = "float32",
    claims: Literal["faster", "all"] = "faster",
) -> ProviderInspection:
    """Show which nodes `OrtolanExecutionProvider` claims, and why it leaves others to ONNX Runtime.

    This opens a session, which takes as much time and memory as any session of the model. Only nodes whose operators
    the provider supports are listed.

    Args:
        model: The path of an ONNX file or of its folder, or a ModelProto.
        precision: As for `session_options`.
        claims: As for `session_options`.

    Raises:
        ArgumentError: An argument has another value.
        LibraryError: There is no provider, see `register_provider`.
        SessionError: The model cannot be opened.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "claims.jsonl"
        options = options_with({**checked_options(precision, claims), CLAIMS_FILE: str(file)})
        options.log_severity_level = 3
        options.add_session_config_entry(_RECORD, "1")
        session = create_session(model, options)
        # Names come from the model's file and may not be UTF-8.
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    name = str(model) if isinstance(model, str | os.PathLike) else "the given ModelProto"
    found = ProviderInspection(
        name, [ProviderNode(**one) for one in map(json.loads, filter(None, lines)) if "node" in one]
    )
    _check(found, session)
    return found


def _check(found: ProviderInspection, session: onnxruntime.InferenceSession) -> None:
    """Check that all claims were accepted: if a provider fails, ONNX Runtime logs that and continues without it."""
    if not hasattr(session, "get_provider_graph_assignment_info"):  # before onnxruntime 1.24
        return
    parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name == PROVIDER]
    assigned, taken = sum(len(part.get_nodes()) for part in parts), sum(node.taken for node in found.nodes)
    if assigned < taken:
        raise SessionError(
            f"provider claims {count(taken, 'node')} of {found.model}, but ONNX Runtime assigns {assigned}; see the "
            "errors that ONNX Runtime logged"
        )

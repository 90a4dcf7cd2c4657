"""The commands for texts: `ortolan embed` and `ortolan rerank`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import cli_options as options
from .cli_output import make_console, progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortolan.graph_passes.text.text_plan import TextInput

    from .embedding import RankedText
    from .text_encoder import TextEncoder


def embed(
    model: options.Model,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.npy",
            help="Where to write the vectors, in the order of the texts: float32 \\[texts, width]. Token vectors: all "
            "below each other, and NAME.lengths.npy. Sparse vectors: an .npz file for scipy.sparse.load_npz.",
        ),
    ],
    texts: options.Texts = Path("-"),
    field: options.TextField = None,
    tokenizer: options.TextTokenizer = None,
    pooling: options.VectorPooling = None,
    normalize: options.VectorNormalize = None,
    max_tokens: options.CutTokens = None,
    prompt_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The sentence-transformers prompt before each text; empty: no prompt. Default: default_prompt_name.",
        ),
    ] = None,
    query: Annotated[
        bool, typer.Option("--query", help="Late-interaction models: the texts are queries, not documents.")
    ] = False,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", "-k", min=1, metavar="K", help="Sparse vectors: keep only the K largest weights."),
    ] = None,
    batch_tokens: options.BatchTokens = None,
    threads: options.Threads = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Write the vectors of texts, one a line, to a NumPy file."""
    from ortolan.graph_passes.text.text_plan import TextInput

    from .embedding import embed_stream
    from .text_encoder import BATCH_TOKENS
    from .text_lines import read_lines
    from .token_vectors import embed_sparse, stream_tokens
    from .vectors_file import check_vectors_file, write_sparse, write_token_vectors, write_vectors

    check_vectors_file(output, ".npz" if output.suffix == ".npz" else ".npy")
    lines = read_lines(texts, field)
    settings = TextInput(pooling=pooling, normalize=normalize, max_tokens=max_tokens, prompt_name=prompt_name)
    encoder = _open(model, tokenizer, settings, threads)
    batch = batch_tokens or BATCH_TOKENS
    if query:
        encoder.require("late_interaction")
    if top_k is not None:
        encoder.require("sparse")
    check_vectors_file(output, ".npz" if encoder.kind == "sparse" else ".npy")
    with progress_bar(quiet=quiet) as progress:
        if encoder.kind == "sparse":
            found = embed_sparse(lines, encoder, top_k=top_k, batch_tokens=batch, progress=progress)
            write_sparse(output, found)
            count, width, what = len(found), found.width, f"{len(found)} sparse vectors"
            more = {"terms": len(found.indices)}
        elif encoder.kind == "late_interaction":
            width = encoder.width or 0
            pieces = stream_tokens(lines, encoder, query, batch, progress)
            count, rows = write_token_vectors(output, pieces, width)
            what, more = f"{rows} token vectors of {count} texts", {"tokens": rows}
        else:
            none = encoder.encode([])  # fails for rerankers before texts are read; its width is written without texts
            vectors = embed_stream(lines, encoder, batch_tokens=batch, progress=progress)
            count, width = write_vectors(output, (piece for found in ([none], vectors) for piece in found))
            what, more = f"{count} vector{'s' * (count != 1)}", {}
    if as_json:
        typer.echo(json.dumps({"output": str(output), "texts": count, "width": width} | more))
    elif not quiet:
        typer.echo(f"{output}: {what} of width {width}")


def rerank(
    model: options.Model,
    query: Annotated[str, typer.Option("--query", "-q", metavar="TEXT", help="The query for which texts are ranked.")],
    texts: options.Texts = Path("-"),
    field: options.TextField = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", "-k", min=1, metavar="K", help="Print only the best K texts.")
    ] = None,
    tokenizer: options.TextTokenizer = None,
    max_tokens: options.CutTokens = None,
    activation: options.ScoreActivation = None,
    batch_tokens: options.BatchTokens = None,
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Rank texts, one a line, for a query with a cross-encoder or ColBERT. All texts are held in memory."""
    from ortolan.graph_passes.text.text_plan import TextInput

    from .embedding import rerank as run
    from .text_encoder import BATCH_TOKENS
    from .text_lines import read_lines

    lines = read_lines(texts, field)
    encoder = _open(model, tokenizer, TextInput(max_tokens=max_tokens, activation=activation), threads)
    encoder.score(query, [])  # refuses models that embed before texts are read
    found = list(lines)
    with progress_bar() as progress:
        ranked = run(query, found, encoder, top_k=top_k, batch_tokens=batch_tokens or BATCH_TOKENS, progress=progress)
    if as_json:
        results = [{"index": one.index, "score": one.score, "text": found[one.index]} for one in ranked]
        typer.echo(json.dumps({"results": results}, indent=2))
    else:
        _print_ranked(ranked, found)


def _open(model: Path, tokenizer: Path | None, settings: TextInput, threads: int | None) -> TextEncoder:
    from .session import new_options
    from .text_encoder import TextEncoder

    session_options = new_options()
    if threads is not None:
        session_options.intra_op_num_threads = threads
    return TextEncoder(model, tokenizer, settings, session_options)


def _print_ranked(ranked: Sequence[RankedText], texts: Sequence[str]) -> None:
    """Print one row a text, cut to the width of a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None)
    for column in ("score", "index"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis")
    for one in ranked:
        table.add_row(f"{one.score:.4f}", str(one.index), Text(texts[one.index]))
    make_console().print(table)

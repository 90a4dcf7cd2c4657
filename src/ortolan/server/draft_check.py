"""Checks that a draft model has the tokens of the model, before one of them is converted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..cache_folder import default_cache_dir
from ..errors import ModelError, missing_model

_MOST_DIFFERENT = 0.01  # of the tokens: models of a family may differ in special tokens, which are drafted wrongly
_GGUF_TOKENS = "tokenizer.ggml.tokens"


def check_same_tokens(model: Path, draft: Path) -> None:
    """Check that two decoders, GGUF files or folders, have vocabularies of the same size and the same tokens.

    Raises:
        ModelError: They have not, or one of them is not a decoder.
    """
    size, tokens = _vocabulary(model)
    draft_size, draft_tokens = _vocabulary(draft)
    advice = "use a draft model of the same family"
    if size is not None and draft_size is not None and size != draft_size:
        raise ModelError(
            f"the draft model {str(draft)!r} has a vocabulary of {draft_size} tokens, expected {size}, as "
            f"{str(model)!r} has; {advice}"
        )
    both = tokens.keys() & draft_tokens.keys()
    different = sorted(index for index in both if tokens[index] != draft_tokens[index])
    if len(different) > _MOST_DIFFERENT * len(both):
        first = different[0]
        raise ModelError(
            f"{len(different)} of {len(both)} tokens of the draft model {str(draft)!r} are not those of "
            f"{str(model)!r}: token {first} is {draft_tokens[first]!r}, expected {tokens[first]!r}; {advice}"
        )


def _vocabulary(path: Path) -> tuple[int | None, Mapping[int, str]]:
    """Return the size of a decoder's vocabulary, if it is known, and its tokens by id, if it has a tokenizer."""
    from ortolan.graph_passes.find.head import LOGITS
    from ortolan.graph_passes.text.tokenizer_file import load_tokenizer

    from .conversion import graph_kind, load_graph, target_folder

    if not path.exists():
        raise ModelError(missing_model(path))
    if path.is_file() and path.suffix == ".gguf":
        converted = target_folder(path, default_cache_dir())
        if converted.is_dir():  # which is faster to read
            return _vocabulary(converted)
        from ..models.gguf.model import read_model

        read = read_model(path)
        tokens = read.file.array(_GGUF_TOKENS) if read.file.has(_GGUF_TOKENS) else []
        return read.config.vocab_size, dict(enumerate(tokens))
    graph = load_graph(path)
    if graph_kind(graph) == "encoder":
        raise ModelError(
            f"{str(path)!r} is an embedding model or a reranker, expected a decoder, since there is a draft model"
        )
    shapes = [value.shape for value in graph.graph.outputs if value.name == LOGITS and value.shape is not None]
    size = shapes[0][-1] if shapes else None
    file = path / "tokenizer.json"
    ids = load_tokenizer(file).get_vocab() if file.is_file() else {}
    return size if isinstance(size, int) else None, {index: token for token, index in ids.items()}

"""Settings for a model that takes texts, read from its folder or given by the caller, and checked before any work."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir

from ortolan.errors import ModelError, listing, suggestion

from ..find.embedding import count_positions
from ..measure.feeds import fixed_sizes, model_inputs
from .bpe import read_bpe
from .nodes import OLDEST_OPSET, Nodes, Tokens
from .padding import UnknownPaddingError, read_padding_id
from .pair_prompt import PAIR_PROMPT, PairPrompt, SplitPrompt
from .pooling import POOLINGS
from .sentence_folder import SentenceFolder, folder_of, read_sentence_folder
from .texts import find_tokenizer
from .token_outputs import TermPooling
from .tokenizer_file import Template, TokenizerFile, read_tokenizer_file
from .unigram import read_unigram
from .wordpiece import read_wordpiece

EMBEDDING = "sentence_embedding"
_SCORES = "logits"
SCORE_ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "none"}  # torch class -> value of TextInput.activation
_MAX_TOKENS = 65536  # limit per text, because the session reserves memory for all tokens
_KNOWN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


@dataclass(frozen=True)
class TextInput:
    """Settings of `optimize_onnx(texts_in=…)`. None means the setting in the model's folder, or else the default below.

    Attributes:
        tokenizer: Path of a tokenizer.json. Default: the argument tokenizer of optimize_onnx, or else the
            tokenizer.json beside the model.
        pooling: "mean" of the token vectors (default), "cls", "lasttoken", "max", "mean_sqrt_len_tokens" or
            "weightedmean".
        normalize: Scale vectors to length 1 (default: yes).
        max_tokens: Longer texts are cut to this length, including special tokens. Default: the limit in
            sentence_bert_config.json, tokenizer_config.json or tokenizer.json.
        prompt_name: Default prompt: from config_sentence_transformers.json, to put before texts, or a reranker's from
            pair_prompt.json.
        activation: Activation of a reranker's scores: "sigmoid" (default, as in CrossEncoder) or "none".
    """

    tokenizer: str | os.PathLike[str] | None = None
    pooling: str | None = None
    normalize: bool | None = None
    max_tokens: int | None = None
    prompt_name: str | None = None
    activation: str | None = None


class GraphTokenizer(Protocol):
    """A tokenizer that can be written as nodes."""

    @property
    def probes(self) -> tuple[str, ...]:
        """Texts that this tokenizer might get wrong."""

    def tokenize(self, nodes: Nodes, texts: ir.Value) -> Tokens:
        """Add nodes that tokenize texts, strings [batch]."""


_READERS: dict[str, Callable[[TokenizerFile], GraphTokenizer]] = {
    "WordPiece": read_wordpiece,
    "BPE": read_bpe,
    "Unigram": read_unigram,
}


@dataclass(frozen=True)
class TextSettings:
    """Checked settings for the handling of texts before and after a model.

    Attributes:
        file: The tokenizer.
        folder: The folder's settings.
        output: The model's output to use: token vectors, text vectors or scores.
        scores: True if the output holds one score per pair of texts.
        pooling: None if the output holds text vectors.
        normalize: Scale vectors to length 1.
        max_tokens: Limit per text.
        prompt_name: The default prompt.
        activation: Activation of scores.
        length: The model's fixed number of tokens, to which texts are padded. None: the model accepts any number.
        terms: How weights of terms are computed; None: the model does not weight terms.
        pair_prompt: The prompt in which a reranker reads a pair. None: it reads the pair as its tokenizer joins it.
    """

    file: TokenizerFile
    folder: SentenceFolder
    output: str
    scores: bool
    pooling: str | None
    normalize: bool
    max_tokens: int
    prompt_name: str
    activation: str
    length: int | None = field(default=None, kw_only=True)
    terms: TermPooling | None = field(default=None, kw_only=True)
    pair_prompt: PairPrompt | None = field(default=None, kw_only=True)

    @cached_property
    def pair(self) -> SplitPrompt | None:
        """The prompt of a pair, with the tokens at its ends."""
        return None if self.pair_prompt is None else self.pair_prompt.split(self.file)

    @property
    def room(self) -> int:
        """The most tokens of a text or pair besides those of the prompt's ends.

        Raises:
            ModelError: The prompt alone is too long.
        """
        prompt = 0 if self.pair is None else len(self.pair.head) + len(self.pair.tail)
        if prompt >= self.max_tokens:
            raise ModelError(
                f"max_tokens is {self.max_tokens}, expected more than the {prompt} tokens of the prompt; give "
                "max_tokens (--max-tokens)"
            )
        return self.max_tokens - prompt

    def encode(self, tokenizer: Any, given: Sequence[tuple[str, ...]]) -> list[tuple[list[int], list[int]]]:
        """Return token ids and token types of texts or pairs.

        tokenizer: The file's tokenizers.Tokenizer, which cuts texts to `room`.
        """
        if self.pair is None:
            found = tokenizer.encode_batch([one if len(one) > 1 else one[0] for one in given])
            return [(one.ids, one.type_ids) for one in found]
        found = tokenizer.encode_batch([self.pair.join(*one) for one in given], add_special_tokens=False)
        ids = [[*self.pair.head, *one.ids, *self.pair.tail] for one in found]
        return [(one, [0] * len(one)) for one in ids]


@dataclass(frozen=True)
class TextPlan(TextSettings):
    """Checked settings and tokenizer of a model that will take texts."""

    tokenizer: GraphTokenizer

    @property
    def template(self) -> Template:
        """The special tokens around a text, or if the model scores pairs, around a pair."""
        if self.pair is not None:
            return self.pair.template
        return self.file.pair if self.scores else self.file.single

    @property
    def description(self) -> str:
        """A description of how texts are handled, for the report."""
        if self.scores:
            made = ["pairs of texts in, scores out", f"activation {self.activation}"]
        else:
            made = ["texts in, vectors out"]
            made.append("as the model pools them" if self.pooling is None else f"pooling {self.pooling}")
            made += [f"{len(self.folder.dense)} dense"] if self.folder.dense and self.pooling is not None else []
            made += ["of length 1"] if self.normalize else []
        prompt = [f"prompt {self.prompt_name!r}"] if self.prompt_name else []
        prompt += ["in a prompt"] if self.pair_prompt is not None and not prompt else []
        kind = self.file.said["model"]["type"]
        padded = [] if self.length is None else [f"padded to {self.length}"]
        return ", ".join([*made, f"{kind} tokenizer", f"up to {self.max_tokens} tokens", *padded, *prompt])


def read_plan(
    model: ir.Model, text: TextInput, path: Path | None = None, tokenizer: str | os.PathLike[str] | None = None
) -> TextPlan:
    """Read the tokenizer and the folder; unsupported ones are refused before any work is done.

    tokenizer: the tokenizer's path, unless `text` has one.

    Raises:
        ModelError: A setting or the tokenizer is not supported.
    """
    _, length = fixed_sizes(next((one.shape for one in model_inputs(model) if one.name == "input_ids"), None))
    settings = read_settings(model.graph.outputs, text, path, tokenizer, count_positions(model.graph), length=length)
    if settings.terms is not None or settings.folder.late is not None:
        raise ModelError(
            f"output {settings.output!r} holds token vectors or weights of terms, expected vectors or scores of texts; "
            "keep tokens as the model's inputs, and use ortolan.embed_tokens or ortolan.embed_sparse"
        )
    plan = TextPlan(**vars(settings), tokenizer=read_graph_tokenizer(settings.file))
    _check_inputs(model)
    return plan


def read_settings(
    outputs: Sequence[ir.Value],
    text: TextInput,
    path: Path | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    table: int | None = None,
    tokens: int | None = None,
    length: int | None = None,
) -> TextSettings:
    """Read the settings for texts; see `read_plan`.

    Args:
        outputs: The model's outputs.
        text: The user's settings.
        path: The model's path.
        tokenizer: The tokenizer's path, unless `text` has one.
        table: Rows of the model's position table, if known.
        tokens: Limit per text if no file gives one.
        length: The model's fixed number of tokens. None: the model accepts any number.
    """
    folder = read_sentence_folder(folder_of(path))
    given = text.tokenizer or tokenizer or find_tokenizer(path)
    if given is None:
        raise ModelError(
            "a model that takes texts needs a tokenizer, and there is no tokenizer.json beside the model; give its "
            "path: tokenizer=… (--tokenizer)"
        )
    file = replace(read_tokenizer_file(given), lowercase=folder.lowercase)
    terms_output, terms = _terms(outputs, folder)
    output = terms_output or _output(outputs, text, folder)
    scores = terms is None and output.name == _SCORES and _is_by_pairs(output)
    by_token = terms is not None or folder.late is not None
    if folder.late is not None:
        file = replace(file, pad_id=_pad_of_documents(file))
    if by_token and text.pooling is not None:
        raise ModelError(
            f"pooling is {text.pooling!r}, but the model gives "
            + ("weights of terms" if terms is not None else "a vector for each token")
            + "; leave it out"
        )
    pooling = None if scores or by_token or _is_flat(output) else text.pooling or folder.pooling or "mean"
    name = _prompt_name(text, folder)
    return TextSettings(
        file=file,
        folder=folder,
        output=output.name or "",
        scores=scores,
        pooling=pooling,
        normalize=_normalizes(text, folder, pooling),
        max_tokens=_max_tokens(text, folder, file, scores, table, tokens, length),
        prompt_name=name,
        activation=_activation(text, folder, scores),
        length=length,
        terms=terms,
        pair_prompt=folder.pair_prompts.prompts[name] if scores and folder.pair_prompts is not None else None,
    )


def read_graph_tokenizer(file: TokenizerFile) -> GraphTokenizer:
    """Return the tokenizer of a file in a form that can be written as nodes.

    Raises:
        ModelError: The tokenizer is not supported.
    """
    if file.tokenizer.get_vocab_size() == 0:  # `tokenizers` reads the file first, and refuses malformed ones
        raise file.refuse("has no tokens")
    kind = file.said["model"].get("type")
    if kind not in _READERS:
        raise file.refuse(f"has a model {kind!r}, expected one of {', '.join(_READERS)}")
    try:
        found: GraphTokenizer = _READERS[kind](file)
        return found
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, AssertionError) as error:
        # `tokenizers` has accepted the file, but it is malformed.
        raise file.refuse(f"is not well formed: {error!r}") from error


def _is_flat(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 2


def _is_by_pairs(value: ir.Value) -> bool:
    """Return True if an output has one row of labels for each pair of texts: [batch, labels] or [batch, 1, labels]."""
    shape = value.shape
    return _is_flat(value) or (shape is not None and len(shape) == 3 and shape[1] == 1)


def _pad_of_documents(file: TokenizerFile) -> int:
    """Return the padding token of a late-interaction model, whose tokenizer may pad with the mask token."""
    try:
        return read_padding_id(Path(file.path).parent)
    except UnknownPaddingError:  # documents are padded with the tokenizer's token, which the model computes
        return file.pad_id


def _terms(given: Sequence[ir.Value], folder: SentenceFolder) -> tuple[ir.Value | None, TermPooling | None]:
    """Return the output with weights of terms, [batch, tokens, vocabulary] or [batch, vocabulary], and its pooling.

    Without settings in the folder, the only output of a masked language model is pooled as SPLADE does.
    """
    known = folder.terms
    if known is None and (folder.late is not None or folder.pooling is not None):
        return None, None
    wide = [
        one
        for one in given
        if one.shape is not None
        and len(one.shape) in (2, 3)
        and (one.shape[-1] == folder.vocabulary if isinstance(one.shape[-1], int) else known is not None)
    ]
    if len(wide) != 1 or (known is None and (len(given) > 1 or folder.vocabulary is None)):
        if known is None:
            return None, None
        raise ModelError(
            f"SpladePooling needs one output [batch, tokens, {folder.vocabulary}] or [batch, {folder.vocabulary}]; "
            f"the model's outputs are {listing(one.name or '' for one in given)}"
        )
    return wide[0], TermPooling(None, 0) if _is_flat(wide[0]) else known or TermPooling()


def _output(given: Sequence[ir.Value], text: TextInput, folder: SentenceFolder) -> ir.Value:
    """Return the output to use: token vectors [batch, tokens, hidden], text vectors [batch, hidden], or scores."""
    if folder.late is not None:
        return _tokens_output(given)
    outputs = {value.name: value for value in given}
    ready = outputs.get(EMBEDDING)
    if ready is not None and _is_flat(ready) and text.pooling is None and folder.pooling is None:
        return ready
    logits = outputs.get(_SCORES)
    if logits is not None and _is_by_pairs(logits) and len(outputs) == 1:
        width = logits.shape[-1] if logits.shape is not None else None
        labels = width if isinstance(width, int) else folder.labels
        if labels != 1:
            raise ModelError(
                f"output 'logits' has {labels or 'unknown'} labels, expected 1: rerankers, which score pairs of texts, "
                "are the only classifiers that can take texts"
            )
        if text.pooling is not None or text.normalize is not None:
            raise ModelError("pooling or normalize was given, but the model gives scores, not vectors; leave them out")
        return logits
    return _tokens_output(given)


def _tokens_output(given: Sequence[ir.Value]) -> ir.Value:
    """Return the output [batch, tokens, hidden]: last_hidden_state, or the only three-dimensional output."""
    outputs = [value for value in given if value.shape is None or len(value.shape) == 3]
    named = [value for value in outputs if value.name in ("last_hidden_state", "token_embeddings")]
    if len(named or outputs) != 1:
        raise ModelError(
            "pooling needs one output [batch, tokens, hidden], such as last_hidden_state; the model's outputs are "
            f"{listing(value.name or '' for value in given)}"
        )
    return (named or outputs)[0]


def _normalizes(text: TextInput, folder: SentenceFolder, pooling: str | None) -> bool:
    if text.normalize is not None:
        return text.normalize
    return folder.normalize if folder.normalize is not None else pooling is not None


def _max_tokens(
    text: TextInput,
    folder: SentenceFolder,
    file: TokenizerFile,
    scores: bool,
    table: int | None,
    otherwise: int | None = None,
    length: int | None = None,
) -> int:
    """Return the limit of tokens per text. table, length: see `read_settings`."""
    if text.pooling is not None and text.pooling not in POOLINGS:
        raise ModelError(f"pooling is {text.pooling!r}, expected one of {', '.join(POOLINGS)}")
    limit = text.max_tokens
    if limit is None:
        limit = folder.max_tokens or _fitting(folder, file, table) or length or otherwise
        limit = limit if limit is None or length is None else min(limit, length)
    special = (file.pair if scores else file.single).added
    minimum = special + (2 if scores else 1)
    if limit is None:
        raise ModelError(
            f"tokenizer file {file.path!r} has no limit of tokens per text; give max_tokens (--max-tokens)"
        )
    if not isinstance(limit, int) or not minimum <= limit <= _MAX_TOKENS:
        raise ModelError(
            f"max_tokens is {limit!r} (given, or from the model's files), expected {minimum} to {_MAX_TOKENS}, "
            f"including {special} special tokens; give max_tokens (--max-tokens)"
        )
    if length is not None and limit > length:
        raise ModelError(
            f"max_tokens is {limit}, but the model takes only texts of {length} tokens; give "
            f"max_tokens (--max-tokens) of at most {length}, or export the model with dynamic axes"
        )
    positions = _usable(table, folder, file)
    if positions is not None and limit > positions:
        raise ModelError(
            f"max_tokens is {limit} (given, or from the model's files), but the model has positions for {positions} "
            f"tokens; give max_tokens (--max-tokens) of at most {positions}"
        )
    return limit


def _fitting(folder: SentenceFolder, file: TokenizerFile, table: int | None) -> int | None:
    """Return the tokenizer's limit, or the number of the model's positions if it is smaller."""
    limits = (file.max_tokens, _usable(folder.positions, folder, file), _usable(table, folder, file))
    return min((limit for limit in limits if limit is not None), default=None)


def _usable(positions: int | None, folder: SentenceFolder, file: TokenizerFile) -> int | None:
    """Return how many of the model's positions a text's tokens can use."""
    if positions is not None and folder.positions_behind_pad:
        return positions - (file.pad_id + 1)
    return positions


def _prompt_name(text: TextInput, folder: SentenceFolder) -> str:
    pairs = folder.pair_prompts
    named = folder.prompts if pairs is None else pairs.prompts
    if text.prompt_name is None:
        return (folder.default_prompt or "") if pairs is None else pairs.default
    if text.prompt_name not in named and (text.prompt_name or pairs is not None):
        file = "config_sentence_transformers.json" if pairs is None else PAIR_PROMPT
        raise ModelError(
            f"there is no prompt {text.prompt_name!r} in {file}, which has {listing(named)}"
            f"{suggestion(text.prompt_name, named)}"
        )
    return text.prompt_name


def _activation(text: TextInput, folder: SentenceFolder, scores: bool) -> str:
    if text.activation is not None:
        if text.activation not in SCORE_ACTIVATIONS.values():
            raise ModelError(
                f"activation is {text.activation!r}, expected one of {', '.join(SCORE_ACTIVATIONS.values())}"
            )
        if not scores:
            raise ModelError("activation was given, but the model gives vectors, not scores; leave it out")
        return text.activation
    named = (folder.activation or "torch.nn.modules.activation.Sigmoid").rsplit(".", 1)[-1]
    if scores and named not in SCORE_ACTIVATIONS:
        raise ModelError(
            f"config.json has the activation {folder.activation!r}, expected one of {listing(SCORE_ACTIVATIONS)}; give "
            "activation (--activation), sigmoid or none"
        )
    return SCORE_ACTIVATIONS.get(named, "none")


def _check_inputs(model: ir.Model) -> None:
    names = [value.name or "" for value in model_inputs(model)]
    if "input_ids" not in names or not set(names) <= set(_KNOWN_INPUTS):
        raise ModelError(
            f"the model's inputs are {listing(names)}, expected input_ids and others of {listing(_KNOWN_INPUTS)} for "
            "a tokenizer before them"
        )
    batch, _ = fixed_sizes(next(value.shape for value in model_inputs(model) if value.name == "input_ids"))
    if batch is not None:
        raise ModelError(
            f"input 'input_ids' has a batch of {batch}, but a tokenizer in the model needs a dynamic batch axis; "
            "export the model with one, or keep tokens as its inputs"
        )
    if model.graph.opset_imports.get("", 1) < OLDEST_OPSET:
        raise ModelError(
            f"the model has opset {model.graph.opset_imports.get('', 1)}, and a tokenizer needs {OLDEST_OPSET} or "
            "later: export it again"
        )

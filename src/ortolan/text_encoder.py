"""TextEncoder: computes vectors of texts, vectors of tokens, weights of terms, or scores of pairs of texts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import onnx_ir as ir

from ortolan.graph_passes.files.model_file import model_in
from ortolan.graph_passes.measure.feeds import fixed_sizes
from ortolan.graph_passes.names import PADDING_KEY
from ortolan.graph_passes.text.text_input import PAIR_INPUT, SCORE, TEXT_INPUT, answers_to_probes, pair_up
from ortolan.graph_passes.text.text_plan import EMBEDDING, TextInput, TextPlan, TextSettings, read_settings
from ortolan.graph_passes.text.token_outputs import TermPooling

from .errors import ArgumentError, ArgumentTypeError, ModelError, listing, wrong_type
from .late_interaction import LateTokens, max_sim
from .session import create_session
from .tokens import Tokens, apply_dense, pool, sigmoid, unit_length

if TYPE_CHECKING:
    import onnxruntime

_T = TypeVar("_T")
BATCH_TOKENS = 1024  # default of batch_tokens; activations of larger batches exceed the CPU's caches
_TOKENS = 256  # the length to which texts are cut if no file has one
_KNOWN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_DTYPES = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    # Only attention masks have these types.
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
}
_LARGEST_ID = 2**31
# Maps a kind of model to its description in errors and the function to call instead.
_KINDS = {
    "embedding": "embeds texts and cannot score pairs",
    "reranker": "is a reranker, which scores pairs of texts",
    "late_interaction": "is a late-interaction model, with a vector for each token: call embed_tokens or rerank",
    "sparse": "weights terms: call embed_sparse",
}
_ADVICE = {
    "embedding": "give a model that embeds",
    "reranker": "give a reranker",
    "late_interaction": "give a late-interaction model, such as ColBERT",
    "sparse": "give a masked language model, such as SPLADE",
}


def _tell_nobody(done: int) -> None:
    pass


class TokenBudget:
    """The tokens that one batch may hold, including padding if the model computes it. The first text always fits."""

    def __init__(self, batch_tokens: int, pads: bool, length: int = 0) -> None:
        """Create an empty batch; `length` is the length to which texts are padded; 0: that of the longest text."""
        self._most, self._pads = batch_tokens, pads
        self._texts = self.tokens = 0
        self._longest = length

    def takes(self, text: Tokens) -> bool:
        """Return True if the batch has room for a text."""
        longest = max(self._longest, len(text))
        size = longest * (self._texts + 1) if self._pads else self.tokens + len(text)
        return self._texts == 0 or size <= self._most

    def add(self, text: Tokens) -> None:
        """Add a text."""
        self._texts += 1
        self._longest = max(self._longest, len(text))
        self.tokens += len(text)


class TextEncoder:
    """An embedding model, a reranker, a late-interaction model (ColBERT), or a model that weights terms (SPLADE).

    Results are computed from the tokens of each text, so that with models of Ortolan they do not depend on the other
    texts of a batch.

    Attributes:
        kind: "embedding"; "reranker" for a model that scores pairs of texts; "late_interaction" for a vector per token;
            "sparse" for weights of terms.
        max_tokens: The length to which texts are cut; None: the model cuts them itself.
        width: The width of the vectors, or the size of the vocabulary; None: unknown before the first call.
        pads: The model computes padding too, so that a batch costs the length of its longest text for each text.
        length: The length to which each text is padded, if the model has a fixed one; else 0.
    """

    kind: Literal["embedding", "reranker", "late_interaction", "sparse"]
    max_tokens: int | None
    width: int | None
    pads: bool
    length: int

    def __init__(
        self,
        model: str | os.PathLike[str] | onnxruntime.InferenceSession,
        tokenizer: str | os.PathLike[str] | None = None,
        settings: TextInput | TextSettings | None = None,
        session_options: onnxruntime.SessionOptions | None = None,
    ) -> None:
        """Open a model.

        Args:
            model: A file or folder as Sentence Transformers, PyLate, Optimum or optimize_onnx write it, or a session.
                It takes tokens, or texts (`optimize_onnx(texts_in=True)`), and returns vectors of tokens or of texts,
                logits of a masked language model, or one score for each pair.
            tokenizer: A tokenizer.json. Default: the one beside the model. If the model is a session, settings are read
                from this file's folder. The file is opened (with the package `tokenizers`) when the first text is
                tokenized.
            settings: Settings that differ from the model's folder. For a model that takes texts, only the fields
                `tokenizer` and `max_tokens` may be given, and they have no effect. TextSettings are used unchanged.
            session_options: Options of the session, if `model` is a path.

        Raises:
            ArgumentTypeError: `model` is not a path or a session.
            ModelError: The model or its folder is not supported.
            SessionError: The model cannot be opened.
        """
        settings = settings or TextInput()
        self._opening = threading.Lock()
        self._opened: Any = None
        path = model_path(model)
        session: Any = model if path is None else create_session(path, session_options)
        self._session: onnxruntime.InferenceSession = session
        inputs = {value.name: value for value in self._session.get_inputs()}
        self.pads = PADDING_KEY not in self._session.get_modelmeta().custom_metadata_map
        self.length = 0
        if TEXT_INPUT in inputs:
            self._take_texts(inputs.keys(), settings)
            return
        if any(name.startswith("past_key_values.") for name in inputs):
            raise ModelError(
                "the model is a decoder with a cache; embed needs an encoder: export the model with optimum-cli export "
                "onnx --task feature-extraction"
            )
        if "input_ids" not in inputs or not inputs.keys() <= set(_KNOWN_INPUTS):
            raise ModelError(
                f"the model has inputs {listing(inputs)}, expected input_ids and any of {listing(_KNOWN_INPUTS)}, or "
                f"{TEXT_INPUT!r}"
            )
        self._inputs = {name: _dtype(value) for name, value in inputs.items()}
        self._rows, length = fixed_sizes(inputs["input_ids"].shape)
        self.length = length or 0
        if isinstance(settings, TextInput):
            beside = path or settings.tokenizer or tokenizer
            settings = read_settings(
                [_value(one) for one in self._session.get_outputs()],
                settings,
                None if beside is None else Path(beside),
                tokenizer,
                tokens=_TOKENS,
                length=length,
            )
        self._settings: TextSettings | None = settings
        self._output = self._settings.output
        self.kind = "reranker" if self._settings.scores else "embedding"
        self.max_tokens = self._settings.max_tokens
        dense = self._settings.folder.dense if self._settings.pooling is not None else ()
        self.width = len(dense[-1].weight) if dense else self._last_dim()
        if self._settings.terms is not None:
            # The output has a row of the vocabulary's size for each token, padding included.
            self.kind, self.pads = "sparse", True
        elif self._settings.folder.late is not None:
            self.kind, self._late = "late_interaction", LateTokens(self._settings, self.width)
            self.width = self._late.width
        self._prompt = (
            "" if self._settings.scores else self._settings.folder.prompts.get(self._settings.prompt_name, "")
        )

    def _take_texts(self, inputs: Any, settings: TextInput | TextSettings) -> None:
        if not isinstance(settings, TextInput) or replace(settings, tokenizer=None, max_tokens=None) != TextInput():
            raise ModelError(
                "the model takes texts and already contains its pooling, normalization and prompts; leave the settings "
                "out, or give the model that takes tokens"
            )
        self._settings = None
        self.kind, self._output = ("reranker", SCORE) if PAIR_INPUT in inputs else ("embedding", EMBEDDING)
        self.max_tokens = None
        self.width = self._last_dim()

    @property
    def _tokenizer(self) -> Any:
        """The tokenizers.Tokenizer of a model that takes tokens."""
        assert self._settings is not None
        with self._opening:  # a tokenizer must not be changed while other threads use it
            if self._opened is None:
                tokenizer = self._settings.file.tokenizer
                tokenizer.enable_truncation(self._settings.room)
                self._opened = tokenizer
        return self._opened

    def _last_dim(self) -> int | None:
        shape = next(one.shape for one in self._session.get_outputs() if one.name == self._output)
        return shape[-1] if shape and isinstance(shape[-1], int) else None

    def tokenize(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of texts for an embedding model.

        Raises:
            ArgumentTypeError: A text is not a string.
            ArgumentError: The model is not an embedding model.
            ModelError: The package `tokenizers` is missing or cannot read the model's file.
        """
        check_texts(texts)
        self.require("embedding")
        return self._tokenize(texts)

    def require(self, kind: str) -> None:
        """Raise ArgumentError if the model is of another kind."""
        if self.kind != kind:
            raise ArgumentError(f"model {_KINDS[self.kind]}; {_ADVICE[kind]}")

    def _tokenize(self, texts: Sequence[str]) -> list[Tokens]:
        if self._settings is None:
            return [Tokens((text,)) for text in texts]
        return self._split([(text,) for text in texts], [(self._prompt + text,) for text in texts])

    def tokenize_pairs(self, query: str, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of the query with each text, for a reranker. Raises errors like `tokenize`."""
        check_texts([query, *texts])
        self.require("reranker")
        pairs = [(query, text) for text in texts]
        return [Tokens(pair) for pair in pairs] if self._settings is None else self._split(pairs, pairs)

    def tokenize_ids(self, texts: Sequence[Sequence[int]]) -> list[Tokens]:
        """Return texts that are already tokenized by the model's tokenizer, cut to the longest length.

        Raises:
            ArgumentError: A token is unknown, or the model takes texts or is a reranker.
        """
        if self._settings is None or self.kind != "embedding":
            raise ArgumentError("model takes texts, not tokens; give texts")
        names = self._tokenizer.id_to_token
        for number, ids in enumerate(texts):
            if wrong := [one for one in ids if not 0 <= one < _LARGEST_ID or names(one) is None]:
                raise ArgumentError(f"text {number} has token {wrong[0]}, which the model's tokenizer does not have")
        cut = [list(ids)[: self.max_tokens] for ids in texts]
        return [Tokens((), ids, [0] * len(ids)) for ids in cut]

    def _split(self, texts: Sequence[tuple[str, ...]], given: Sequence[tuple[str, ...]]) -> list[Tokens]:
        assert self._settings is not None
        encoded = self._settings.encode(self._tokenizer, given)
        return [Tokens(text, ids, types) for text, (ids, types) in zip(texts, encoded, strict=True)]

    def run(self, batch: Sequence[Tokens]) -> np.ndarray:
        """Run one batch; return float32 [len(batch), width], or [len(batch)] for a reranker."""
        if self._settings is None:
            return self._run_texts(batch)
        found = self._outputs(batch)
        if self._settings.scores:
            scores = found.reshape(len(batch)).astype(np.float32)
            return np.asarray(sigmoid(scores) if self._settings.activation == "sigmoid" else scores)
        if self._settings.pooling is None:
            return self._finished(list(found))
        return self._finished(_unpadded(found, batch))

    def _outputs(self, batch: Sequence[Tokens]) -> np.ndarray:
        """Return the session's output, one row a text. A model with a fixed batch size is called several times."""
        rows, width = self._rows or len(batch), self.length or max(1, *map(len, batch))
        found = []
        for start in range(0, len(batch), rows):
            part = list(batch[start : start + rows])
            (answers,) = self._session.run([self._output], self._feeds(part + part[:1] * (rows - len(part)), width))
            found.append(answers[: len(part)])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _finished(self, found: list[np.ndarray]) -> np.ndarray:
        """Return the vectors of texts, from each text's vector or from those of its tokens.

        Each text is computed alone, so that results do not depend on the batch.
        """
        assert self._settings is not None
        pooling = self._settings.pooling
        vectors = []
        for rows in found:
            vector = rows.astype(np.float32, copy=False)
            if pooling is not None:
                vector = pool(vector, pooling)
                for layer in self._settings.folder.dense:
                    vector = apply_dense(layer, vector)
            if self._settings.normalize:
                vector = unit_length(vector)
            vectors.append(vector)
        return np.stack(vectors)

    def _run_texts(self, batch: Sequence[Tokens]) -> np.ndarray:
        # The tokenizer in the graph ends a text at NUL. It drops \1 as it would drop NUL, so the result is the same.
        columns = zip(*([text.replace("\0", "\1") for text in one.texts] for one in batch), strict=True)
        feeds = {name: np.array(texts, object) for name, texts in zip((TEXT_INPUT, PAIR_INPUT), columns, strict=False)}
        (found,) = self._session.run([self._output], feeds)
        return np.asarray(found.reshape(len(batch)) if self.kind == "reranker" else found)

    def _feeds(self, batch: Sequence[Tokens], width: int) -> dict[str, np.ndarray]:
        assert self._settings is not None
        file, shape = self._settings.file, (len(batch), width)
        ids, mask, types = np.full(shape, file.pad_id), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, one in enumerate(batch):
            ids[row, : len(one)], types[row, : len(one)] = one.ids, one.type_ids
            mask[row, : len(one) if one.attended is None else one.attended] = 1
        first = file.pad_id + 1 if self._settings.folder.positions_behind_pad else 0
        positions = np.broadcast_to(np.arange(first, first + shape[1]), shape)
        made = dict(zip(_KNOWN_INPUTS, (ids, mask, types, positions), strict=True))
        return {name: made[name].astype(dtype, copy=False) for name, dtype in self._inputs.items()}

    def encode(
        self, texts: Sequence[str], batch_tokens: int = BATCH_TOKENS, tell: Callable[[int], None] = _tell_nobody
    ) -> np.ndarray:
        """Return the vectors of texts, float32 [texts, width], in order.

        Args:
            texts: The texts.
            batch_tokens: Largest number of tokens in one call of the session, padding included if the model computes
                it.
            tell: Called after each batch with the number of finished texts.
        """
        return self.encode_tokens(self.tokenize(texts), batch_tokens, tell)

    def encode_tokens(
        self, tokens: Sequence[Tokens], batch_tokens: int = BATCH_TOKENS, tell: Callable[[int], None] = _tell_nobody
    ) -> np.ndarray:
        """Like `encode`, for the results of `tokenize`."""
        vectors = np.empty((0, self.width or 0), np.float32)
        done = 0
        for batch in batches(tokens, batch_tokens, self.pads, self.length):
            found = self.run([tokens[index] for index in batch])
            if not len(vectors):
                vectors = np.empty((len(tokens), found.shape[1]), np.float32)
            vectors[batch] = found
            tell(done := done + len(batch))
        return vectors

    def encode_late(
        self,
        texts: Sequence[str],
        query: bool = False,
        batch_tokens: int = BATCH_TOKENS,
        tell: Callable[[int], None] = _tell_nobody,
    ) -> list[np.ndarray]:
        """Return the token vectors of documents or queries, float32 [tokens, width] for each text, in order.

        Args:
            texts: The texts.
            query: The texts are queries, not documents.
            batch_tokens: As for `encode`.
            tell: As for `encode`.

        Raises:
            ArgumentError: The model is not a late-interaction model.
        """
        tokens = self._late_tokens(texts, query)
        return self._each(tokens, batch_tokens, tell, self._late.vectors)

    def _late_tokens(self, texts: Sequence[str], query: bool) -> list[Tokens]:
        check_texts(texts)
        self.require("late_interaction")
        return self._late.tokens([self._prompt + text for text in texts], query)

    def encode_sparse(
        self,
        texts: Sequence[str],
        top_k: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        tell: Callable[[int], None] = _tell_nobody,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the terms of each text, in order: indices, int32 in increasing order, and their weights, float32.

        Args:
            texts: The texts.
            top_k: Keep only the terms with the largest weights; None: all that are not 0.
            batch_tokens: As for `encode`.
            tell: As for `encode`.

        Raises:
            ArgumentError: The model does not weight terms, or `top_k` is not positive.
        """
        check_texts(texts)
        self.require("sparse")
        if top_k is not None and top_k < 1:
            raise ArgumentError(f"top_k is {top_k}, expected at least 1")
        terms = self._settings.terms if self._settings is not None else None
        assert terms is not None
        return self._each(
            self._tokenize(texts), batch_tokens, tell, lambda rows, _: _strongest(weigh_terms(rows, terms), top_k)
        )

    def _each(
        self,
        tokens: Sequence[Tokens],
        batch_tokens: int,
        tell: Callable[[int], None],
        finish: Callable[[np.ndarray, Tokens], _T],
    ) -> list[_T]:
        """Run texts in batches; return what `finish` makes of the output for each text, in order."""
        found: dict[int, _T] = {}
        for batch in batches(tokens, batch_tokens, self.pads, self.length):
            texts = [tokens[index] for index in batch]
            rows = _unpadded(self._outputs(texts), texts)
            found |= {index: finish(row, text) for index, row, text in zip(batch, rows, texts, strict=True)}
            tell(len(found))
        return [found[index] for index in range(len(tokens))]

    def score(
        self,
        query: str,
        texts: Sequence[str],
        batch_tokens: int = BATCH_TOKENS,
        tell: Callable[[int], None] = _tell_nobody,
    ) -> np.ndarray:
        """Return the scores of the query with each text, float32 [texts], in order. Arguments as for `encode`.

        A late-interaction model scores by MaxSim, a reranker by its output for the pair.
        """
        if self.kind == "late_interaction":
            (asked,) = self.encode_late([query], query=True, batch_tokens=batch_tokens)
            late, given = self._late, self._late_tokens(texts, query=False)
            found = self._each(given, batch_tokens, tell, lambda rows, one: max_sim(asked, late.vectors(rows, one)))
            return np.array(found, np.float32)
        tokens = self.tokenize_pairs(query, texts)
        scores = np.empty(len(tokens), np.float32)
        done = 0
        for batch in batches(tokens, batch_tokens, self.pads, self.length):
            scores[batch] = self.run([tokens[index] for index in batch])
            tell(done := done + len(batch))
        return scores

    def token_vectors(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token vectors of each text, float32 [tokens, hidden] without padding, computed in one batch.

        Raises:
            ArgumentError: The model has no output with token vectors.
        """
        if self._settings is None or self._settings.pooling is None:
            raise ArgumentError("model has no output [batch, tokens, hidden] with token vectors")
        batch = self.tokenize(texts)
        return _unpadded(self._outputs(batch), batch) if batch else []


def ask_probes(session: onnxruntime.InferenceSession, plan: TextPlan) -> list[np.ndarray]:
    """Run a token model on the same texts on which `check_text_model` runs the model that contains the tokenizer.

    Raises:
        VerificationError: The model does not run, or returns NaN or infinity.
    """
    encoder = TextEncoder(session, settings=plan)

    def answer(texts: Sequence[str]) -> np.ndarray:
        if not plan.scores:
            return encoder.run(encoder.tokenize(texts))
        pairs = [encoder.tokenize_pairs(first, [second]) for first, second in pair_up(texts)]
        return encoder.run([pair for (pair,) in pairs])

    return answers_to_probes(plan, answer)


def model_path(model: Any) -> Path | None:
    """Return the path of the model's file; None if the model is a session."""
    if not isinstance(model, str | os.PathLike):
        return None
    path = Path(model)
    return model_in(path) if path.is_dir() else path


def check_texts(texts: Sequence[Any]) -> None:
    """Check that texts is a list of strings.

    Raises:
        ArgumentTypeError: It is not.
    """
    if isinstance(texts, str):
        raise ArgumentTypeError("texts is a single text, expected a list of texts; give [text]")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise wrong_type(f"text {number}", text, "a str")


def batches(tokens: Sequence[Tokens], batch_tokens: int, pads: bool = True, length: int = 0) -> Iterator[list[int]]:
    """Yield the indices of each batch, longest texts first, so that memory peaks at the beginning.

    batch_tokens: Largest number of tokens in a batch of several texts, padding included if `pads`.
    pads, length: As for `TokenBudget`.

    Raises:
        ArgumentError: `batch_tokens` is not positive.
    """
    if batch_tokens < 1:
        raise ArgumentError(f"batch_tokens is {batch_tokens}, expected at least 1")
    order = sorted(range(len(tokens)), key=lambda index: -len(tokens[index]))
    budget = TokenBudget(batch_tokens, pads, length)
    batch: list[int] = []
    for index in order:
        if not budget.takes(tokens[index]):
            yield batch
            batch, budget = [], TokenBudget(batch_tokens, pads, length)
        budget.add(tokens[index])
        batch.append(index)
    if batch:
        yield batch


def weigh_terms(logits: np.ndarray, terms: TermPooling) -> np.ndarray:
    """Return the weights of terms, float32 [vocabulary], from the logits of a text's tokens, [tokens, vocabulary].

    With max pooling, the largest logit is found first: log(1 + x) does not change which one is the largest.
    """
    if terms.pooling == "max":
        logits = logits.max(axis=0, initial=0)
    weights = np.maximum(logits.astype(np.float32, copy=False), 0)
    for _ in range(terms.logs):
        weights = np.log1p(weights)
    return np.asarray(weights.sum(axis=0) if terms.pooling == "sum" else weights)


def _strongest(weights: np.ndarray, top_k: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return indices and weights of the terms that are not 0, or of the `top_k` largest. Ties go to lower indices."""
    (indices,) = np.nonzero(weights)
    if top_k is not None and len(indices) > top_k:
        indices = np.sort(indices[np.argsort(-weights[indices], kind="stable")[:top_k]])
    return indices.astype(np.int32), weights[indices]


def _unpadded(found: np.ndarray, batch: Sequence[Tokens]) -> list[np.ndarray]:
    """Return each text's rows without padding. An output [batch, width] has one row a text."""
    if found.ndim == 2:
        return list(found)
    return [rows[: len(one)] for rows, one in zip(found, batch, strict=True)]


def _dtype(value: Any) -> Any:
    if value.type not in _DTYPES:
        raise ModelError(f"input {value.name!r} is {value.type}, expected {listing(_DTYPES)}")
    return _DTYPES[value.type]


def _value(one: Any) -> ir.Value:
    shape = None if one.shape is None else ir.Shape(one.shape)
    return ir.Value(name=one.name, shape=shape)

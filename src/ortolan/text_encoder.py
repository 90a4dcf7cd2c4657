"""Texts to vectors, and pairs of texts to scores, by a session: the tokenizer, batches, pooling."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir

from ortolan.graph_passes.files.model_file import model_in
from ortolan.graph_passes.measure.feeds import fixed_sizes
from ortolan.graph_passes.names import PADDING_KEY
from ortolan.graph_passes.text.pooling import Dense
from ortolan.graph_passes.text.text_input import PAIR_INPUT, SCORE, TEXT_INPUT, answers_to_probes, pair_up
from ortolan.graph_passes.text.text_plan import EMBEDDING, TextInput, TextPlan, TextSettings, read_settings

from .errors import ModelError, OrtolanError, listing
from .session import create_session

if TYPE_CHECKING:
    import onnxruntime

BATCH_TOKENS = 1024  # larger ones leave the caches
_TOKENS = 256  # to which texts are cut where no file says it
_KNOWN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_DTYPES = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    # masks only
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
}
_CHARACTERS_OF_A_TOKEN = 4  # about, of a text that the model splits itself
_LEAST_NORM = 1e-12
_LARGEST_ID = 2**31


def _tell_nobody(done: int) -> None:
    pass


class Budget:
    """The tokens that one batch may hold, padding included if the model computes it. The first text always fits.

    length: tokens that each text is padded to; 0: those of the longest text in the batch.
    """

    def __init__(self, batch_tokens: int, pads: bool, length: int = 0) -> None:
        self._most, self._pads = batch_tokens, pads
        self._texts = self.tokens = 0
        self._longest = length

    def takes(self, text: Tokens) -> bool:
        longest = max(self._longest, len(text))
        size = longest * (self._texts + 1) if self._pads else self.tokens + len(text)
        return self._texts == 0 or size <= self._most

    def add(self, text: Tokens) -> None:
        self._texts += 1
        self._longest = max(self._longest, len(text))
        self.tokens += len(text)


@dataclass(frozen=True)
class Tokens:
    """A text, or a pair of texts, as a model takes it. len(): its number of tokens; an estimate where the model takes
    texts and splits them itself."""

    texts: tuple[str, ...]
    ids: Sequence[int] | None = None
    type_ids: Sequence[int] = ()

    def __len__(self) -> int:
        return 2 + sum(map(len, self.texts)) // _CHARACTERS_OF_A_TOKEN if self.ids is None else len(self.ids)


class TextEncoder:
    """An embedding model or a reranker, ready to be called. The answer for a text is computed from that text's own
    tokens, so with models of Ortolan it does not depend on who shares its batch.

    kind: "embedding", or "reranker" for a model that scores pairs of texts. max_tokens: longer texts are cut; None: the
    model cuts them itself. width: of the vectors, where the model tells it. pads: padding is computed as well, so that
    a batch costs its longest text times its texts. length: tokens that each text is padded to, if the model takes
    only that many; else 0.
    """

    kind: Literal["embedding", "reranker"]
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
        """model: a file or folder as sentence-transformers, Optimum or optimize_onnx writes it, or a session. It takes
            tokens, or texts itself (optimize_onnx(texts_in=True)), and answers with vectors of tokens, of texts, or
            with one score a pair.
        tokenizer: a tokenizer.json, where none lies beside the model. Beside a session's lies what its folder says.
            The package `tokenizers` opens it with the first text; tokens need none.
        settings: where they differ from what the folder says: see TextInput. A model that takes texts has its own:
            no tokenizer or max_tokens is read for it, and others are refused. TextSettings are used as they are.
        session_options: of the session that is made of a path.

        Raises ModelError for a model or folder of another form, SessionError where there can be no session.
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
                f"the model takes {listing(inputs)}, expected input_ids and of {listing(_KNOWN_INPUTS)} any others, or "
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
        self._prompt = self._settings.folder.prompts.get(self._settings.prompt_name, "")

    def _take_texts(self, inputs: Any, settings: TextInput | TextSettings) -> None:
        if not isinstance(settings, TextInput) or replace(settings, tokenizer=None, max_tokens=None) != TextInput():
            raise ModelError(
                f"{settings} was given for a model that takes texts itself, and keeps its own settings; leave them "
                "out, or give the model that takes tokens"
            )
        self._settings = None
        self.kind, self._output = ("reranker", SCORE) if PAIR_INPUT in inputs else ("embedding", EMBEDDING)
        self.max_tokens = None
        self.width = self._last_dim()

    @property
    def _tokenizer(self) -> Any:
        """A tokenizers.Tokenizer of a model that takes tokens. Raises ModelError."""
        assert self._settings is not None
        with self._opening:  # a tokenizer that others use may not be changed
            if self._opened is None:
                tokenizer = self._settings.file.tokenizer
                tokenizer.enable_truncation(self.max_tokens)
                self._opened = tokenizer
        return self._opened

    def _last_dim(self) -> int | None:
        shape = next(one.shape for one in self._session.get_outputs() if one.name == self._output)
        return shape[-1] if shape and isinstance(shape[-1], int) else None

    def tokenize(self, texts: Sequence[str]) -> list[Tokens]:
        """Of an embedding model's texts. Raises OrtolanError for what is no text, ModelError where the package
        `tokenizers` is missing or does not read the model's file."""
        check_texts(texts)
        if self.kind != "embedding":
            raise OrtolanError("the model scores pairs of texts, and was given texts; give a model that embeds")
        if self._settings is None:
            return [Tokens((text,)) for text in texts]
        return self._split([(text,) for text in texts], [self._prompt + text for text in texts])

    def tokenize_pairs(self, query: str, texts: Sequence[str]) -> list[Tokens]:
        """Of a reranker's pairs: the query with each of the texts. Raises as tokenize does."""
        check_texts([query, *texts])
        if self.kind != "reranker":
            raise OrtolanError("the model embeds texts, and was given pairs to score; give a reranker")
        pairs = [(query, text) for text in texts]
        return [Tokens(pair) for pair in pairs] if self._settings is None else self._split(pairs, pairs)

    def tokenize_ids(self, texts: Sequence[Sequence[int]]) -> list[Tokens]:
        """Of texts that are tokens already, those of the model's tokenizer, and stay as they are but for being cut.
        Raises OrtolanError for what is no token, and where the model takes texts itself."""
        if self._settings is None or self.kind != "embedding":
            raise OrtolanError("the model takes texts, and was given tokens; give texts")
        names = self._tokenizer.id_to_token
        for number, ids in enumerate(texts):
            if wrong := [one for one in ids if not 0 <= one < _LARGEST_ID or names(one) is None]:
                raise OrtolanError(f"text {number} has token {wrong[0]}, which the model's tokenizer does not know")
        cut = [list(ids)[: self.max_tokens] for ids in texts]
        return [Tokens((), ids, [0] * len(ids)) for ids in cut]

    def _split(self, texts: Sequence[tuple[str, ...]], given: Sequence[Any]) -> list[Tokens]:
        encodings = self._tokenizer.encode_batch(given)
        return [Tokens(text, one.ids, one.type_ids) for text, one in zip(texts, encodings, strict=True)]

    def run(self, batch: Sequence[Tokens]) -> np.ndarray:
        """float32 [len(batch), width] of an embedding model, [len(batch)] of a reranker: one call of the session."""
        if self._settings is None:
            return self._run_texts(batch)
        found = self._outputs(batch)
        if self._settings.scores:
            scores = found.reshape(len(batch)).astype(np.float32)
            return np.asarray(_sigmoid(scores) if self._settings.activation == "sigmoid" else scores)
        if self._settings.pooling is None:
            return self._finished(list(found))
        return self._finished([rows[: len(one)] for rows, one in zip(found, batch, strict=True)])

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
        """Text by text, so that no sum knows of another text. found: each text's vector, or those of its tokens."""
        assert self._settings is not None
        pooling = self._settings.pooling
        vectors = []
        for rows in found:
            vector = rows.astype(np.float32, copy=False)
            if pooling is not None:
                vector = _pooled(vector, pooling)
                for layer in self._settings.folder.dense:
                    vector = _applied(layer, vector)
            if self._settings.normalize:
                vector = vector / np.maximum(np.sqrt(np.sum(vector * vector)), np.float32(_LEAST_NORM))
            vectors.append(vector)
        return np.stack(vectors)

    def _run_texts(self, batch: Sequence[Tokens]) -> np.ndarray:
        # The tokenizer in the graph takes NUL for the end of a text; it drops both characters.
        columns = zip(*([text.replace("\0", "\1") for text in one.texts] for one in batch), strict=True)
        feeds = {name: np.array(texts, object) for name, texts in zip((TEXT_INPUT, PAIR_INPUT), columns, strict=False)}
        (found,) = self._session.run([self._output], feeds)
        return np.asarray(found.reshape(len(batch)) if self.kind == "reranker" else found)

    def _feeds(self, batch: Sequence[Tokens], width: int) -> dict[str, np.ndarray]:
        assert self._settings is not None
        file, shape = self._settings.file, (len(batch), width)
        ids, mask, types = np.full(shape, file.pad_id), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, one in enumerate(batch):
            ids[row, : len(one)], mask[row, : len(one)], types[row, : len(one)] = one.ids, 1, one.type_ids
        first = file.pad_id + 1 if self._settings.folder.positions_behind_pad else 0
        positions = np.broadcast_to(np.arange(first, first + shape[1]), shape)
        made = dict(zip(_KNOWN_INPUTS, (ids, mask, types, positions), strict=True))
        return {name: made[name].astype(dtype, copy=False) for name, dtype in self._inputs.items()}

    def encode(
        self, texts: Sequence[str], batch_tokens: int = BATCH_TOKENS, tell: Callable[[int], None] = _tell_nobody
    ) -> np.ndarray:
        """float32 [len(texts), width], in the order given. batch_tokens: of a call of the session, padding counted
        where the model computes it. tell: is told after each call how many texts are done."""
        return self.encode_tokens(self.tokenize(texts), batch_tokens, tell)

    def encode_tokens(
        self, tokens: Sequence[Tokens], batch_tokens: int = BATCH_TOKENS, tell: Callable[[int], None] = _tell_nobody
    ) -> np.ndarray:
        """Of texts that are divided into tokens already: see tokenize, encode."""
        vectors = np.empty((0, self.width or 0), np.float32)
        done = 0
        for batch in batches(tokens, batch_tokens, self.pads, self.length):
            found = self.run([tokens[index] for index in batch])
            if not len(vectors):
                vectors = np.empty((len(tokens), found.shape[1]), np.float32)
            vectors[batch] = found
            tell(done := done + len(batch))
        return vectors

    def score(
        self,
        query: str,
        texts: Sequence[str],
        batch_tokens: int = BATCH_TOKENS,
        tell: Callable[[int], None] = _tell_nobody,
    ) -> np.ndarray:
        """float32 [len(texts)]: of the query with each text, in the order given. batch_tokens, tell: see encode."""
        tokens = self.tokenize_pairs(query, texts)
        scores = np.empty(len(tokens), np.float32)
        done = 0
        for batch in batches(tokens, batch_tokens, self.pads, self.length):
            scores[batch] = self.run([tokens[index] for index in batch])
            tell(done := done + len(batch))
        return scores

    def token_vectors(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Of each text, all in one batch, float32 [tokens, hidden] without padding. Raises OrtolanError where the model
        has no such output."""
        if self._settings is None or self._settings.pooling is None:
            raise OrtolanError("the model has no output [batch, tokens, hidden], from which tokens' vectors are taken")
        batch = self.tokenize(texts)
        return [rows[: len(one)] for rows, one in zip(self._outputs(batch), batch, strict=True)] if batch else []


def ask_probes(session: onnxruntime.InferenceSession, plan: TextPlan) -> list[np.ndarray]:
    """Run a model that takes tokens on the texts on which `check_text_model` runs the model with its tokenizer.

    Raises:
        VerificationError: The model does not run, or answers with NaN or infinity.
    """
    encoder = TextEncoder(session, settings=plan)

    def answer(texts: Sequence[str]) -> np.ndarray:
        if not plan.scores:
            return encoder.run(encoder.tokenize(texts))
        pairs = [encoder.tokenize_pairs(first, [second]) for first, second in pair_up(texts)]
        return encoder.run([pair for (pair,) in pairs])

    return answers_to_probes(plan, answer)


def model_path(model: Any) -> Path | None:
    """Of the file, where the model is no session."""
    if not isinstance(model, str | os.PathLike):
        return None
    path = Path(model)
    return model_in(path) if path.is_dir() else path


def check_texts(texts: Sequence[Any]) -> None:
    """Raises OrtolanError."""
    if isinstance(texts, str):
        raise OrtolanError("texts is one text, expected a list of them; give [text]")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise OrtolanError(f"text {number} is a {type(text).__name__}, expected a str")


def batches(tokens: Sequence[Tokens], batch_tokens: int, pads: bool = True, length: int = 0) -> Iterator[list[int]]:
    """Yield the indices of each batch, longest texts first, so that memory peaks at the beginning.

    A batch of several texts has at most `batch_tokens`, padding included if `pads`. length: see Budget. Raises
    OrtolanError.
    """
    if batch_tokens < 1:
        raise OrtolanError(f"batch_tokens is {batch_tokens}, expected at least 1")
    order = sorted(range(len(tokens)), key=lambda index: -len(tokens[index]))
    budget = Budget(batch_tokens, pads, length)
    batch: list[int] = []
    for index in order:
        if not budget.takes(tokens[index]):
            yield batch
            batch, budget = [], Budget(batch_tokens, pads, length)
        budget.add(tokens[index])
        batch.append(index)
    if batch:
        yield batch


def _pooled(rows: np.ndarray, pooling: str) -> np.ndarray:
    """rows float32 [tokens, hidden] -> [hidden]: what sentence-transformers calls so."""
    count = np.float32(len(rows))
    if not len(rows):  # an empty text, and a tokenizer that adds nothing
        return np.zeros(rows.shape[1], np.float32)
    if pooling == "cls":
        return np.asarray(rows[0])
    if pooling == "lasttoken":
        return np.asarray(rows[-1])
    if pooling == "max":
        return np.asarray(rows.max(axis=0))
    if pooling == "weightedmean":
        weights = np.arange(1, len(rows) + 1, dtype=np.float32)
        return np.asarray((rows * weights[:, None]).sum(axis=0) / weights.sum())
    return np.asarray(rows.sum(axis=0) / (np.sqrt(count) if pooling == "mean_sqrt_len_tokens" else count))


def _applied(layer: Dense, vector: np.ndarray) -> np.ndarray:
    made = layer.weight @ vector
    made = made if layer.bias is None else made + layer.bias
    if layer.activation is None:
        return np.asarray(made)
    if layer.activation == "Sigmoid":
        return _sigmoid(made)
    return np.asarray(np.tanh(made) if layer.activation == "Tanh" else np.maximum(made, 0))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x.astype(np.float64))), np.float32)


def _dtype(value: Any) -> Any:
    if value.type not in _DTYPES:
        raise ModelError(f"input {value.name!r} is {value.type}, expected {listing(_DTYPES)}")
    return _DTYPES[value.type]


def _value(one: Any) -> ir.Value:
    shape = None if one.shape is None else ir.Shape(one.shape)
    return ir.Value(name=one.name, shape=shape)

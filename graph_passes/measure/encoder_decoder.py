"""Feeds for the files of an encoder-decoder model; feeds of the decoders are computed from feeds of the encoder.

The original model encodes each feed and decodes a few tokens, so that decoders get realistic hidden states and caches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ortolan.errors import CalibrationError

from ..files.model_file import ModelFile
from ..files.model_folder import DECODER, DECODER_WITH_PAST, ENCODER, MERGED_DECODER
from .feeds import Feeds
from .sessions import open_quietly, run_session

_TOKENS = 12  # number of tokens decoded for each feed
_CONFIGS = ("generation_config.json", "config.json")
_HIDDEN, _IDS, _FLAG = "encoder_hidden_states", "input_ids", "use_cache_branch"
_LOGITS = "logits"
_ONE_BY_ONE = "optimize each file separately, with calibration=… for it"
_MASKS = {"encoder_attention_mask": "attention_mask"}  # maps decoder inputs to the encoder inputs with the same values


def feeds_of_decoders(
    folder: Path, sources: Mapping[str, ModelFile], encoder_feeds: Sequence[Feeds]
) -> dict[str, list[Feeds]]:
    """Return feeds by file name, for decoders whose inputs have the names of Optimum's exports.

    Args:
        folder: The model's folder.
        sources: The encoder and its decoders, by file name.
        encoder_feeds: The encoder's feeds.

    Raises:
        CalibrationError: The original model does not run.
    """
    sessions = {name: _open(source) for name, source in sources.items()}
    beginning = next((name for name in (DECODER, MERGED_DECODER) if name in sources), None)
    if beginning is None:
        return {}
    decoder = _Decoder(sessions[beginning], beginning == MERGED_DECODER)
    found: dict[str, list[Feeds]] = {}
    start = _start_token(folder)
    for given in encoder_feeds:
        hidden = run_session(sessions[ENCODER], given, "the original encoder", CalibrationError)[0]
        if hidden is None:
            return {}
        context = {_HIDDEN: hidden} | {name: given[own] for name, own in _MASKS.items() if own in given}
        ids = np.full((len(hidden), 1), start, np.int64)
        for _ in range(_TOKENS):
            logits = decoder.logits(context | {_IDS: ids})
            ids = np.concatenate([ids, logits[:, -1:].argmax(-1).astype(np.int64)], axis=1)
        caches = _as_past(decoder.answers(context | {_IDS: ids[:, :-1]}))
        first, later = context | {_IDS: ids}, context | caches | {_IDS: ids[:, -1:]}
        for name, calls in ((DECODER, [first]), (DECODER_WITH_PAST, [later]), (MERGED_DECODER, [later, first])):
            made = [_complete(sessions[name], call) for call in calls] if name in sessions else []
            if made and None not in made:
                found.setdefault(name, []).extend(one for one in made if one is not None)
    return found


class _Decoder:
    """The decoder file that runs the first call, without a cache."""

    def __init__(self, session: Any, merged: bool) -> None:
        self._session = session
        self._merged = merged
        self._names = [output.name for output in session.get_outputs()]

    def logits(self, call: Feeds) -> np.ndarray:
        """Return the logits of a call."""
        answers = self.answers(call)
        if _LOGITS not in answers:
            raise CalibrationError(f"the decoder has no output {_LOGITS!r} but {', '.join(self._names)}; {_ONE_BY_ONE}")
        return answers[_LOGITS]

    def answers(self, call: Feeds) -> dict[str, np.ndarray]:
        """Return the outputs of a call by name."""
        feeds = _complete(self._session, call)
        if feeds is None:
            raise CalibrationError(
                "the decoder has inputs that are not supported: "
                f"{', '.join(value.name for value in self._session.get_inputs())}; {_ONE_BY_ONE}"
            )
        answers = run_session(self._session, feeds, "the original decoder", CalibrationError)
        return {name: answer for name, answer in zip(self._names, answers, strict=True) if answer is not None}


def _as_past(answers: Mapping[str, np.ndarray]) -> Feeds:
    prefix = "present."
    return {
        f"past_key_values.{name.removeprefix(prefix)}": answer
        for name, answer in answers.items()
        if name.startswith(prefix)
    }


def _complete(session: Any, call: Feeds) -> Feeds | None:
    """Return all inputs of a session, with defaults for inputs that the call lacks; None if an input is unknown."""
    feeds: Feeds = {}
    ids = call[_IDS]
    with_past = any("past" in name for name in call)
    past = next((array.shape[2] for name, array in call.items() if "decoder" in name and array.ndim == 4), 0)
    for value in session.get_inputs():
        if value.name in call:
            feeds[value.name] = call[value.name]
        elif value.name == _FLAG:
            feeds[value.name] = np.array([with_past])
        elif value.name == "decoder_attention_mask":
            feeds[value.name] = np.ones((len(ids), past + ids.shape[1]), np.int64)
        elif "past" in value.name and not with_past and len(value.shape) == 4:
            sizes = (len(ids), value.shape[1], 1, value.shape[3])  # the branch without a cache does not read these
            if not all(isinstance(size, int) for size in sizes):
                return None
            feeds[value.name] = np.zeros(sizes, np.float16 if "float16" in value.type else np.float32)
        else:
            return None
    return feeds


def _start_token(folder: Path) -> int:
    """Return the decoder's start token in the folder's configuration, or 0."""
    for name in _CONFIGS:
        with suppress(OSError, ValueError):
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            start = found.get("decoder_start_token_id") if isinstance(found, dict) else None
            if isinstance(start, int) and start >= 0:
                return start
    return 0


def _open(source: ModelFile) -> Any:
    assert source.path is not None
    return open_quietly(source.path, source)

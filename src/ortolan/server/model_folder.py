"""The files beside a decoder that a server reads: tokenizer, chat template, end tokens, defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .chat import ChatTemplate, read_chat_template
from .reasoning import ThoughtMarkers, find_markers
from .tool_calls import ARGS, PARSERS, PYTHON_TAG, TOOL_CALLS, detect_family

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Special tokens that the parsers of answers must see. Texts of answers contain no other special tokens.
_MARKERS = {
    *(PYTHON_TAG, TOOL_CALLS, ARGS, "[CALL_ID]", "<tool_call>", "</tool_call>"),
    *("<think>", "</think>", "[THINK]", "[/THINK]"),
}
# Fields of generation_config.json that are defaults of a request: the least value, and the largest one. A field of
# _ABOVE must be larger than the least value.
_SAMPLING = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, 1 << 20),
    "min_p": (0, 1),
    "repetition_penalty": (0, 10),
}
_ABOVE = ("top_p", "repetition_penalty")


@dataclass(frozen=True)
class ModelFolder:
    """The texts of a decoder: from messages to tokens, and from tokens to answers.

    Attributes:
        tokenizer: The tokenizer, whose markers of tool calls and thoughts are ordinary tokens, so that texts show them.
        end_tokens: Tokens that end an answer.
        prefix: Tokens in front of a prompt that is not a chat, such as <s>.
        start: The first token of an answer without a prompt.
        template: The chat template; None: the model is not for chats.
        tool_family: The form of the model's tool calls, a key of PARSERS; None: it makes no calls.
        thoughts: The markers of thoughts, for reasoning models.
        sampling: Default values of a request's sampling options, from generation_config.json.
    """

    tokenizer: Tokenizer
    end_tokens: frozenset[int]
    prefix: tuple[int, ...] = ()
    start: int = 0
    template: ChatTemplate | None = None
    tool_family: str | None = None
    thoughts: ThoughtMarkers | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def added_tokens(self) -> frozenset[str]:
        """The tokenizer's added tokens."""
        return frozenset(token.content for token in self.tokenizer.get_added_tokens_decoder().values())

    def encode(self, text: str, *, whole: bool) -> tuple[int, ...]:
        """Return the tokens of a text. whole: add the tokens that every text begins with, unless they are there."""
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)
        if whole and ids[: len(self.prefix)] != self.prefix:
            ids = self.prefix + ids
        return ids or (self.start,)


def read_model_folder(folder: Path, tool_family: str | None = None, chat_template: Path | None = None) -> ModelFolder:
    """Read the tokenizer and the configuration files of a decoder's folder.

    Args:
        folder: A folder with tokenizer.json.
        tool_family: The form of tool calls, a key of PARSERS. Default: the chat template tells.
        chat_template: A Jinja file that replaces the folder's chat template.

    Raises:
        OrtolanError: A file is missing or malformed.
    """
    from ortolan.graph_passes.text.tokenizer_file import load_tokenizer as load_json

    from ..models.tokenizer import load_tokenizer

    check_tool_family(tool_family)
    facts = load_tokenizer(folder)
    tokenizer = show_markers(load_json(folder / "tokenizer.json"))
    template = read_chat_template(folder, chat_template)
    source = template.source if template is not None else ""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    family = tool_family or detect_family(source) if template is not None and template.takes_tools else None
    return ModelFolder(
        tokenizer,
        frozenset(facts.stop),
        facts.prefix,
        facts.start,
        template,
        family,
        find_markers(source, added) if template is not None else None,
        read_sampling(folder),
    )


def check_tool_family(name: str | None) -> None:
    """Raise ModelError for an unknown form of tool calls."""
    if name is not None and name not in PARSERS:
        raise ModelError(f"the form of tool calls is {name!r}, expected one of {', '.join(PARSERS)}")


def show_markers(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer whose decoded texts show the markers of tool calls and thoughts. It never cuts or pads."""
    added = tokenizer.get_added_tokens_decoder()
    if any(token.special and token.content in _MARKERS for token in added.values()):
        said = json.loads(tokenizer.to_str())
        for token in said["added_tokens"]:
            token["special"] = token["special"] and token["content"] not in _MARKERS
        tokenizer = type(tokenizer).from_str(json.dumps(said))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_sampling(folder: Path) -> dict[str, float]:
    """Return the model's recommended sampling options, from generation_config.json.

    Raises:
        ModelError: The file is malformed.
    """
    from ortolan.graph_passes.text.tokenizer_file import read_json

    said: Mapping[str, Any] = read_json(folder / "generation_config.json")
    if said.get("do_sample") is False:
        return {}
    found = {}
    for name, (least, most) in _SAMPLING.items():
        value = said.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or (name in _ABOVE and value == least):
            bounds = f"above {least} and at most {most}" if name in _ABOVE else f"{least} to {most}"
            raise ModelError(f"{name} in {str(folder / 'generation_config.json')!r} is {value!r}, expected {bounds}")
        found[name] = float(value)
    return found

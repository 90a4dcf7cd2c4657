"""The tokenizer of a GGUF file, as a tokenizer of the package `tokenizers`.

Byte-level BPE (tokenizer.ggml.model "gpt2"): vocabulary, merges, and a pre-tokenizer named by tokenizer.ggml.pre.
SentencePiece ("llama"): BPE with byte fallback, whose merges are derived from the scores of pieces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import OrtolanError
from ..graph_builder import ModelBuildError
from .file import GgufFile

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_PREFIX = "tokenizer.ggml."
# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"  # SentencePiece's space

_DIGIT = r"\p{N}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LETTERS = (  # a word in lower case, perhaps with capitals before; or capitals, perhaps with lower case after
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


@dataclass(frozen=True)
class _Splitting:
    """The pre-tokenizer of byte-level BPE.

    Attributes:
        patterns: Regular expressions that split a text, applied one after the other.
        whole_words: A word that is in the vocabulary becomes one token without merges.
        begins: The tokenizer adds BOS before a text.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False


_THREE_DIGITS = f"{_CONTRACTIONS}|{_WORDS}|{_DIGIT}{{1,3}}|{_SIGNS}|{_SPACES}"
_LLAMA3 = _Splitting((_THREE_DIGITS,), whole_words=True, begins=True)
_CASED = "|".join(f"{word}{_CONTRACTIONS}?" for word in _LETTERS)
_TEKKEN = _Splitting((f"{'|'.join(_LETTERS)}|{_DIGIT}|{_PATHS}|{_SPACES}",), whole_words=True, begins=True)
_QWEN2 = _Splitting((f"{_CONTRACTIONS}|{_WORDS}|{_DIGIT}|{_SIGNS}|{_SPACES}",))
# Maps values of tokenizer.ggml.pre to pre-tokenizers.
_SPLITTINGS: Mapping[str, _Splitting] = {
    # llama.cpp's fallback, for files whose converter did not recognize the tokenizer.
    "default": _Splitting((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")),
    "gpt-2": _Splitting((_GPT2,)),
    "smollm": _Splitting((_DIGIT, _GPT2)),
    "refact": _Splitting((_DIGIT, _GPT2)),  # Granite
    "starcoder": _Splitting((_DIGIT, _GPT2)),
    "smaug-bpe": _Splitting((_THREE_DIGITS,)),  # SmolLM3
    "dbrx": _Splitting((_THREE_DIGITS,)),  # Phi-4
    "gpt-4o": _Splitting((f"{_CASED}|{_DIGIT}{{1,3}}|{_PATHS}|{_SPACES}",)),  # Phi-4-mini
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


@dataclass(frozen=True)
class TokenizerFacts:
    """The settings of tokenizer_config.json that a GGUF file contains. A token id is None if there is no such token."""

    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    ends: tuple[int, ...]  # ids of all tokens that end an answer, eos first
    adds_bos: bool
    adds_eos: bool
    chat_template: str | None


# Tokens that end a turn and stop generation even if they are not eos, as in llama.cpp.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "</s>")


def read_tokenizer_facts(file: GgufFile) -> TokenizerFacts:
    """Read the settings of a file's tokenizer.

    Raises:
        ModelBuildError: The metadata are malformed.
    """
    tokens = file.array(f"{_PREFIX}tokens")

    def token(name: str) -> int | None:
        found = file.metadata.get(f"{_PREFIX}{name}_token_id")
        if found is None or found == 0xFFFFFFFF:  # 0xFFFFFFFF is -1 as uint32: there is no such token
            return None
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < len(tokens):
            raise ModelBuildError(
                f"{file.path}: metadata '{_PREFIX}{name}_token_id' is {found!r}, expected one of {len(tokens)} tokens"
            )
        return found

    def flag(name: str, default: bool) -> bool:
        return bool(file.metadata.get(f"{_PREFIX}{name}", default))

    kinds = _token_types(file, len(tokens))
    eos, turn = token("eos"), token("eot")
    ends = [one for one in (eos, turn) if one is not None]
    ends += [index for index, text in enumerate(tokens) if text in _TURN_ENDS and kinds[index] == _CONTROL]
    template = file.metadata.get("tokenizer.chat_template")
    byte_level = file.metadata.get(f"{_PREFIX}model") == "gpt2"
    return TokenizerFacts(
        bos=token("bos"),
        eos=eos,
        unknown=token("unknown"),
        padding=token("padding"),
        ends=tuple(dict.fromkeys(ends)),
        adds_bos=flag("add_bos_token", _splitting(file).begins if byte_level else True),
        adds_eos=flag("add_eos_token", False),
        chat_template=template if isinstance(template, str) else None,
    )


def read_gguf_tokenizer(path: str | os.PathLike[str] | GgufFile) -> Tokenizer:
    """Build the tokenizer described in a GGUF file's metadata, including the tokens that it adds around a text.

    Raises:
        OrtolanError: The packages `gguf` or `tokenizers` are missing.
        ModelBuildError: The tokenizer is of an unsupported kind, or malformed.
    """
    file = path if isinstance(path, GgufFile) else GgufFile(path)
    try:
        import tokenizers
    except ImportError as error:
        raise OrtolanError(
            "text in and out needs the package 'tokenizers'; install it with: pip install tokenizers"
        ) from error
    kind = file.text(f"{_PREFIX}model")
    if kind not in ("gpt2", "llama"):
        raise ModelBuildError(
            f"{file.path} has a tokenizer of kind {kind!r}; expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece)"
        )
    tokens = _texts(file, "tokens")
    if len(set(tokens)) != len(tokens):
        raise ModelBuildError(f"{file.path}: its vocabulary has duplicate tokens")
    facts = read_tokenizer_facts(file)
    try:
        tokenizer = _byte_level(file, tokens) if kind == "gpt2" else _sentence_piece(file, tokens, facts)
        tokenizer.add_tokens(list(_added_tokens(tokens, _token_types(file, len(tokens)))))
    except ModelBuildError:
        raise
    except Exception as error:  # the package raises Exception if merges use missing tokens
        raise ModelBuildError(f"{file.path}: the tokenizer cannot be built: {error}") from error
    ends = [
        (index, tokens[index])
        for index, wanted in ((facts.bos, facts.adds_bos), (facts.eos, facts.adds_eos))
        if wanted and index is not None
    ]
    if ends:
        begins = facts.adds_bos and facts.bos is not None
        before = [f"{tokens[facts.bos or 0]}:0"] if begins else []
        after = [f"{tokens[facts.eos or 0]}:1"] if len(ends) > len(before) else []
        single = [*before, "$A:0", *(end.replace(":1", ":0") for end in after)]
        pair = [*single, *(one.replace(":0", ":1") for one in single)]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=single,
            pair=[part.replace("$A:1", "$B:1") for part in pair],
            special_tokens=[(t, i) for i, t in ends],
        )
    return tokenizer


def _texts(file: GgufFile, name: str) -> list[str]:
    found = file.array(_PREFIX + name)
    if not found or not all(isinstance(one, str) for one in found):
        raise ModelBuildError(f"{file.path}: metadata '{_PREFIX}{name}' is not an array of strings")
    return list(found)


def _token_types(file: GgufFile, count: int) -> Sequence[int]:
    found = file.array(f"{_PREFIX}token_type")
    if len(found) != count:
        raise ModelBuildError(f"{file.path}: its {count} tokens have {len(found)} types")
    return found


def _splitting(file: GgufFile) -> _Splitting:
    name = file.text(f"{_PREFIX}pre", "default")
    if name not in _SPLITTINGS:
        raise ModelBuildError(
            f"{file.path} has a tokenizer of kind 'gpt2' that splits text as {name!r}; expected one of "
            f"{', '.join(map(repr, _SPLITTINGS))}"
        )
    return _SPLITTINGS[name]


def _added_tokens(tokens: Sequence[str], kinds: Sequence[int]) -> Iterable[AddedToken]:
    """Yield the added tokens, which are found in a text before it is split."""
    from tokenizers import AddedToken

    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) and token:
            yield AddedToken(token, special=kind != _USER_DEFINED, normalized=False)


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merges = []
    for merge in _texts(file, "merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelBuildError(f"{file.path}: merge {merge!r} is not two tokens")
        merges.append((left, right))
    splitting = _splitting(file)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting.whole_words))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns]
    # Split by an explicit pattern, because onnxruntime-genai does not split texts by ByteLevel's own pattern.
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile, tokens: Sequence[str], facts: TokenizerFacts) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.array(f"{_PREFIX}scores")
    if len(scores) != len(tokens) or not all(isinstance(score, float) for score in scores):
        raise ModelBuildError(f"{file.path}: its {len(tokens)} tokens have {len(scores)} scores")
    unknown = None if facts.unknown is None else tokens[facts.unknown]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _merges_of_scores(vocabulary, scores, _token_types(file, len(tokens)))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(file.metadata.get(f"{_PREFIX}add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_of_scores(
    vocabulary: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, highest score first, in SentencePiece's order."""
    found = []
    for piece, index in vocabulary.items():
        if kinds[index] != _USER_DEFINED and kinds[index] != _CONTROL:
            cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
            pairs = [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
            pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
            found += [(-scores[index], pair) for pair in pairs]
    found.sort(key=lambda one: one[0])  # the sort is stable, so of equal scores the earlier piece comes first
    return [pair for _, pair in found]

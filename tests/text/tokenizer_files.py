"""Small tokenizers of every kind, trained with the package `tokenizers`."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
WORDS = ("the", "cat", "cats", "sleeps", "sleeping", "unaffable", "doesn't", "we'll", "1234", "2024,", "end.", "(see")
WORDS += ("Crème", "brûlée", "Привет", "мир!", "日本語", "の", "テキスト", "한국어", "นี่", "नमस्ते", "fi", "--", "x²")
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def corpus() -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=12)) for _ in range(300)]


def hard_texts(specials: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """Return random texts of special parts for tokenizers and of characters from all Unicode planes in use."""
    rng = random.Random(seed)
    parts = [
        *specials,
        *WORDS,
        " ",
        "  ",
        "\t",
        "\n",
        "\r\n",
        "\n\n",
        "...",
        "!?",
        "_",
        "$5",
        "½",
        "²",
        "٣",
        "Ⅷ",
        "x" * 40,
    ]
    parts += ["'s", "'LL", "'ſ", "e\u0301", "a\u030a\u0301", "\u0301", "\u200d", "\u200b", "\u00ad", "\u00a0", "\u3000"]
    parts += ["\u2003", "\u2028", "\x85", "\x1c", "\x0b", "\x07", "각", "\u1112\u1161\u11ab", "😀", "👩‍👩‍👧", "🇩🇪", "☃"]
    parts += ["“", "—", "ﬁ", "Å", "\u212b", "Ω", "\u2126", "İ", "ẞ", "ß", "ς", "Σ", "\ue000", "\ufffd", "\U00050000"]
    parts += ["ＡＢ", "ｶﾞ", "①", "𝐀", "\ufeff", "\u202e", "\u0e33", "▁", "▁▁", "Ġ", "<", "</s", "s>", "\ufdd0", "Ａ <s>"]
    texts = ["".join(rng.choices(parts, k=rng.randrange(1, 10))) for _ in range(count)]
    planes = [(1, 0x180), (1, 0x3000), (1, 0xD800), (0xE000, 0x30000)]
    return texts + [
        "".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(rng.randrange(1, 12))) for _ in range(count)
    ]


def write(path: Path, tokenizer: Any, **changes: Any) -> Path:
    said = json.loads(tokenizer.to_str())
    path.write_text(json.dumps(said | changes), encoding="utf-8")
    return path


def add_tokens(tokenizer: Any) -> None:
    """Add a mask token that includes the spaces before it, and two tokens that are not special."""
    tokenizer.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    tokenizer.add_tokens(["new-word", "new"])


def byte_level(path: Path, specials: Sequence[str] = SPECIALS) -> Path:
    """Write a byte-level tokenizer like those of GPT-2 and RoBERTa."""
    tokenizer = _train_byte_level(specials, pre_tokenizers.ByteLevel(add_prefix_space=False))
    add_tokens(tokenizer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=False)
    return write(path, tokenizer)


def prefixed(path: Path) -> Path:
    """Write a byte-level tokenizer that adds a space before the first word, splits digits and normalizes."""
    before = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()])
    tokenizer = _train_byte_level(SPECIALS, before)
    tokenizer.normalizer = normalizers.NFC()
    add_tokens(tokenizer)
    tokenizer.post_processor = processors.ByteLevel()
    return write(path, tokenizer)


def llama3(path: Path, **model: Any) -> Path:
    """Write a tokenizer like those of Llama 3 and Qwen."""
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    tokenizer = _train_byte_level(
        SPECIALS, pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    )
    template = processors.TemplateProcessing(
        single="$A </s>", pair="$A:0 </s>:0 $B:1 </s>:1", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    said = json.loads(tokenizer.to_str())
    return write(path, tokenizer, model=said["model"] | model)


def qwen3(path: Path, ends: bool = True) -> Path:
    """Write a tokenizer like that of Qwen3-Embedding, which pads in front and ends texts with a token, if `ends`."""
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    split = pre_tokenizers.Split(Regex(QWEN2), "isolated")
    before = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer = _train_byte_level(specials, before, ["yes", "no", *corpus()])
    tokenizer.normalizer = normalizers.NFC()
    template = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    level = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = processors.Sequence([level, template]) if ends else level
    tokenizer.enable_padding(direction="left", pad_id=0, pad_token="<|endoftext|>")
    return write(path, tokenizer)


def llama2(path: Path) -> Path:
    """Write a tokenizer like those of Llama 2 and Mistral.

    The text is not split into words, and unknown characters become bytes.
    """
    tokenizer = _train_characters()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return write(path, tokenizer)


def gemma(path: Path) -> Path:
    """Write a BPE tokenizer that splits words and marks only the first word with a space."""
    tokenizer = _train_characters()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    return write(path, tokenizer)


def xlm_roberta(path: Path, **model: Any) -> Path:
    """Write a tokenizer like XLM-RoBERTa's: Unigram, normalized by a SentencePiece precompiled_charsmap."""
    chars = {
        "ﬁ": "fi",
        "Ａ": "A",
        "Ｂ": "B",
        "①": "1",
        "½": "1⁄2",
        "e\u0301": "é",
        "\u3000": " ",
        "\t": " ",
        "\n": " ",
        "\x07": "",
    }
    normalizer = normalizers.Sequence(
        [normalizers.Precompiled(characters_map(chars)), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer = _train_unigram(normalizer, pre_tokenizers.Metaspace())
    return write(path, tokenizer, model=json.loads(tokenizer.to_str())["model"] | model)


def old_xlm_roberta(path: Path) -> Path:
    """Write a file as older versions of `tokenizers` wrote it for XLM-RoBERTa, which splits at spaces first."""
    before = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return write(path, _train_unigram(normalizers.NFKC(), before))


def albert(path: Path) -> Path:
    normalizer = normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Strip(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    return write(path, _train_unigram(normalizer, pre_tokenizers.Metaspace()))


KINDS: Mapping[str, Callable[[Path], Path]] = {
    "byte_level": byte_level,
    "prefixed": prefixed,
    "llama3": llama3,
    "llama2": llama2,
    "gemma": gemma,
    "xlm_roberta": xlm_roberta,
    "old_xlm_roberta": old_xlm_roberta,
    "albert": albert,
}


def _train_byte_level(specials: Sequence[str], before: Any, texts: Sequence[str] | None = None) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = before
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts or corpus(), trainer)
    return tokenizer


def _train_characters() -> Any:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False, limit_alphabet=60
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    said = json.loads(tokenizer.to_str())
    said["added_tokens"] = said["added_tokens"][:3]  # texts cannot contain the byte tokens
    said["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(said))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def _train_unigram(normalizer: Any, before: Any) -> Any:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, before
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=list(SPECIALS[:4]), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    add_tokens(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def characters_map(chars: Mapping[str, str]) -> bytes:
    """Return SentencePiece's precompiled_charsmap for replacements of characters.

    The format is the size of a Darts double array, the array, and the replacement strings.
    """
    results, starts = b"", {}
    for key, made in chars.items():
        starts[key.encode()] = len(results)
        results += made.encode() + b"\0"
    array = _double_array(starts)
    return struct.pack("<I", 4 * len(array)) + struct.pack(f"<{len(array)}I", *array) + results


def _double_array(values: Mapping[bytes, int]) -> list[int]:
    """Return the units of a double array in the format of Darts-clone.

    The low byte is a label. Bit 8 is set if the node has a value. The offset to the children starts at bit 10. A unit
    that holds a value has bit 31 set.
    """
    array, used, bases = [0] * 65536, {0}, set()

    def place(node: int, prefix: bytes) -> None:
        labels = sorted({key[len(prefix)] if len(key) > len(prefix) else 0 for key in values if key.startswith(prefix)})
        free = (at for at in range(1, 65000) if at not in bases)
        base = next(at for at in free if all((at ^ label) not in used for label in labels))
        bases.add(base)
        used.update(base ^ label for label in labels)
        array[node] |= (node ^ base) << 10 | (0 in labels) << 8
        for label in labels:
            if label == 0:
                array[base] = values[prefix] | 1 << 31
            else:
                array[base ^ label] = label
                place(base ^ label, prefix + bytes([label]))

    place(0, b"")
    return array[: -(-(max(used) + 1) // 256) * 256]

"""How well a decoder predicts text: cross-entropy and perplexity.

python -m ortolan.models.evaluate --model stories15m [--text FILE] [--sampled TOKENS] [--variant NAME=PATH …]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import OrtolanError
from ..generate import Decoder, sample

if TYPE_CHECKING:
    import onnxruntime as ort


@dataclass(frozen=True)
class Score:
    """cross_entropy: nats a token, the mean over `tokens` predicted tokens."""

    cross_entropy: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(cross_entropy)."""
        return math.exp(self.cross_entropy)


def score_tokens(
    session: ort.InferenceSession,
    ids: Sequence[int],
    window: int = 256,
    stride: int | None = None,
    step: int | None = None,
) -> Score:
    """How well the model predicts each token of `ids` but the first.

    The text is cut into windows of `window` tokens, which begin `stride` tokens apart (half a window when None), and
    each is run with an empty cache. A token counts once, in the first window that holds it and a token before it: its
    context is at least window - stride tokens, where the text has so many.

    window: no longer than the contexts that the model was trained on. 1 <= stride <= window - 1.
    step: tokens that the model is given at a time; None: a whole window. What a cache holds of tokens before is only
        read at the next step: one that rounds them is judged by steps of 1.
    Raises OrtolanError for fewer than two tokens, a window below 2, a step below 1, or such a stride; and for a step
    above 1 of a model that keeps the last token's logits alone (keep_last_logits).
    """
    stride = window // 2 if stride is None else stride
    step = window if step is None else step
    if len(ids) < 2 or window < 2 or not 1 <= stride < window or step < 1:
        raise OrtolanError(
            f"{len(ids)} tokens, window {window}, stride {stride}, step {step}; expected at least 2 tokens, window >= "
            "2, 1 <= stride < window and step >= 1"
        )
    decoder = Decoder(session)
    if decoder.only_last_logits and step > 1:
        raise OrtolanError(f"the model gives the logits of a call's last token alone, but step is {step}; give step=1")
    total, scored_to = 0.0, 1
    for start in range(0, len(ids), stride):
        part = np.asarray(ids[start : start + window], np.int64)
        if start + len(part) <= scored_to:
            break
        decoder.reset()
        first = scored_to - start  # in this window
        for begin in range(0, len(part) - 1, step):
            end = min(begin + step, len(part))
            logits = decoder.step(part[begin:end])
            # The logits of a token are for the next one.
            of = np.arange(max(begin, first - 1), min(end, len(part) - 1))
            if len(of):
                total += surprise(logits[of - begin], part[of + 1])
        scored_to = start + len(part)
    return Score(total / (len(ids) - 1), len(ids) - 1)


def score_texts(
    session: ort.InferenceSession,
    texts: Sequence[Sequence[int]],
    window: int = 256,
    stride: int | None = None,
    step: int | None = None,
) -> Score:
    """`score_tokens` of several texts, each with a context of its own, weighted by their tokens."""
    scores = [score_tokens(session, ids, window, stride, step) for ids in texts]
    tokens = sum(score.tokens for score in scores)
    if not tokens:
        raise OrtolanError("no texts to score; give at least one")
    return Score(sum(score.cross_entropy * score.tokens for score in scores) / tokens, tokens)


def surprise(logits: np.ndarray, tokens: np.ndarray) -> float:
    """The sum of -log softmax(logits)[token] over the rows."""
    rows = logits.astype(np.float64)
    peak = rows.max(axis=1)
    log_sum = peak + np.log(np.exp(rows - peak[:, None]).sum(axis=1))
    return float((log_sum - rows[np.arange(len(tokens)), tokens]).sum())


def sample_texts(
    session: ort.InferenceSession, start: int, tokens: int, window: int = 256, seed: int = 0
) -> list[list[int]]:
    """Texts drawn from the model itself (temperature 1, nothing cut off), `tokens` tokens in all.

    Each begins with the token `start` and holds `window` tokens, the last one fewer (but at least two): the model may
    end a story inside and begin the next. On such text the model that it was drawn from has, in expectation, the
    lowest cross-entropy of all; what another one has more is its Kullback-Leibler divergence from that model.

    The same seed gives the same texts wherever the logits are the same.
    Raises OrtolanError for fewer than two tokens or a window below 2.
    """
    if tokens < 2 or window < 2:
        raise OrtolanError(f"{tokens} tokens in windows of {window}; expected at least 2 and 2")
    decoder = Decoder(session)
    rng = np.random.default_rng(seed)
    texts: list[list[int]] = []
    left = tokens
    while left >= 2:
        decoder.reset()
        ids = [start]
        while len(ids) < min(window, left):
            ids.append(sample(decoder.step(ids[-1:])[-1], rng))
        texts.append(ids)
        left -= len(ids)
    return texts


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    from ..session import create_session
    from .catalog import get_model
    from .tokenizer import load_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories15m", help="a decoder that get_model knows")
    parser.add_argument("--text", type=Path, help="a text file, UTF-8")
    parser.add_argument("--tokens", type=int, default=20000, help="of the text, from its beginning")
    parser.add_argument("--sampled", type=int, default=20000, help="tokens drawn from the fp32 model; 0: none")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--stride", type=int, help="half a window unless told")
    parser.add_argument("--step", type=int, help="tokens given at a time; a whole window unless told")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=PATH", help="an ONNX file to score too")
    arguments = parser.parse_args()
    for variant in arguments.variant:
        if not Path(variant.partition("=")[2]).is_file():
            parser.error(f"--variant: expected NAME=PATH of an ONNX file, found {variant!r}")
    if arguments.text and not arguments.text.is_file():
        parser.error(f"--text: file {str(arguments.text)!r} does not exist")

    files = get_model(arguments.model)
    if files.tokenizer is None:
        parser.error(f"--model: {arguments.model} has no tokenizer")
    tokenizer = load_tokenizer(files.tokenizer)
    original = create_session(files.onnx)
    sessions = {"fp32": original}
    for variant in arguments.variant:
        name, _, path = variant.partition("=")
        sessions[name] = create_session(path)

    texts: dict[str, list[list[int]]] = {}
    if arguments.text:
        text = arguments.text.read_text(encoding="utf-8")
        texts[arguments.text.name] = [tokenizer.encode(text[: 16 * arguments.tokens])[: arguments.tokens]]
    if arguments.sampled:
        texts["sampled from fp32"] = sample_texts(
            original, tokenizer.start, arguments.sampled, arguments.window, arguments.seed
        )
    table = Table(title=f"{arguments.model}: windows of {arguments.window} tokens", title_justify="left")
    for column in ("text", "model", "tokens", "cross-entropy, nats", "increase", "perplexity"):
        table.add_column(column, justify="left" if column in ("text", "model") else "right")
    for label, parts in texts.items():
        scores = {
            name: score_texts(session, parts, arguments.window, arguments.stride, arguments.step)
            for name, session in sessions.items()
        }
        for name, score in scores.items():
            increase = score.cross_entropy - scores["fp32"].cross_entropy
            table.add_row(
                label,
                name,
                str(score.tokens),
                f"{score.cross_entropy:.5f}",
                f"{increase:+.5f}",
                f"{score.perplexity:.3f}",
            )
        table.add_section()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

"""Score a decoder on text after a prompt whose keys and values are pruned (pass cache_prompt).

python -m tools.evaluate_prompt --model smollm2-135m-instruct [--text FILE] [--windows N] [--run N]

Each window of the text (by default, text sampled from the model) begins with the prompt; its other tokens are scored.
The table is computed with float caches: the cache of the prompt is pruned as the pass does, the cache of later tokens
is exact.
NoMADAttention additionally rounds queries and attention weights to bfloat16: --run N scores N windows with it, token by
token.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ortolan.errors import OrtolanError
from ortolan.generate import Decoder
from ortolan.graph_passes.passes.prompt import prune_prompt
from ortolan.models.perplexity import Score, sample_texts, surprise

if TYPE_CHECKING:
    import onnxruntime as ort

SPARSITIES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
Sparsities = tuple[float, float]  # keys, values
Caches = dict[str, np.ndarray]


class PromptedDecoder:
    """A decoder that continues after a prompt whose cache is exact or pruned."""

    def __init__(self, session: ort.InferenceSession) -> None:
        """Use a session with float caches that `Decoder` supports."""
        self._session = session
        self._decoder = Decoder(session)
        names = [value.name for value in session.get_inputs()]
        self._keys = [name for name in names if name.startswith("past_key_values.") and name.endswith(".key")]
        self._names = names

    def exact(self, prompt: Sequence[int]) -> Caches:
        """Return the exact cache of the prompt by input name: float32 [1, kv_heads, tokens, head_dim]."""
        self._decoder.reset()
        self._decoder.step(prompt)
        return self._decoder.cache()

    def pruned(self, caches: Caches, sparsities: Sparsities, scope: str = "token") -> Caches:
        """Return the caches pruned as by pass cache_prompt."""
        result = {}
        for key in self._keys:
            value = key.removesuffix("key") + "value"
            layer = prune_prompt(caches[key][0], caches[value][0], *sparsities, scope)
            result[key], result[value] = layer.keys[None], layer.values[None]
        return result

    def score(self, caches: Caches, ids: Sequence[int]) -> Score:
        """Score the tokens of `ids` except the first, after a prompt in the caches."""
        tokens = np.asarray(ids, np.int64)[None]
        past = next(iter(caches.values())).shape[2]
        feeds = {"input_ids": tokens, "attention_mask": np.ones((1, past + tokens.shape[1]), np.int64)}
        feeds["position_ids"] = past + np.arange(tokens.shape[1])[None]
        given = {name: array for name, array in feeds.items() if name in self._names} | caches
        (logits,) = self._session.run(["logits"], given)
        return Score(surprise(logits[0, :-1], tokens[0, 1:]) / (tokens.shape[1] - 1), tokens.shape[1] - 1)


def mean(scores: Sequence[Score]) -> Score:
    """Return the score of all tokens together."""
    tokens = sum(score.tokens for score in scores)
    return Score(sum(score.cross_entropy * score.tokens for score in scores) / tokens, tokens)


def score_operator(
    model: Path, prompt: Sequence[int], ids: Sequence[int], sparsities: Sparsities, scope: str = "token"
) -> Score:
    """Score with NoMADAttention: optimize the model with this prompt and run one token after another."""
    from ortolan import Recipe, create_session, optimize_onnx

    keys, values = sparsities
    steps = [
        {"name": "normalize"},
        {"name": "cache_prompt", "keys_sparsity": keys, "values_sparsity": values, "scope": scope},
        {"name": "compress_cache", "keys": "float32", "values": "float32"},
    ]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "prompt.onnx"
        optimize_onnx(
            model, output, recipe=Recipe.from_dict({"name": "prompt", "pass": steps}), prompt=prompt, portable=False
        )
        decoder = Decoder(create_session(output))
        total = sum(surprise(decoder.step([token]), np.array([after])) for token, after in itertools.pairwise(ids))
    return Score(total / (len(ids) - 1), len(ids) - 1)


def cut_windows(ids: Sequence[int], window: int, count: int) -> list[Sequence[int]]:
    """Return windows that are evenly spread over the text.

    Raises:
        OrtolanError: The text is shorter than a window.
    """
    if len(ids) < window:
        raise OrtolanError(f"the text has {len(ids)} tokens, fewer than a window of {window}; give more text")
    starts = np.linspace(0, len(ids) - window, count).astype(int)
    return [ids[start : start + window] for start in starts]


def main() -> None:
    """Run the command."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from ortolan.models.catalog import get_model
    from ortolan.models.tokenizer import load_tokenizer
    from ortolan.session import create_session

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories15m", help="a decoder of the catalog")
    parser.add_argument("--text", type=Path, help="a UTF-8 text file; default: text sampled from the model")
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--window", type=int, default=512, help="tokens in a window")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the window that form the prompt")
    parser.add_argument(
        "--sparsity", type=float, nargs="+", default=SPARSITIES, help="fractions of keys and of values to prune"
    )
    parser.add_argument(
        "--scope",
        choices=("token", "layer"),
        default="token",
        help="prune the smallest values of each token or of each layer",
    )
    parser.add_argument("--run", type=int, default=0, metavar="N", help="windows to also score with NoMADAttention")
    parser.add_argument("--run-sparsity", type=float, nargs=2, default=(0.3, 0.5), metavar=("KEYS", "VALUES"))
    arguments = parser.parse_args()
    if arguments.text is not None and not arguments.text.is_file():
        parser.error(f"--text: file {str(arguments.text)!r} does not exist")
    if not 0 < arguments.prompt < arguments.window - 1:
        parser.error(f"--prompt: {arguments.prompt} tokens leave fewer than 2 of a window of {arguments.window}")
    files = get_model(arguments.model)
    if files.tokenizer is None:
        parser.error(f"--model: {arguments.model} has no tokenizer")
    tokenizer = load_tokenizer(files.tokenizer)
    session = create_session(files.onnx)
    if arguments.text is None:
        count = arguments.window * arguments.windows
        windows: list[Sequence[int]] = list(sample_texts(session, tokenizer.start, count, arguments.window))
    else:
        ids = tokenizer.encode(arguments.text.read_text(encoding="utf-8"))
        windows = cut_windows(ids, arguments.window, arguments.windows)
    decoder = PromptedDecoder(session)
    pairs: list[Sparsities] = list(itertools.product(arguments.sparsity, repeat=2))
    scores: dict[Sparsities | None, list[Score]] = {pair: [] for pair in (None, *pairs)}
    cut = arguments.prompt
    for window in track(windows, "windows"):
        caches = decoder.exact(window[:cut])
        for pair, found in scores.items():
            pruned = caches if pair is None else decoder.pruned(caches, pair, arguments.scope)
            found.append(decoder.score(pruned, window[cut:]))
    console = Console(width=120)
    exact = mean(scores[None])
    table = Table(
        title=f"{arguments.model}: perplexity of {exact.tokens} tokens after prompts of {cut}, {exact.perplexity:.3f} "
        "with an exact cache; increase with pruned keys (rows) and values (columns), the smallest of "
        f"each {arguments.scope}",
        title_justify="left",
    )
    table.add_column("keys")
    for values in arguments.sparsity:
        table.add_column(f"{values:.0%}", justify="right")
    for keys in arguments.sparsity:
        increases = [
            math.exp(mean(scores[keys, values]).cross_entropy - exact.cross_entropy) - 1
            for values in arguments.sparsity
        ]
        table.add_row(f"{keys:.0%}", *(f"{increase:+.2%}" for increase in increases))
    console.print(table)
    if arguments.run:
        pair = tuple(arguments.run_sparsity)
        some = windows[: arguments.run]
        scope = arguments.scope
        simulated = mean([decoder.score(decoder.pruned(decoder.exact(w[:cut]), pair, scope), w[cut:]) for w in some])
        before = mean([decoder.score(decoder.exact(w[:cut]), w[cut:]) for w in some])
        operator = mean([score_operator(files.onnx, w[:cut], w[cut:], pair, scope) for w in track(some, "operator")])
        console.print(
            f"{len(some)} windows, keys {pair[0]:.0%} and values {pair[1]:.0%} pruned: perplexity "
            f"{before.perplexity:.4f} with an exact cache, {simulated.perplexity:.4f} pruned, "
            f"{operator.perplexity:.4f} by the operator"
        )


if __name__ == "__main__":
    main()

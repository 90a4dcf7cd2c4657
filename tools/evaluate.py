"""Score decoders on text: cross-entropy and perplexity.

python -m tools.evaluate --model stories15m [--text FILE] [--sampled TOKENS] [--variant NAME=PATH …]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ortolan.models import get_model
from ortolan.models.perplexity import sample_texts, score_texts
from ortolan.models.tokenizer import load_tokenizer
from ortolan.session import create_session


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories15m", help="a decoder of the catalog")
    parser.add_argument("--text", type=Path, help="a text file, UTF-8")
    parser.add_argument("--tokens", type=int, default=20000, help="tokens of the text to score, from its beginning")
    parser.add_argument(
        "--sampled", type=int, default=20000, help="tokens to sample from the fp32 model and score; 0: none"
    )
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--stride", type=int, help="tokens between windows; default: half a window")
    parser.add_argument("--step", type=int, help="tokens per run; default: a whole window")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME=PATH", help="another ONNX file to score"
    )
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

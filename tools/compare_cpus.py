"""Compare the vectors that kinds of CPU give to the same texts: an index is built on one and queried on another.

python -m tools.compare_cpus --texts FILE [--model all-minilm-l6-v2] [--weights int8] [--isa avx2 amx …] [--json FILE]

The model is optimized once for the fastest order of sums and once with reproducible="everywhere". Each feature set of
--isa (by default, all that this CPU has) embeds the texts with the first model. The second model has the bits of CPUs
with fast bf16 pairs (AMD Zen 4 and later), so a CPU without them can be compared with those. Feature sets with equal
vectors are one kind. The original float model is compared too, for scale.

For each pair of kinds, each text is a query with its vector of one kind against the vectors of the other kind.
`overlap` is the mean share of its ten nearest texts that stay. FILE has one text a line, or is sts-dev.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortolan.errors import OrtolanError

Vectors = NDArray[np.float32]

FASTEST, REPRODUCIBLE, ORIGINAL = "fastest order", "reproducible", "original"
NEAREST = 10
_STS_COLUMNS = slice(5, 7)  # the sentences of a line of STS-B
_EMBED = """
import sys
from pathlib import Path
import numpy as np
from ortolan.session import create_session
from ortolan.text_encoder import TextEncoder
model, tokenizer, texts, output = map(Path, sys.argv[1:])
encoder = TextEncoder(create_session(model), tokenizer)
np.save(output, encoder.encode(texts.read_text(encoding="utf-8").splitlines()))
"""


def read_lines(path: Path) -> list[str]:
    """Return the distinct texts of a file with one text a line, or of sentence pairs in the format of STS-B."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix == ".csv":
        lines = [text for line in lines for text in line.split("\t")[_STS_COLUMNS]]
    return list(dict.fromkeys(lines))


def nearest(queries: Vectors, index: Vectors) -> NDArray[np.int64]:
    """Return the indices of the NEAREST vectors of an index for each query, the query's own text excluded.

    Args:
        queries: float32 [texts, width], unit vectors.
        index: float32 [texts, width], unit vectors of the same texts.
    """
    similar = queries.astype(np.float64) @ index.astype(np.float64).T
    np.fill_diagonal(similar, -np.inf)
    return np.argsort(-similar, axis=1, kind="stable")[:, :NEAREST]


def compare(one: Vectors, other: Vectors) -> dict[str, float]:
    """Return the least and the mean cosine, and the mean overlap of the nearest texts in both directions."""
    cosines = np.einsum("ij,ij->i", one.astype(np.float64), other.astype(np.float64))
    cosines /= np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    overlaps = []
    for queries, index in ((one, other), (other, one)):
        within, across = nearest(queries, queries), nearest(queries, index)
        overlaps += [len({*a} & {*b}) / within.shape[1] for a, b in zip(within.tolist(), across.tolist(), strict=True)]
    return {
        "least cosine": float(cosines.min()),
        "mean cosine": float(cosines.mean()),
        "overlap": float(np.mean(overlaps)),
    }


def by_kind(vectors: dict[str, Vectors]) -> dict[str, Vectors]:
    """Join the names of equal vectors: "scalar, avx2 (fastest order)"."""
    kinds: dict[bytes, list[str]] = {}
    for name, found in vectors.items():
        kinds.setdefault(found.tobytes(), []).append(name)
    return {" = ".join(names): vectors[names[0]] for names in kinds.values()}


def embed(model: Path, tokenizer: Path, texts: Path, isa: str, folder: Path) -> Vectors:
    """Return the vectors of the texts with a feature set, from a process of its own, because it is read only once.

    Raises:
        OrtolanError: The process failed.
    """
    output = folder / f"{model.stem}-{isa}.npy"
    done = subprocess.run(
        [sys.executable, "-c", _EMBED, str(model), str(tokenizer), str(texts), str(output)],
        env={**os.environ, "ORTOLAN_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise OrtolanError(f"embedding with ORTOLAN_ISA={isa} failed: {done.stderr.strip()[-500:]}")
    found: Vectors = np.load(output)
    return found


def main() -> None:
    """Run the command."""
    from ortolan import optimize_onnx
    from ortolan.models.catalog import get_model
    from ortolan.session import cpu_info

    cpu = cpu_info()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="a UTF-8 file, one text a line, or sts-dev.csv")
    parser.add_argument("--model", default="all-minilm-l6-v2", help="an encoder of the catalog")
    parser.add_argument("--weights", default="int8", choices=("int8", "int4"))
    parser.add_argument("--isa", nargs="+", default=cpu["detected_features"], help="values of ORTOLAN_ISA")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures")
    arguments = parser.parse_args()
    if not arguments.texts.is_file():
        parser.error(f"--texts: file {str(arguments.texts)!r} does not exist")
    files = get_model(arguments.model)
    if files.tokenizer is None:
        parser.error(f"--model: {arguments.model} has no tokenizer")
    lines = read_lines(arguments.texts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = folder / "texts.txt"
        texts.write_text("\n".join(lines), encoding="utf-8")
        vectors: dict[str, Vectors] = {}
        vectors[ORIGINAL] = embed(Path(files.onnx), files.tokenizer, texts, arguments.isa[-1], folder)
        for order, where in ((FASTEST, None), (REPRODUCIBLE, "everywhere")):
            model = folder / f"{order.split()[0]}.onnx"
            optimize_onnx(
                files.onnx, model, weights=arguments.weights, reproducible=where, options={"verify.seconds": 0.0}
            )
            for isa in arguments.isa if where is None else arguments.isa[-1:]:
                vectors[f"{isa}, {order}"] = embed(model, files.tokenizer, texts, isa, folder)
    kinds = by_kind(vectors)
    found: list[dict[str, Any]] = [
        {"kinds": [one, other], **compare(kinds[one], kinds[other])} for one, other in combinations(kinds, 2)
    ]
    print(f"{arguments.model}, {arguments.weights}, {len(lines)} texts, {cpu['name']}")
    for one in found:
        print(f"{one['kinds'][0]}  |  {one['kinds'][1]}")
        print("  " + ", ".join(f"{key} {one[key]:.6f}" for key in ("least cosine", "mean cosine", "overlap")))
    if not found:
        print(f"equal bytes: {next(iter(kinds))}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"cpu": cpu["name"], "texts": len(lines), "pairs": found}, indent=1))


if __name__ == "__main__":
    main()

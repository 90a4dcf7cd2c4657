"""Table of the zoo's models by exporter, for docs/architectures.md: what Ortolan replaces, and the provider claims.

    python -m tools.zoo FOLDER --python optimum=PYTHON --python torch,torch-fused,genai,mobius=PYTHON

Models are exported to FOLDER/EXPORTER/ARCHITECTURE, once, by the given interpreters (ortolan/models/zoo_exporters.py).
Each is then optimized to bf16 and to exact settings, and opened unmodified with the execution provider, in a process of
its own. Each file's line has linear layers replaced and found, attentions replaced and found, attentions that the
provider claims, tokens that a decoder generates like the original at exact settings, and reasons. An export is complete
if all of these are equal, and the provider's answers have the bits of the optimized file.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from ortolan.benchmarks.zoo import Study, provided, study
from ortolan.errors import NothingToReplaceError
from ortolan.generate import Decoder, generate
from ortolan.graph_passes.measure.feeds import Sizes, has_past, synthetic_feeds
from ortolan.models.zoo import ARCHITECTURES, NEWER, SMALL, find_architecture
from ortolan.models.zoo_exporters import CHECKPOINT, ERROR, EXPORTERS
from ortolan.optimize import optimize_onnx
from ortolan.session import create_session

_EXACT: dict[str, Any] = {"keys": "float32", "values": "float32", "verify.seconds": 0.0}
_PROMPT, _TOKENS = (5, 17, 8, 11, 20, 3, 9, 40, 12, 33), 12
_COMPLETE, _NOT_EXPORTED = "complete", "not exported"
_LEAST_COSINE = 0.9995  # of bf16 weights on random models; exact bits are tested in tests/zoo


@dataclass(frozen=True)
class Found:
    """The result of Ortolan on one model file.

    Attributes:
        file: The file, relative to the export's folder.
        study: The result of optimize_onnx, to bf16.
        claimed: The attentions that the provider claims.
        same_bits: The provider's answers have the bits of the optimized file.
        tokens: Greedy tokens that agree with the original's before the first difference, at exact settings; None: not a
            decoder, or its caches stay.
        problems: Errors, answers that differ, and caches that stay, each with details after a colon.
    """

    file: str
    study: Study | None
    claimed: float = 0
    same_bits: bool = True
    tokens: int | None = None
    problems: tuple[str, ...] = ()

    def counts(self) -> str:
        """Return the counts for the file's line."""
        if self.study is None:
            return "fails"
        parts = [f"{self.study.linear_replaced}/{self.study.linear}"]
        parts.append(f"{self.study.fused}/{self.study.attentions}")
        parts.append(f"{self.claimed:g}")
        if self.tokens is not None:
            parts.append(f"{self.tokens} of {_TOKENS}")
        return " · ".join(parts)


def model_files(folder: Path) -> list[Path]:
    """Return the models of an export. If it has merged and separate decoders, only the separate ones are returned."""
    found = [path for path in sorted(folder.rglob("*.onnx")) if CHECKPOINT not in path.parts]
    return [path for path in found if "merged" not in path.stem and not path.name.startswith("ortolan-")]


def examine(name: str, source: Path, root: Path) -> Found:
    """Optimize one model, and open it with the provider."""
    architecture = find_architecture(name)
    file, problems = str(source.relative_to(root)), []
    output, exact = (source.with_name(f"ortolan-{kind}-{source.name}") for kind in ("bf16", "exact"))
    try:
        studied = study(architecture, SMALL, source, output, "bf16")
    except Exception as error:  # continue with the other models
        return Found(file, None, problems=(f"optimize_onnx: {_line(error)}",))
    if studied.cosine < _LEAST_COSINE:
        problems.append(f"inaccurate in bf16: cosine {studied.cosine:.4f}")
    model, claimed, same = ir.load(source), 0.0, True
    try:
        feeds = synthetic_feeds(model, Sizes(1, 1, 9) if has_past(model) else Sizes(1, 16, 0), seed=5)
        in_provider = provided(source, output, feeds)
        claimed, same = in_provider.attentions, not in_provider.unequal
        if in_provider.unequal:
            problems.append(f"other bits in the provider: {', '.join(in_provider.unequal[:3])}")
    except Exception as error:
        problems.append(f"provider fails: {_line(error)}")
    tokens = None
    if "input_ids" in {value.name for value in model.graph.inputs} and has_past(model):
        try:
            tokens = _equal_tokens(source, exact)
        except NothingToReplaceError as error:
            problems.append(f"caches stay: {_line(error)}")
        except Exception as error:
            problems.append(f"exact settings fail: {_line(error)}")
    return Found(file, studied, claimed, same, tokens, tuple(problems))


def _equal_tokens(source: Path, output: Path) -> int:
    optimize_onnx(source, output, recipe="long-context", options=_EXACT)
    sessions = ort.InferenceSession(str(source), providers=["CPUExecutionProvider"]), create_session(output)
    expected, found = (_greedy(session) for session in sessions)
    return next((index for index, pair in enumerate(zip(expected, found, strict=True)) if len({*pair}) > 1), _TOKENS)


def _greedy(session: ort.InferenceSession) -> list[int]:
    """Generate with `Decoder`, or, if it does not know the names, by passing caches on in their order."""
    inputs = {value.name: value for value in session.get_inputs()}
    if any(name.startswith("past_key_values.") for name in inputs):
        return generate(Decoder(session, head_size=SMALL.head_dim), _PROMPT, _TOKENS)
    past = [name for name in inputs if "past" in name]
    kinds = {"tensor(int64)": np.int64}  # torch's exporter passes the window's length on, too
    caches: dict[str, Any] = {
        name: np.zeros(_empty(inputs[name].shape), kinds.get(inputs[name].type, np.float32)) for name in past
    }
    tokens = list(_PROMPT)
    answer: list[int] = []
    while len(answer) < _TOKENS:
        total = len(_PROMPT) + len(answer)
        feeds: dict[str, Any] = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, total), np.int64)}
        feeds["position_ids"] = np.arange(total - len(tokens), total)[None]
        outputs = session.run(None, {name: feeds[name] for name in feeds if name in inputs} | caches)
        logits = outputs.pop([value.name for value in session.get_outputs()].index("logits"))
        caches = dict(zip(past, outputs, strict=True))
        answer.append(int(logits[0, -1].argmax()))
        tokens = answer[-1:]
    return answer


def _empty(shape: Sequence[int | str | None]) -> list[int]:
    """Return the shape of an empty cache. The exporter of torch writes some fixed sizes as strings."""
    return [1, *(int(str(size)) if str(size).isdecimal() else 0 for size in shape[1:])] if shape else []


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"


def export_missing(folder: Path, exporter: str, names: Sequence[str], python: str) -> None:
    """Export the architectures that have no folder yet, in one process, because importing torch takes long."""
    command = [python, "-m", "ortolan.models.zoo_exporters", str(folder / exporter), exporter, *names]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def collect(folder: Path, exporters: Iterable[str], names: Sequence[str]) -> dict[tuple[str, str], list[Found]]:
    """Examine all exports: {(architecture, exporter): its files}."""
    found: dict[tuple[str, str], list[Found]] = {}
    for exporter in exporters:
        for name in names:
            root = folder / exporter / name
            failed = root / ERROR
            if failed.exists():
                found[name, exporter] = [Found("export", None, problems=(f"not exported: {failed.read_text()}",))]
            elif root.exists():
                found[name, exporter] = [_in_process(name, file, root) for file in model_files(root)]
            for one in found.get((name, exporter), ()):
                print(f"{name} {exporter} {one.file}: {one.counts()}; {'; '.join(_reasons(one))}", flush=True)
    return found


def _in_process(name: str, file: Path, root: Path) -> Found:
    """Examine a model in a process of its own, so that a crash is a line of the table."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        try:
            return pool.submit(examine, name, file, root).result()
        except BrokenProcessPool:
            return Found(str(file.relative_to(root)), None, problems=("crashes the process",))


def _reasons(found: Found) -> list[str]:
    kept = () if found.study is None else found.study.reasons
    return [*found.problems, *kept]


def summary(files: Sequence[Found]) -> str:
    """Return what an export lacks: the parts that stay, or _COMPLETE."""
    studies = [one.study for one in files if one.study is not None]
    if not files or files[0].file == "export":
        return _NOT_EXPORTED
    if len(studies) < len(files):
        return "fails"
    attentions = sum(one.attentions for one in studies)
    missing = []
    for what, found, wanted in (
        ("layers", sum(one.linear_replaced for one in studies), sum(one.linear for one in studies)),
        ("attention", sum(one.fused for one in studies), attentions),
        ("provider's attention", sum(one.claimed for one in files), attentions),
    ):
        if found < wanted:
            missing.append(f"{what} {found:g}/{wanted}")
    if any(one.tokens not in (None, _TOKENS) for one in files):
        missing.append("other tokens")
    missing += dict.fromkeys(problem.partition(":")[0] for one in files for problem in one.problems)
    return ", ".join(missing) or _COMPLETE


def markdown(found: dict[tuple[str, str], list[Found]], exporters: Sequence[str]) -> str:
    """Return the table: a row for each exporter, with the architectures that are complete, and reasons for the rest."""
    lines = ["| exporter | complete | not complete | not exported |", "| --- | --- | --- | --- |"]
    for exporter in exporters:
        cells: dict[str, list[str]] = {}
        for (name, one), files in found.items():
            if one == exporter:
                cells.setdefault(summary(files), []).append(name)
        complete, missing = (", ".join(cells.pop(cell, ())) for cell in (_COMPLETE, _NOT_EXPORTED))
        rest = "; ".join(f"{', '.join(names)}: {cell}" for cell, names in cells.items())
        lines.append(f"| {exporter} | {complete} | {rest} | {missing} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", action="append", default=[], metavar="EXPORTERS=PYTHON")
    parser.add_argument("--exporters", default=",".join(EXPORTERS))
    parser.add_argument("--architectures", default=",".join(one.name for one in (*ARCHITECTURES, *NEWER)))
    options = parser.parse_args()
    ort.set_default_logger_severity(3)  # exports have unused initializers, each a warning
    exporters, names = options.exporters.split(","), options.architectures.split(",")
    for one in options.python:
        chosen, _, python = one.partition("=")
        for exporter in chosen.split(","):
            if exporter in exporters:
                export_missing(options.folder, exporter, names, python)
    print(f"\n{markdown(collect(options.folder, exporters, names), exporters)}")


if __name__ == "__main__":
    main()

"""Optimum: optimized models in ORTModelFor…, and an optimizer in the shape of Optimum's ORTOptimizer.

OrtolanOptimizer.from_pretrained("model/").optimize("fast/", weights="int4")
ORTModelForCausalLM.from_pretrained("fast/", session_options=session_options())
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .choice import read_choice
from .errors import ModelError
from .optimize import optimize_onnx
from .session import new_options, register

if TYPE_CHECKING:
    import onnxruntime

    from ortolan.graph_passes.measure.feeds import Calibration
    from ortolan.graph_passes.recipe import Recipe
    from ortolan.graph_passes.report.optimization import OptimizationReport
    from ortolan.graph_passes.text.texts import Tokenizer

    from .progress import Progress


def session_options() -> onnxruntime.SessionOptions:
    """New session options that know Ortolan's operators, for `ORTModelForX.from_pretrained(…, session_options=…)`."""
    options = new_options()
    register(options)
    return options


class OrtolanOptimizer:
    """Optimizes the ONNX model in a folder that Optimum has written, or its encoder and decoders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def from_pretrained(cls, model_or_path: str | os.PathLike[str] | Any) -> OrtolanOptimizer:
        """model_or_path: a local folder, or an ORTModel, whose folder is taken. Raises ModelError."""
        encoder = getattr(model_or_path, "encoder", None)  # of an ORTModel with decoders
        path = getattr(encoder or model_or_path, "path", model_or_path)  # of an ORTModel: its ONNX file
        if not isinstance(path, str | os.PathLike):
            raise ModelError(f"model is a {type(model_or_path).__name__}, expected a folder or an ORTModel")
        folder = Path(path).parent if path is not model_or_path else Path(path)
        if not folder.is_dir():
            raise ModelError(
                f"{str(folder)!r} is no folder, expected one as Optimum writes it; export the model first: "
                "optimum-cli export onnx --model MODEL FOLDER"
            )
        return cls(folder)

    def optimize(
        self,
        save_dir: str | os.PathLike[str],
        recipe: str | os.PathLike[str] | Recipe | None = None,
        *,
        calibration: Calibration | None = None,
        tokenizer: Tokenizer | None = None,
        options: Mapping[str, Any] | None = None,
        portable: bool = True,
        allow_different: bool = False,
        threads: int | None = None,
        progress: Progress | None = None,
        **form: Any,
    ) -> OptimizationReport:
        """Writes the optimized model, with configuration and tokenizer, to a new folder.

        Arguments, report and errors are those of `ortolan.optimize_onnx`, with `form` for weights, group_size,
        sparsity, pattern, method, cache and ignore; compressed caches take the shape that
        Optimum makes, with which options `window` and `sinks` do not go.
        """
        choice = read_choice(recipe, form, options)
        if choice.recipe is not None:  # a recipe that is found later compresses no caches
            served = choice.recipe.for_equal_caches("Optimum")
            # A Recipe must have all its passes; of a preset or form, optimize_onnx may leave some out.
            if served != choice.recipe:
                recipe, form, options = served, {}, None
        return optimize_onnx(
            self.folder,
            save_dir,
            recipe=recipe,
            calibration=calibration,
            tokenizer=tokenizer,
            options=options,
            portable=portable,
            allow_different=allow_different,
            threads=threads,
            progress=progress,
            **form,
        )

"""An optimizer with the interface of Optimum's ORTOptimizer, for models that run in ORTModelFor… classes.

OrtolanOptimizer.from_pretrained("model/").optimize("fast/", weights="int4")
ORTModelForCausalLM.from_pretrained("fast/", session_options=ortolan.register())
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ortolan.graph_passes.names import FORMAT_OPTIONS

from .choice import read_choice
from .errors import ModelError, RecipeError, wrong_type
from .optimize import optimize_onnx
from .optimize_options import OptimizeArguments, OptimizeOptions, read_options

if TYPE_CHECKING:
    from ortolan.graph_passes.report.optimization import OptimizationReport


class OrtolanOptimizer:
    """Optimizes the ONNX model in a folder that Optimum has written, or its encoder and decoders."""

    def __init__(self, folder: Path) -> None:
        """Create an optimizer; `from_pretrained` checks the folder."""
        self.folder = folder

    @classmethod
    def from_pretrained(cls, model_or_path: str | os.PathLike[str] | Any) -> OrtolanOptimizer:
        """Return an optimizer for a local folder, or for the folder of an ORTModel.

        Raises:
            ArgumentTypeError: The argument is neither a path nor an ORTModel.
            ModelError: The folder does not exist.
        """
        encoder = getattr(model_or_path, "encoder", None)  # the encoder of an ORTModel with decoders
        path = getattr(encoder or model_or_path, "path", model_or_path)  # the path of an ORTModel's ONNX file
        if not isinstance(path, str | os.PathLike):
            raise wrong_type("model", model_or_path, "a folder or an ORTModel")
        folder = Path(path).parent if path is not model_or_path else Path(path)
        if not folder.is_dir():
            raise ModelError(
                f"{str(folder)!r} is not a folder; export the model first: optimum-cli export onnx --model MODEL FOLDER"
            )
        return cls(folder)

    def optimize(
        self,
        save_dir: str | os.PathLike[str],
        settings: OptimizeOptions | None = None,
        **options: Unpack[OptimizeArguments],
    ) -> OptimizationReport:
        """Write the optimized model, with configuration and tokenizer, to a new folder.

        Options, report and errors are those of `ortolan.optimize_onnx`, without `prompt`, `texts_in` and `serve`.
        Compressed caches get the shape that Optimum creates, so options `window` and `sinks` of pass compress_cache
        must be 0.

        Args:
            save_dir: The folder to write.
            settings: Options to start from; keyword arguments replace single ones.
            options: The fields of `OptimizeOptions` as keyword arguments.
        """
        chosen = read_options("optimize", settings, options)
        if chosen.texts_in:
            raise RecipeError("texts_in is not supported by Optimum, which tokenizes texts itself; use optimize_onnx")
        if chosen.serve:
            raise RecipeError("serve is not supported by Optimum, which cannot run that form; use optimize_onnx")
        choice = read_choice(chosen)
        if choice.recipe is not None:  # recipes found by a search never compress caches
            served = choice.recipe.for_equal_caches("Optimum")
            # If a Recipe object is given, all its passes must run. Passes of a preset or target format may be skipped.
            if served != choice.recipe:
                plain = OptimizeOptions()
                chosen = replace(
                    chosen, recipe=served, options=None, **{name: getattr(plain, name) for name in FORMAT_OPTIONS}
                )
        return optimize_onnx(self.folder, save_dir, chosen)

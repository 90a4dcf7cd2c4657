"""The export format "ortolan" of transformers (5.23): its ONNX exporter, then Ortolan. Importing registers the format.

exported = OrtolanExporter().export(model, inputs, OrtolanConfig(dynamic=True, weights="int8"))
exported(**inputs); exported.save_pretrained("fast/"); ExportedModel.from_pretrained("fast/")
"""

from __future__ import annotations

import re
import tempfile
import weakref
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortolan.graph_passes.passes.cache.compress_cache import CompressCacheOptions

from .choice import read_choice
from .errors import ModelError, NothingToReplaceError, RecipeError
from .optimize import optimize_onnx
from .optimize_options import OptimizeOptions, options_of
from .session import new_options, register

try:
    import torch
    from transformers import DynamicCache
    from transformers.exporters import ExportedModel, OnnxConfig, OnnxExporter, register_backend
    from transformers.exporters.runners import OnnxModelRunner
except ImportError as error:
    raise ImportError(
        f"ortolan.transformers needs transformers 5.23 or later, with torch and onnxscript ({error}); install them "
        "with: pip install 'transformers>=5.23,<5.24' 'torch>=2.12' onnxscript"
    ) from error

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime

FORMAT = "ortolan"
REPORT_KEY = "ortolan_report"  # key of the report in the `meta` of an exported program
_CACHE_INPUT = re.compile(r"past_key_values\.layers\.(\d+)\.(keys|values)$")
_CACHE_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(uint8)": torch.uint8,  # compressed caches
}


def _config_fields() -> list[tuple[str, Any, Any]]:
    return [
        (option.name, Any, field(default=option.default, metadata=option.metadata))
        for option in options_of("transformers")
    ]


# OptimizeOptions is frozen, and transformers changes config objects, so its fields are copied to a new dataclass.
_Options: Any = make_dataclass("_Options", _config_fields(), bases=(OnnxConfig,))


@dataclass
class OrtolanConfig(_Options):  # type: ignore[misc]
    """OnnxConfig with `ortolan.OptimizeOptions`, except prompt, texts_in, serve, dry_run and progress."""

    export_format: str = FORMAT

    def optimize_options(self) -> OptimizeOptions:
        """Return the options for `optimize_onnx`."""
        return OptimizeOptions(**{option.name: getattr(self, option.name) for option in options_of("transformers")})

    def to_json_string(self) -> str:
        """Return the JSON that `save_pretrained` stores: all options except calibration data and tokenizer."""
        stored = replace(self, calibration=None, tokenizer=None)  # type: ignore[call-arg]
        return str(super(OrtolanConfig, stored).to_json_string())


class OrtolanExporter(OnnxExporter):  # type: ignore[misc]
    """Exports each graph like OnnxExporter, and optimizes it.

    A program is an onnx_ir.Model; after an export, its `meta["ortolan_report"]` is the OptimizationReport. `export`
    raises errors of Ortolan, and `export_for_generation` raises a RuntimeError with the error as its cause.
    """

    export_format = FORMAT
    config_class = OrtolanConfig
    # Errors of components left unchanged during export_for_generation; None outside of it.
    _unchanged: list[NothingToReplaceError] | None = None

    def export_program(
        self, model: Any, sample_inputs: MutableMapping[str, Any], config: OrtolanConfig
    ) -> tuple[ir.Model, Any]:
        """Export and optimize one graph; return the program and the metadata of OnnxExporter."""
        exported, metadata = super().export_program(model, sample_inputs, config)
        work = tempfile.TemporaryDirectory(prefix="ortolan-")
        try:
            source, target = (Path(work.name) / name for name in ("exported.onnx", "model.onnx"))
            OnnxExporter.save_program(exported, source)
            del exported
            try:
                report = optimize_onnx(source, target, config.optimize_options())
            except NothingToReplaceError as error:
                if self._unchanged is None:
                    raise
                self._unchanged.append(error)
                program, report = self.load_program(source), None
            else:
                for file in OnnxExporter.program_files(source.name):
                    (source.parent / file).unlink(missing_ok=True)
                program = self.load_program(target)
        except BaseException:
            work.cleanup()
            raise
        # Large weights stay in the file, which sessions map. So the file is deleted when the program is.
        weakref.finalize(program, work.cleanup)
        if report is not None:
            program.meta[REPORT_KEY] = report
        return program, metadata

    def export_for_generation(
        self, model: Any, sample_inputs: MutableMapping[str, Any], config: Any, **options: Any
    ) -> ExportedModel:
        """Export and optimize all components of a model that generates.

        Components in which the recipe finds no layer stay unchanged, without a report.

        Raises:
            RecipeError: A component would read compressed caches that no other component writes. 'prefill' reads no
                caches and writes floats, so that with compressed caches generation must begin with 'decode'.
            NothingToReplaceError: The recipe finds no layer in any component.
        """
        if not isinstance(config, Mapping) and _compresses_caches(config):
            raise RecipeError(
                "recipe compresses caches, but component 'prefill' gives float caches to 'decode'; give "
                "config={'prefill': OrtolanConfig(…), 'decode': …} with such a recipe for 'decode' only and "
                "multi_token_decode=True, and begin with 'decode' and ortolan.transformers.empty_cache; or set options "
                'keys and values to "float32"'
            )
        if isinstance(config, Mapping) and not options.get("multi_token_decode"):
            for name, one in config.items():
                if name != "prefill" and isinstance(one, OrtolanConfig) and _compresses_caches(one):
                    raise RecipeError(
                        f"recipe of component {name!r} compresses caches, but 'prefill' gives float caches; give "
                        "multi_token_decode=True, and begin with 'decode' and ortolan.transformers.empty_cache; or set "
                        'options keys and values to "float32"'
                    )
        self._unchanged = []
        try:
            exported = super().export_for_generation(model, sample_inputs, config, **options)
            if len(self._unchanged) == len(exported.components):
                raise self._unchanged[0]
        finally:
            self._unchanged = None
        return exported

    @classmethod
    def save_program(cls, program: ir.Model, path: str | Path) -> None:
        """Save a program like OnnxExporter, with weights aligned so that kernels can read the mapped file."""
        import onnx_ir as ir

        data = f"{Path(path).name}.data"
        ir.save(program, str(path), external_data=data, size_threshold_bytes=1024, alignment=64, align_threshold=0)


class OrtolanModelRunner(OnnxModelRunner):  # type: ignore[misc]
    """Runs a program in ONNX Runtime with Ortolan's operators, by default on the CPU."""

    @classmethod
    def from_program(
        cls,
        program: ir.Model,
        metadata: Any,
        device: Any = None,
        providers: list[Any] | None = None,
        session_options: onnxruntime.SessionOptions | None = None,
    ) -> Any:
        """Return a runner for a program; arguments as for OnnxModelRunner."""
        options = session_options if session_options is not None else new_options()
        register(options)
        if device is None and providers is None:
            device = "cpu"
        return super().from_program(program, metadata, device, providers, options)


def empty_cache(runner: OrtolanModelRunner) -> DynamicCache:
    """Return empty caches, with which generation begins in a component exported with `multi_token_decode`.

    Returns:
        Caches [1, heads, 0, size] of the types that the component reads.

    Raises:
        ModelError: The component has no caches of known shape, or caches of an unsupported type.
    """
    found: dict[tuple[int, str], torch.Tensor] = {}
    for spec in runner.session.get_inputs():
        named = _CACHE_INPUT.search(spec.name)
        if named is not None:
            shape = [size if isinstance(size, int) else 0 for size in spec.shape]
            if spec.type not in _CACHE_TYPES:
                raise ModelError(
                    f"input {spec.name!r} is a cache of type {spec.type}, expected one of {', '.join(_CACHE_TYPES)}; "
                    "export the model in float32, float16 or bfloat16"
                )
            found[int(named[1]), named[2]] = torch.zeros([1, shape[1], 0, shape[3]], dtype=_CACHE_TYPES[spec.type])
    layers = sorted({layer for layer, _ in found})
    if not layers or any(0 in (one.shape[1], one.shape[3]) for one in found.values()):
        names = ", ".join(spec.name for spec in runner.session.get_inputs())
        raise ModelError(f"component has no cache inputs of known shape, only {names}; use 'decode'")
    cache = DynamicCache()
    for layer in layers:
        cache.update(found[layer, "keys"], found[layer, "values"], layer)
    return cache


def _compresses_caches(config: OrtolanConfig) -> bool:
    chosen = read_choice(config.optimize_options()).recipe
    if chosen is None:
        return False
    caches = [step.options for step in chosen.passes if isinstance(step.options, CompressCacheOptions)]
    return any((one.keys, one.values) != ("float32", "float32") for one in caches)


register_backend(OrtolanExporter, OrtolanModelRunner)

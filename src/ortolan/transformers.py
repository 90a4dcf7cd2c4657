"""transformers' own ONNX exporter (5.23), followed by Ortolan: importing this module registers export format "ortolan".

exported = OrtolanExporter().export(model, inputs, OrtolanConfig(dynamic=True, weights="int8"))
exported(**inputs); exported.save_pretrained("fast/"); ExportedModel.from_pretrained("fast/")
"""

from __future__ import annotations

import re
import tempfile
import weakref
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortolan.graph_passes.forms import CHOICES
from ortolan.graph_passes.options import HEADS
from ortolan.graph_passes.passes.cache.compress_cache import CompressCacheOptions

from .choice import read_choice
from .errors import ModelError, NothingToReplaceError, RecipeError
from .optimize import optimize_onnx
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
REPORT_KEY = "ortolan_report"  # of a fresh program's meta
_CACHE_INPUT = re.compile(r"past_key_values\.layers\.(\d+)\.(keys|values)$")
_CACHE_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(uint8)": torch.uint8,  # compressed
}


@dataclass
class OrtolanConfig(OnnxConfig):  # type: ignore[misc]
    """OnnxConfig, and the arguments of `ortolan.optimize_onnx` of these names."""

    export_format: str = FORMAT
    recipe: Any = None
    weights: str | None = None
    group_size: int | None = None
    sparsity: float | None = None
    pattern: str | None = None
    method: Any = None
    cache: str | None = None
    ignore: Any = HEADS
    calibration: Any = None
    tokenizer: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    portable: bool = True
    allow_different: bool = False
    threads: int | None = None

    def form(self) -> dict[str, Any]:
        """What layers become."""
        return {name: getattr(self, name) for name in CHOICES}

    def to_json_string(self) -> str:
        """What `save_pretrained` keeps: all but the calibration data, and the objects of others."""
        return str(super(OrtolanConfig, replace(self, calibration=None, tokenizer=None)).to_json_string())


class OrtolanExporter(OnnxExporter):  # type: ignore[misc]
    """Exports each graph as OnnxExporter does and optimizes it. Errors of Ortolan are raised as they are by `export`,
    and as the cause of a RuntimeError by `export_for_generation`.

    A program is an onnx_ir.Model; of a fresh one, `meta["ortolan_report"]` is the OptimizationReport.
    """

    export_format = FORMAT
    config_class = OrtolanConfig
    # While components of a model that generates are exported: why the recipe left some of them as they were.
    _unchanged: list[NothingToReplaceError] | None = None

    def export_program(
        self, model: Any, sample_inputs: MutableMapping[str, Any], config: OrtolanConfig
    ) -> tuple[ir.Model, Any]:
        exported, metadata = super().export_program(model, sample_inputs, config)
        work = tempfile.TemporaryDirectory(prefix="ortolan-")
        try:
            source, target = (Path(work.name) / name for name in ("exported.onnx", "model.onnx"))
            OnnxExporter.save_program(exported, source)
            del exported
            try:
                report = optimize_onnx(
                    source,
                    target,
                    recipe=config.recipe,
                    calibration=config.calibration,
                    tokenizer=config.tokenizer,
                    options=config.options,
                    portable=config.portable,
                    allow_different=config.allow_different,
                    threads=config.threads,
                    **config.form(),
                )
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
        # Large weights stay in the file, which the session maps; it goes with the program.
        weakref.finalize(program, work.cleanup)
        if report is not None:
            program.meta[REPORT_KEY] = report
        return program, metadata

    def export_for_generation(
        self, model: Any, sample_inputs: MutableMapping[str, Any], config: Any, **options: Any
    ) -> ExportedModel:
        """As OnnxExporter does. Raises RecipeError where a component is to read compressed caches that no other gives:
        'prefill' reads none, and gives floats, so that generation must begin with 'decode', on several tokens. A
        component in which the recipe finds nothing to replace stays as it was exported, without a report; where that
        is all of them, NothingToReplaceError is raised."""
        if not isinstance(config, Mapping) and _compresses_caches(config):
            raise RecipeError(
                "the recipe compresses caches, but component 'prefill' reads none, and gives floats to 'decode'; give "
                "config={'prefill': OrtolanConfig(…), 'decode': …} with such a recipe for 'decode' only and "
                "multi_token_decode=True, and begin with 'decode' and ortolan.transformers.empty_cache; or set options "
                'keys and values to "float32"'
            )
        if isinstance(config, Mapping) and not options.get("multi_token_decode"):
            for name, one in config.items():
                if name != "prefill" and isinstance(one, OrtolanConfig) and _compresses_caches(one):
                    raise RecipeError(
                        f"the recipe of component {name!r} compresses caches, but 'prefill' gives floats; give "
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
        """As OnnxExporter does, with the weights where kernels can read them in the mapped file."""
        import onnx_ir as ir

        data = f"{Path(path).name}.data"
        ir.save(program, str(path), external_data=data, size_threshold_bytes=1024, alignment=64, align_threshold=0)


class OrtolanModelRunner(OnnxModelRunner):  # type: ignore[misc]
    """Runs a program in ONNX Runtime with Ortolan's operators, on the CPU unless told otherwise."""

    @classmethod
    def from_program(
        cls,
        program: ir.Model,
        metadata: Any,
        device: Any = None,
        providers: list[Any] | None = None,
        session_options: onnxruntime.SessionOptions | None = None,
    ) -> Any:
        options = session_options if session_options is not None else new_options()
        register(options)
        if device is None and providers is None:
            device = "cpu"
        return super().from_program(program, metadata, device, providers, options)


def empty_cache(runner: OrtolanModelRunner) -> DynamicCache:
    """What generation begins with in a component that takes several tokens after a cache (`multi_token_decode`): caches
    of no token for a batch of 1, [1, heads, 0, size] each, in the type that this component reads. Raises ModelError for
    one without caches, or with caches of another type."""
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
        raise ModelError(f"this component reads no caches of known shapes: its inputs are {names}; take 'decode'")
    cache = DynamicCache()
    for layer in layers:
        cache.update(found[layer, "keys"], found[layer, "values"], layer)
    return cache


def _compresses_caches(config: OrtolanConfig) -> bool:
    chosen = read_choice(config.recipe, config.form(), config.options).recipe
    if chosen is None:
        return False
    caches = [step.options for step in chosen.passes if isinstance(step.options, CompressCacheOptions)]
    return any((one.keys, one.values) != ("float32", "float32") for one in caches)


register_backend(OrtolanExporter, OrtolanModelRunner)

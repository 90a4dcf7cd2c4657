"""The measurements of layers in a search: time and error of each format, and sensitivity of the outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

import onnx_ir as ir

from ortolan.errors import NothingToReplaceError
from ortolan.progress import Progress, Stage

from ..find.attention import Attention, find_attentions
from ..find.cached_attention import CachedAttention, find_cached_attentions
from ..find.dimensions import Dimensions
from ..find.linear import Linear
from ..measure.evidence import Evidence
from ..measure.feeds import Feeds
from ..passes.context import PassContext
from ..recipe import Recipe
from ..report.search import AutoReport, LayerChoice, MeasuredForm
from ..run import plan, transform
from .budget import Limit
from .candidates import NAME, ORIGINAL, ROWS, Candidate, make_recipe
from .layer_times import LayerTimes, case_of
from .path import worth_measuring
from .sensitivity import measure_sensitivities
from .trials import new_context

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
_NORMALIZE = {"name": NAME, "pass": [{"name": "normalize"}]}


class LayerStudy:
    """Measures layers and adds them to a report.

    Attributes:
        has_attention: The model has attention that can be fused.
    """

    def __init__(self, evidence: Evidence, report: AutoReport, times: LayerTimes, progress: Progress) -> None:
        """Prepare the measurements."""
        self._evidence, self._report, self._times, self._progress = evidence, report, times, progress
        self.has_attention = False

    def measure(
        self, shapes: Sequence[Feeds], judged: Sequence[Feeds], limit: Limit, forms: Sequence[Candidate]
    ) -> None:
        """Measure time, sensitivity and error of all layers in these formats.

        shapes: Feeds of the shapes to optimize for. judged: Feeds on which the whole model is evaluated.
        """
        with new_context(self._evidence, "model.onnx", portable=False) as context:
            transform(plan(Recipe.from_dict(_NORMALIZE), context), context)
            model = context.source.model
            dims = Dimensions(model.graph)
            attentions = [*find_attentions(dims), *find_cached_attentions(dims)]
            self.has_attention = any(isinstance(one, Attention | CachedAttention) for one in attentions)
            able = self._able(model, context.survey(model))
            rows = self._count_rows(model, able, shapes)
            self._time_layers(context, able, rows, forms)
            outputs = limit.outputs([value.name or "" for value in model.graph.outputs if value.dtype in _FLOATS])
            self._measure_sensitivities(context, [linear for linear in able if linear.name in rows], judged, outputs)
        self._measure_errors(forms)

    def measure_errors_of(self, recipes: Mapping[str, Recipe], judged: Sequence[Feeds], limit: Limit) -> dict[str, str]:
        """Measure sensitivity, and the error and the bytes of each layer in each recipe.

        The report lists them under the recipe's name. Layers to which two recipes give the same bits are not measured.
        judged: Feeds on which the whole model is evaluated.

        Returns:
            The name of each layer's input.
        """
        with new_context(self._evidence, "model.onnx", portable=False) as context:
            transform(plan(Recipe.from_dict(_NORMALIZE), context), context)
            model = context.source.model
            able = self._able(model, context.survey(model))
            inputs = {linear.name: linear.x.name or "" for linear in able}
            self._report.layers += [LayerChoice(linear.name, "has no choice of bits") for linear in able]
            outputs = limit.outputs([value.name or "" for value in model.graph.outputs if value.dtype in _FLOATS])
            self._measure_sensitivities(context, able, judged, outputs)
        layers = {layer.name: layer for layer in self._report.layers if layer.name in inputs}
        found: dict[str, dict[str, tuple[int | None, MeasuredForm]]] = {}
        for number, (name, recipe) in enumerate(recipes.items()):
            self._progress(Stage.LAYER_ERRORS, number, len(recipes))
            with new_context(self._evidence, "model.onnx", portable=False) as context:
                transform(plan(recipe, context), context)
            for layer in context.report.layers:
                if layer.status == "replaced" and layer.name in layers:
                    form = MeasuredForm([], layer.output_error, layer.bytes_after)
                    found.setdefault(layer.name, {})[name] = (layer.weight_bits, form)
        self._progress(Stage.LAYER_ERRORS, len(recipes), len(recipes))
        for layer_name, forms in found.items():
            if len({bits for bits, _ in forms.values()}) == len(recipes):
                layers[layer_name].forms = {name: form for name, (_, form) in forms.items()}
        return inputs

    def _able(self, model: ir.Model, linears: Sequence[Linear]) -> list[Linear]:
        """Return the layers that can change, and report why the others cannot."""
        names = Counter(name for linear in linears for name in {linear.name, *linear.weight_names})
        able = []
        for linear in linears:
            reason = None
            if linear.int4 is not None or linear.int8 is not None:
                kept = "already stores a quantized weight, which the default recipe keeps exactly"
                reason = linear.why_not_stored or kept
            elif linear.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
                reason = f"computes on {linear.dtype.name}, expected FLOAT or FLOAT16"
            elif names[linear.name] > 1:
                reason = (
                    f"{names[linear.name]} layers or weights are named {linear.name!r}, so that it cannot be selected"
                )
            elif any(names[name] > 1 for name in linear.weight_names):
                reason = "shares its weight with another layer"
            elif linear.node.graph is not model.graph:
                reason = "is in a subgraph, so it is not measured"
            if reason is None:
                able.append(linear)
            else:
                self._report.layers.append(LayerChoice(linear.name, reason))
        return able

    def _count_rows(self, model: ir.Model, linears: Sequence[Linear], shapes: Sequence[Feeds]) -> dict[str, list[int]]:
        """Return the number of input rows of each layer at each shape, without inputs from subgraphs."""
        counts: dict[str, list[int]] = {}
        with self._evidence.recording(model, linears, shapes) as recorder:
            recorder.record(
                recorder.names, lambda name, x: counts.setdefault(name, []).append(len(x)), lambda done, total: None
            )
        return {linear.name: counts[linear.x.name] for linear in linears if linear.x.name in counts}

    def _time_layers(
        self,
        context: PassContext,
        linears: Sequence[Linear],
        rows: Mapping[str, Sequence[int]],
        forms: Sequence[Candidate],
    ) -> None:
        weights = sum(linear.k * linear.n for linear in linears)
        for number, linear in enumerate(linears):
            self._progress(Stage.TIME_LAYERS, number, len(linears))
            choice = LayerChoice(linear.name, "the original is faster")
            self._report.layers.append(choice)
            if linear.name not in rows:
                choice.reason = "has an input from a subgraph, so it is not measured"
                continue
            matrix = linear.matrix()
            bias = linear.bias_value is not None
            cases = [case_of(matrix, count, linear.dtype, bias, weights) for count in rows[linear.name]]
            times = [self._times.of(case, linear.matrix, forms) for case in cases]
            choice.before_ms = [of_shape[ORIGINAL] for of_shape in times]
            for form in forms:
                if all(form.timing in of_shape for of_shape in times):
                    choice.forms[form.name] = MeasuredForm([of_shape[form.timing] for of_shape in times])
            del matrix
            context.release()
        self._progress(Stage.TIME_LAYERS, len(linears), len(linears))

    def _measure_sensitivities(
        self, context: PassContext, linears: Sequence[Linear], feeds: Sequence[Feeds], outputs: Sequence[str]
    ) -> None:
        """Measure the sensitivity of `outputs` to each layer. This changes the context's model."""
        model = context.source.model
        with ExitStack() as copies:
            found = measure_sensitivities(
                model,
                linears,
                feeds,
                outputs,
                lambda wanted: context.new_name(model, wanted),
                lambda: copies.enter_context(self._evidence.open(model)),
                lambda done, total: self._progress(Stage.SENSITIVITIES, done, total),
            )
        for layer in self._report.layers:
            layer.sensitivity = found.get(layer.name)

    def _measure_errors(self, forms: Sequence[Candidate]) -> None:
        layers = {layer.name: layer for layer in self._report.layers}
        worth = {name: worth_measuring(layer) for name, layer in layers.items()}
        for number, form in enumerate(forms):
            self._progress(Stage.LAYER_ERRORS, number, len(forms))
            names = [name for name, found in worth.items() if form.name in found]
            if not names:
                continue
            with (
                new_context(self._evidence, "model.onnx", portable=False) as context,
                suppress(NothingToReplaceError),
            ):
                transform(plan(make_recipe({form: names}, rows=ROWS), context), context)
            for layer in context.report.layers:
                if layer.status == "replaced" and layer.name in names:
                    layers[layer.name].forms[form.name].error = layer.output_error
        self._progress(Stage.LAYER_ERRORS, len(forms), len(forms))

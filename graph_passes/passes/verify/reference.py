"""Answers of the pruned and quantized model, kept for pass verify before layers are replaced.

If ONNX Runtime rounds the inputs of layers that keep their stored weights, the model is run with these weights in float
(float_reference.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import onnx_ir as ir

from ortolan.errors import CalibrationError, VerificationError

from ...find.linear import linears_in
from ...measure.answers import keep
from ...measure.decoding import Decoded, calls_to_decode, decode
from ...measure.feeds import Feeds
from ...measure.segments import Segments
from ...measure.sessions import only_numbers, open_quietly, run_session
from ..activations import masked_inputs
from ..context import PassContext, Reference
from .float_reference import computed_in_float, rounding_layers


def keep_reference(model: ir.Model, context: PassContext) -> None:
    """Run the model before layers are replaced, if its answers may differ from the original's.

    They may differ after pruning or quantization, with thresholds or a prompt, and if layers keep stored weights.
    """
    if not context.plan.feeds_to_verify or context.reference is not None:
        return
    layers = context.layers
    rounding = rounding_layers(model, context.plan)
    if not (layers.changed or layers.masked or context.caches.prompt or rounding):
        return

    def new_name(wanted: str) -> str:
        return context.new_name(model, wanted)

    in_float = bool(rounding or layers.freed) and not layers.weights_changed
    context.evidence.feeds()  # generates feeds for the original if none are given
    with computed_in_float(rounding, new_name), masked_inputs(model, layers.thresholds, new_name):
        caches = context.caches
        # A compressed cache is verified by decoding tokens one by one. Each would be another run of all pieces.
        decodes = caches.prompt is not None or caches.taken or caches.formats
        found = _in_pieces(model, context) if context.source.is_large and not decodes else _whole(model, context)
    context.reference = replace(found, in_float=in_float)


def _in_pieces(model: ir.Model, context: PassContext) -> Reference:
    """Run a large model piece by piece. The whole model would need a file as large as its weights in float32.

    Tokens are not decoded one by one, so verify_decoded reports their error and does not limit it.
    """
    evidence = context.evidence
    feeds = evidence.feeds_to_judge(context.plan.feeds_to_verify)
    context.release()
    open_piece = partial(open_quietly, source=context.source, library=not context.portable, in_float=True)
    folder = evidence.new_folder() / "pieces"
    outputs, which = model.graph.outputs, "verification inputs"
    with Segments(model, list(linears_in(model)), feeds, folder, open_piece, outputs, which) as pieces:
        try:
            for _ in pieces.run(lambda value, array: None):
                context.release()
            return Reference([keep(only_numbers(one), evidence.folder) for one in pieces.answers()], None)
        except CalibrationError as error:
            raise VerificationError(f"before its layers were replaced, {error}; nothing was saved") from error


def _whole(model: ir.Model, context: PassContext) -> Reference:
    with context.evidence.open(model, in_float=True) as session:
        context.release()
        feeds = context.evidence.feeds_to_judge(context.plan.feeds_to_verify, session)
        return _run(session, feeds, context)


def _run(session: Any, feeds: Sequence[Feeds], context: PassContext) -> Reference:
    past = None if context.caches.prompt is None else context.caches.prompt.pruned_past()
    who = "the model before its layers were replaced"
    calls = calls_to_decode(feeds, context.caches.uses) if context.caches.uses else None
    decoded = None
    if calls is not None:
        names = [output.name for output in session.get_outputs()]
        with suppress(VerificationError):  # the model has fixed shapes
            decoded = decode_calls(session, calls, context, names, who, VerificationError, past)
            decoded = replace(
                decoded,
                prompt=keep(decoded.prompt, context.evidence.folder),
                steps=[keep(one, context.evidence.folder) for one in decoded.steps],
                last=[],
                last_feeds={},  # these arrays hold caches in the session's memory
            )
    if context.caches.prompt is not None and past is not None:
        feeds = [context.caches.prompt.in_front_of(one, past) for one in feeds]
    runs = (run_session(session, one, who, VerificationError) for one in feeds)
    return Reference([keep(one, context.evidence.folder) for one in runs], decoded)


def decode_calls(
    session: Any,
    calls: Sequence[Feeds],
    context: PassContext,
    names: Sequence[str],
    who: str,
    error_type: type[Exception],
    past: Feeds | None = None,
) -> Decoded:
    """Return a model's answers to calls of calls_to_decode, each with the caches of the call before.

    names: the original's outputs; the steps contain only these. who, error_type: as for run_session. past: keys and
    values of the prompt, if the model does not contain it.
    """
    prompt = context.caches.prompt
    if prompt is not None and past is not None:
        calls = [prompt.in_front_of(calls[0], past), *map(prompt.counted_in, calls[1:])]
    carried = {use.past: names.index(use.present) for use in context.caches.uses.values()}
    added = {name: len(names) + number for number, name in enumerate(context.caches.exact_keys) if name in calls[0]}
    decoded = decode(lambda feeds: run_session(session, feeds, who, error_type), calls, carried | added)
    if prompt is not None and past is not None:
        decoded = replace(decoded, prompt=prompt.cut_from(names, decoded.prompt))
    return replace(decoded, steps=[answers[: len(names)] for answers in decoded.steps])

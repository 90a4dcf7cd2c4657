"""Puts a tokenizer before a model and pooling after it, so that the model maps texts to vectors or scores.

The tokenizer consists of nodes of onnxruntime-extensions, which create_session registers for such models.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.errors import ModelError, VerificationError, one_line

from ..measure.feeds import model_inputs
from ..measure.sessions import quiet_options
from .batch import Batch, make_batch, positions
from .nodes import EXTENSIONS_DOMAIN, NAMES, Nodes, graph_input
from .pair_prompt import PairPrompt
from .pooling import apply_dense, normalize, pool
from .text_plan import EMBEDDING, TextInput, TextPlan, read_plan

TEXT_INPUT, PAIR_INPUT, PROMPT_INPUT = "text", "text_pair", "prompt_name"
SCORE = "score"
_ONE_LENGTH = "text_and_text_pair_have_one_length"  # name of the node that fails otherwise
# Limit for the relative error of vectors or scores between the models with and without a tokenizer. The models differ
# in the summation order of pooling and in padding; padding matters if activations are quantized by a tensor's range.
_MAX_TEXT_ERROR = 1e-2

# Texts on which the tokenizer in the graph must agree with `tokenizers`, in addition to calibration texts.
PROBES = (
    "",
    " ",
    "Hello, world!",
    "The QUICK brown fox -- doesn't jump over 13 lazy dogs?",
    "we'll I'M they'RE 12345 1,000.5 3\u00b2 \u0663\u0664 \u2167 'S 'LL",
    "Crème brûlée, Ångström, Český, Łódź, İstanbul, Việt Nam, straße, ﬁne ½",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "日本語のテキスト 中文文本 한국어 텍스트 नमस्ते दुनिया ไทย",
    "great😀 news 👩‍👩‍👧 foo☃bar ¿qué? “quoted” – dash… €5 🇩🇪 ＡＢＣ ｶﾞ ① 𝐀",
    "tab\tline\nreturn\r bell\x07 soft\u00adhyphen zero\u200bwidth nbsp\u00a0end \ue000 \ufffd \U00050000 \ufeff",
    "  two  spaces\u3000wide \u2003 em \u2028line\x85next\x0b\x0c\x1c \t\n\n  x \r\n\r\n y   \n",
    "[CLS] a [SEP] b [MASK] [UNK] [PAD] <s> </s> <mask> [ sep ] <unk> a< <s </",
    "x" * 100 + " " + "y" * 101 + " " + "unaffable" * 30,
    "e\u0301 combining a\u030a\u0301 \u0301alone \u1112\u1161\u11ab",
    "▁under ▁▁ Ġ _ __init__(self): return x[0]  # comment",
    "many words " * 400,
)


def plan_text_input(
    model: ir.Model, text: TextInput, path: Path | None = None, tokenizer: str | os.PathLike[str] | None = None
) -> TextPlan:
    """Read the tokenizer and the folder; unsupported ones are refused before any work is done.

    tokenizer: the tokenizer's path, unless `text` has one.

    Raises:
        ModelError: A setting or the tokenizer is not supported.
        LibraryError: onnxruntime-extensions is not installed.
        VerificationError: The tokenizer's nodes disagree with `tokenizers`.
    """
    plan = read_plan(model, text, path, tokenizer)
    check_tokenizer(plan, [*PROBES, *plan.tokenizer.probes])
    return plan


def add_text_input(model: ir.Model, plan: TextPlan, probes: Sequence[str] = ()) -> None:
    """Change a model so that it takes texts.

    The input is "text", strings [batch], and the output "sentence_embedding", float32 [batch, hidden]. A model that
    gives scores has inputs "text" and "text_pair" and output "score", float32 [batch]. If the folder has prompts, an
    optional input "prompt_name" selects one: strings [1], or one per text.

    Args:
        model: A model that `plan_text_input` has accepted.
        plan: The result of `plan_text_input`.
        probes: Further texts to check the tokenizer on.

    Raises:
        VerificationError: The tokenizer's nodes disagree with `tokenizers` on `probes`.
    """
    if probes:
        check_tokenizer(plan, probes)
    output = next(value for value in model.graph.outputs if value.name == plan.output)
    _free_names(model)
    builder = Nodes(_opset(model))
    texts = [graph_input(TEXT_INPUT, ir.DataType.STRING, ["batch"])]
    if plan.scores:
        texts.append(graph_input(PAIR_INPUT, ir.DataType.STRING, ["batch"]))
    prompt = _prompt_input(plan) if plan.folder.prompts and not plan.scores else None
    read = texts if prompt is None else [_with_prompt(builder, plan, texts[0], prompt), *texts[1:]]
    batch = _tokenize(builder, plan, read)
    for value in model_inputs(model):
        new = _fed(builder, plan, batch, value.name or "")
        if value.dtype not in (None, ir.DataType.INT64):
            new = builder.cast(new, value.dtype)
        value.replace_all_uses_with(new)
    in_front = len(builder.nodes)
    made = _finish(builder, plan, output, batch)
    first = next(iter(model.graph), None)
    if first is not None:
        model.graph.insert_before(first, builder.nodes[:in_front])
        model.graph.extend(builder.nodes[in_front:])
    else:
        model.graph.extend(builder.nodes)
    for value in list(model.graph.inputs):
        if value.name not in model.graph.initializers:
            model.graph.inputs.remove(value)
    model.graph.inputs[:0] = texts
    if prompt is not None:
        model.graph.inputs.append(prompt)
        model.graph.initializers[PROMPT_INPUT] = prompt
    model.graph.outputs[:] = [made]
    model.graph.opset_imports[EXTENSIONS_DOMAIN] = 1


def _fed(nodes: Nodes, plan: TextPlan, batch: Batch, name: str) -> ir.Value:
    if name == "position_ids":
        return positions(nodes, batch, plan.file.pad_id + 1 if plan.folder.positions_behind_pad else 0)
    return {"input_ids": batch.ids, "attention_mask": batch.mask, "token_type_ids": batch.types}[name]


def _tokenize(nodes: Nodes, plan: TextPlan, texts: Sequence[ir.Value]) -> Batch:
    read = texts[0]
    if plan.pair is not None:
        read = _in_prompt(nodes, plan.pair.inner, texts)
    elif len(texts) > 1:  # one tokenizer handles all first texts, then all second texts
        rows = (nodes.op("Unsqueeze", one, nodes.ints(0)) for one in texts)
        both = nodes.op("Concat", *rows, axis=0, name=_ONE_LENGTH)
        read = nodes.op("Reshape", both, nodes.ints(-1))
    tokens = plan.tokenizer.tokenize(nodes, read)
    return make_batch(nodes, tokens, plan.template, plan.max_tokens, plan.file.pad_id, plan.length)


def _in_prompt(nodes: Nodes, prompt: PairPrompt, texts: Sequence[ir.Value]) -> ir.Value:
    """Return the prompts with queries and documents, strings [batch]."""
    query, document = (nodes.op("Unsqueeze", one, nodes.ints(1)) for one in texts)
    pairs = nodes.op("Concat", query, document, axis=1, name=_ONE_LENGTH)
    query, document = nodes.many("Split", 2, pairs, nodes.ints(1, 1), axis=1)
    shape = nodes.op("Shape", query)
    before, between, after = (
        nodes.op("Expand", nodes.texts(one), shape) for one in (prompt.before, prompt.between, prompt.after)
    )
    parts = nodes.op("Concat", before, query, between, document, after, axis=1)
    return nodes.text_op("StringJoin", parts, nodes.texts(""), nodes.ints(1))


def _prompt_input(plan: TextPlan) -> ir.Value:
    value = graph_input(PROMPT_INPUT, ir.DataType.STRING, ["prompts"])
    value.const_value = ir.StringTensor([plan.prompt_name.encode()], shape=ir.Shape([1]), name=PROMPT_INPUT)
    value.shape = ir.Shape([None])
    return value


def _with_prompt(nodes: Nodes, plan: TextPlan, texts: ir.Value, name: ir.Value) -> ir.Value:
    """Add the prompt with this name before each text; an empty name means no prompt."""
    known = {"": "", **plan.folder.prompts}
    # StringEqual requires equal shapes.
    shape = nodes.op("Concat", nodes.op("Shape", name), nodes.ints(len(known)), axis=0)
    names = nodes.op("Expand", nodes.op("Unsqueeze", name, nodes.ints(1)), shape)
    equal = nodes.text_op("StringEqual", names, nodes.op("Expand", nodes.texts(*known), shape))
    found = nodes.op("Mul", nodes.cast(equal, ir.DataType.INT64), nodes.ints(*range(1, len(known) + 1)))
    # An unknown name gets index -1 - len(known), which Gather refuses.
    number = nodes.op("Sub", nodes.sum(found, 1), nodes.integer(1))
    number = nodes.op("Where", nodes.op("Less", number, nodes.integer(0)), nodes.integer(-1 - len(known)), number)
    number = nodes.op("Expand", number, nodes.op("Shape", texts))
    prompts = nodes.op("Gather", nodes.texts(*known.values()), number, axis=0, name="prompt_name_is_known")
    both = nodes.op("Concat", *(nodes.op("Unsqueeze", one, nodes.ints(1)) for one in (prompts, texts)), axis=1)
    return nodes.text_op("StringJoin", both, nodes.texts(""), nodes.ints(1))


def _finish(nodes: Nodes, plan: TextPlan, output: ir.Value, batch: Batch) -> ir.Value:
    """Return the model's new output: vectors or scores of texts."""
    if plan.scores:
        made = nodes.op("Reshape", nodes.cast(output, ir.DataType.FLOAT), nodes.ints(-1))
        made = nodes.op("Sigmoid", made) if plan.activation == "sigmoid" else made
        made.name, made.shape = SCORE, ir.Shape(["batch"])
    else:
        made = nodes.cast(output, ir.DataType.FLOAT)
        width = output.shape[-1] if output.shape is not None else None
        if plan.pooling is not None:
            made = pool(nodes, output, batch.mask, plan.pooling)
            for layer in plan.folder.dense:
                made = apply_dense(nodes, made, layer)
                width = len(layer.weight)
        made = normalize(nodes, made) if plan.normalize else made
        made.name, made.shape = EMBEDDING, ir.Shape(["batch", width])
    made.type = ir.TensorType(ir.DataType.FLOAT)
    return made


def tokenizer_model(plan: TextPlan, opset: int = 17, ir_version: int = 8) -> ir.Model:
    """Return the tokenizer as a model.

    Inputs: text, and text_pair for pairs, strings [batch]. Outputs: input_ids, attention_mask and token_type_ids, int64
    [batch, tokens].
    """
    builder = Nodes(opset)
    names = [TEXT_INPUT, PAIR_INPUT] if plan.scores else [TEXT_INPUT]
    texts = [graph_input(name, ir.DataType.STRING, ["batch"]) for name in names]
    batch = _tokenize(builder, plan, texts)
    outputs = {"input_ids": batch.ids, "attention_mask": batch.mask, "token_type_ids": batch.types}
    for name, value in outputs.items():
        value.name, value.type = name, ir.TensorType(ir.DataType.INT64)
        value.shape = ir.Shape(["batch", "tokens"])
    graph = ir.Graph(
        texts, list(outputs.values()), nodes=builder.nodes, opset_imports={"": opset, EXTENSIONS_DOMAIN: 1}, name="text"
    )
    return ir.Model(graph, ir_version=ir_version, producer_name="ortolan")


def _free_names(model: ir.Model) -> None:
    """Rename values of the model whose names are needed for new values, such as sentence_embedding."""
    values = [
        *model.graph.initializers.values(),
        *(value for node in model.graph.all_nodes() for value in node.outputs),
    ]
    taken = {value.name for value in values}
    for value in values:
        name = value.name or ""
        if name in (TEXT_INPUT, PAIR_INPUT, PROMPT_INPUT, EMBEDDING, SCORE) or name.startswith(NAMES):
            number = next(number for number in itertools.count() if f"{name}_before_{number}" not in taken)
            value.name = f"{name}_before_{number}"
            taken.add(value.name)


def answers_to_probes(plan: TextPlan, answer: Callable[[Sequence[str]], np.ndarray]) -> list[np.ndarray]:
    """Run a model on short texts, and on one text of max_tokens tokens.

    Args:
        plan: The settings.
        answer: Returns vectors [texts, width], or the scores [texts] of the pairs that `pair_up` makes.

    Raises:
        VerificationError: The model does not run, or answers with NaN or infinity.
    """
    found = []
    for texts in (PROBES, ["a " * plan.max_tokens]):
        try:
            answers = answer(texts)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise VerificationError(
                f"the model fails on {'a text' if len(texts) == 1 else 'texts'} of up to {plan.max_tokens} tokens: "
                f"{one_line(error)}; nothing was saved; give max_tokens (--max-tokens), the number of the model's "
                "positions"
            ) from error
        if not np.isfinite(answers).all():
            raise VerificationError("the model with its tokenizer answers with NaN or infinity; nothing was saved")
        found.append(answers)
    return found


def pair_up(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of texts that a reranker is checked on."""
    return list(zip(texts, reversed(texts), strict=True))


def check_text_model(path: Path, plan: TextPlan, expected: Sequence[np.ndarray]) -> None:
    """Run the final file, and compare its answers with the answers of the model without a tokenizer.

    Args:
        path: The model that takes texts.
        plan: The settings.
        expected: From `answers_to_probes`, for the verified model that takes tokens.

    Raises:
        VerificationError: The model does not run, or answers differently.
    """
    from ortolan.session import create_session

    session = create_session(path, quiet_options())

    def answer(texts: Sequence[str]) -> np.ndarray:
        columns = zip(*pair_up(texts), strict=True) if plan.scores else [texts]
        names = (TEXT_INPUT, PAIR_INPUT)[: 2 if plan.scores else 1]
        feeds = {name: np.array(column, object) for name, column in zip(names, columns, strict=True)}
        return np.asarray(session.run([SCORE if plan.scores else EMBEDDING], feeds)[0])

    for found, want in zip(answers_to_probes(plan, answer), expected, strict=True):
        rows = found.reshape(len(want), -1) - want.reshape(len(want), -1)
        scale = np.maximum(np.linalg.norm(want.reshape(len(want), -1), axis=1), 1.0 if plan.scores else 1e-6)
        error = float((np.linalg.norm(rows, axis=1) / scale).max())
        if not error <= _MAX_TEXT_ERROR:
            raise VerificationError(
                f"the model with its tokenizer answers differently than without: relative error {error:.2g}, expected "
                f"at most {_MAX_TEXT_ERROR}; nothing was saved; keep tokens as the model's inputs"
            )


def check_tokenizer(plan: TextPlan, texts: Sequence[str]) -> None:
    """Compare the tokenizer's nodes with the package `tokenizers`, text by text.

    Raises:
        VerificationError: They disagree.
    """
    from ortolan.session import create_session

    session = create_session(ir.to_proto(tokenizer_model(plan)), quiet_options())
    tokenizer = plan.file.tokenizer
    tokenizer.enable_truncation(plan.room)
    # Also compare a batch of ASCII texts, which takes a separate branch of the graph.
    for some in (texts, [text for text in texts if text.isascii()]):
        _compare(plan, session, some)
    tokenizer.no_truncation()


def _compare(plan: TextPlan, session: Any, texts: Sequence[str]) -> None:
    seconds = [*texts[3:], *texts[:3]]  # second texts of pairs, some shorter and some longer than the first texts
    given: list[tuple[str, ...]] = list(zip(texts, seconds, strict=True) if plan.scores else zip(texts, strict=True))
    expected = plan.encode(plan.file.tokenizer, given)
    columns = [list(texts), seconds][: 2 if plan.scores else 1]
    feeds = {name: np.array(some, object) for name, some in zip((TEXT_INPUT, PAIR_INPUT), columns, strict=False)}
    try:
        ids, mask, types = session.run(None, feeds)
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise ModelError(f"tokenizer file {plan.file.path!r} cannot be run in a graph: {one_line(error)}") from error
    for text, (want, want_kinds), row, kept, kinds in zip(given, expected, ids, mask, types, strict=True):
        found = row[kept.astype(bool)].tolist()
        if found != want or kinds[kept.astype(bool)].tolist() != want_kinds:
            raise VerificationError(_difference(repr(text if plan.scores else text[0]), found, want))


def _difference(text: str, found: Sequence[int], expected: Sequence[int]) -> str:
    first = next((at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, first - 3)
    return (
        f"the tokenizer in the graph gives {list(found[start : start + 12])} from token {start} on for {text[:200]}, "
        f"and 'tokenizers' {list(expected[start : start + 12])}; nothing was saved: keep tokens as the model's inputs"
    )


def _opset(model: ir.Model) -> int:
    return model.graph.opset_imports.get("", 1)

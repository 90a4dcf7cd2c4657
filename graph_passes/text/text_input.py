"""Texts in, vectors out: puts a tokenizer in front of an encoder, and pooling behind it.

The tokenizer's nodes are those of onnxruntime-extensions, which create_session registers where a model has them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.errors import ModelError, VerificationError, listing, one_line

from ..measure.feeds import model_inputs
from ..measure.sessions import quiet_options
from .wordpiece import WordPiece, character_model, load_tokenizer, read_wordpiece, replacements

EXTENSIONS_DOMAIN = "ai.onnx.contrib"
TEXT_INPUT, EMBEDDING = "text", "sentence_embedding"
POOLINGS = ("mean", "cls")
_MOST_TOKENS = 65536  # of a text: ONNX Runtime would reserve memory for more
_NAMES = "/ortolan_text"  # of nodes and values
_OLDEST_OPSET = 13  # Unsqueeze and ReduceSum take their axes as inputs
_REDUCE_AXES_OPSET = 18  # and now ReduceMax and ReduceL2 do
_TINY_COUNT, _TINY_NORM = 1e-9, 1e-12  # what is divided by is at least this

# Texts on which the tokenizer in the graph must give what `tokenizers` gives; those of calibration come on top.
PROBES = (
    "",
    " ",
    "Hello, world!",
    "The QUICK brown fox -- doesn't jump over 13 lazy dogs?",
    "Crème brûlée, Ångström, Český, Łódź, İstanbul, Việt Nam, straße, ﬁne ½",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "日本語のテキスト 中文文本 한국어 텍스트 नमस्ते दुनिया ไทย",
    "great😀 news 👩‍👩‍👧 foo☃bar ¿qué? “quoted” – dash… €5",
    "tab\tline\nreturn\r bell\x07 soft\u00adhyphen zero\u200bwidth nbsp\u00a0end \ue000 \ufffd \U00050000",
    "[CLS] a [SEP] b [MASK] [UNK] [PAD] <s> </s> <mask> [ sep ]",
    "x" * 100 + " " + "y" * 101 + " " + "unaffable" * 30,
    "e\u0301 combining a\u030a\u0301 \u0301alone",
    "many words " * 400,
)


@dataclass(frozen=True)
class TextInput:
    """What optimize_onnx(with_tokenizer=…) puts around an encoder.

    tokenizer: the path of a tokenizer.json (WordPiece). pooling: "mean" of the tokens' vectors, or "cls", the first.
    normalize: makes vectors of length 1. max_tokens: longer texts are cut to so many, special tokens counted; None: to
    as many as the tokenizer.json says.
    """

    tokenizer: str | os.PathLike[str]
    pooling: str = "mean"
    normalize: bool = True
    max_tokens: int | None = None


def check_text_input(model: ir.Model, text: TextInput) -> WordPiece:
    """Reads the tokenizer, and refuses what cannot be built or run, before any work is done.

    Raises ModelError, LibraryError without onnxruntime-extensions, VerificationError as add_text_input does.
    """
    if text.pooling not in POOLINGS:
        raise ModelError(f"pooling is {text.pooling!r}, expected one of {', '.join(POOLINGS)}")
    wordpiece = read_wordpiece(text.tokenizer)
    most = wordpiece.max_tokens if text.max_tokens is None else text.max_tokens
    if most is None:
        raise ModelError(
            f"tokenizer file {os.fspath(text.tokenizer)!r} does not say to how many tokens texts are cut; give "
            "max_tokens (--max-tokens)"
        )
    if not isinstance(most, int) or not 3 <= most <= _MOST_TOKENS:
        raise ModelError(
            f"max_tokens is {most!r} (given, or as the tokenizer.json says), expected at least 3, as two are special "
            f"tokens, and at most {_MOST_TOKENS}; give max_tokens (--max-tokens)"
        )
    known = {"input_ids", "attention_mask", "token_type_ids"}
    names = [value.name or "" for value in model_inputs(model)]
    if "input_ids" not in names or not set(names) <= known:
        raise ModelError(
            f"a tokenizer can be put in front of models with inputs {listing(known)}; this one has {listing(names)}"
        )
    _tokens_output(model)
    if model.graph.opset_imports.get("", 1) < _OLDEST_OPSET:
        raise ModelError(
            f"the model has opset {model.graph.opset_imports.get('', 1)}, and a tokenizer needs {_OLDEST_OPSET} or "
            "later: export it again"
        )
    _check_tokenizer(tokenizer_model(wordpiece, most), text.tokenizer, most, PROBES)
    return wordpiece


def add_text_input(
    model: ir.Model, text: TextInput, wordpiece: WordPiece | None = None, probes: Sequence[str] = ()
) -> None:
    """Changes an encoder (inputs input_ids, and attention_mask and token_type_ids if it has them; an output [batch,
    tokens, hidden]) into a model with input "text", strings [batch], and output "sentence_embedding", float32 [batch,
    hidden].

    Raises ModelError as check_text_input does; VerificationError where the tokenizer's nodes do not give what
    `tokenizers` gives, on our own texts or on `probes`.
    """
    wordpiece = wordpiece or check_text_input(model, text)
    most = text.max_tokens or wordpiece.max_tokens
    assert most is not None
    tokenizer = tokenizer_model(wordpiece, most, _opset(model), model.ir_version)
    long_word = "a" * (wordpiece.most_characters + 1)
    _check_tokenizer(tokenizer, text.tokenizer, most, [*PROBES, long_word, *probes])
    _free_names(model)
    builder = _Nodes(_opset(model))
    texts = _input(TEXT_INPUT, ir.DataType.STRING, ["batch"])
    ids, mask = _tokenize(builder, wordpiece, most, texts)
    tokens = _tokens_output(model)
    given = {"input_ids": ids, "attention_mask": mask}
    for value in model_inputs(model):
        name = value.name or ""
        # All tokens are of one text, of type 0.
        new = given[name] if name in given else builder.op("Mul", ids, builder.constant(np.int64(0)))
        if value.dtype not in (None, ir.DataType.INT64):
            new = builder.op("Cast", new, to=value.dtype.value)
        value.replace_all_uses_with(new)
    first = next(iter(model.graph), None)
    in_front, behind = builder.nodes, _Nodes(_opset(model))
    behind.start_at(len(in_front))
    pooled = _pool(behind, tokens, mask, text)
    if first is not None:
        model.graph.insert_before(first, in_front)
    model.graph.extend(behind.nodes)
    for value in list(model.graph.inputs):
        if value.name not in model.graph.initializers:
            model.graph.inputs.remove(value)
    model.graph.inputs.insert(0, texts)
    pooled.name, pooled.type = EMBEDDING, ir.TensorType(ir.DataType.FLOAT)
    width = tokens.shape[2] if tokens.shape is not None else None
    pooled.shape = ir.Shape(["batch", width])
    model.graph.outputs[:] = [pooled]
    model.graph.opset_imports[EXTENSIONS_DOMAIN] = 1


def tokenizer_model(wordpiece: WordPiece, max_tokens: int, opset: int = 17, ir_version: int = 8) -> ir.Model:
    """The tokenizer alone: text, strings [batch] -> input_ids and attention_mask, int64 [batch, tokens]."""
    builder = _Nodes(opset)
    texts = _input(TEXT_INPUT, ir.DataType.STRING, ["batch"])
    outputs = _tokenize(builder, wordpiece, max_tokens, texts)
    for value, name in zip(outputs, ("input_ids", "attention_mask"), strict=True):
        value.name, value.type = name, ir.TensorType(ir.DataType.INT64)
        value.shape = ir.Shape(["batch", "tokens"])
    graph = ir.Graph(
        [texts], outputs, nodes=builder.nodes, opset_imports={"": opset, EXTENSIONS_DOMAIN: 1}, name="tokenizer"
    )
    return ir.Model(graph, ir_version=ir_version, producer_name="ortolan")


class _Nodes:
    """Nodes in the order written, with names of their own."""

    def __init__(self, opset: int, place: str = _NAMES) -> None:
        self._tape = ir.tape.Tape()
        self._opset, self._place, self._first = opset, place, 0

    @property
    def nodes(self) -> list[ir.Node]:
        return list(self._tape.nodes)

    def start_at(self, number: int) -> None:
        """Numbers nodes from here."""
        self._first = number

    def many(self, op_type: str, count: int, *inputs: ir.Value, domain: str = "", **attributes: Any) -> list[ir.Value]:
        name = f"{self._place}/{op_type}_{self._first + len(self.nodes)}"
        values = self._tape.op_multi_out(op_type, inputs, attributes, num_outputs=count, domain=domain, name=name)
        for index, value in enumerate(values):
            value.name = f"{name}_output_{index}"
        return list(values)

    def op(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return self.many(op_type, 1, *inputs, **attributes)[0]

    def text_op(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return self.op(op_type, *inputs, domain=EXTENSIONS_DOMAIN, **attributes)

    def constant(self, array: np.ndarray | np.generic) -> ir.Value:
        return self.op("Constant", value=ir.tensor(np.asarray(array)))

    def ints(self, *numbers: int) -> ir.Value:
        return self.constant(np.array(numbers, np.int64))

    def texts(self, *texts: str) -> ir.Value:
        content = [text.encode() for text in texts]
        return self.op("Constant", value=ir.StringTensor(content, shape=ir.Shape([len(content)])))

    def largest(self, x: ir.Value) -> ir.Value:
        """Of a vector, as a vector of one."""
        if self._opset >= _REDUCE_AXES_OPSET:
            return self.op("ReduceMax", x, self.ints(0), keepdims=1)
        return self.op("ReduceMax", x, axes=[0], keepdims=1)

    def sum(self, x: ir.Value, axis: int, keepdims: int = 0) -> ir.Value:
        return self.op("ReduceSum", x, self.ints(axis), keepdims=keepdims)


def _tokenize(nodes: _Nodes, wordpiece: WordPiece, most: int, texts: ir.Value) -> tuple[ir.Value, ir.Value]:
    """input_ids and attention_mask, int64 [batch, tokens], as long as the longest text's."""
    loop = _each_text(nodes, wordpiece, most, texts)
    batch = nodes.op("Squeeze", nodes.op("Shape", texts), nodes.ints(0))
    all_ids, counts = nodes.many("Loop", 2, batch, nodes.constant(np.array(True)), body=loop)
    # Special tokens are always there; named here for a batch of no text.
    longest = nodes.largest(nodes.op("Concat", nodes.ints(2), nodes.op("Reshape", counts, nodes.ints(-1)), axis=0))
    all_ids = nodes.op("Reshape", all_ids, nodes.op("Concat", nodes.op("Shape", texts), nodes.ints(most), axis=0))
    ids = nodes.op("Slice", all_ids, nodes.ints(0), longest, nodes.ints(1))
    positions = nodes.op(
        "Range", nodes.constant(np.int64(0)), nodes.op("Squeeze", longest, nodes.ints(0)), nodes.constant(np.int64(1))
    )
    before_end = nodes.op("Less", positions, nodes.op("Reshape", counts, nodes.ints(-1, 1)))
    return ids, nodes.op("Cast", before_end, to=ir.DataType.INT64.value)


def _each_text(nodes: _Nodes, wordpiece: WordPiece, most: int, texts: ir.Value) -> ir.Graph:
    """The body of a Loop over the texts: the ids of one, int64 [most], and their count, int64 [1]."""
    model, becomes = character_model(wordpiece)
    first, last = replacements(wordpiece)
    clean = _replace(nodes, texts, first)
    table = nodes.texts(*becomes, " ")
    body = _Nodes(nodes._opset, f"{_NAMES}/each")
    number = _input(f"{_NAMES}/number", ir.DataType.INT64, [])
    goes_on = _input(f"{_NAMES}/goes_on", ir.DataType.BOOL, [])
    one = body.op("Gather", clean, body.op("Unsqueeze", number, body.ints(0)), axis=0)
    false = body.constant(np.array([False]))
    characters = body.many(
        "SentencepieceTokenizer",
        3,
        one,
        body.ints(0),
        body.constant(np.zeros(1, np.float32)),
        *[false] * 4,
        domain=EXTENSIONS_DOMAIN,
        model=model,
    )[0]
    # A space at the end: StringJoin wants something to join.
    space = body.constant(np.array([len(becomes)], np.int32))
    made = body.op("Gather", table, body.op("Concat", characters, space, axis=0), axis=0)
    joined = body.text_op("StringJoin", made, body.texts(""), body.ints(0))
    words = _replace(body, joined, last)
    ids = _ids_of_words(body, wordpiece, most, words)
    count = body.op("Shape", ids)
    room = body.op("Concat", body.ints(0), body.op("Sub", body.ints(most), count), axis=0)
    padded = body.op("Pad", ids, room, body.constant(np.int64(wordpiece.pad_id)))
    again = body.op("Identity", goes_on)
    loop = ir.Graph([number, goes_on], [again, padded, count], nodes=body.nodes, name="each_text")
    for value, dtype, shape in (
        (again, ir.DataType.BOOL, []),
        (padded, ir.DataType.INT64, [most]),
        (count, ir.DataType.INT64, [1]),
    ):
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)
    return loop


def _ids_of_words(nodes: _Nodes, wordpiece: WordPiece, most: int, words: ir.Value) -> ir.Value:
    """int64 [tokens], at most `most`."""
    return nodes.many(
        "BertTokenizer",
        3,
        words,
        domain=EXTENSIONS_DOMAIN,
        vocab_file="\n".join(wordpiece.vocabulary),
        do_lower_case=0,
        do_basic_tokenize=0,
        strip_accents=0,
        tokenize_chinese_chars=0,
        unk_token=wordpiece.unknown,
        cls_token=wordpiece.begin,
        sep_token=wordpiece.end,
        pad_token=wordpiece.pad,
        mask_token=wordpiece.unknown,  # not used, but it must be in the vocabulary
        suffix_indicator=wordpiece.prefix,
        max_length=most,
    )[0]


def _replace(nodes: _Nodes, texts: ir.Value, replacements: Sequence[tuple[str, str]]) -> ir.Value:
    for pattern, by in replacements:
        texts = nodes.text_op("StringRegexReplace", texts, nodes.texts(pattern), nodes.texts(by), global_replace=1)
    return texts


def _pool(nodes: _Nodes, tokens: ir.Value, mask: ir.Value, text: TextInput) -> ir.Value:
    """[batch, tokens, hidden] -> float32 [batch, hidden]."""
    tokens = nodes.op("Cast", tokens, to=ir.DataType.FLOAT.value)
    if text.pooling == "cls":
        pooled = nodes.op("Gather", tokens, nodes.constant(np.int64(0)), axis=1)
    else:
        share = nodes.op("Unsqueeze", nodes.op("Cast", mask, to=ir.DataType.FLOAT.value), nodes.ints(2))
        count = nodes.op("Max", nodes.sum(share, 1), nodes.constant(np.float32(_TINY_COUNT)))
        pooled = nodes.op("Div", nodes.sum(nodes.op("Mul", tokens, share), 1), count)
    if text.normalize:
        norm = nodes.op("Sqrt", nodes.sum(nodes.op("Mul", pooled, pooled), 1, keepdims=1))
        pooled = nodes.op("Div", pooled, nodes.op("Max", norm, nodes.constant(np.float32(_TINY_NORM))))
    return pooled


def _free_names(model: ir.Model) -> None:
    """Renames values of the model that have the names of ours, such as an output sentence_embedding of its own."""
    values = [
        *model.graph.initializers.values(),
        *(value for node in model.graph.all_nodes() for value in node.outputs),
    ]
    taken = {value.name for value in values}
    for value in values:
        name = value.name or ""
        if name in (TEXT_INPUT, EMBEDDING) or name.startswith(_NAMES):
            number = next(number for number in itertools.count() if f"{name}_before_{number}" not in taken)
            value.name = f"{name}_before_{number}"
            taken.add(value.name)


def check_text_model(path: Path, text: TextInput, wordpiece: WordPiece) -> None:
    """Runs the model as it was written, on short texts and on one of max_tokens tokens. Raises VerificationError."""
    from ortolan.session import create_session

    most = text.max_tokens or wordpiece.max_tokens
    session = create_session(path, quiet_options())
    for texts in (PROBES, ["a " * (most or 0)]):
        try:
            (vectors,) = session.run([EMBEDDING], {TEXT_INPUT: np.array(texts, object)})
        except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
            raise VerificationError(
                f"the model does not take {'a text' if len(texts) == 1 else 'texts'} of up to {most} tokens: "
                f"{one_line(error)}; nothing was saved; give max_tokens (--max-tokens), the positions that it has"
            ) from error
        if not np.isfinite(vectors).all():
            raise VerificationError("the model with its tokenizer answers with NaN or infinity; nothing was saved")


def _check_tokenizer(model: ir.Model, path: str | os.PathLike[str], most: int, texts: Sequence[str]) -> None:
    """Compares the nodes with the package `tokenizers`, text by text and as a batch."""
    from ortolan.session import create_session

    tokenizer = load_tokenizer(path)
    tokenizer.enable_truncation(most)
    session = create_session(ir.to_proto(model))
    expected = [encoded.ids for encoded in tokenizer.encode_batch(list(texts))]
    try:
        ids, mask = session.run(None, {TEXT_INPUT: np.array(texts, object)})
    except Exception as error:  # as above
        raise ModelError(f"tokenizer file {os.fspath(path)!r} cannot be run in a graph: {one_line(error)}") from error
    for text, want, row, kept in zip(texts, expected, ids, mask, strict=True):
        found = row[kept.astype(bool)].tolist()
        if found != want:
            raise VerificationError(
                f"the tokenizer in the graph gives {found[:12]} for {text[:60]!r}, and 'tokenizers' {want[:12]}; "
                "nothing was saved: keep tokens as the model's inputs"
            )


def _tokens_output(model: ir.Model) -> ir.Value:
    """The output [batch, tokens, hidden]: last_hidden_state, or the only one of three dimensions."""
    outputs = [value for value in model.graph.outputs if value.shape is None or len(value.shape) == 3]
    named = [value for value in outputs if value.name in ("last_hidden_state", "token_embeddings")]
    if len(named or outputs) != 1:
        raise ModelError(
            "pooling needs one output [batch, tokens, hidden], such as last_hidden_state; the model's outputs are "
            f"{listing(value.name or '' for value in model.graph.outputs)}"
        )
    return (named or outputs)[0]


def _input(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _opset(model: ir.Model) -> int:
    return model.graph.opset_imports.get("", _OLDEST_OPSET)

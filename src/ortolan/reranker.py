"""make_reranker: a decoder that answers yes or no becomes a reranker with one score for each pair."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ortolan.graph_passes.files.model_file import load_model, model_in, write_model
from ortolan.graph_passes.files.model_folder import check_output_folder, copy_others, find_others
from ortolan.graph_passes.files.output import move_folder_into_place
from ortolan.graph_passes.files.work_folder import work_folder
from ortolan.graph_passes.text.pair_prompt import PAIR_PROMPT, PairPrompt, PairPrompts
from ortolan.graph_passes.text.score_head import keep_score
from ortolan.graph_passes.text.sentence_folder import MODULES, SENTENCE_CONFIG, read_logit_score
from ortolan.graph_passes.text.texts import find_tokenizer
from ortolan.graph_passes.text.tokenizer_file import load_tokenizer, read_json

from .errors import ArgumentTypeError, ModelError, wrong_type
from .progress import Progress, Stage, no_progress, told

_YES, _NO = "yes", "no"
_DEFAULT = "query"  # name of the only prompt
_QUERY, _DOCUMENT = "\ufdd0query\ufdd0", "\ufdd0document\ufdd0"  # texts that no template contains
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompt in the model card of Qwen3-Reranker.
_QWEN3 = PairPrompt(
    before=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: {instruction}\n<Query>: "
    ),
    between="\n<Document>: ",
    after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


def make_reranker(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    instruction: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a reranker with one score for each pair, from a decoder that judges pairs by the next token.

    The model is a folder such as Qwen3-Reranker's, exported without a cache: its output is logits [batch, tokens,
    vocabulary]. The new output is logits [batch, 1], the logit of "yes" minus that of "no" after the last token, whose
    sigmoid is the softmax over both. Only this token and these two logits are computed. A model that already returns
    logits [batch, 1] (a conversion for sequence classification) stays unchanged.

    The folder's other files are copied. Its prompt is written to pair_prompt.json: the chat template, if that has the
    roles query and document, or else the prompt of Qwen3-Reranker. Call `optimize_onnx` on the result.

    Args:
        model: The folder.
        output: The folder to write.
        instruction: The task, which the prompt names. Default: that of the folder, or web search.
        progress: As for `optimize_onnx`.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ModelError: The folder holds no such model, or no prompt for pairs.
        OutputError: The output cannot be written.
    """
    for name, path in (("model", model), ("output", output)):
        if not isinstance(path, str | os.PathLike):
            raise wrong_type(name, path, "the path of a folder")
    if instruction is not None and not isinstance(instruction, str):
        raise ArgumentTypeError(f"instruction is {type(instruction).__name__}, expected a text")
    folder, target = Path(model), Path(output)
    if not folder.is_dir():
        raise ModelError(f"model {str(folder)!r} is not a folder; give the folder with the model and its tokenizer")
    check_output_folder(target, folder)
    source = load_model(folder)
    path = model_in(folder)
    prompts = _prompts(folder, instruction)
    logits = next((one for one in source.model.graph.outputs if one.name == "logits"), None)
    if logits is None or logits.shape is None or len(logits.shape) != 2 or logits.shape[1] != 1:
        true, false = _tokens(folder, path)
        keep_score(source.model, source.name, true, false)
    with told(progress or no_progress) as tell, work_folder(target) as work:
        written = work / "result"
        into = written / path.relative_to(folder)
        into.parent.mkdir(parents=True)
        write_model(source.model, into, lambda done, total: tell(Stage.WRITE, done, total))
        copy_others(find_others(folder, [source]), written, lambda done, total: None)
        for name, said in _files(folder, prompts).items():
            (written / name).write_text(json.dumps(said, indent=2, ensure_ascii=False), encoding="utf-8")
        move_folder_into_place(written, target)


def _prompts(folder: Path, instruction: str | None) -> PairPrompts:
    """Return the folder's prompt for pairs."""
    try:
        from .server.chat import read_chat_template

        template = read_chat_template(folder)
    except ImportError as error:
        raise ModelError("a chat template needs the package 'jinja2'; install it with: pip install jinja2") from error
    config = read_json(folder / SENTENCE_CONFIG)
    named, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if instruction is not None:
        named, default = {_DEFAULT: instruction}, _DEFAULT
    if template is not None and all(f"{role!r}" in template.source.replace('"', "'") for role in ("query", "document")):
        named = {name: text for name, text in named.items() if isinstance(text, str)}
        made = {name: _rendered(template, text) for name, text in named.items()}
        return (
            PairPrompts(made, str(default))
            if default in made
            else PairPrompts({_DEFAULT: _rendered(template, None)}, _DEFAULT)
        )
    if read_json(folder / "config.json").get("model_type") != "qwen3":
        raise ModelError(
            f"{str(folder)!r} has no chat template with the roles 'query' and 'document', expected one, as only "
            "the prompt of Qwen3-Reranker is known; write it to chat_template.jinja"
        )
    said = named.get(default, _INSTRUCTION) if isinstance(named, dict) else _INSTRUCTION
    return PairPrompts(
        {_DEFAULT: PairPrompt(_QWEN3.before.replace("{instruction}", said), _QWEN3.between, _QWEN3.after)}, _DEFAULT
    )


def _rendered(template: Any, instruction: str | None) -> PairPrompt:
    """Return the chat template's text around a query and a document."""
    messages = [{"role": "query", "content": _QUERY}, {"role": "document", "content": _DOCUMENT}]
    if instruction is not None:
        messages.insert(0, {"role": "system", "content": instruction})
    text = template.render(messages)
    before, query, rest = text.partition(_QUERY)
    between, document, after = rest.partition(_DOCUMENT)
    if not query or not document or _QUERY in rest:
        raise ModelError(
            "the chat template does not render a query and then a document, each once, for the roles 'query' and "
            f"'document'; it renders {text[:200]!r}"
        )
    return PairPrompt(before, between, after)


def _tokens(folder: Path, path: Path) -> tuple[int, int | None]:
    """Return the tokens whose logits are compared."""
    said = read_logit_score(folder)
    if said is not None:
        return said.true, said.false
    file = find_tokenizer(path)
    if file is None:
        raise ModelError(f"{str(folder)!r} has no tokenizer.json, which has the tokens {_YES!r} and {_NO!r}")
    tokenizer = load_tokenizer(file)
    true, false = tokenizer.token_to_id(_YES), tokenizer.token_to_id(_NO)
    if true is None or false is None:
        raise ModelError(f"tokenizer file {str(file)!r} lacks the token {_YES if true is None else _NO!r}")
    return true, false


def _files(folder: Path, prompts: PairPrompts) -> dict[str, Any]:
    """Return the JSON files of the new folder that differ."""
    config = read_json(folder / "config.json")
    names = [str(one).replace("ForCausalLM", "ForSequenceClassification") for one in config.get("architectures") or []]
    files: dict[str, Any] = {PAIR_PROMPT: prompts.to_json()}
    files["config.json"] = {**config, "architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if (folder / MODULES).is_file():
        modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        files[MODULES] = [one for one in modules if not str(one["type"]).endswith(".LogitScore")]
    return files

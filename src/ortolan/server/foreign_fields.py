"""Fields of vLLM and llama.cpp that OpenAI's API does not have: ours under another name, or refused.

A field that changes answers is never ignored. Fields that only tune a server are.
"""

from __future__ import annotations

from typing import Any

from .fields import Fields

# Other names of our fields.
_ALIASES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty"}

# Fields that set the form of an answer, and what they hold. structured.py reads them.
FORMS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
STRUCTURED = "structured_outputs"  # has a field for each kind of form
STRUCTURED_FIELDS = (
    *("json", "regex", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern"),
    *("disable_fallback", "disable_any_whitespace", "disable_additional_properties"),
)

# Fields that are not supported: values that mean nothing, and what to do instead.
_ZERO, _ONE = (0, 0.0), (1, 1.0)
_SAMPLERS = "send temperature, top_k, top_p and min_p, which apply in this order"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    # vLLM
    "add_generation_prompt": ((True,), "send the rendered prompt to /v1/completions"),
    "allowed_token_ids": (([],), "send logit_bias, or guided_choice"),
    "bad_words": (([],), "send logit_bias"),
    "chat_template": ((), "start the server with --chat-template"),
    "continue_final_message": ((False,), "send the rendered prompt to /v1/completions"),
    "documents": (([],), "send them in a message"),
    "guided_decoding_backend": ((), "leave it out; there is one backend"),
    "guided_whitespace_pattern": ((), "leave it out; JSON has the spaces of Python's json.dumps"),
    "include_stop_str_in_output": ((False,), "append the stop string to the text"),
    "logits_processors": (([],), "send logit_bias"),
    "min_tokens": (_ZERO, "send ignore_eos and max_tokens for answers of one length"),
    "priority": (_ZERO, "requests have equal priority; send user, so that users take turns"),
    "prompt_logprobs": ((), "send logprobs, which are those of the answer"),
    "return_token_ids": ((False,), "send the text to /tokenize"),
    "return_tokens_as_token_ids": ((False,), "send the texts to /tokenize"),
    "skip_special_tokens": ((True,), "leave it out; texts have no special tokens"),
    "stop_token_ids": (([],), "send stop with the texts of these tokens"),
    "truncate_prompt_tokens": ((), "send a shorter prompt; /tokenize counts tokens"),
    "use_beam_search": ((False,), "send n for several answers"),
    # llama.cpp
    "dry_multiplier": (_ZERO, "send repetition_penalty"),
    "dynatemp_range": (_ZERO, "send temperature"),
    "image_data": (([],), "this model takes text only"),
    "lora": (([],), "start a server with the merged model"),
    "min_keep": ((*_ZERO, *_ONE), _SAMPLERS),
    "mirostat": (_ZERO, _SAMPLERS),
    "n_keep": (_ZERO, "send a prompt that fits into the context"),
    "n_probs": (_ZERO, "send logprobs"),
    "post_sampling_probs": ((False,), "send logprobs, which are those before sampling"),
    "response_fields": (([],), "read these fields from the whole answer"),
    "return_tokens": ((False,), "send the text to /tokenize"),
    "samplers": ((), _SAMPLERS),
    "t_max_predict_ms": ((*_ZERO, -1), "send max_tokens"),
    "top_n_sigma": ((-1, -1.0), _SAMPLERS),
    "typical_p": (_ONE, _SAMPLERS),
    "xtc_probability": (_ZERO, _SAMPLERS),
}
# Fields with another meaning, or none, in the other kind of request.
_IN_CHATS: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_special_tokens": ((False,), "leave it out; the chat template writes special tokens"),
    "include_reasoning": ((True,), "leave reasoning_content of the answer unread"),
    "reasoning_format": (("auto", "deepseek"), "thoughts are in reasoning_content"),
}
_IN_COMPLETIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_special_tokens": ((True,), "send tokens, which are taken unchanged"),
}


# llama.cpp's repeat_last_n, and the values that mean nothing: its default does if there is no penalty.
_LAST_N, _ALL_TOKENS, _DEFAULT_LAST_N = "repeat_last_n", -1, 64
_NO_PENALTY = {
    "repeat_penalty": 1,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}


def sent_name(body: Fields, name: str) -> str:
    """Return the name under which a body has one of our fields."""
    other = _ALIASES[name]
    return other if body.get(name) is None and body.get(other) is not None else name


def refuse_foreign(body: Fields, *, is_chat: bool) -> None:
    """Raise ApiError 400 for a field that would change the answer, but is not supported."""
    refused = _REFUSED | (_IN_CHATS if is_chat else _IN_COMPLETIONS)
    for name, (neutral, instead) in refused.items():
        body.refuse_unless(name, *neutral, why=instead)
    without_penalties = all(body.get(name) in (None, off) for name, off in _NO_PENALTY.items())
    last_n = (_ALL_TOKENS, _DEFAULT_LAST_N) if without_penalties else (_ALL_TOKENS,)
    body.refuse_unless(_LAST_N, *last_n, why="leave it out; penalties look at all tokens")

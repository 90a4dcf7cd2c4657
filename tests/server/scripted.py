"""A decoder whose answers a test writes, with a tokenizer of single bytes, and servers around them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ortolan.engine import BLOCK_TOKENS, Engine
from ortolan.server.application import Application
from ortolan.server.chat import ChatTemplate
from ortolan.server.model_folder import ModelFolder, show_markers
from ortolan.server.reasoning import find_markers
from ortolan.server.run import make_generator, make_server
from ortolan.server.settings import Limits, ServerSettings
from ortolan.server.tool_calls import detect_family

START, END = "<|im_start|>", "<|im_end|>"
ASSISTANT = f"{START}assistant\n"
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>")
CHATML = """{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- 'Call as <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each byte, and added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END, *ADDED])
    return tokenizer


class ScriptedModel:
    """A model that answers a chat's prompt with `reply(prompt)`, and other prompts with their letters, repeated.

    It keeps tokens in blocks as a real model keeps keys and values.

    Attributes:
        steps: The number of calls.
        hold: While this lock is held, calls wait.
        failing: The next call raises.
    """

    def __init__(
        self, tokenizer: Tokenizer, reply: Callable[[str], str], blocks: int = 512, context: int = 2048
    ) -> None:
        self.tokenizer, self.reply = tokenizer, reply
        self.vocabulary, self.blocks, self.context = tokenizer.get_vocab_size(), blocks, context
        self._pool = np.full((blocks, BLOCK_TOKENS), -1, np.int64)
        self._replies: dict[str, list[int]] = {}
        self.steps = 0
        self.hold = threading.Lock()
        self.failing = False

    def run(self, step):
        with self.hold:
            self.steps += 1
        if self.failing:
            self.failing = False
            raise ValueError("secret: the model fails")
        ends = {}
        for sequence, past in enumerate(step.past_lengths):
            first, last = step.sequence_starts[sequence : sequence + 2]
            for row in range(first, last):
                position = int(past) + row - int(first)
                assert position == step.position_ids[row]
                block = step.block_table[sequence, position // BLOCK_TOKENS]
                self._pool[block, position % BLOCK_TOKENS] = step.input_ids[row]
                ends[row] = (sequence, position + 1)
        logits = np.zeros((len(step.logit_rows), self.vocabulary), np.float32)
        for index, row in enumerate(step.logit_rows):
            sequence, length = ends[row]
            table = step.block_table[sequence, : -(-length // BLOCK_TOKENS)]
            logits[index, self._next(self._pool[table].reshape(-1)[:length].tolist())] = 40
        return logits

    def _next(self, tokens: list[int]) -> int:
        """Return the token after a sequence."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        at = text.rfind(ASSISTANT)
        if at < 0:
            return tokens[len(tokens) // 2]
        prompt = text[: at + len(ASSISTANT)]
        if prompt not in self._replies:
            self._replies[prompt] = self.tokenizer.encode(self.reply(prompt), add_special_tokens=False).ids
        done = len(tokens) - len(self.tokenizer.encode(prompt, add_special_tokens=False).ids)
        answer = self._replies[prompt]
        return answer[done] if done < len(answer) else self.tokenizer.token_to_id(END)


def last_message(prompt: str) -> str:
    """Return the text of the last message in a prompt."""
    return prompt.split(START)[-2].split("\n", 1)[1].removesuffix(f"{END}\n")


def echo(prompt: str) -> str:
    """Answer with the last message."""
    return last_message(prompt)


@contextmanager
def scripted_application(
    reply=echo,
    *,
    template: str | None = CHATML,
    limits=None,
    api_key=None,
    encoder=None,
    sampling=None,
    allow_origins=(),
    **options,
):
    """Yield an application, its engine's model and its settings."""
    tokenizer = show_markers(make_tokenizer())
    model = ScriptedModel(
        tokenizer, reply, **{name: options.pop(name) for name in ("blocks", "context") if name in options}
    )
    settings = ServerSettings(
        "scripted",
        api_key,
        limits or Limits(),
        allow_origins,
        keep_alive_seconds=options.pop("keep_alive_seconds", 15),
    )
    folder = ModelFolder(
        tokenizer,
        frozenset([tokenizer.token_to_id(END)]),
        start=tokenizer.token_to_id(START),
        template=None if template is None else ChatTemplate({"default": template}),
        tool_family=None if template is None else detect_family(template),
        thoughts=None if template is None else find_markers(template),
        sampling=sampling or {},
    )
    with Engine(model, tokenizer=tokenizer, **options) as engine:
        application = Application(settings, make_generator(engine, folder), encoder, encoder and "encoder")
        application.model, application.engine = model, engine
        yield application


@contextmanager
def running(application, drain_seconds=5, say=None):
    """Run an application in a thread on the loopback interface; yield the server, with its address as `url`."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = make_server(application, drain_seconds, say=say)
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield server
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def wait_for(condition, seconds=60):
    """Wait until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def events(text: str) -> list:
    """Return the events of a stream, parsed; the last one is "[DONE]"."""
    found = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in found]

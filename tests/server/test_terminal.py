"""The commands `ortolan chat` and `ortolan generate`, and conversations."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
tokenizers = pytest.importorskip("tokenizers")


from ortolan.conversation import AnswerOptions, Conversation, complete  # noqa: E402
from ortolan.engine.model import PagedModel  # noqa: E402
from ortolan.errors import ArgumentError, OrtolanError  # noqa: E402
from ortolan.server.run import ServeOptions, open_engine  # noqa: E402

from .commands import LIMITS, invoke  # noqa: E402
from .scripted import CHATML, scripted_application, wait_for  # noqa: E402

SMALL = ServeOptions(threads=1, context=128, cache_bytes=1 << 22)


def test_the_command_generate(prepared):
    first, second = (invoke("generate", prepared, "hello", *LIMITS) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0), first.output
    assert first.stdout == second.stdout
    read = invoke("generate", prepared, "-", *LIMITS, input="hello")
    assert read.stdout == first.stdout


@pytest.mark.parametrize(("prompt", "piped"), [("", None), (" ", None), ("-", ""), ("-", "\n")])
def test_an_empty_prompt(prompt, piped):
    refused = invoke("generate", "missing.gguf", prompt, input=piped)
    assert refused.exit_code == 1 and "the prompt is empty" in refused.stderr


def test_the_type_of_the_cache(prepared):
    with (
        open_engine(prepared, SMALL) as (engine, _),
        open_engine(prepared, replace(SMALL, cache_type="int8")) as (less, _),
    ):
        assert less.model.block_bytes < engine.model.block_bytes
        assert less.model.blocks > engine.model.blocks
    done = invoke("generate", prepared, "hello", *LIMITS, "--cache-type", "int8")
    assert done.exit_code == 0 and done.stdout.strip()


@pytest.mark.parametrize("shares", [False, True])
def test_weights_are_shared_on_request(prepared, shares, monkeypatch):
    opened, original = [], PagedModel.open
    monkeypatch.setattr(PagedModel, "open", lambda *args, **given: opened.append(given) or original(*args, **given))
    with open_engine(prepared, replace(SMALL, draft_model=prepared, share_weights=shares)):
        assert [one["share_weights"] for one in opened] == [shares, shares]


def test_the_command_chat(prepared):
    done = invoke("chat", prepared, "--system", "Be brief.", *LIMITS, input="hello\n\n/new\nhello\n/exit\nhello\n")
    assert done.exit_code == 0, done.output
    half = len(done.stdout) // 2
    assert done.stdout[:half] == done.stdout[half:] != ""
    cut = "the answer was cut: --max-tokens is 8\n"
    assert done.stderr == f"{cut}new conversation\n{cut}"


def test_prompts_of_the_chat_in_a_terminal(prepared, monkeypatch):
    lines = iter(["/new", "/exit"])
    prompts = []
    monkeypatch.setattr("builtins.input", lambda prompt: prompts.append(prompt) or next(lines))
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("ortolan.cli_serve.sys", terminal)  # the runner replaces sys.stdin
    done = invoke("chat", prepared, *LIMITS)
    assert done.exit_code == 0, done.output
    assert prompts == ["> ", "> "]
    assert "/help lists the commands\n" in done.stderr


def test_commands_of_the_chat(prepared):
    lines = ["/help", "/new", "/nonsense with words", "/", "/quit", "hello"]
    done = invoke("chat", prepared, *LIMITS, input="\n".join(lines) + "\n")
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("/new ")
    assert "new conversation\nunknown command /nonsense; /help lists the commands\nunknown command /;" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("said", [" /help me", "/etc/hosts has what?"])
def test_messages_that_look_like_commands(said, prepared):
    done = invoke("chat", prepared, *LIMITS, input=f"{said}\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() and "unknown command" not in done.stderr


def test_a_chat_that_ends_with_its_input(prepared):
    done = invoke("chat", prepared, *LIMITS, input="x" * 200 + "\nhello\n")
    assert done.exit_code == 0, done.output
    # The first message is too long; the second one gets an answer.
    assert "the context's 128; begin a new conversation with /new, or set a larger --context" in done.stderr
    assert done.stdout.strip()


def test_a_conversation():
    def reply(prompt):
        return f"<think>\n{prompt.count('user')}\n</think>\n\nYes {prompt.count('assistant')}."

    with scripted_application(reply, template=CHATML + "{# </think> #}") as application:
        talk = Conversation(application.engine, application._generator.folder)
        for turn in (1, 2, 3):
            pieces = list(talk.say("hi"))
            assert "".join(text for kind, text in pieces if kind == "reasoning") == str(turn)
            assert "".join(text for kind, text in pieces if kind == "content") == f"Yes {turn}."
        assert [one["role"] for one in talk.messages] == ["user", "assistant"] * 3
        assert talk.messages[-1]["content"] == "Yes 3."
        stopped = talk.say("stop")
        next(stopped)
        stopped.close()
        assert len(talk.messages) == 6
        wait_for(lambda: application.engine.stats().running_sequences == 0)
        application.model.failing = True
        with pytest.raises(OrtolanError, match="failed"):
            list(talk.say("fail"))
        assert len(talk.messages) == 6
        with pytest.raises(ArgumentError, match="context"):
            list(talk.say("x" * 3000))
        notes = []
        folder = application._generator.folder
        text = "".join(complete(application.engine, folder, "hi", AnswerOptions(), notes.append))
        assert (text, notes) == ("Yes 1.", [])


def test_a_prompt_without_a_template():
    with scripted_application(template=None) as application:
        folder = application._generator.folder
        assert "".join(complete(application.engine, folder, "aaa", AnswerOptions(max_tokens=4))) == "aaaa"
        with pytest.raises(ArgumentError, match=r"the prompt has 2048 tokens, expected fewer .* a larger --context"):
            list(complete(application.engine, folder, "a" * 2048, AnswerOptions()))
        with pytest.raises(OrtolanError, match="chat template"):
            list(Conversation(application.engine, folder).say("x"))


def test_notes_on_answers_that_were_cut():
    with scripted_application(lambda _: "word " * 1000) as application:
        engine, folder = application.engine, application._generator.folder
        notes = []
        few = AnswerOptions(max_tokens=4)
        assert "".join(complete(engine, folder, "hi", few, notes.append)) == "word"
        list(complete(engine, folder, "hi", AnswerOptions(), notes.append))
        list(Conversation(engine, folder).say("hi", notes.append))
    full = "the answer was cut: the context of 2048 tokens is full;"
    assert notes == [
        "the answer was cut: --max-tokens is 4",
        f"{full} shorten the prompt, or set a larger --context",
        f"{full} begin a new conversation with /new, or set a larger --context",
    ]

"""One answer to a request, while it is computed."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from .requests import ErrorKind, FinishReason, Grammar, Output, Request, TokenLogprobs
from .rows import RowState, Sampled
from .sequence import Sequence
from .text import TextStream


class Choice(Sequence):
    """A sequence with all that turns its tokens into events.

    Attributes:
        emit: Where events go.
        make_text: Makes `text` at the first token, because most of a long queue would only keep it in memory.
        row: What the sampler sees.
        text: The text of the answer; None without a tokenizer and before the first token.
        grammar: The state of structured output.
        most_tokens: The answer ends when it has this many tokens.
        submitted: The time of `submit`, in seconds of time.monotonic().
        last_token: The time of the last token; 0 before the first one.
    """

    __slots__ = ("emit", "end_tokens", "grammar", "last_token", "make_text", "most_tokens", "row", "submitted", "text")

    def __init__(
        self,
        request: Request,
        prompt: array[int],
        index: int,
        seed: int,
        *,
        context: int,
        make_text: Callable[[], TextStream] | None,
        submitted: float,
        emit: Callable[[Output], None],
    ) -> None:
        self.most_tokens = min(request.max_tokens, context - len(prompt))
        limit = len(prompt) + self.most_tokens
        salt = request.cache_salt.encode()
        super().__init__(prompt, limit, request.priority, request.client, request.user, salt)
        self.emit = emit
        self.row = RowState(request.sampling, request.prompt, [], index, seed)
        self.text: TextStream | None = None
        self.make_text = make_text
        self.grammar: Grammar | None = None if request.grammar is None else request.grammar.copy()
        self.end_tokens = request.end_tokens
        self.submitted = submitted
        self.last_token = 0.0

    def append(self, sampled: Sampled) -> FinishReason | None:
        """Append a token, emit its event, and return the finish reason if the answer has ended."""
        token = sampled.token
        row = self.row
        answer = row.answer
        answer.append(token)
        if self.make_text is not None:
            self.text, self.make_text = self.make_text(), None
        self.tokens.append(token)
        reason: FinishReason | None = None
        text = ""
        if token in self.end_tokens:
            reason = "stop"
        else:
            if self.grammar is not None:
                self.grammar.advance(token)
                if self.grammar.finished:
                    reason = "stop"
            if self.text is not None:
                text = self.text.push(token)
                if self.text.stopped:
                    reason = "stop"
            if reason is None and len(answer) >= self.most_tokens:
                reason = "length"
        if reason is not None and self.text is not None:
            text += self.text.end()
            if self.text.stopped:
                reason = "stop"
        logprobs = None
        if sampled.logprob is not None:
            logprobs = (TokenLogprobs(token, sampled.logprob, sampled.top),)
        self._put((token,), text, logprobs, reason)
        return reason

    def finish(self, reason: FinishReason, error: str | None = None, kind: ErrorKind | None = None) -> None:
        """Emit the last event, with the text that was held back."""
        self._put((), "" if self.text is None else self.text.end(), None, reason, error, kind)

    def _put(
        self,
        tokens: tuple[int, ...],
        text: str,
        logprobs: tuple[TokenLogprobs, ...] | None,
        reason: FinishReason | None,
        error: str | None = None,
        kind: ErrorKind | None = None,
    ) -> None:
        row = self.row
        self.emit(
            Output(
                row.index, tokens, text, logprobs, reason, error, kind, self.cached, len(row.prompt), len(row.answer)
            )
        )  # fmt: skip

"""The thread that runs steps, and what others call."""

from __future__ import annotations

import heapq
import logging
import random
import time
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from itertools import count
from threading import Condition, Thread, current_thread
from types import TracebackType
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, OrtolanError, one_line, wrong_type
from .choice import Choice
from .draft_model import DraftModel
from .drafts import Drafter, LookupDrafter
from .requests import EngineClosedError, ErrorKind, FinishReason, QueueFullError, Request
from .rows import Sampled, TokenSampler
from .scheduler import Plan, Scheduler
from .sequence import State
from .speculation import Speculation
from .stats import Counters, Stats
from .step import BLOCK_TOKENS, Model
from .stream import Stream
from .text import Detokenizer, TextStream, special_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_log = logging.getLogger(__name__)
_NO_TOKENS: frozenset[int] = frozenset()
# Prompts that wait may have this many times the tokens of the pools, or this many tokens if that is more. A waiting
# token takes some 40 bytes, and its keys and values take thousands, so that the queue stays small next to the pools.
_WAITING_POOLS = 4
_WAITING_TOKENS = 1 << 20


class Engine:
    """Serves many requests at once from one model, in a thread of its own.

    An answer depends on its request alone, not on other requests or on when they arrive.

    Attributes:
        model: The model.
        tokenizer: The tokenizer, or None.
        context: The most tokens of prompt and answer together: the model's context, or the size of the pools.
    """

    def __init__(
        self,
        model: Model,
        *,
        tokenizer: Tokenizer | None = None,
        sampler: TokenSampler | None = None,
        max_step_tokens: int = 512,
        max_sequences: int = 64,
        max_queue: int = 1024,
        speculation: Literal["lookup"] | DraftModel | Drafter | None = "lookup",
    ) -> None:
        """Start an engine.

        Args:
            model: The model. Only the engine may call it.
            tokenizer: For text and stop strings. Without one, outputs have tokens only.
            sampler: Draws tokens; by default, Ortolan's native sampler.
            max_step_tokens: The most tokens of a call of the model. Lower: shorter pauses between the tokens of an
                answer while prompts of others are computed. Higher: more tokens of prompts a second.
            max_sequences: The most sequences that run at the same time.
            max_queue: The most sequences that wait. Their prompts, counted once for each choice, may have four times
                the tokens that the pools hold, or 2**20 tokens if that is more.
            speculation: Where drafts of the next tokens come from. A call of the model verifies them, so that answers
                are the same with any drafts. "lookup": what followed the same tokens earlier in prompt and answer.
                A DraftModel: as "lookup", and where that has no likely draft, what a smaller model of the same
                vocabulary guesses. None: each call computes one token of an answer.

        Raises:
            ArgumentTypeError: The tokenizer is of a different library.
            ArgumentError: A number is out of range, or the draft model has another vocabulary.
        """
        if tokenizer is not None and not hasattr(tokenizer, "get_added_tokens_decoder"):
            expected = "a tokenizers.Tokenizer; load one with tokenizers.Tokenizer.from_file('tokenizer.json')"
            raise wrong_type("tokenizer", tokenizer, expected)
        if max_queue < 1:
            raise ArgumentError(f"max_queue is {max_queue}, expected at least 1")
        if isinstance(speculation, DraftModel) and speculation.model.vocabulary != model.vocabulary:
            raise ArgumentError(
                f"the draft model has a vocabulary of {speculation.model.vocabulary} tokens, expected "
                f"{model.vocabulary}, the model's; use a draft model of the same family"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.context = min(model.context, model.blocks * BLOCK_TOKENS)
        self._limits = (max_step_tokens, max_sequences)
        self._speculation = _speculation(speculation, model.vocabulary)
        self._scheduler = self._new_scheduler()
        self._sampler = sampler if sampler is not None else _native_sampler()
        self._special = _NO_TOKENS if tokenizer is None else special_tokens(tokenizer)
        self._max_queue = max_queue
        self._most_waiting = max(_WAITING_POOLS * model.blocks * BLOCK_TOKENS, _WAITING_TOKENS)
        self._counters = Counters()
        self._finish_times: deque[float] = deque(maxlen=33)
        # Other threads pass work to the engine's thread by the next fields, and hold the condition.
        self._condition = Condition()
        self._inbox: list[Stream] = []
        self._inbox_choices = self._inbox_tokens = 0
        self._cancelled: list[Stream] = []
        self._closing = self._stopping = False
        # Only the engine's thread uses these fields.
        self._active: dict[Choice, None] = {}
        self._deadlines: list[tuple[float, int, Choice]] = []
        self._deadline_order = count()
        self._thread = Thread(target=self._run, name="ortolan-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Stream:
        """Queue a request. Any thread may call this.

        Returns:
            The events of the answers.

        Raises:
            ArgumentError: The request does not fit the model.
            QueueFullError: Too many sequences or tokens wait.
            EngineClosedError: The engine is closed.
        """
        self._check(request)
        stream = Stream(request, self._cancel)
        seed = request.sampling.seed
        seed = random.getrandbits(64) if seed is None else seed % 2**64
        now = time.monotonic()
        prompt, make_text = array("q", request.prompt), self._text_maker(request)
        tokens = request.n * len(prompt)
        stream.choices = tuple(
            Choice(
                request,
                prompt,
                index,
                seed,
                context=self.context,
                make_text=make_text,
                submitted=now,
                emit=stream.put,
            )
            for index in range(request.n)
        )
        with self._condition:
            self._require_room(request.n, tokens)
            self._inbox.append(stream)
            self._inbox_choices += request.n
            self._inbox_tokens += tokens
            self._condition.notify_all()
        return stream

    def check_room(self, sequences: int = 1) -> None:
        """Check that a request would be queued now, before its prompt is prepared. Any thread may call this.

        Args:
            sequences: The number of the request's choices.

        Raises:
            QueueFullError: Too many sequences or tokens wait.
            EngineClosedError: The engine is closed.
        """
        with self._condition:
            self._require_room(sequences, sequences)  # each has at least one token

    def stats(self) -> Stats:
        """Return counters and histograms. Any thread may call this; numbers may be of one step more or less."""
        scheduler, counters = self._scheduler, self._counters
        pool = scheduler.pool
        return Stats(
            queued_sequences=self._queued(),
            running_sequences=len(scheduler.running),
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_free=pool.free,
            prefix_queried_tokens=scheduler.prefix_queries,
            prefix_hit_tokens=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            steps=counters.steps,
            computed_tokens=counters.computed_tokens,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            drafted_tokens=counters.drafted_tokens,
            accepted_tokens=counters.accepted_tokens,
            finished=dict(counters.finished),
            rejected_requests=counters.rejected,
            time_to_first_token=counters.time_to_first_token.data(),
            time_between_tokens=counters.time_between_tokens.data(),
            step_seconds=counters.step_seconds.data(),
            request_seconds=counters.request_seconds.data(),
        )

    def close(self, drain_seconds: float = 0) -> None:
        """Refuse new requests, wait for the present ones, cancel the rest, and end the thread.

        Args:
            drain_seconds: How long to wait before requests that have not ended are cancelled.
        """
        with self._condition:
            self._closing = True
            self._condition.wait_for(lambda: not self._active and not self._inbox, timeout=drain_seconds)
            self._stopping = True
            self._condition.notify_all()
        if self._thread is not current_thread():
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- any thread

    def _check(self, request: Request) -> None:
        vocabulary = self.model.vocabulary
        if max(request.prompt) >= vocabulary:
            raise ArgumentError(
                f"prompt contains token {max(request.prompt)}, expected less than {vocabulary}, the model's vocabulary"
            )
        biased = max(request.sampling.logit_bias, default=0)
        if biased >= vocabulary:
            raise ArgumentError(f"logit_bias has token {biased}, expected less than {vocabulary}, the vocabulary")
        if len(request.prompt) >= self.context:
            why = "the model's context" if self.context == self.model.context else "what the KV cache holds"
            raise ArgumentError(
                f"prompt has {len(request.prompt)} tokens, expected at most {self.context - 1}: {why} is "
                f"{self.context} tokens, and an answer needs one"
            )
        if request.n > self._max_queue:
            raise ArgumentError(f"n is {request.n}, expected at most {self._max_queue}, the engine's max_queue")
        if request.stop and self.tokenizer is None:
            raise ArgumentError("stop needs a tokenizer: pass one to Engine, or use end_tokens")

    def _require_room(self, sequences: int, tokens: int) -> None:
        if self._closing:
            raise EngineClosedError("the engine is closed and takes no more requests")
        queued, waiting = self._queued(), self._scheduler.waiting.tokens + self._inbox_tokens
        if not queued:  # an empty queue refuses no request: to wait would not help
            return
        if queued + sequences > self._max_queue:
            full = f"{queued} sequences wait, and at most {self._max_queue} may"
        elif waiting + tokens > self._most_waiting:
            full = f"sequences of {waiting} tokens wait, and at most {self._most_waiting} tokens may"
        else:
            return
        self._counters.rejected += 1
        seconds = self._retry_after(queued)
        raise QueueFullError(f"the queue is full: {full}; try again in {seconds:.0f} seconds", seconds)

    def _text_maker(self, request: Request) -> Callable[[], TextStream] | None:
        if self.tokenizer is None:
            return None
        special = self._special if request.skip_special_tokens else _NO_TOKENS
        return partial(_text_stream, self.tokenizer, request, special)

    def _queued(self) -> int:
        return len(self._scheduler.waiting) + self._inbox_choices

    def _retry_after(self, queued: int) -> float:
        """Return the seconds in which a tenth of the queue should be served, from 1 to 60."""
        times = list(self._finish_times)
        if len(times) < 2:
            return 1.0
        seconds = (time.monotonic() - times[0]) / (len(times) - 1)
        return min(max(seconds * queued / 10, 1.0), 60.0)

    def _cancel(self, stream: Stream) -> None:
        with self._condition:
            self._cancelled.append(stream)
            self._condition.notify_all()

    # -- the engine's thread

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.model.blocks, self.context, *self._limits, self._speculation)

    def _run(self) -> None:
        while self._receive():
            try:
                self._step()
            # A bug of the engine must not let requests wait forever. Panics of Rust libraries are BaseExceptions.
            except BaseException as error:
                _log.exception("a step of the engine failed; all requests end with an error")
                self._reset(f"the engine failed: {one_line(error)}")
        for choice in list(self._active):
            self._end(choice, "cancelled")

    def _receive(self) -> bool:
        """Wait for work, and start or cancel what other threads asked for. Return False if the engine should end."""
        with self._condition:
            while not (self._inbox or self._cancelled or self._active or self._stopping):
                self._condition.wait()
            inbox, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, []
            for stream in inbox:
                for choice in stream.choices:
                    self._active[choice] = None
                    self._scheduler.add(choice)
                    if stream.request.deadline is not None:
                        heapq.heappush(self._deadlines, (stream.request.deadline, next(self._deadline_order), choice))
            self._inbox_choices = self._inbox_tokens = 0
            stopping = self._stopping
        for stream in cancelled:
            for choice in stream.choices:
                self._end(choice, "cancelled")
        return not stopping

    def _step(self) -> None:
        began = time.monotonic()
        self._end_late(began)
        plan = self._scheduler.schedule()
        drafted = time.monotonic()
        if plan is None:
            if self._active:
                raise AssertionError(f"{len(self._active)} sequences are active, and none was scheduled")
            return
        try:
            logits = self.model.run(plan.step)
            self._check_logits(logits, len(plan.step.logit_rows))
        except Exception as error:
            _log.exception("the model failed; the %d sequences of the step end with an error", len(plan.counts))
            for sequence in list(plan.counts):  # ending one removes it
                self._end(cast(Choice, sequence), "error", f"the model failed: {one_line(error)}", "internal")
            return
        self._scheduler.complete(plan)
        counters = self._counters
        counters.steps += 1
        counters.computed_tokens += len(plan.step.input_ids)
        if plan.drafts:
            self._verify(plan, logits)
            self._scheduler.settle(plan)
        elif plan.rows:
            self._sample(cast("list[Choice]", plan.rows), logits)
        ended = time.monotonic()
        counters.step_seconds.observe(ended - began)
        if self._speculation is not None:  # without the time of the draft model
            self._speculation.observe(len(plan.step.logit_rows), len(plan.step.input_ids), ended - drafted)

    def _end_late(self, now: float) -> None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            self._end(heapq.heappop(deadlines)[2], "deadline")
        if len(deadlines) > 2 * len(self._active) + 64:  # most are of answers that have ended, and keep their memory
            deadlines[:] = [one for one in deadlines if one[2].state is not State.ENDED]
            heapq.heapify(deadlines)

    def _check_logits(self, logits: NDArray[np.float32], rows: int) -> None:
        expected = (rows, self.model.vocabulary)
        if rows and logits.shape != expected:
            raise OrtolanError(f"logits have shape {list(logits.shape)}, expected {list(expected)}")

    def _verify(self, plan: Plan, logits: NDArray[np.float32]) -> None:
        """Draw the tokens of a step with drafts.

        A draft's next logits count if its token is the one that was drawn. So each token is drawn from the logits,
        history and random number that it would have without drafts. Sequences take turns, a token each, so that all
        share a call of the sampler.
        """
        counters, drafts = self._counters, cast("dict[Choice, Items[int]]", plan.drafts)
        choices = cast("list[Choice]", plan.rows)
        counters.drafted_tokens += sum(map(len, drafts.values()))
        rows = np.cumsum([0, *(1 + len(drafts.get(choice, ())) for choice in choices)])[:-1]
        for drawn in count():
            self._sample(choices, logits[rows])
            kept = [
                index
                for index, choice in enumerate(choices)
                if choice.state is State.RUNNING
                and drawn < len(draft := drafts.get(choice, ()))
                and draft[drawn] == choice.tokens[-1]
            ]
            if not kept:
                return
            choices, rows = [choices[index] for index in kept], rows[kept] + 1
            for choice in choices:
                self._scheduler.accept(choice)
            counters.accepted_tokens += len(kept)

    def _sample(self, choices: list[Choice], logits: NDArray[np.float32]) -> None:
        """Draw the next token of each choice."""
        failed: dict[Choice, tuple[Exception, ErrorKind]] = {}
        for choice in choices:
            if choice.grammar is not None:
                try:
                    choice.row.mask = choice.grammar.mask()
                except Exception as error:
                    failed[choice] = error, _kind(error)
        if failed:
            logits = logits[[choice not in failed for choice in choices]]
            choices = [choice for choice in choices if choice not in failed]
        try:
            drawn: list[Sampled | Exception] = list(self._sampler.sample(logits, [one.row for one in choices]))
        except Exception:  # find out which rows fail, for the others
            drawn = [self._sample_one(logits[index : index + 1], one) for index, one in enumerate(choices)]
        now = time.monotonic()
        for choice, sampled in zip(choices, drawn, strict=True):
            if isinstance(sampled, Exception):
                mask = choice.row.mask
                failed[choice] = sampled, "internal" if mask is None or mask.any() else "request"
                continue
            try:
                self._append(choice, sampled, now)
            except Exception as error:  # of a grammar or a tokenizer
                failed[choice] = error, _kind(error)
        for choice, (reason, kind) in failed.items():
            self._end(choice, "error", one_line(reason), kind)

    def _sample_one(self, logits: NDArray[np.float32], choice: Choice) -> Sampled | Exception:
        try:
            return self._sampler.sample(logits, [choice.row])[0]
        except Exception as error:
            return error

    def _append(self, choice: Choice, sampled: Sampled, now: float) -> None:
        counters = self._counters
        counters.generated_tokens += 1
        if choice.last_token:
            counters.time_between_tokens.observe(now - choice.last_token)
        else:
            counters.time_to_first_token.observe(now - choice.submitted)
            counters.prompt_tokens += len(choice.row.prompt)
        choice.last_token = now
        reason = choice.append(sampled)
        if reason is not None:
            self._forget(choice, reason)

    def _end(
        self, choice: Choice, reason: FinishReason, error: str | None = None, kind: ErrorKind | None = None
    ) -> None:
        """End an answer before its time. Nothing happens if it has ended."""
        if choice.state is State.ENDED:
            return
        self._forget(choice, reason)
        _finish(choice, reason, error, kind)

    def _forget(self, choice: Choice, reason: FinishReason) -> None:
        self._scheduler.end(choice)
        now = time.monotonic()
        self._counters.finished[reason] += 1
        self._counters.request_seconds.observe(now - choice.submitted)
        self._finish_times.append(now)
        with self._condition:
            del self._active[choice]
            if not self._active:
                self._condition.notify_all()

    def _reset(self, error: str) -> None:
        """End all requests after an error of the engine's own, and begin with an empty cache."""
        for choice in self._active:
            choice.state = State.ENDED
            choice.drafting = None
            self._counters.finished["error"] += 1
            _finish(choice, "error", error, "internal")
        with self._condition:
            self._active.clear()
            self._deadlines.clear()
            self._scheduler = self._new_scheduler()
            self._condition.notify_all()


def _finish(choice: Choice, reason: FinishReason, error: str | None, kind: ErrorKind | None) -> None:
    try:
        choice.finish(reason, error, kind)
    except BaseException as failure:  # of the tokenizer, a Rust library
        choice.text = None
        choice.finish("error", error or one_line(failure), kind or "internal")


def _kind(error: Exception) -> ErrorKind:
    """Return whose fault an error of a grammar or a tokenizer is. Grammars raise ArgumentError for the request's."""
    return "request" if isinstance(error, ArgumentError) else "internal"


def _text_stream(tokenizer: Tokenizer, request: Request, special: frozenset[int]) -> TextStream:
    return TextStream(Detokenizer(tokenizer, request.prompt, special), request.stop)


def _speculation(source: Literal["lookup"] | DraftModel | Drafter | None, vocabulary: int) -> Speculation | None:
    if isinstance(source, str):
        if source != "lookup":
            raise ArgumentError(f"speculation is {source!r}, expected 'lookup', a DraftModel, a Drafter, or None")
        return Speculation(LookupDrafter())
    if isinstance(source, DraftModel):
        return Speculation(LookupDrafter(), source)
    return None if source is None else Speculation(source, vocabulary=vocabulary)


def _native_sampler() -> TokenSampler:
    from .sampling import NativeSampler

    return NativeSampler()

"""Results of running the original model, shared by all passes of a run, and by all runs of a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, one_line

from ..files.model_file import (
    ModelFile,
    data_path,
    external_tensors,
    load_model,
    release_maps,
    tensor_slots,
    to_bytes,
    write_model,
)
from ..find.bfloat16 import widen_bfloat16
from ..find.linear import Linear, layer_key
from ..report.lines import count
from .answers import keep, max_answer_bytes, shorten
from .feeds import (
    SIZES_TO_TRY,
    Feeds,
    Outputs,
    Sizes,
    has_past,
    hold_out,
    model_inputs,
    sizes_in_graph,
    synthetic_feeds,
)
from .fits import Fits
from .input_dimensions import InputDimensions
from .machine import free_memory
from .recorder import InputRecorder, OnRun, Recorded
from .sampling import BEYOND_MEMORY, LARGE, USUAL, sampled_feeds, start_token
from .sessions import open_quietly, open_to_time, run_session

_SECONDS_TO_TRY = 20.0  # time limit for trying shapes of synthetic inputs
_SMALL = 1024  # tensors of at most this many bytes stay in the model file
T = TypeVar("T")


class Evidence:
    """The given model, its feeds, and the results of running it on them.

    Recordings of the original model are stored by value name, because every run of a search loads the model anew. Use
    the object in a with statement, because it keeps files in `folder`.
    """

    def __init__(
        self,
        source: ModelFile,
        folder: Path,
        feeds: Sequence[Feeds] | None = None,
        description: str | None = None,
        portable: bool = True,
        keeps_fits: bool = False,
    ) -> None:
        """Create an empty store.

        Args:
            source: The given model.
            folder: The folder for temporary files.
            feeds: The user's feeds. None: synthetic feeds are made when they are needed.
            description: Description of the feeds for the report.
            portable: True if the model contains ONNX functions for Ortolan's operators between passes.
            keeps_fits: True if fitted weights are stored for later runs of a search.
        """
        self.source = source
        self.folder = folder
        self.description = description
        self.portable = portable
        self.made_up = feeds is None
        self.sampled = False  # True if the feeds are text that the model generated
        self.fitted_to = False  # True if weights were fitted to the feeds
        self.held_out: list[Feeds] = []  # feeds to which no weights are fitted
        self.fits = Fits(folder) if keeps_fits else None  # weights fitted to the inputs of the original's layers
        self._feeds = None if feeds is None else list(feeds)
        self._every: int | None = None  # every n-th feed is held out
        self._judged: list[Feeds] | None = None  # held-out and other feeds, cut if answers are very large
        self.judged_tokens: int | None = None  # number of tokens per sequence to which feeds were cut
        self._rows: dict[tuple[str, int], np.ndarray] = {}
        self._answers: dict[int, tuple[Feeds, Outputs]] = {}  # answers of the original by id(feeds)
        self._remembered: dict[Hashable, Any] = {}
        self._copies = self._runs = 0

    def __enter__(self) -> Evidence:
        return self

    def __exit__(self, *error: object) -> None:
        if self.fits is not None:
            self.fits.close()

    def new_folder(self) -> Path:
        """Make a new folder inside `folder`, for the files of one run."""
        self._runs += 1
        folder = self.folder / f"run-{self._runs}"
        folder.mkdir()
        return folder

    # ---- feeds -------------------------------------------------------------------------------------------------------

    def feeds(self, session: Any = None) -> list[Feeds]:
        """Return the feeds to which weights are fitted.

        These are the user's feeds without the held-out ones. Without user feeds, the feeds are text that a decoder
        generates, or else random inputs.
        """
        if self._feeds is None:
            source, session = self.source, session or self.open_original()
            size = BEYOND_MEMORY if source.size > free_memory() else LARGE if source.is_large else USUAL
            self._feeds = sampled_feeds(source.model, session, start_token(source.path), size)
            self.sampled = bool(self._feeds)
            if self.sampled:
                tokens = sum(one["input_ids"].size for one in self._feeds)
                self.description = f"{count(len(self._feeds), 'input')} sampled from the model itself, {tokens} tokens"
            else:
                self._feeds, self.description = make_up_feeds(source.model, session)
        return self._feeds

    def hold_out(self, every: int) -> None:
        """Hold out every n-th feed for evaluation; 0, or more than the number of feeds, disables."""
        if self._every is None:
            self._every, self._judged = every, None
            self._feeds, self.held_out = hold_out(self.feeds(), every)

    def feeds_to_judge(self, count: int | None = None, session: Any = None) -> list[Feeds]:
        """Return the first `count` feeds, held-out feeds first; feeds with very large answers are cut short."""
        if self._judged is None:
            fitted = self.feeds(session)
            feeds = [*self.held_out, *fitted]
            limit = max_answer_bytes(self.source.size)
            self._judged = feeds if self.made_up else shorten(feeds, lambda: session or self.open_original(), limit)
            shorter = [one for one, whole in zip(self._judged, feeds, strict=True) if one is not whole]
            self.judged_tokens = max((one["input_ids"].shape[1] for one in shorter), default=None)
        return self._judged[:count]

    # ---- sessions ----------------------------------------------------------------------------------------------------

    def open_original(self, timed: bool = False) -> Any:
        """Open a session on the given model, for comparison or for timing."""
        model: Path | bytes | None = self._float32_copy() if self.source.widened else self.source.path
        if model is None:
            assert self.source.proto is not None
            model = to_bytes(self.source.proto)
        return open_to_time(model) if timed else open_quietly(model, self.source)

    def _float32_copy(self) -> Path:
        """Write the original in float32, once: ONNX Runtime cannot run the given bfloat16 file."""
        path = self.folder / "float32.onnx"
        if not path.exists():
            source = load_again(self.source)
            write_model(source.model, path, lambda done, total: None)
            release_maps(list(external_tensors(source.model)))
        return path

    @contextmanager
    def open(self, model: ir.Model, *, library: bool | None = None, in_float: bool = False) -> Iterator[Any]:
        """Open a session on a model between passes, for comparison.

        Args:
            model: The model in its present state.
            library: Register Ortolan's operators. None: register them only if the model has no ONNX functions for them.
            in_float: See `open_quietly`.
        """
        library = not self.portable if library is None else library
        self._copies += 1
        path = self.folder / f"copy-{self._copies}.onnx"
        try:
            root = self.source.external_root
            if _is_in_files(model, root):
                content = to_bytes(model)
                yield open_quietly(content, self.source, library=library, data_folder=root, in_float=in_float)
            else:
                write_model(model, path, lambda done, total: None)
                release_maps(list(external_tensors(model)))
                yield open_quietly(path, self.source, library=library, in_float=in_float)
        finally:
            for file in (path, data_path(path)):
                file.unlink(missing_ok=True)

    def remembered(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return compute(), which is called once per key in a search.

        key: everything besides the original model on which the result depends.
        """
        if self.fits is None:
            return compute()
        if key not in self._remembered:
            self._remembered[key] = compute()
        found: T = self._remembered[key]
        return found

    # ---- runs of the original ----------------------------------------------------------------------------------------

    def answers(self, feeds: Sequence[Feeds], session: Any = None) -> list[Outputs]:
        """Return the original's answers; each feed runs only once in a search.

        Raises:
            CalibrationError: The original model does not run.
        """
        for one in feeds:
            if id(one) not in self._answers:
                session = session or self.open_original()
                answers = run_session(session, one, "the original model", CalibrationError)
                self._answers[id(one)] = one, keep(answers, self.folder)
        return [self._answers[id(one)][1] for one in feeds]

    def rows(
        self, model: ir.Model, linears: Sequence[Linear], max_rows: int, on_run: OnRun
    ) -> dict[ir.Value, np.ndarray]:
        """Return up to max_rows inputs of each layer of the original, float32 [rows, k], by layer_key.

        The inputs are recorded on the held-out feeds if feeds are held out, else on all feeds. Layers in subgraphs are
        left out.

        Args:
            model: The original, or a later state in which all layers still have their original weights.
            linears: The layers.
            max_rows: Limit per layer.
            on_run: Progress callback.
        """
        feeds = self.held_out or self.feeds()
        missing = [linear for linear in linears if (linear.x.name or "", max_rows) not in self._rows]
        if missing:
            with self.recording(model, missing, feeds) as recorder:
                for name, kept in recorder.some_rows(recorder.names, max_rows, on_run).items():
                    self._rows[name, max_rows] = kept
        found = ((layer_key(linear), self._rows.get((linear.x.name or "", max_rows))) for linear in linears)
        return {key: rows for key, rows in found if rows is not None}

    @contextmanager
    def recording(
        self, model: ir.Model, values: Sequence[Recorded], feeds: Sequence[Feeds] | None = None
    ) -> Iterator[InputRecorder]:
        """Yield a recorder for values of the model in its present state. feeds: None means `self.feeds()`."""
        feeds = self.feeds() if feeds is None else feeds
        with ExitStack() as copies:
            yield InputRecorder(model, values, feeds, lambda: copies.enter_context(self.open(model)))


def load_again(source: ModelFile) -> ModelFile:
    """Load the given model anew, because passes change models in place."""
    given = source.path if source.path is not None else source.proto
    assert given is not None
    loaded = load_model(given)
    widen_bfloat16(loaded)
    return loaded


def make_up_feeds(model: ir.Model, session: Any) -> tuple[list[Feeds], str]:
    """Return synthetic feeds that this session accepts, and a description of them."""
    problem = ""
    began = time.monotonic()
    for sizes in (*SIZES_TO_TRY, *sizes_in_graph(model)):
        feeds = synthetic_feeds(model, sizes)
        if problem and time.monotonic() > began + _SECONDS_TO_TRY:
            break
        try:
            session.run(None, feeds)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            problem = problem or one_line(error)
            continue
        found = [feeds]
        # A second length reveals shapes that a pass made constant by mistake. Some exports accept only one length, and
        # then the second feed is left out.
        short = synthetic_feeds(model, Sizes(1, max(1, sizes.sequence // 2 - 1), sizes.past), seed=1)
        others = [_with_hidden_tokens(model, session, short)]
        # Boolean flags select branches of the model, so run the model with each flag off as well.
        flags = [name for name, array in feeds.items() if array.dtype == bool and array.size == 1]
        others += [feeds | {name: np.zeros_like(feeds[name])} for name in flags]
        for other in others:
            with suppress(Exception):  # feeds that do not run are left out
                session.run(None, other)
                found.append(other)
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in list(feeds.items())[:3])
        assumed = InputDimensions.of(model_inputs(model)).describe()
        more = f"{', …' if len(feeds) > 3 else ''}{f' (assumed: {assumed})' if assumed else ''}"
        return found, f"{count(len(found), 'synthetic input')}: {shapes}{more}"
    raise CalibrationError(
        f"the original model does not run on synthetic inputs: {problem}; give calibration=… with inputs "
        "for this model (an .npz file, a dict of arrays, or a list of such dicts)"
    )


def _with_hidden_tokens(model: ir.Model, session: Any, feeds: Feeds) -> Feeds:
    """Return an encoder's feeds with the last third of the tokens masked.

    The feeds are returned unchanged if they are not those of an encoder, or if the model answers with NaN on masked
    tokens.
    """
    ids, mask = feeds.get("input_ids"), feeds.get("attention_mask")
    if ids is None or mask is None or ids.ndim != 2 or ids.shape != mask.shape or has_past(model):
        return feeds
    hidden = mask * (np.arange(ids.shape[1]) < ids.shape[1] - ids.shape[1] // 3)
    changed = feeds | {"attention_mask": hidden.astype(mask.dtype)}
    with suppress(Exception):  # the model may not run with this mask
        answers = session.run(None, changed)
        if all(np.isfinite(one).all() for one in answers if isinstance(one, np.ndarray) and one.dtype.kind == "f"):
            return changed
    return feeds


def _is_in_files(model: ir.Model, root: Path | None) -> bool:
    """Return whether all weights are still stored in the files of the given model."""
    large = [tensor for tensor, _ in tensor_slots(model) if tensor.nbytes > _SMALL]
    return root is not None and all(
        isinstance(tensor, ir.ExternalTensor) and Path(tensor.base_dir) == root for tensor in large
    )

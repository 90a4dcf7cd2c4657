"""The training: a sparse student learns the outputs and hidden states of the dense teacher."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ortolan.graph_passes.weights.pruners.masks import Pattern
from ortolan.progress import Progress, Stage

from . import checkpoint
from .batches import Batches, feeds_of
from .report import CurvePoint, write_curve
from .schedule import learning_rate, sparsities
from .student import PrunedWeight, hidden_states, prune_weight
from .torch_graph import TorchGraph
from .torch_ops import Tensor

HESSIAN_TOKENS = 8192  # number of tokens on which SparseGPT is run
_CLIP = 1.0  # limit to which the gradient's norm is clipped
_BETAS = (0.9, 0.98)
_CHECKPOINT_SECONDS = 300.0
_CURVE = "curve.csv"


class Training:
    """A training run from a state to the last step."""

    def __init__(
        self,
        model: ir.Model,
        graph: TorchGraph,
        weights: Sequence[PrunedWeight],
        original: Mapping[str, np.ndarray],
        batches: Batches,
        state: checkpoint.State,
        *,
        pattern: Pattern,
        target: float,
        steps: int,
        peak: float,
        bfloat16: bool,
    ) -> None:
        """Prepare the training.

        graph: The model in torch. original: The trained initializers of the original model, by name. state: The state
        from which to continue. target: The final sparsity. peak: The highest learning rate. bfloat16: Compute matrix
        products in bfloat16.
        """
        self._model, self._graph, self._weights, self._batches = model, graph, weights, batches
        self._pattern, self._steps, self._peak, self._bfloat16 = pattern, steps, peak, bfloat16
        self._schedule = sparsities(target, steps)
        self._teacher = {name: torch.from_numpy(np.array(array)) for name, array in original.items()}
        self.state = state
        if not state.parameters:
            state.parameters = {name: tensor.clone() for name, tensor in self._teacher.items()}
        if bfloat16:  # converted once here, because autocast would convert the weights in each step
            for weight in weights:
                self._teacher[weight.name] = self._teacher[weight.name].bfloat16()
        for tensor in state.parameters.values():
            tensor.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(
            list(state.parameters.values()), lr=peak, betas=_BETAS, weight_decay=0.0, fused=True
        )
        if state.optimizer:
            self._optimizer.load_state_dict(state.optimizer)
        outputs = [value for value in model.graph.outputs if value.dtype is None or value.dtype.is_floating_point()]
        self._outputs = len(outputs)
        self._wanted = [*outputs, *(x for x in hidden_states(list(weights)) if x not in outputs)]
        self._losses: list[float] = []

    def run(
        self,
        folder: Path,
        every: int,
        evaluate: Callable[[], float | None],
        stopped: Callable[[], bool],
        progress: Progress,
        tell: Callable[[CurvePoint], None] | None,
    ) -> bool:
        """Train to the last step, and write a checkpoint to `folder`.

        every: Steps between points of the curve. evaluate: Scores the current model. stopped: Returns True to stop
        after the current step. tell: Called with each point of the curve.

        Returns:
            False if it was stopped before the last step.
        """
        state = self.state
        start, saved = time.monotonic() - state.seconds, time.monotonic()
        while state.step < self._steps:
            if state.step in self._schedule:
                progress(Stage.PRUNE, 0, 1)
                self._prune(self._schedule[state.step])
            progress(Stage.DISTILL, state.step, self._steps)
            self._losses.append(self._learn(self._batches.batch(state.step)))
            state.step += 1
            state.seconds = time.monotonic() - start
            if state.step % every == 0 or state.step == self._steps:
                score = evaluate()
                loss = float(np.mean(self._losses))
                state.curve.append(
                    CurvePoint(state.step, self.sparsity(), state.tokens, round(state.seconds, 1), loss, score)
                )
                self._losses = []
                if tell is not None:
                    tell(state.curve[-1])
                folder.mkdir(parents=True, exist_ok=True)
                write_curve(folder / _CURVE, state.curve)
            last = state.step == self._steps
            if stopped() or last or time.monotonic() - saved > _CHECKPOINT_SECONDS:
                self._save(folder)
                saved = time.monotonic()
                if not last and stopped():
                    return False
        return True

    def sparsity(self) -> float:
        """Return the fraction of zeros in pruned weights."""
        masks = list(self.state.masks.values())
        kept, size = sum(int(mask.sum()) for mask in masks), sum(int(mask.numel()) for mask in masks)
        return 1 - kept / size if size else 0.0

    def arrays(self) -> dict[str, np.ndarray]:
        """Return copies of the trained initializers."""
        return {name: tensor.detach().numpy().copy() for name, tensor in self.state.parameters.items()}

    def _save(self, folder: Path) -> None:
        self.state.optimizer = self._optimizer.state_dict()
        checkpoint.save(folder, self.state)

    def _learn(self, ids: np.ndarray) -> float:
        state = self.state
        feeds = self._feeds(ids)
        rate = learning_rate(state.step, self._steps, self._peak)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with torch.no_grad(), self._precision():
            taught = self._graph.run(feeds, self._teacher, self._wanted)
        with self._precision():
            learnt = self._graph.run(feeds, state.parameters, self._wanted)
        loss = self._loss(learnt, taught)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(state.parameters.values(), _CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._keep_masks()
        state.tokens += ids.size
        return float(loss.detach())

    def _loss(self, learnt: list[Tensor], taught: list[Tensor]) -> Tensor:
        """Return the sum of the relative errors of token outputs, of text vectors and of hidden states (their mean)."""
        errors = [relative_error(one, other) for one, other in zip(learnt, taught, strict=True)]
        outputs, hidden = errors[: self._outputs], errors[self._outputs :]
        loss = sum(outputs)
        for one, other in zip(learnt[: self._outputs], taught[: self._outputs], strict=True):
            if one.ndim == 3:
                loss = loss + relative_error(_direction(one), _direction(other))
        return loss + sum(hidden) / len(hidden) if hidden else loss

    def _prune(self, sparsity: float) -> None:
        """Prune more weights; SparseGPT compensates on the inputs of the next batches."""
        state = self.state
        inputs = list(dict.fromkeys(x for weight in self._weights for x in weight.inputs))
        sums: dict[ir.Value, Any] = {}
        seen = number = 0
        while seen < min(HESSIAN_TOKENS, self._batches.tokens):
            ids = self._batches.batch(state.step + number)
            with torch.no_grad(), self._precision():
                values = self._graph.run(self._feeds(ids), state.parameters, inputs)
            for x, value in zip(inputs, values, strict=True):
                rows = value.float().reshape(-1, value.shape[-1])
                sums[x] = sums[x] + rows.T @ rows if x in sums else rows.T @ rows
            seen, number = seen + ids.size, number + 1
        for weight in self._weights:
            hessian = sum(sums[x] for x in weight.inputs).numpy()
            tensor = state.parameters[weight.name]
            pruned = prune_weight(tensor.detach().numpy(), weight, hessian, self._pattern, sparsity)
            with torch.no_grad():
                tensor.copy_(torch.from_numpy(pruned))
            state.masks[weight.name] = tensor.detach() != 0

    def _keep_masks(self) -> None:
        with torch.no_grad():
            for name, mask in self.state.masks.items():
                self.state.parameters[name].mul_(mask)

    def _feeds(self, ids: np.ndarray) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in feeds_of(ids, self._model).items()}

    def _precision(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._bfloat16)


def relative_error(learnt: Tensor, taught: Tensor) -> Tensor:
    """Return ||learnt - taught||^2, relative to the squared distance of the rows of `taught` to their mean."""
    learnt, taught = learnt.float(), taught.float()
    rows = taught.reshape(-1, taught.shape[-1])
    spread = (rows - rows.mean(0)).square().sum() if len(rows) > 1 else rows.square().sum()
    return (learnt - taught).square().sum() / spread.clamp_min(1e-12)


def _direction(tokens: Tensor) -> Tensor:
    """Return the mean over tokens, scaled to length 1, as for embeddings."""
    return torch.nn.functional.normalize(tokens.float().mean(1), dim=-1)

# SPDX-License-Identifier: Apache-2.0
"""Learner: Experience or batches → gradients → new weights."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from etude.errors import CheckpointError, EtudeError, ModuleError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import Array
from etude.learners.adam import Adam
from etude.learners.batch import Batch, MinibatchColumns, Shuffled, as_tensors
from etude.learners.clipping import ClipBy, clip
from etude.learners.compiled import CompiledStep
from etude.learners.flat import FlatParameters
from etude.learners.loss import Loss
from etude.learners.schedules import Schedule, value_at
from etude.learners.sequences import Sequences, sequence_batches
from etude.modules import Module

LossFn = Callable[[Module, Batch], Loss]
Figures = dict[str, torch.Tensor]


class Update(NamedTuple):
    """What an update brought: means over its gradient steps."""

    losses: dict[str, float]
    """Each part of the loss."""
    metrics: dict[str, float]
    """What the loss logs, and ``grad_norm`` (before clipping) where gradients are clipped."""


class Learner:
    """Owns the optimizers of a module and makes its updates.

    Args:
        module: What is trained, in place. Its parameters are moved into flat memory, once, here.
        loss: ``loss(module, batch) -> Loss``.
        lr: Learning rate, or points of env steps → rate; or one of these for each named optimizer.
        parameters: The parameters of each named optimizer; None is one, ``"all"``, of all that need a gradient.
        grad_clip: The limit that gradients are clipped to; None leaves them.
        grad_clip_by: What the limit is of, see `ClipBy`.
        compile: Compile the whole step (loss, gradient, clipping, Adam) with ``torch.compile`` when batches are all of
            one size: several seconds at the first step, then faster. Not for recurrent modules.
        device: Where batches go; the module must be there already.
        seed: Of the order of minibatches.

    Raises:
        EtudeError: a parameter belongs to no optimizer or to two; it is named.
        SettingsError: ``compile`` is asked for, and the module is recurrent.
    """

    def __init__(
        self,
        module: Module,
        loss: LossFn,
        *,
        lr: Schedule | Mapping[str, Schedule] = 3e-4,
        parameters: Mapping[str, Sequence[nn.Parameter]] | None = None,
        grad_clip: float | None = None,
        grad_clip_by: ClipBy = "global_norm",
        compile: bool = False,
        device: torch.device | str = "cpu",
        seed: int | np.random.SeedSequence | None = None,
    ) -> None:
        if compile and module.recurrent:
            raise SettingsError(
                "`compile` is True, but the module is recurrent: its sequences differ in length, and each length would "
                "be compiled anew. Leave `compile` out."
            )
        self.module = module
        self.loss = loss
        self.grad_clip = grad_clip
        self.grad_clip_by: ClipBy = grad_clip_by
        self.device = device
        groups = _checked_groups(module, parameters)
        self.optimizers = {name: Adam(FlatParameters(group)) for name, group in groups.items()}
        self.schedules: dict[str, Schedule] = (
            dict(lr) if isinstance(lr, Mapping) else dict.fromkeys(self.optimizers, lr)
        )
        if set(self.schedules) != set(self.optimizers):
            raise EtudeError(f"learning rates for {sorted(self.schedules)}, but optimizers {sorted(self.optimizers)}.")
        self.lr = {name: value_at(schedule, 0) for name, schedule in self.schedules.items()}
        self.updates = 0
        self._rng = np.random.default_rng(seed)
        self._compiled = CompiledStep(self) if compile else None

    # -- updates ------------------------------------------------------------------------------------------------

    def set_env_steps(self, env_steps: int) -> None:
        """Set the learning rates to their schedules' values after ``env_steps`` over the lifetime of the run."""
        self.lr = {name: value_at(schedule, env_steps) for name, schedule in self.schedules.items()}

    def update(
        self, exp: Experience, *, minibatch_size: int, epochs: int = 1, shuffle: bool = True, max_seq_len: int = 32
    ) -> Update:
        """Update from Experience: minibatches of its steps, lookback left out, each step once an epoch.

        Args:
            exp: The experience.
            minibatch_size: Steps in a gradient step. For a recurrent module about so many, in whole sequences.
            epochs: How many times over.
            shuffle: In a new random order each epoch; else in order.
            max_seq_len: For a recurrent module: segments are cut to sequences of at most so many steps, each of which
                begins in the state that was recorded. Gradients flow no further back.
        """
        batches = self._minibatches(exp, minibatch_size, max_seq_len, epochs, shuffle)
        return self._update_all(batch for batch, _ in batches)

    def measure(
        self,
        exp: Experience,
        figures: Callable[[Module, Batch], Figures],
        *,
        chunk_size: int = 8192,
        max_seq_len: int = 32,
    ) -> dict[str, float]:
        """The means of ``figures(module, batch)``, scalars, over the steps of ``exp``, without gradients."""
        totals: dict[str, float] = {}
        rows = 0
        self.module.eval()
        with torch.no_grad():
            for batch, size in self._minibatches(exp, chunk_size, max_seq_len, 1, False):
                rows += size
                for name, value in figures(self.module, batch).items():
                    totals[name] = totals.get(name, 0.0) + size * float(value)
        return {name: total / rows for name, total in totals.items()}

    def _minibatches(
        self, exp: Experience, size: int, max_seq_len: int, epochs: int, shuffle: bool
    ) -> Iterator[tuple[Batch, int]]:
        """Batches of about ``size`` steps, and how many exactly."""
        columns = exp.to(self.device).steps
        if self.module.recurrent:
            sequences = Sequences.of(exp, max_seq_len)
            for _ in range(epochs):
                order = sequences.shuffled(self._rng) if shuffle else sequences
                yield from sequence_batches(columns, order, size, self.module, self.device)
            return
        rows = np.flatnonzero(exp.trained())
        for _ in range(epochs):
            rows_in_order = self._rng.permutation(rows) if shuffle else rows
            epoch = Shuffled(columns, torch.from_numpy(rows_in_order).to(self.device), size)
            for i, start in enumerate(range(0, len(rows), size)):
                yield Batch(MinibatchColumns(epoch, i), self.module), min(size, len(rows) - start)

    def update_from(self, batches: Iterable[Mapping[str, Array]]) -> Update:
        """Update once from each batch of columns ``[B, ...]``.

        Raises:
            ModuleError: the module is recurrent, and such batches have no order in time.
        """
        if self.module.recurrent:
            raise ModuleError(
                f"{type(self.module.net).__name__} is recurrent, and can't learn from batches of single steps, which "
                "have no order in time. Take a network without a memory here, or learn from Experience (as PPO does)."
            )
        return self._update_all(Batch(as_tensors(columns, self.device), self.module) for columns in batches)

    def _update_all(self, batches: Iterable[Batch]) -> Update:
        losses: list[Figures] = []
        metrics: list[Figures] = []
        self.module.train()
        with seeded(int(self._rng.integers(2**63)), self.device):  # dropout and the like, too
            for batch in batches:
                parts, figures = self._step(batch)
                losses.append(parts)
                metrics.append(figures)
        update = Update(_means(losses), _means(metrics))
        for name, mean in update.losses.items():
            if not math.isfinite(mean):
                raise EtudeError(
                    f"the loss part `{name}` became {mean} within {len(losses)} gradient steps, as did the weights. "
                    "Lower `lr` or `grad_clip`, look at the scale of observations and rewards (normalize_obs helps), "
                    "and go on from the last checkpoint."
                )
        return update

    def _step(self, batch: Batch) -> tuple[Figures, Figures]:
        """One gradient step; gives the loss parts and other figures, without their gradients."""
        self.updates += 1
        if self._compiled is not None and (done := self._compiled.step(batch)) is not None:
            return done
        for optimizer in self.optimizers.values():
            optimizer.parameters.attach_grads()
        loss = self.loss(self.module, batch)
        loss.total.backward()  # type: ignore[no-untyped-call]
        groups = [optimizer.parameters for optimizer in self.optimizers.values()]
        figures = dict(loss.logged)
        if self.grad_clip is not None:
            grads = [group.grad for group in groups]
            figures["grad_norm"] = clip(groups, grads, self.grad_clip, self.grad_clip_by)
        for name, optimizer in self.optimizers.items():
            optimizer.step(self.lr[name])
        return {name: part.detach() for name, part in loss.parts.items()}, figures

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizers, count of updates and the random stream: plain data, tensors and arrays."""
        return {
            "module": {name: value.detach().clone() for name, value in self.module.state_dict().items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "updates": self.updates,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            CheckpointError: the weights are those of another module; the first that differs is named.
        """
        load_weights(self.module, state["module"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.updates = int(state["updates"])
        self._rng.bit_generator.state = state["rng"]


def _means(rows: list[Figures]) -> dict[str, float]:
    """The mean of each figure over the gradient steps that have it; moved to the host once."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        return {}
    means = [torch.stack([row[name] for row in rows if name in row]).to(torch.float64).mean() for name in names]
    return dict(zip(names, torch.stack(means).tolist(), strict=True))


@contextmanager
def seeded(seed: int, device: torch.device | str) -> Iterator[None]:
    """Torch draws from ``seed`` within a ``with`` block, on the CPU and on ``device``, and as before after it."""
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


def load_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy weights into a module, in place.

    Raises:
        CheckpointError: a weight is missing, unknown or of another shape.
    """
    own = module.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        if name not in weights or name not in own:
            where = "the checkpoint" if name not in weights else "the module"
            raise CheckpointError(f"{where} has no weight `{name}`: the checkpoint is of another module.")
        if own[name].shape != weights[name].shape:
            raise CheckpointError(
                f"weight `{name}` has shape {tuple(weights[name].shape)} in the checkpoint, but "
                f"{tuple(own[name].shape)} in the module: the checkpoint is of another module."
            )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(weights[name])


def _checked_groups(
    module: nn.Module, parameters: Mapping[str, Sequence[nn.Parameter]] | None
) -> dict[str, list[nn.Parameter]]:
    needed = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    if not needed:
        raise EtudeError("the module has no parameter to train.")
    if parameters is None:
        return {"all": [p for p in module.parameters() if p.requires_grad]}
    owner: dict[int, str] = {}
    for group, members in parameters.items():
        if not members:
            raise EtudeError(f"optimizer `{group}` has no parameters: give it some, or leave it out.")
        for p in members:
            if id(p) in owner:
                raise EtudeError(f"parameter `{needed.get(id(p), '?')}` has two optimizers: {owner[id(p)]}, {group}.")
            owner[id(p)] = group
    for key, name in needed.items():
        if key not in owner:
            raise EtudeError(f"parameter `{name}` has no optimizer: give it one, or set requires_grad to False.")
    return {group: list(members) for group, members in parameters.items()}

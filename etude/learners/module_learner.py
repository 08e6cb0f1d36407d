# SPDX-License-Identifier: Apache-2.0
"""ModuleLearner: the optimizers of one module, and its gradient steps."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import nn

from etude.errors import EtudeError, ModuleError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import Array
from etude.learners.batch import Batch, MinibatchColumns, Shuffled, as_tensors
from etude.learners.clipping import ClipBy, clip
from etude.learners.compiled import CompiledStep
from etude.learners.loss import Loss
from etude.learners.nonfinite import what_was_not_finite
from etude.learners.optimizers import MakeOptimizer, Optimizer, check_owners, make_optimizer
from etude.learners.schedules import Schedule, value_at
from etude.learners.seeding import seeded
from etude.learners.sequences import Sequences, batch_of, sequence_batches
from etude.learners.splits import SequenceRule, Split
from etude.learners.updates import Figures, Update, means_of
from etude.modules import Module
from etude.modules.weights import load_weights

LossFn: TypeAlias = Callable[[Module, Batch], Loss]
Precision: TypeAlias = Literal["float32", "bfloat16"]


class ModuleLearner:
    """Owns the optimizers of a module and makes its gradient steps.

    Args:
        module: What is trained, in place. Its parameters are moved into flat memory when they get their optimizer.
        loss: ``loss(module, batch) -> Loss``.
        name: The module's id, for messages.
        lr: Learning rate, or points of env steps → rate; or one of these for each named optimizer.
        parameters: The parameters of each named optimizer, which is Adam; None is one, ``"all"``, of all that need a
            gradient. With {}, and for other optimizers, call `register_optimizer`.
        grad_clip: The limit that the gradients of each optimizer are clipped to; or one for each named optimizer. None
            leaves them.
        grad_clip_by: What the limit is of, see `ClipBy`.
        accumulate: Batches whose mean gradient makes a step; the last of an update's may be of fewer.
        precision: Of the forward pass: with ``bfloat16``, `torch.autocast` chooses what is computed in it. Weights,
            gradients and optimizers stay float32.
        log_grad_norms: Log ``grad_norm`` (``grad_norm/name`` where there are several optimizers) though nothing is
            clipped.
        max_skipped: Steps in a row that may be skipped because the loss or a gradient is not finite.
        compile: Compile the whole step (loss, gradient, clipping, Adam) with ``torch.compile`` when batches are all of
            one size: several seconds at the first step, then faster. Not for recurrent modules.
        device: Where batches go; the module must be there already.
        seed: Of the order of minibatches.
        on_gradients: Called with the module before its gradients are clipped and applied: ``parameter.grad`` may be
            read and changed in place.
        after_step: Called with the module after each step, without gradients: for target networks.

    Raises:
        EtudeError: a parameter belongs to no optimizer or to two; it is named.
        SettingsError: ``compile`` is asked for where it can't be.
    """

    def __init__(
        self,
        module: Module,
        loss: LossFn,
        *,
        name: str = "main",
        lr: Schedule | Mapping[str, Schedule] = 3e-4,
        parameters: Mapping[str, Sequence[nn.Parameter]] | None = None,
        grad_clip: float | Mapping[str, float | None] | None = None,
        grad_clip_by: ClipBy = "global_norm",
        accumulate: int = 1,
        precision: Precision = "float32",
        log_grad_norms: bool = False,
        max_skipped: int = 10,
        compile: bool = False,
        device: torch.device | str = "cpu",
        seed: int | np.random.SeedSequence | None = None,
        on_gradients: Callable[[Module], None] | None = None,
        after_step: Callable[[Module], None] | None = None,
    ) -> None:
        self.module = module
        self.loss = loss
        self.name = name
        self.grad_clip = grad_clip
        self.grad_clip_by: ClipBy = grad_clip_by
        self.accumulate = accumulate
        self.precision: Precision = precision
        self.log_grad_norms = log_grad_norms
        self.max_skipped = max_skipped
        self.device = torch.device(device)
        self.on_gradients, self.after_step = on_gradients, after_step
        self.optimizers: dict[str, Optimizer] = {}
        self.schedules: dict[str, Schedule] = {}
        self.lr: dict[str, float] = {}
        """The learning rate of each optimizer now."""
        self.updates = 0
        """Gradient steps over the lifetime, skipped ones included."""
        self.skipped = 0
        """Those that were skipped."""
        self.steps_trained = 0
        """Steps of experience that went into them, each as often as it did."""
        self.kept: Figures = {}
        """What the loss kept of the latest batch, by row; see `Loss.keep`."""
        self._skipped_in_a_row = self._env_steps = self._gathered = 0
        self._resting: frozenset[str] = frozenset()
        self._are_owners_checked = False
        self._compiled: CompiledStep | None = None
        self._compile = compile
        self._rng = np.random.default_rng(seed)
        self._register_all(parameters, lr)
        if compile and module.recurrent:
            raise SettingsError(
                "`compile` is True, but the module is recurrent: its sequences differ in length, and each length would "
                "be compiled anew. Leave `compile` out."
            )

    # -- optimizers ---------------------------------------------------------------------------------------------

    def _register_all(
        self, parameters: Mapping[str, Sequence[nn.Parameter]] | None, lr: Schedule | Mapping[str, Schedule]
    ) -> None:
        if parameters is None:
            parameters = {"all": [p for p in self.module.parameters() if p.requires_grad]}
        elif not parameters:
            return  # they are still to be registered
        rates = dict(lr) if isinstance(lr, Mapping) else dict.fromkeys(parameters, lr)
        if rates.keys() != parameters.keys():
            raise EtudeError(f"learning rates for {sorted(rates)}, but optimizers {sorted(parameters)}.")
        check_owners(self.module, parameters)
        for name, members in parameters.items():
            self.register_optimizer(name, None, members, rates[name])
        self._are_owners_checked = True

    def register_optimizer(
        self, name: str, optimizer: MakeOptimizer | None, params: Sequence[nn.Parameter], lr: Schedule
    ) -> None:
        """Give some parameters an optimizer. All that need a gradient must have one before the first update.

        Args:
            name: What it is called; one of this name is replaced.
            optimizer: None is Adam; or what makes a torch optimizer, called with ``([parameter], lr=...)``: such as
                ``torch.optim.SGD``, or a ``functools.partial`` of it. It must work element by element, as it is given
                one flat parameter that holds all of them.
            params: Which parameters.
            lr: Learning rate, or points of env steps → rate.
        """
        self.optimizers[name] = make_optimizer(optimizer, params)
        self.schedules[name] = lr
        self.lr[name] = value_at(lr, self._env_steps)
        self._are_owners_checked = False
        self._compiled = None

    def _check_owners(self) -> None:
        if not self._are_owners_checked:
            check_owners(self.module, {name: o.parameters.parameters for name, o in self.optimizers.items()})
            self._are_owners_checked = True

    # -- updates ------------------------------------------------------------------------------------------------

    def set_env_steps(self, env_steps: int) -> None:
        """Set the learning rates to their schedules' values after ``env_steps`` over the lifetime of the run."""
        self._env_steps = env_steps
        self.lr = {name: value_at(self.schedules[name], env_steps) for name in self.optimizers}

    def update(
        self,
        exp: Experience,
        *,
        minibatch_size: int | None = None,
        num_minibatches: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        max_seq_len: int = 32,
        burn_in: int = 0,
        sequence_start: Literal["stored", "zeros"] = "stored",
    ) -> Update:
        """Update from Experience: minibatches of its steps, lookback left out, each step once an epoch.

        Args:
            exp: The experience.
            minibatch_size: Steps in a gradient step. For a recurrent module about so many, in whole sequences.
            num_minibatches: Instead of that, how many minibatches an epoch has; where there are fewer steps (or
                sequences) than that, they come again.
            epochs: How many times over.
            shuffle: In a new random order each epoch; else in order.
            max_seq_len: For a recurrent module: segments are cut to sequences of at most so many steps. Gradients flow
                no further back.
            burn_in: Steps before each of these, of the same segment, lookback included, that the module walks through
                first, without gradients.
            sequence_start: The state it begins with: the one that was recorded, or the initial one.
        """
        split = Split(minibatch_size, num_minibatches)
        sequences = SequenceRule(max_seq_len, burn_in, sequence_start)
        return self._update_all(self._minibatches(exp, split, sequences, epochs, shuffle))

    def measure(
        self,
        exp: Experience,
        figures: Callable[[Module, Batch], Figures],
        *,
        chunk_size: int = 2048,
        max_seq_len: int = 32,
        sparse: int = 1,
    ) -> dict[str, float]:
        """The means of ``figures(module, batch)``, scalars, over the steps of ``exp``, without gradients.

        With ``sparse``, over every so many steps only, or, for a recurrent module, sequences.
        """
        totals: dict[str, float] = {}
        rows = 0
        self.module.eval()
        with torch.no_grad():
            for batch in self._minibatches(exp, Split(chunk_size), SequenceRule(max_seq_len), 1, False, sparse):
                rows += batch.size
                for name, value in figures(self.module, batch).items():
                    totals[name] = totals.get(name, 0.0) + batch.size * float(value)
        return {name: total / rows for name, total in totals.items()}

    def _minibatches(
        self, exp: Experience, split: Split, rule: SequenceRule, epochs: int, shuffle: bool, sparse: int = 1
    ) -> Iterator[Batch]:
        columns = exp.to(self.device).steps
        if self.module.recurrent:
            sequences = Sequences.of(exp, rule)
            sequences = sequences.take(np.arange(0, len(sequences.starts), sparse))
            for _ in range(epochs):
                order = sequences.shuffled(self._rng) if shuffle else sequences
                yield from sequence_batches(columns, order, split, rule, self.module, self.device)
            return
        rows = np.flatnonzero(exp.trained())[::sparse]
        sizes = split.sizes(len(rows))
        for _ in range(epochs):
            filled = split.filled(self._rng.permutation(rows) if shuffle else rows)
            epoch = Shuffled(columns, torch.from_numpy(filled).to(self.device), sizes)
            for i, size in enumerate(sizes):
                yield Batch(MinibatchColumns(epoch, i), self.module, size=size)

    def update_from(self, batches: Iterable[Mapping[str, Array] | Experience]) -> Update:
        """Update once from each batch of columns ``[B, ...]``; a generator goes on after its batch's step is made.

        A recurrent module learns from Experience: each segment is a sequence, which it begins with its initial state,
        and where there is lookback, walks through that first, without gradients.

        Raises:
            ModuleError: the module is recurrent, and a batch is of single steps, which have no order in time.
        """
        return self._update_all(map(self._batch_of, batches))

    def _batch_of(self, given: Mapping[str, Array] | Experience) -> Batch:
        if isinstance(given, Experience):
            if self.module.recurrent:
                return batch_of(given, self.module, self.device)
            given = given.steps
        if self.module.recurrent:
            raise ModuleError(
                f"{type(self.module.net).__name__} is recurrent, and can't learn from batches of single steps, which "
                "have no order in time. Take a network without a memory here, or give batches of Experience."
            )
        return Batch(as_tensors(given, self.device), self.module)

    def _update_all(self, batches: Iterable[Batch]) -> Update:
        self._check_owners()
        losses: list[Figures] = []
        metrics: list[Figures] = []
        names: dict[str, float] = {}
        before = self.skipped
        self.module.train()
        with seeded(int(self._rng.integers(2**63)), self.device):  # dropout and the like, too
            group: list[tuple[Figures, Figures]] = []
            for batch in batches:
                parts, figures, is_fine = self._step(batch)
                names |= dict.fromkeys(parts, math.nan)
                group.append((parts, figures))
                if is_fine is None:
                    continue
                if is_fine:
                    losses += [parts for parts, _ in group]
                    metrics += [figures for _, figures in group]
                group = []
            if self._gathered and self._apply_rest():
                losses += [parts for parts, _ in group]
                metrics += [figures for _, figures in group]
        means = means_of(metrics)
        if self.skipped > before:
            means["skipped_steps"] = float(self.skipped - before)
        return Update(names | means_of(losses), means)

    def _step(self, batch: Batch) -> tuple[Figures, Figures, bool | None]:
        """The gradients of a batch, and a step where they are enough for one.

        Gives the loss parts and other figures, and whether all was finite; None where no step was made.
        """
        if self._compile and self._compiled is None:
            self._compiled = CompiledStep(self)
        if self._compiled is not None and (done := self._compiled.step(batch)) is not None:
            parts, figures, self.kept, is_fine = done
            self.steps_trained += batch.size
            return parts, figures, self._noted(is_fine, parts, batch)
        if not self._gathered:
            for optimizer in self.optimizers.values():
                optimizer.parameters.attach_grads()
        with self.autocast():
            loss = self.loss(self.module, batch)
            total = loss.total
        (total / self.accumulate if self.accumulate > 1 else total).backward()  # type: ignore[no-untyped-call]
        self._gathered += 1
        self._resting = loss.resting
        self.steps_trained += batch.size
        self.kept = loss.kept
        parts, figures = {name: part.detach() for name, part in loss.parts.items()}, dict(loss.logged)
        if self._gathered < self.accumulate:
            return parts, figures, None
        self.updates += 1
        norms = self._clip_gradients()
        if self.grad_clip is not None or self.log_grad_norms:
            figures |= {"grad_norm" if name == "all" else f"grad_norm/{name}": norm for name, norm in norms.items()}
        is_fine = self._noted(_are_finite([total.detach(), *norms.values()]), parts, batch)
        if is_fine:
            self._apply()
        self._gathered = 0
        return parts, figures, is_fine

    def _clip_gradients(self) -> Figures:
        """Clip the gradients of each optimizer; gives their norms before."""
        if self.on_gradients is not None:
            with torch.no_grad():
                self.on_gradients(self.module)
        norms = {}
        for name, optimizer in self._moving().items():
            group = optimizer.parameters
            norms[name] = clip(group, group.grad, self.limit(name), self.grad_clip_by)
        return norms

    def limit(self, optimizer: str) -> float | None:
        """What the gradients of an optimizer are clipped to."""
        return self.grad_clip.get(optimizer) if isinstance(self.grad_clip, Mapping) else self.grad_clip

    def _moving(self) -> dict[str, Optimizer]:
        """The optimizers that the latest loss lets make a step."""
        if not self._resting:
            return self.optimizers
        return {name: optimizer for name, optimizer in self.optimizers.items() if name not in self._resting}

    def _apply(self) -> None:
        for name, optimizer in self._moving().items():
            optimizer.step(self.lr[name])
        if self.after_step is not None:
            with torch.no_grad():
                self.after_step(self.module)

    def _apply_rest(self) -> bool:
        """Make a step of what was gathered, but was not enough for one; says if it was finite."""
        self.updates += 1
        for optimizer in self.optimizers.values():
            optimizer.parameters.grad.mul_(self.accumulate / self._gathered)
        self._gathered = 0
        is_fine = _are_finite(list(self._clip_gradients().values()))
        if is_fine:
            self._apply()
        else:
            self.skipped += 1
        return is_fine

    def _noted(self, is_fine: bool, parts: Figures, batch: Batch) -> bool:
        """Count a step that is skipped, and raise an error where too many are."""
        if is_fine:
            self._skipped_in_a_row = 0
            return True
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self.max_skipped:
            raise EtudeError(what_was_not_finite(self.name, self._skipped_in_a_row, parts, batch))
        return False

    def autocast(self) -> Any:
        """Within it, the forward pass is computed with ``precision``."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bfloat16" else nullcontext()

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizers, counts and the random stream: plain data, tensors and arrays."""
        return {
            "module": {name: value.detach().clone() for name, value in self.module.state_dict().items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "updates": self.updates,
            "skipped": self.skipped,
            "steps_trained": self.steps_trained,
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
        self.skipped, self.steps_trained = int(state.get("skipped", 0)), int(state.get("steps_trained", 0))
        self._rng.bit_generator.state = state["rng"]


def _are_finite(numbers: Sequence[torch.Tensor]) -> bool:
    total = numbers[0]
    for number in numbers[1:]:
        total = total + number
    return math.isfinite(total.item())

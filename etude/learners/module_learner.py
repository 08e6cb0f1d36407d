# SPDX-License-Identifier: Apache-2.0
"""ModuleLearner: the optimizers of one module, and its gradient steps."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import nn

from etude.connectors import Pipeline
from etude.errors import EtudeError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import Array
from etude.learners.adam import Adam, Rates
from etude.learners.averaging import share_buffers
from etude.learners.batch import Batch
from etude.learners.clipping import ClipBy
from etude.learners.loss import Loss, checked
from etude.learners.minibatches import Going, batch_from, minibatches
from etude.learners.optimizers import MakeOptimizer, Optimizer, check_owners, make_optimizer
from etude.learners.schedules import Schedule, value_at
from etude.learners.seeding import seeded
from etude.learners.sides import Sides
from etude.learners.splits import SequenceRule, Split
from etude.learners.steps import Stepped, Steps
from etude.learners.team import Team
from etude.learners.updates import Figures, Update, found_by_all, joined_means, means_of
from etude.modules import Module
from etude.modules.module import load_weights
from etude.threads import SMALL, StepThreads, ThreadsLike, for_acting

LossFn: TypeAlias = Callable[[Module, Batch], Loss]
Precision: TypeAlias = Literal["float32", "bfloat16"]
ScheduleBy: TypeAlias = Literal["env_steps", "updates"]

RATE_OF = {"policy": "actor", "value": "critic", "critic": "critic"}
"""By side of the loss, which learning rate of their own its parameters can have."""


def check_device(device: torch.device | str) -> None:
    """Raise a SettingsError unless a module can learn on ``device`` here."""
    try:
        kind = torch.device(device).type
        if kind in ("cpu", "cuda"):
            torch.zeros(1, device=device)
            return
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise SettingsError(f"`device` is {str(device)!r}, which torch can't use here: {reason} Use cpu.") from None
    why = " Some figures are computed in float64, which Apple's GPUs don't have." if kind == "mps" else ""
    raise SettingsError(f"`device` is {str(device)!r}, but modules learn on cpu and cuda only.{why} Use cpu.")


class ModuleLearner:
    """Owns the optimizers of a module and makes its gradient steps.

    Args:
        module: What is trained, in place. Its parameters are moved into flat memory when they get their optimizer.
        loss: ``loss(module, batch) -> Loss``.
        connectors: Add to experience what the loss needs, before `update`: whoever calls it sends it through them.
        name: The module's id, for messages.
        lr: Learning rate, or a `Schedule` of it; or one of these for each named optimizer.
        own_lr: Where there is one optimizer, other learning rates for the parameters that only the policy's loss
            reaches (``actor``), and for those that only the part ``value`` or ``critic`` of the loss reaches
            (``critic``).
        schedules_by: What schedules count: ``env_steps``, which `set_env_steps` is told, or the learner's ``updates``.
        scheduled: Schedules of numbers that the loss reads, as ``module.scheduled[name]``.
        adam_betas: Decay rates of Adam's two moments.
        adam_eps: What Adam adds to the root of the second moment.
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
        threads: CPU threads of gradient steps, see `StepThreads`; None leaves torch as it is.
        seed: Of the order of minibatches.
        on_gradients: Called with the module before its gradients are clipped and applied: ``parameter.grad`` may be
            read and changed in place.
        after_step: Called with the module after each step, without gradients: for target networks.

    Raises:
        EtudeError: a parameter belongs to no optimizer or to two; it is named.
        SettingsError: ``compile`` is asked for where it can't be, or ``device`` can't be learned on.
    """

    def __init__(
        self,
        module: Module,
        loss: LossFn,
        *,
        connectors: Pipeline | None = None,
        name: str = "main",
        lr: Schedule | Mapping[str, Schedule] = 3e-4,
        own_lr: Mapping[str, Schedule] | None = None,
        schedules_by: ScheduleBy = "env_steps",
        scheduled: Mapping[str, Schedule] | None = None,
        adam_betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        parameters: Mapping[str, Sequence[nn.Parameter]] | None = None,
        grad_clip: float | Mapping[str, float | None] | None = None,
        grad_clip_by: ClipBy = "global_norm",
        accumulate: int = 1,
        precision: Precision = "float32",
        log_grad_norms: bool = False,
        max_skipped: int = 10,
        compile: bool = False,
        device: torch.device | str = "cpu",
        threads: ThreadsLike | None = None,
        seed: int | np.random.SeedSequence | None = None,
        on_gradients: Callable[[Module], None] | None = None,
        after_step: Callable[[Module], None] | None = None,
    ) -> None:
        self.module = module
        self.loss: LossFn = checked(loss)
        self.connectors = Pipeline() if connectors is None else connectors
        self.name = name
        self.grad_clip = grad_clip
        self.grad_clip_by: ClipBy = grad_clip_by
        self.accumulate = accumulate
        self.precision: Precision = precision
        self.log_grad_norms = log_grad_norms
        self.max_skipped = max_skipped
        check_device(device)
        self.device = torch.device(device)
        on_cpu = self.device.type == "cpu"
        self.threads = None if threads is None else StepThreads(threads if on_cpu else for_acting(threads))
        """The CPU threads of gradient steps; None: as torch is set."""
        self.on_gradients, self.after_step = on_gradients, after_step
        self.optimizers: dict[str, Optimizer] = {}
        self.adam_betas, self.adam_eps = adam_betas, adam_eps
        self.schedules: dict[str, Schedule] = dict(own_lr or {})
        self.schedules_by: ScheduleBy = schedules_by
        self.scheduled = dict(scheduled or {})
        self.lr: dict[str, float] = {}
        """The learning rate of each optimizer now, and those of `own_lr`."""
        self._own_lr = frozenset(self.schedules)
        self.updates = 0
        """Gradient steps over the lifetime, skipped ones included."""
        self.skipped = 0
        """Those that were skipped."""
        self.steps_trained = 0
        """Steps of experience that went into them, each as often as it did."""
        self.kept: Figures = {}
        """What the loss kept of the latest batch, by row; see `Loss.keep`."""
        self.compile = compile
        self._at = 0  # what schedules count
        self._are_owners_checked = False
        self._steps = Steps(self)
        self._team: Team | None = None
        self._rng = np.random.default_rng(seed)
        self._register_all(parameters, lr)
        self._follow(0)
        if compile and module.recurrent:
            raise SettingsError(
                "`compile` is True, but the module is recurrent: its sequences differ in length, and each length would "
                "be compiled anew. Leave `compile` out."
            )

    @property
    def team(self) -> Team | None:
        """The learners, in processes of their own, that make each step together with this one; None: it is alone.

        All of a team have a learner of the same module, with equal weights and settings. Each is given its share of the
        experience, or of each batch, perhaps none, and all are asked for the same updates in the same order. Each step
        is then the one that a single learner would make from everyone's rows: what `update` says of sizes and numbers
        of minibatches is about everyone's steps together, and so are all figures and counts. For this a loss must be a
        mean over the rows of its batch, as gradients are averaged in proportion to rows: one that is a sum would weigh
        as much as the mean of everyone's sums, and one that compares rows (with their mean, say) sees only its own.
        Random numbers, of dropout, say, differ between them. Buffers that change, such as running means, are after each
        update those of the learner that had the most rows in it.
        """
        return self._team

    @team.setter
    def team(self, team: Team | None) -> None:
        if team is not None and team.size > 1 and self.compile:
            raise SettingsError(
                f"`compile` is True, but {team.size} learners average their gradients in the middle of each step, "
                "which then can't be compiled as a whole. Leave `compile` out, or take one learner."
            )
        self._team = team
        self._steps.forget_optimizers()

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
            lr: Learning rate, or a `Schedule` of it.
        """
        self.optimizers[name] = make_optimizer(optimizer, params, betas=self.adam_betas, eps=self.adam_eps)
        self.schedules[name] = lr
        self.lr[name] = value_at(lr, self._at)
        self._are_owners_checked = False
        self._steps.forget_optimizers()

    def _check_owners(self) -> None:
        if not self._are_owners_checked:
            check_owners(self.module, {name: o.parameters.parameters for name, o in self.optimizers.items()})
            self._are_owners_checked = True

    # -- updates ------------------------------------------------------------------------------------------------

    def set_env_steps(self, env_steps: int) -> None:
        """Let schedules that count env steps be where they are after ``env_steps`` over the lifetime of the run."""
        if self.schedules_by == "env_steps":
            self._follow(env_steps)

    def follow_updates(self) -> None:
        """Let schedules that count gradient steps be where they are now."""
        if self.schedules_by == "updates" and self._follows:
            self._follow(self.updates)

    @property
    def _follows(self) -> bool:
        return any(isinstance(schedule, tuple) for schedule in (*self.schedules.values(), *self.scheduled.values()))

    def _follow(self, at: int) -> None:
        self._at = at
        self.lr = {name: value_at(self.schedules[name], at) for name in (*self.optimizers, *sorted(self._own_lr))}
        for name, schedule in self.scheduled.items():
            value = self.module.scheduled.setdefault(name, torch.zeros((), device=self.device))
            value.fill_(value_at(schedule, at))

    def rates(self, optimizer: str) -> Rates:
        """The learning rate of an optimizer now, or those of its slices."""
        sides = self._steps.sides
        if sides is None or not self._own_lr:
            return self.lr[optimizer]
        rate_of = {side: self.lr.get(RATE_OF.get(side, ""), self.lr[optimizer]) for side in sides.slices}
        return [(own, rate_of[side]) for side, slices in sides.slices.items() for own in slices]

    @property
    def wants_sides(self) -> bool:
        """Whether it is to be known what each side of the loss reaches."""
        apart = self.grad_clip_by == "loss_norm" and self.limit("all") is not None
        return list(self.optimizers) == ["all"] and (apart or bool(self._own_lr))

    def check_rates(self, sides: Sides) -> None:
        """Raise a SettingsError where a learning rate is of no parameter."""
        there = {RATE_OF.get(side) for side in sides.slices} if len(sides.names) > 1 else set()
        for name in sorted(self._own_lr - there):
            parts = "named `value` or `critic`" if name == "critic" else "beside `value` and `critic`"
            raise SettingsError(
                f"`{name}_lr` is set, but of module {self.name!r} no parameter has a gradient from a part of the loss "
                f"{parts}, and from no other: leave it out and set `lr`, or let policy and value share no layers."
            )
        if self._own_lr and not isinstance(self.optimizers["all"], Adam):
            raise SettingsError("`actor_lr` and `critic_lr` go with Adam: give other optimizers their own parameters.")

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
        going = self._going(split, sequences, epochs, shuffle)
        return self._update_all(minibatches(exp, going, self.module, self.device))

    def measure(
        self,
        exp: Experience,
        figures: Callable[[Module, Batch], Figures],
        *,
        chunk_size: int = 2048,
        max_seq_len: int = 32,
        burn_in: int = 0,
        sequence_start: Literal["stored", "zeros"] = "stored",
        sparse: int = 1,
    ) -> dict[str, float]:
        """The means of ``figures(module, batch)``, scalars, over the steps of ``exp``, without gradients.

        Args:
            exp: The experience.
            figures: What is measured of a batch.
            chunk_size: Steps in a batch.
            max_seq_len: For a recurrent module, as `update` has it; so are the next two. Equal settings give every step
                the state that it has in an update.
            burn_in: Steps before each sequence that the module walks through first.
            sequence_start: The state it begins with.
            sparse: Measure every so many steps only, or, for a recurrent module, sequences.
        """
        totals: dict[str, float] = {}
        rows = 0
        going = Going(Split(chunk_size), SequenceRule(max_seq_len, burn_in, sequence_start), sparse=sparse)
        self.module.eval()
        with torch.no_grad(), self.with_threads():
            for batch in minibatches(exp, going, self.module, self.device):
                rows += batch.size
                for name, value in figures(self.module, batch).items():
                    totals[name] = totals.get(name, 0.0) + batch.size * float(value)
        every = [(rows, totals)] if self.team is None else self.team.gathered((rows, totals))
        rows = sum(own for own, _ in every)
        names = dict.fromkeys(name for _, own in every for name in own)
        return {name: sum(own.get(name, 0.0) for _, own in every) / rows for name in names}

    def _going(self, split: Split, rule: SequenceRule, epochs: int, shuffle: bool) -> Going:
        rng = self._rng
        if self.team is not None and shuffle:  # all go on with equal streams, whatever each draws
            rng = np.random.default_rng([int(rng.integers(2**63)), self.team.rank])
        return Going(split, rule, epochs, rng=rng if shuffle else None, team=self.team)

    def update_from(self, batches: Iterable[Mapping[str, Array] | Experience]) -> Update:
        """Update once from each batch of columns ``[B, ...]``; a generator goes on after its batch's step is made.

        A recurrent module learns from Experience: each segment is a sequence, which it begins with its initial state,
        and where there is lookback, walks through that first, without gradients.

        Raises:
            ModuleError: the module is recurrent, and a batch is of single steps, which have no order in time.
        """
        return self._update_all(batch_from(given, self.module, self.device) for given in batches)

    def _update_all(self, batches: Iterable[Batch]) -> Update:
        self._check_owners()
        done: list[Stepped] = []
        names: dict[str, float] = {}
        before = self.skipped
        seed = int(self._rng.integers(2**63)) + (0 if self.team is None else self.team.rank)
        self.module.train()
        make = self._steps.make if self.threads is None else self._timed
        with seeded(seed, self.device), self.with_threads():  # dropout and the like, too
            group: list[Stepped] = []
            for batch in batches:
                stepped = make(batch)
                names |= dict.fromkeys(stepped.parts, math.nan)
                group.append(stepped)
                if stepped.is_fine is None:
                    continue
                done += group if stepped.is_fine else []
                group = []
            if self._steps.has_rest and self._steps.make_rest():
                done += group
        losses, metrics = self._means(done, names)
        if self.skipped > before:
            metrics["skipped_steps"] = float(self.skipped - before)
        if self.threads is not None:
            metrics["threads"] = float(self.threads.num)
        return Update(losses, metrics)

    def _timed(self, batch: Batch) -> Stepped:
        assert self.threads is not None
        return self.threads.step(self._steps.make, batch, self._size * batch.size, again=not self.compile)

    @cached_property
    def _size(self) -> int:
        """Multiplications of the forward pass for a row, about: where there are convolutions, any number of them."""
        if any(isinstance(part, nn.modules.conv._ConvNd) for part in self.module.modules()):
            return SMALL
        return sum(parameter.numel() for parameter in self.module.parameters())

    def with_threads(self) -> AbstractContextManager[None]:
        """Within it, torch computes with as many CPU threads as gradient steps do."""
        return nullcontext() if self.threads is None else self.threads.taken()

    def _means(self, done: list[Stepped], names: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """The means over steps of the parts of the loss, NaN if there is none, and of what was logged."""
        parts, figures = [step.parts for step in done], [step.figures for step in done]
        if self.team is None:
            return names | means_of(parts), means_of(figures)
        found = found_by_all(self.team, names, [step.rows for step in done], parts, figures)
        share_buffers(self.team, self.module, [sum(own.rows) for own in found])
        names = dict.fromkeys((name for own in found for name in own.names), math.nan)
        return names | joined_means(found, 0), joined_means(found, 1)

    def limit(self, optimizer: str) -> float | None:
        """What the gradients of an optimizer are clipped to."""
        return self.grad_clip.get(optimizer) if isinstance(self.grad_clip, Mapping) else self.grad_clip

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
            "threads": {} if self.threads is None else self.threads.state_dict(),
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
        if self.schedules_by == "updates":
            self._follow(self.updates)
        self.skipped, self.steps_trained = int(state.get("skipped", 0)), int(state.get("steps_trained", 0))
        self._rng.bit_generator.state = state["rng"]
        if self.threads is not None:
            self.threads.load_state_dict(state.get("threads", {}))

# SPDX-License-Identifier: Apache-2.0
"""ModuleLearner: the gradient steps of one module. Learner: one or many modules, each with its own learner."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import nn

from etude.connectors import Pipeline
from etude.display import short
from etude.errors import CheckpointError, DataError, EtudeError, ModuleError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import Array
from etude.interruption import pause
from etude.learners.batch import Batch, batch_from, minibatches
from etude.learners.compiled import CompiledStep, LossFn, check_compilable
from etude.learners.distributed import BatchResult, Team, TeamGradients, blamed, move_to_host, results_of_all
from etude.learners.loss import Figures, Loss, checked, numbers_of
from etude.learners.optim import Adam, MakeOptimizer, OptimizerConfig, Optimizers, Schedule, check_owners, value_at
from etude.modules import Module
from etude.modules.module import load_weights
from etude.settings import IntFrom1, settings
from etude.threads import SMALL, StepThreads, for_acting, held, keep_freed_memory

T = TypeVar("T")

Precision: TypeAlias = Literal["float32", "bfloat16"]
ScheduleBy: TypeAlias = Literal["env_steps", "updates"]

ModulesToTrain: TypeAlias = Collection[str] | Callable[[str, Any], bool]
"""Module ids; or a function ``(module_id, batch) -> bool``, where ``batch`` is what the module would learn from."""


class Update(NamedTuple):
    """The result of an update: means over its gradient steps, without those that were skipped."""

    losses: dict[str, float]
    """Each part of the loss; NaN if every step was skipped."""
    metrics: dict[str, float]
    """What the loss logs; ``grad_norm`` (before clipping) if gradients are clipped; ``skipped_steps`` if some were
    skipped because the loss or its gradients were not finite; ``threads`` of the CPU."""


def mean_of(updates: Sequence[Update | BatchResult], steps: Sequence[int] | None = None) -> Update:
    """Merge several updates: the mean of each figure over the updates that have it.

    ``skipped_steps`` are added up, and ``threads`` are those of the last update. The losses of an update in which every
    step was skipped are NaN; they count only if there are no others.

    Args:
        updates: The updates.
        steps: The gradient steps of each, by which means are weighted; None: all have as many.
    """
    losses, metrics = defaultdict[str, _Weighted](list), defaultdict[str, _Weighted](list)
    for i, update in enumerate(updates):
        for found, figures in (losses, update.losses), (metrics, update.metrics):
            for name, value in figures.items():
                found[name].append((value, 1 if steps is None else steps[i]))
    mean = Update({}, {})
    for name, pairs in losses.items():
        mean.losses[name] = _mean([pair for pair in pairs if not math.isnan(pair[0])] or pairs)
    for name, pairs in metrics.items():
        if name == "skipped_steps":
            mean.metrics[name] = sum(value for value, _ in pairs)
        elif name == "threads":
            mean.metrics[name] = pairs[-1][0]
        else:
            mean.metrics[name] = _mean(pairs)
    return mean


_Weighted = list[tuple[float, int]]
"""Values of one name, each with the weight of the update that it is from."""


def _mean(pairs: _Weighted) -> float:
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def check_device(device: torch.device | str) -> None:
    """Raise a SettingsError unless a module can learn on ``device`` here."""
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        why = " Some figures are computed in float64, which Apple's GPUs don't have." if kind == "mps" else ""
        raise SettingsError(f"`device` is {str(device)!r}, but modules learn on cpu and cuda only.{why} Use cpu.")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise SettingsError(f"`device` is {str(device)!r}, which torch can't use here: {reason}. Use cpu.") from None


@settings
class ComputeConfig:
    """Device, threads and precision."""

    everyday: ClassVar[tuple[str, ...]] = ("device",)

    device: str = "cpu"
    """Device of the module, as torch names it: cpu, cuda, cuda:1. Other devices are refused: Apple's `mps` has no
    float64, in which some figures are computed."""

    threads: IntFrom1 | Literal["auto"] = "auto"
    """Torch's CPU threads during training, at least 1; the process's own setting is restored afterwards. `auto`:
    gradient steps use the number that the first steps show to be fastest (one for small networks), at most the number
    of free cores; everything else uses one. Sums split among threads may differ in their last bits: for exactly
    repeatable numbers with large networks, give a number."""

    precision: Precision = "float32"
    """Data type of the forward pass. `bfloat16` halves the memory of activations. It is faster for wide networks on
    hardware that supports it, and slower for small ones. Weights and optimizers stay float32."""

    compile: bool = False
    """Compile the whole gradient step with torch.compile. Takes up to half a minute at the start; steps are then about
    twice as fast on a CPU. Needs a C++ compiler, and a temporary folder (`TMPDIR`) whose path has no space."""


class ModuleLearner:
    """Owns the optimizers of a module and makes its gradient steps.

    Args:
        module: The module to train, in place. Its parameters are moved into flat memory when they get their optimizer.
        loss: ``loss(module, batch) -> Loss``.
        connectors: Connectors that add the columns that the loss needs. The caller of `update` applies them first.
        name: The module's id, for messages.
        lr: Learning rate, or a `Schedule`; or one of these for each named optimizer.
        schedules_by: What schedules count: ``env_steps``, as given to `set_env_steps`, or the learner's ``updates``.
        scheduled: Schedules of numbers that the loss reads as ``module.scheduled[name]``.
        parameters: The parameters of each named optimizer, which is Adam; None: a single one, ``"all"``, of all that
            need a gradient. With {}, and for other optimizers, call `register_optimizer`.
        optimizer: Settings of Adam, of clipping and of accumulation. ``actor_lr`` and ``critic_lr`` apply if there is a
            single optimizer; give named ones their rates in ``lr``. Default: gradients are not clipped.
        compute: Device, threads, precision, and whether steps are compiled. The module must be on the device already.
            With `compile`, the loss, the gradient, clipping and Adam are compiled together, for batches of one size:
            the first step takes several seconds, later ones are faster. Not for recurrent modules.
        seed: Seed of the order of minibatches, and of what the loss draws from torch's generator.
        on_gradients: Called with the module before its gradients are clipped and applied: ``parameter.grad`` may be
            read and changed in place.
        after_step: Called with the module after each step, under ``no_grad``: for target networks.

    Raises:
        EtudeError: a parameter belongs to no optimizer or to two; the message names it.
        SettingsError: steps can't be compiled here, or the device can't be used for learning.
    """

    def __init__(
        self,
        module: Module,
        loss: LossFn,
        *,
        connectors: Pipeline | None = None,
        name: str = "main",
        lr: Schedule | Mapping[str, Schedule] = 3e-4,
        schedules_by: ScheduleBy = "env_steps",
        scheduled: Mapping[str, Schedule] | None = None,
        parameters: Mapping[str, Sequence[nn.Parameter]] | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(grad_clip=None),  # noqa: B008 - frozen
        compute: ComputeConfig = ComputeConfig(),  # noqa: B008
        seed: int | np.random.SeedSequence | None = None,
        on_gradients: Callable[[Module], None] | None = None,
        after_step: Callable[[Module], None] | None = None,
    ) -> None:
        self.module = module
        self.loss: LossFn = checked(loss)
        self.connectors = Pipeline() if connectors is None else connectors
        self.name = name
        self.accumulate, self.max_skipped = optimizer.accumulate, optimizer.max_skipped
        self.precision, self.compile = compute.precision, compute.compile
        check_device(compute.device)
        self.device = torch.device(compute.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.threads = StepThreads(compute.threads if self.device.type == "cpu" else for_acting(compute.threads))
        """The CPU threads of gradient steps."""
        self.on_gradients, self.after_step = on_gradients, after_step
        self.schedules_by: ScheduleBy = schedules_by
        self.scheduled = dict(scheduled or {})
        self.updates = 0
        """Gradient steps over the lifetime, skipped ones included."""
        self.skipped = 0
        """Gradient steps that were skipped."""
        self.steps_trained = 0
        """Rows of all batches so far: a step of experience counts each time that it is learned from."""
        self.kept: Figures = {}
        """What the loss kept of the latest batch, tensors ``[B, ...]`` by name; see `Loss.keep`."""
        own = {"actor": optimizer.actor_lr, "critic": optimizer.critic_lr}
        own_lr = {name: rate for name, rate in own.items() if rate is not None}
        is_one = parameters is None and not isinstance(lr, Mapping)
        self._optim = Optimizers(name, optimizer, own_lr if is_one else {})
        self.optimizers = self._optim.by_name
        """The optimizers by name."""
        self.schedules = self._optim.schedules
        """The schedules of `lr`."""
        self.lr = self._optim.lr
        """The current learning rate of each optimizer, and those of parts of a single one."""
        self._team: Team | None = None
        self._shared: TeamGradients | None = None  # None: to be made, if there is a team
        self._compiled: CompiledStep | None = None
        self._gathered: list[BatchResult] = []  # batches that belong to the current step
        self._made: list[BatchResult] = []  # batches of completed steps in the current update
        self._skipped_in_a_row = 0
        self._rng = np.random.default_rng(seed)
        self._last_loss: Loss | None = None
        self._is_scheduled = bool(self.scheduled)  # whether anything follows a schedule
        self._register_all(parameters, lr)
        self._follow(0)
        if compute.compile and module.recurrent:
            raise SettingsError(
                "`compile` is True, but the module is recurrent: its sequences differ in length, and each length would "
                "be compiled anew. Leave `compile` out."
            )

    def __repr__(self) -> str:
        return short(
            self, self.name, updates=self.updates, connectors=[repr(one) for one in self.connectors.connectors]
        )

    @property
    def team(self) -> Team | None:
        """The learners, each in its own process, that make each step together with this one; None: there are no others.

        All learners of a team have the same module, with equal weights and settings. Each is given its share of the
        experience, or of each batch, perhaps none, and all are asked for the same updates in the same order. Each step
        is then the one that a single learner would make from all rows: the sizes and numbers of minibatches that
        `update` takes refer to the whole team's steps, and so do all figures and counts. For this a loss must be a mean
        over the rows of its batch, as gradients are averaged in proportion to rows. A loss that is a sum would count as
        the mean of the learners' sums, and one that compares rows (with their mean, say) sees only its own. Random
        numbers, such as those of dropout, differ between learners. After each update, buffers that change, such as
        running means, are those of the learner that had the most rows in it.
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
        self._optim.forget_sides()
        self._optimizers_changed()

    # -- optimizers ---------------------------------------------------------------------------------------------

    def _register_all(
        self, parameters: Mapping[str, Sequence[nn.Parameter]] | None, lr: Schedule | Mapping[str, Schedule]
    ) -> None:
        if parameters is None:
            parameters = {"all": [p for p in self.module.parameters() if p.requires_grad]}
        elif not parameters:
            return  # they will be registered later
        if not isinstance(parameters, Mapping):
            raise ModuleError(
                f"parameter_groups returned a {type(parameters).__name__}: it must return a dict of parameters "
                'by the names of their optimizers, such as {"all": list(module.parameters())}.'
            )
        parameters = {name: [*got] if isinstance(got, Iterable) else [got] for name, got in parameters.items()}
        rates = dict(lr) if isinstance(lr, Mapping) else dict.fromkeys(parameters, lr)
        if rates.keys() != parameters.keys():
            raise EtudeError(f"learning rates for {sorted(rates)}, but optimizers {sorted(parameters)}.")
        check_owners(self.module, parameters)
        for name, members in parameters.items():
            self.register_optimizer(name, None, members, rates[name])

    def register_optimizer(
        self, name: str, optimizer: MakeOptimizer | None, params: Sequence[nn.Parameter], lr: Schedule
    ) -> None:
        """Give some parameters an optimizer. All that need a gradient must have one before the first update.

        Args:
            name: Its name; an optimizer with this name is replaced.
            optimizer: None: Adam. Otherwise a function that makes a torch optimizer, called with ``([parameter],
                lr=...)``: such as ``torch.optim.SGD``, or a ``functools.partial`` of it. It must work element by
                element, as it is given one flat parameter that holds all of them.
            params: The parameters.
            lr: Learning rate, or a `Schedule`.
        """
        self._optim.register(name, optimizer, params, lr)
        rates = (*self.schedules.values(), *self.scheduled.values())
        self._is_scheduled = any(isinstance(rate, tuple) for rate in rates)
        self._optimizers_changed()

    def _optimizers_changed(self) -> None:
        self._optim.forget_memory()
        self._shared = self._compiled = None

    # -- schedules ----------------------------------------------------------------------------------------------

    def set_env_steps(self, env_steps: int) -> None:
        """Set schedules that count env steps to their values after ``env_steps`` over the lifetime of the run."""
        if self._is_scheduled and self.schedules_by == "env_steps":
            self._follow(env_steps)

    def _follow(self, at: int) -> None:
        self._optim.follow(at)
        for name, schedule in self.scheduled.items():
            value = self.module.scheduled.setdefault(name, torch.zeros((), device=self.device))
            value.fill_(value_at(schedule, at))

    # -- updates ------------------------------------------------------------------------------------------------

    def update(self, exp: Experience, *, shuffle: bool = True, **how: Any) -> Update:
        """Update from Experience, in minibatches of its steps without lookback, each step once per epoch.

        Args:
            exp: The experience.
            shuffle: Go through the steps in a new random order each epoch; otherwise in order.
            how: ``minibatch_size`` (steps in a gradient step; for a recurrent module about this many, in whole
                sequences) or ``num_minibatches`` (in an epoch; if there are fewer steps or sequences, they are reused);
                ``epochs`` (passes over the steps, 1 by default). For a recurrent module, ``max_seq_len`` (longest
                sequence, in steps, to which segments are cut; gradients flow no further back; 32 by default),
                ``burn_in`` (steps before each sequence, of the same segment, lookback included, that the module first
                processes without gradients; 0 by default), ``context`` (the steps that connectors look back, see
                `Sequences.cut`; 0 by default) and ``sequence_start`` (whether it begins with the ``"stored"`` state, as
                by default, or with ``"zeros"``, the initial one).

        Returns:
            Means over the gradient steps.

        Raises:
            SettingsError: both or neither of `minibatch_size` and `num_minibatches` is given.
            DataError: the loss needs a column that is missing, or a recurrent module a state.
            EtudeError: `max_skipped` steps in a row were not finite.
        """
        rng = self._rng
        if self._team is not None and shuffle:  # `_rng` stays equal in all learners, whatever each draws here
            rng = np.random.default_rng([int(rng.integers(2**63)), self._team.rank])
        own = rng if shuffle else None
        return self._update(minibatches(exp, self.module, self.device, rng=own, team=self._team, **how))

    def update_from(self, batches: Iterable[Mapping[str, Array] | Experience]) -> Update:
        """Update once from each batch of columns ``[B, ...]``; a generator is resumed after its batch's step.

        A recurrent module learns from batches of Experience. Each segment is a sequence. It begins with the state that
        was recorded for its first step, or with the initial state if none was. Its lookback is processed first, without
        gradients.

        Raises:
            ModuleError: the module is recurrent, and a batch is of single steps, which have no order in time.
        """
        return self._update(map(partial(batch_from, module=self.module, device=self.device), batches))

    def measure(
        self,
        exp: Experience,
        figures: Callable[[Module, Batch], Figures],
        *,
        chunk_size: int = 2048,
        sparse: int = 1,
        **sequences: Any,
    ) -> dict[str, float]:
        """The means of ``figures(module, batch)``, scalars, over the steps of ``exp``, without gradients.

        Args:
            exp: The experience.
            figures: Returns scalars by name, each a mean over the rows of the batch.
            chunk_size: Steps in a batch.
            sparse: Use only every ``sparse``-th step or, for a recurrent module, sequence.
            sequences: For a recurrent module, `max_seq_len`, `burn_in`, `context` and `sequence_start` as in `update`.
                With equal settings every step has the state that it has in an update.
        """
        totals: dict[str, float] = {}
        rows = 0
        self.module.eval()
        with torch.no_grad(), held(self.threads.num):
            how: dict[str, Any] = {"minibatch_size": chunk_size, "sparse": sparse, **sequences}
            for batch in minibatches(exp, self.module, self.device, **how):
                rows += batch.size
                for name, value in figures(self.module, batch).items():
                    totals[name] = totals.get(name, 0.0) + batch.size * float(value)
        if self._team is not None:
            every = self._team.gathered((rows, totals))
            rows, totals = sum(own for own, _ in every), {}
            for _, own in every:
                for name, total in own.items():
                    totals[name] = totals.get(name, 0.0) + total
        for name in totals:
            totals[name] /= rows
        return totals

    def _update(self, batches: Iterable[Batch]) -> Update:
        """Make a gradient step from each batch, or from each `accumulate` of them."""
        owned = {}
        for name, optimizer in self.optimizers.items():
            optimizer.parameters.take_back()
            owned[name] = optimizer.parameters.parameters
        check_owners(self.module, owned)
        self._gathered, self._made = [], []
        parts: dict[str, float] = {}
        before, team = self.skipped, self._team
        seed = int(self._rng.integers(2**63)) + (0 if team is None else team.rank)
        self.module.train()
        step = self._compiled_step if self.compile else self._plain_step
        is_one = self.threads.is_one
        with seeded(seed, self.device), held(self.threads.num):  # dropout and the like, too
            for batch in batches:
                if team is None:  # others would wait for this one
                    pause()
                if is_one:
                    names = step(batch)
                else:  # with the number of threads that is fastest
                    names = self.threads.step(step, batch, self._size * batch.size, again=not self.compile)
                parts.update(dict.fromkeys(names, math.nan))
            if self._gathered:  # a last step of fewer than `accumulate` batches
                self._apply(batch)
        results = self._made
        move_to_host(results)
        if team is not None:
            every, results, rows = results_of_all(team, list(parts), results)
            if buffers := list(self.module.buffers()):  # gradients don't keep these equal
                team.take_from(rows.index(max(rows)), buffers)
            parts = dict.fromkeys(every, math.nan)
        update = mean_of(results)
        if self.skipped > before:
            update.metrics["skipped_steps"] = float(self.skipped - before)
        update.metrics["threads"] = float(self.threads.num)
        return Update(parts | update.losses, update.metrics)

    # -- gradient steps -----------------------------------------------------------------------------------------

    def _plain_step(self, batch: Batch) -> Iterable[str]:
        """Add the gradients of a batch, and make a step once there are `accumulate`; return the names of the loss's
        parts."""
        rows, team = batch.size, self._team
        if self._is_scheduled and self.schedules_by == "updates" and not self._gathered:
            self._follow(self.updates)
        loss, result = None, BatchResult(rows, {}, {})
        if rows or team is None:  # else only other learners have rows of this batch
            with nullcontext() if self.precision == "float32" else self.autocast():
                loss = self.loss(self.module, batch)
            for name, part in loss.parts.items():
                result.losses[name] = part.detach()
            result.metrics.update(loss.logged)
        optim = self._optim
        if optim.needs_sides and (
            optim.sides is None or (loss is not None and not loss.parts.keys() <= optim.known_parts)
        ):
            self._find_sides(loss)
        if not self._gathered or (team is not None and self._shared is None):  # the first batch of a step
            if team is not None:
                if self._shared is None:
                    self._optim.forget_memory()
                    self._shared = TeamGradients(team, self.optimizers, self.accumulate, self.device)
                self._shared.begin()
            for optimizer in self.optimizers.values():
                optimizer.parameters.attach_grads()
        weight = 1.0 / self.accumulate if self._shared is None else self._shared.weight(rows)
        if loss is not None:
            self._optim.backward(loss, weight)
        if self._shared is not None:
            self._shared.add(loss, weight)
        self.kept = {} if loss is None else loss.kept
        self._last_loss = loss
        self._gathered.append(result)
        if len(self._gathered) == self.accumulate:
            self._apply(batch)
        return result.losses

    def _find_sides(self, loss: Loss | None) -> None:
        """Find which parameters each side of the loss reaches; a team uses the finding of its first learner that has
        rows.

        Raises:
            EtudeError: a later batch has parts that reach more parameters, but the gradients of a step are already
                being accumulated, or there is a team, whose other learners can't know of it.
        """
        optim, sides = self._optim, self._optim.sides
        reached = None if loss is None else optim.reached_by(loss)
        if sides is None:
            if self._team is not None:
                reached = next((found for found in self._team.gathered(reached) if found is not None), None)
            if reached is not None:
                optim.set_sides(reached)
                self._shared = None  # the layout of gradients may have changed
            return
        assert loss is not None
        assert reached is not None
        reached = [known | new for known, new in zip(sides.reached, reached, strict=True)]
        if reached == list(sides.reached):
            return
        if self._team is not None or self._gathered:
            raise EtudeError(
                f"the loss of module {self.name!r} has parts {', '.join(loss.parts)}, more than in its first batch. "
                "With several learners or `accumulate`, name all in the first batch, too: give those that are not "
                "learned yet as 0 times themselves."
            )
        optim.set_sides(reached)

    def _apply(self, batch: Batch) -> None:
        """Make a step from the gradients, or skip it if they or the loss are not finite; ``batch`` is their last
        one."""
        results, self._gathered = self._gathered, []
        if self._shared is not None:
            rows, mean, resting = self._shared.average()
        else:
            rows, loss = 0, self._last_loss
            assert loss is not None
            for result in results:
                rows += result.rows
            mean, resting = loss.total.detach(), loss.resting
            if len(results) < self.accumulate:
                for optimizer in self.optimizers.values():
                    for grad in optimizer.parameters.grads:
                        grad.mul_(self.accumulate / len(results))
        self.updates += 1
        self.steps_trained += rows
        sides = self._optim.sides
        are_apart = sides is not None and sides.separate_backward
        if self.on_gradients is not None and not are_apart:
            with torch.no_grad():
                self.on_gradients(self.module)
        clippings = self._optim.all_clippings(resting)
        total, *norms = numbers_of([mean, *self._optim.norms(clippings)])
        results[-1].metrics.update(self._optim.norms_by_name(clippings, norms))
        if not math.isfinite(total + sum(norms)):
            self._skip(results[-1].losses, batch)
            return
        self._optim.clip(clippings, norms)
        if are_apart:
            self._optim.join_sides()
            if self.on_gradients is not None:
                with torch.no_grad():
                    self.on_gradients(self.module)
        self._optim.step(resting)
        self._finish_step(results)

    def _finish_step(self, results: list[BatchResult]) -> None:
        """Call `after_step` and store the results of a step that was not skipped. Tensors on a GPU are converted to
        numbers together, at the end of the update."""
        self._skipped_in_a_row = 0
        if self.after_step is not None:
            with torch.no_grad():
                self.after_step(self.module)
        if self.device.type == "cpu":
            # Small tensors that stay alive fragment memory, so each step with large intermediate tensors would allocate
            # new memory.
            move_to_host(results)
        self._made += results

    def _compiled_step(self, batch: Batch) -> Iterable[str]:
        """Like `_plain_step`, but compiled as a whole, once the threads are settled, for batches of one size."""
        if self._is_scheduled and self.schedules_by == "updates":
            self._follow(self.updates)
        if self._compiled is None and self.threads.is_settled:
            changes_gradients = self.on_gradients is not None
            check_compilable(self._optim, accumulate=self.accumulate, changes_gradients=changes_gradients)
            self._compiled = CompiledStep(self.module, self.loss, self._optim, self.autocast, self.device)
        done = None if self._compiled is None else self._compiled.step(batch)
        if done is None:
            return self._plain_step(batch)
        parts, figures, self.kept, is_fine = done
        self.updates += 1
        self.steps_trained += batch.size
        if not is_fine:
            self._skip(parts, batch)
        else:
            self._finish_step([BatchResult(batch.size, parts, figures)])
        return parts

    def _skip(self, parts: Figures, batch: Batch) -> None:
        """Count a skipped step, and raise an error if there were too many in a row."""
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self.max_skipped:
            message = _why_skipped(self.name, self._skipped_in_a_row, parts, batch)
            raise EtudeError(message if self._team is None else blamed(self._team, message, parts))

    @cached_property
    def _size(self) -> int:
        """Approximate multiplications of the forward pass per row; `SMALL` with convolutions, so that steps are
        timed."""
        if any(isinstance(part, nn.modules.conv._ConvNd) for part in self.module.modules()):
            return SMALL
        return sum(parameter.numel() for parameter in self.module.parameters())

    def autocast(self) -> AbstractContextManager[Any]:
        """Context in which the forward pass is computed with ``precision``."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bfloat16" else nullcontext()

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizers, counts and the random stream, as plain data, tensors and arrays."""
        return {"module": self.weights(), "optimizers": self.optimizer_states(), **self.progress()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: the weights are those of another module; the first that differs is named.
        """
        load_weights(self.module, state["module"])
        self.set_optimizer_states(state["optimizers"])
        self.set_progress(state)

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the weights."""
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def optimizer_states(self) -> dict[str, Any]:
        """The state of each optimizer."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def set_optimizer_states(self, states: Mapping[str, Any], *, optional: Collection[str] = ()) -> None:
        """Restore what `optimizer_states` returned.

        Args:
            states: The states by the optimizers' names.
            optional: Names of optimizers that may be missing in ``states``, and then stay as they are, or here.

        Raises:
            CheckpointError: the optimizers are others.
        """
        if states:
            here = self.optimizers
            states = {name: state for name, state in states.items() if name in here or name not in optional}
            states |= {name: here[name].state_dict() for name in here.keys() & set(optional) - states.keys()}
        for name, optimizer in self.optimizers.items():
            is_other = isinstance(optimizer, Adam) and states.get(name, {}).keys() != optimizer.state_dict().keys()
            if states and (is_other or set(states) != set(self.optimizers)):
                raise CheckpointError(
                    f"the optimizers of module {self.name!r} were {', '.join(sorted(states))} when it was saved, and "
                    f"are {', '.join(sorted(self.optimizers))} now, or of another kind. What `register_optimizer` "
                    "registered is not in a checkpoint: call it in `setup` of the algorithm's class, or make the "
                    "algorithm, register them again, and then call algorithm.load(folder)."
                )
            optimizer.load_state_dict(states[name])

    def progress(self) -> dict[str, Any]:
        """Counts, the random stream, and the choice of threads."""
        return {
            "updates": self.updates,
            "skipped": self.skipped,
            "steps_trained": self.steps_trained,
            "rng": self._rng.bit_generator.state,
            "threads": self.threads.state_dict(),
        }

    def set_progress(self, state: Mapping[str, Any]) -> None:
        """Restore what `progress` returned."""
        self.updates = int(state["updates"])
        if self.schedules_by == "updates":
            self._follow(self.updates)
        self.skipped, self.steps_trained = int(state["skipped"]), int(state["steps_trained"])
        self._rng.bit_generator.state = state["rng"]
        self.threads.load_state_dict(state.get("threads", {}))


class Learner:
    """The independent learners of one or many modules, and the choice of which modules are trained.

    Args:
        modules: The learner of each module, by module id; may be changed.
        modules_to_train: The modules that are trained; None: all. A function is called by `chosen`.
    """

    def __init__(
        self, modules: Mapping[str, ModuleLearner] | None = None, *, modules_to_train: ModulesToTrain | None = None
    ) -> None:
        self.modules = dict(modules or {})
        self.modules_to_train = modules_to_train
        self.env_steps = 0
        """The last value given to `set_env_steps`."""
        self.updates_of_removed = 0
        """Gradient steps of modules that are no longer there."""

    def __repr__(self) -> str:
        return short(self, modules=[*self.modules], updates=self.updates if self.modules else 0)

    @property
    def only(self) -> ModuleLearner:
        """The learner of the only module.

        Raises:
            EtudeError: there are several, or none.
        """
        if len(self.modules) != 1:
            raise EtudeError(f"there are the modules {sorted(self.modules)}: choose one with learner.modules[name].")
        return next(iter(self.modules.values()))

    @property
    def updates(self) -> int:
        """Total gradient steps of all modules so far, removed ones included."""
        return self.updates_of_removed + sum(learner.updates for learner in self.modules.values())

    # -- updates ------------------------------------------------------------------------------------------------

    def set_env_steps(self, env_steps: int) -> None:
        """Set all schedules that count env steps to their values after ``env_steps`` over the lifetime of the run."""
        self.env_steps = env_steps
        for learner in self.modules.values():
            learner.set_env_steps(env_steps)

    def chosen(self, parts: Mapping[str, T]) -> dict[str, T]:
        """The parts, by module id, that are to be trained on; see ``modules_to_train``. Parts are the experience to
        learn from, or None if it is not known yet.

        Raises:
            DataError: a part is of an unknown module.
            EtudeError: ``modules_to_train`` names an unknown module.
        """
        if not parts.keys() <= self.modules.keys():
            raise DataError(
                f"the batch is of the modules {sorted(parts)}, but the learner has {sorted(self.modules)}: let "
                "`module_of` name these, or add the others."
            )
        which = self.modules_to_train
        if which is None:
            return dict(parts)
        if callable(which):
            return {module_id: part for module_id, part in parts.items() if which(module_id, part)}
        if unknown := sorted(set(which) - self.modules.keys()):
            raise EtudeError(f"there is no module {', '.join(map(repr, unknown))}: there are {sorted(self.modules)}.")
        return {module_id: part for module_id, part in parts.items() if module_id in which}


# -- helpers ------------------------------------------------------------------------------------------------------


@contextmanager
def seeded(seed: int, device: torch.device | str) -> Iterator[None]:
    """Context in which torch's random numbers depend only on ``seed``, on the CPU and on ``device``; the random state
    is restored afterwards."""
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


def _why_skipped(module_id: str, steps: int, parts: Mapping[str, torch.Tensor], batch: Batch) -> str:
    """The message for ``steps`` skipped steps in a row: the module, the parts of the loss, and the suspected column."""
    bad = [f"`{name}` = {float(part)}" for name, part in parts.items() if not math.isfinite(part)]
    where = f"the loss part {', '.join(bad)}" if bad else "a gradient, though the loss itself is finite"
    return (
        f"module {module_id!r}: {steps} gradient steps in a row were skipped, because of {where}. {_suspect(batch)} "
        "The weights are as they were before. Look at the scale of observations and rewards (normalize_obs helps), "
        "lower `lr` or `grad_clip`, or allow more with `max_skipped`."
    )


def _suspect(batch: Batch) -> str:
    """The column that holds non-finite numbers; otherwise the one with the largest numbers."""
    columns = {name: c.detach().double() for name, c in batch.used.items() if c.dtype != torch.bool and c.numel()}
    if not columns:
        return ""
    counts = {name: int((~column.isfinite()).sum()) for name, column in columns.items()}
    name = max(columns, key=lambda name: (counts[name] > 0, float(columns[name].nan_to_num().abs().max())))
    column, count = columns[name], counts[name]
    finite = column[column.isfinite()]
    if count:
        found = f"In the last batch `{name}` holds {count} numbers of {column.numel()} that are not finite"
    else:
        found = f"In the last batch all columns are finite; the largest numbers are in `{name}`"
    if not len(finite):
        return f"{found} (none is finite)."
    return f"{found} (of the others: least {finite.min():.4g}, mean {finite.mean():.4g}, greatest {finite.max():.4g})."

# SPDX-License-Identifier: Apache-2.0
"""Optimizers of a module: learning rates and schedules, flat parameters, Adam, and gradient clipping."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.optim.adam import adam

from etude.errors import EtudeError, ModuleError, SettingsError
from etude.learners.loss import Loss
from etude.settings import FloatAbove0, FloatFrom0, IntFrom1, Rule, settings

# -- schedules -----------------------------------------------------------------------------------------------------

Schedule: TypeAlias = float | tuple[tuple[int, float] | Literal["cosine"], ...]
"""A constant; or points ``((step, value), ...)`` with straight lines between them, and the last value after them. With
``"cosine"`` before the points, half a period of a cosine connects them: ``("cosine", (0, 3e-4), (10**6, 0.0))``.

Steps are env steps, or gradient steps for algorithms that learn from a recording."""


def value_at(schedule: Schedule, step: int) -> float:
    """The value of a schedule after ``step`` steps over the lifetime of a run."""
    if isinstance(schedule, int | float):
        return float(schedule)
    steps, values = zip(*points_of(schedule), strict=True)
    if schedule[0] != "cosine":
        return float(np.interp(step, steps, values))
    at = float(np.interp(step, steps, range(len(steps))))
    at = math.floor(at) + (1 - math.cos(math.pi * (at % 1))) / 2
    return float(np.interp(at, range(len(steps)), values))


def points_of(schedule: Schedule) -> list[tuple[int, float]]:
    """The points of a schedule; for a constant, one at step 0."""
    if isinstance(schedule, int | float):
        return [(0, float(schedule))]
    return [point for point in schedule if not isinstance(point, str)]


def check_schedule(name: str, schedule: Schedule | Sequence[Sequence[float]]) -> None:
    """Raise a SettingsError unless ``schedule`` is a number of at least 0, or points of such numbers in order of
    steps."""
    try:
        points: Sequence[Sequence[float]] = [(0, schedule)] if isinstance(schedule, int | float) else schedule  # type: ignore[assignment]
        points = points[1:] if points[0] == "cosine" else points  # type: ignore[comparison-overlap]
        steps, values = [float(point[0]) for point in points], [float(point[1]) for point in points]
        fine = all(len(point) == 2 for point in points) and steps == sorted(set(steps)) and len(steps) > 0
        fine = fine and all(0 <= value < math.inf for value in values)
    except (TypeError, IndexError, ValueError):
        fine = False
    if not fine:
        raise SettingsError(
            f"{name} is {schedule!r}, but a schedule is a number from 0 on, or points of (step, such a number) in "
            'rising order of steps, such as ((0, 3e-4), (100000, 0.0)); with "cosine" in front, a cosine connects '
            "the points instead of straight lines."
        )


# -- flat parameters -----------------------------------------------------------------------------------------------


class FlatParameters:
    """Parameters of one dtype on one device, and their gradients, each in one flat block of memory.

    A step, a norm or a copy is then one operation instead of one per tensor; these take most of the time of a small
    network's step. Parameters keep their shapes: they become views.

    ``flat`` is a parameter that shares its memory with all of them, and ``flat.grad`` with all their gradients. It can
    be given to any optimizer that works element by element, such as Adam.

    Args:
        parameters: The parameters, at least one.

    Raises:
        ModuleError: they differ in dtype or device.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            raise ModuleError(
                f"parameters of one optimizer must share dtype and device, but these are of {sorted(map(str, kinds))}. "
                "Convert the module (float32 is usual), or give each kind an optimizer of its own."
            )
        self.sizes = [p.numel() for p in self.parameters]
        self.shapes = [p.shape for p in self.parameters]
        with torch.no_grad():
            data = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.flat = nn.Parameter(data, requires_grad=first.requires_grad)
        self.flat.grad = torch.zeros_like(data)
        self._values = self.split(self.flat.data)
        for parameter, value in zip(self.parameters, self._values, strict=True):
            parameter.data = value
        self._grads = self.split(self.flat.grad)
        self.apart: list[torch.Tensor] = []
        """Further flat gradients, of sides of a loss that are clipped separately."""

    def take_back(self) -> None:
        """Move parameters that are now in other memory back into the flat block, as views with their current values.
        They move after ``parameter.data = ...``, or if another learner trains the module, too.

        Raises:
            ModuleError: a parameter has another shape, dtype or device than before.
        """
        for parameter, value in zip(self.parameters, self._values, strict=True):
            if parameter.data_ptr() == value.data_ptr() and parameter.shape == value.shape:
                continue
            kinds = [(tuple(x.shape), x.dtype, x.device) for x in (parameter, value)]
            if kinds[0] != kinds[1]:
                now, before = (f"{dtype} of shape {shape} on {device}" for shape, dtype, device in kinds)
                raise ModuleError(
                    f"a parameter is {now} since the last update, and was {before}: its optimizer can't go on. Change "
                    "a module before its learner is made."
                )
            value.copy_(parameter.data)
            parameter.data = value
            self._grads = self.split(self.grad)  # conversions of a module replace the memory of gradients, too

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A flat tensor as views in the parameters' shapes."""
        parts = torch.split(flat, self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    @property
    def grad(self) -> torch.Tensor:
        """The flat gradient."""
        grad = self.flat.grad
        assert grad is not None
        return grad

    @property
    def grads(self) -> list[torch.Tensor]:
        """The flat gradient, then those in `apart`."""
        return [self.grad, *self.apart]

    def keep_grads_in(self, memory: torch.Tensor) -> None:
        """Store `grads` in ``memory``, one-dimensional and of their total size, from the next step on."""
        grad, *self.apart = torch.split(memory, self.flat.numel())
        self.flat.grad = grad
        self._grads = self.split(grad)

    def attach_grads(self) -> None:
        """Set all gradients to zero, in place, and make each parameter's ``grad`` its part of the flat gradient again.

        Calls such as ``module.zero_grad()`` may have replaced it.
        """
        for flat in (self.flat.grad, *self.apart):
            flat.zero_()  # type: ignore[union-attr]  # never None
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            parameter.grad = grad


# -- optimizers ----------------------------------------------------------------------------------------------------

Rates: TypeAlias = float | Sequence[tuple[slice, float]]
"""A learning rate; or one for each of several slices of the flat parameters, which together cover all."""


class Adam:
    """Adam (Kingma & Ba 2015, algorithm 1) over flat parameters, using torch's function and its fused kernel.

    ``torch.optim.Adam`` calls the same function, but its overhead is 40 us on a CPU, and 75 us of a PPO step of 1,900
    us (measured): more than 3 % of a gradient step of a small network, for each optimizer.

    Args:
        parameters: The parameters; their gradients are read from ``parameters.grad``.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
    """

    _STATE = ("first_moment", "second_moment", "steps")

    def __init__(
        self, parameters: FlatParameters, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        self.parameters = parameters
        self.betas = betas
        self.eps = eps
        self.first_moment = torch.zeros_like(parameters.flat.data)
        self.second_moment = torch.zeros_like(parameters.flat.data)
        self.steps = torch.zeros((), dtype=torch.float32, device=self.first_moment.device)

    def step(self, lr: Rates) -> None:
        """Make one update with learning rate ``lr``."""
        flat, grad = self.parameters.flat.data, self.parameters.flat.grad
        assert grad is not None
        own = (flat, grad, self.first_moment, self.second_moment)
        pieces: list[tuple[tuple[torch.Tensor, ...], float]] = []
        if isinstance(lr, int | float):
            pieces.append((own, lr))
        else:
            pieces += [(tuple(tensor[piece] for tensor in own), rate) for piece, rate in lr]
            before = self.steps.clone()
        for i, ((flat, grad, first, second), rate) in enumerate(pieces):
            if i:
                self.steps.copy_(before)  # each call would count a step
            adam(
                [flat],
                [grad],
                [first],
                [second],
                [],
                [self.steps],
                fused=True,
                lr=rate,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=0.0,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )

    def traced_step(self, grad: torch.Tensor, lr: torch.Tensor, is_fine: torch.Tensor) -> None:
        """The same update written out, so that ``torch.compile`` can fuse it with its surroundings.

        ``lr`` is one number, or one for each parameter. If ``is_fine`` is False, nothing changes.
        """
        flat, (beta1, beta2) = self.parameters.flat.data, self.betas
        steps = self.steps + 1
        first = self.first_moment.lerp(grad, 1 - beta1)
        second = (self.second_moment * beta2).addcmul(grad, grad, value=1 - beta2)
        correction = (1 - beta2**steps).sqrt()
        moved = flat - lr / (1 - beta1**steps) * first / (second.sqrt() / correction + self.eps)
        for own, new in ((self.steps, steps), (self.first_moment, first), (self.second_moment, second), (flat, moved)):
            own.copy_(torch.where(is_fine, new, own))

    def state_dict(self) -> dict[str, Any]:
        """The moments and the number of steps."""
        return {name: getattr(self, name).clone() for name in self._STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in self._STATE:
            getattr(self, name).copy_(state[name])


MakeOptimizer: TypeAlias = Callable[..., torch.optim.Optimizer]
"""Makes a torch optimizer, called with ``([parameter], lr=...)``."""


class TorchOptimizer:
    """A torch optimizer over flat parameters."""

    def __init__(self, parameters: FlatParameters, make: MakeOptimizer) -> None:
        self.parameters = parameters
        self.optimizer = make([parameters.flat], lr=1.0)

    def step(self, lr: Rates) -> None:
        """Make one update with learning rate ``lr``, which must be a number."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of the torch optimizer; empty before the first step."""
        state = self.optimizer.state.get(self.parameters.flat, {})
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        device = self.parameters.flat.device
        self.optimizer.state[self.parameters.flat] = {
            # torch keeps counts of steps on the CPU
            name: value.to(device if value.ndim else "cpu").clone() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }


Optimizer: TypeAlias = Adam | TorchOptimizer


def check_owners(module: nn.Module, parameters: Mapping[str, Sequence[nn.Parameter]]) -> None:
    """Raise an EtudeError if a parameter that needs a gradient has no optimizer, or two, or if an optimizer has a
    frozen one, one that is not in the module, or something else; the message names it."""
    names = {p: name for name, p in module.named_parameters()}
    needed = {p: name for p, name in names.items() if p.requires_grad}
    if not needed:
        raise EtudeError("the module has no parameter to train.")
    owner: dict[nn.Parameter, str] = {}
    for group, members in parameters.items():
        if not members:
            raise EtudeError(f"optimizer `{group}` has no parameters: give it some, or leave it out.")
        for p in members:
            if not isinstance(p, nn.Parameter):
                raise ModuleError(
                    f"optimizer `{group}` was given a {type(p).__name__}: give it a list of parameters of the "
                    "module, such as list(module.parameters())."
                )
            if p in owner:
                raise EtudeError(f"parameter `{needed.get(p, '?')}` has two optimizers: {owner[p]}, {group}.")
            if not p.requires_grad:
                name = names.get(p, "?")
                raise EtudeError(
                    f"parameter `{name}` of optimizer `{group}` is frozen (requires_grad is False), but "
                    "the optimizer's averages of past gradients would still move it. Freeze parameters before the "
                    "learner is made, and leave them out of parameter_groups; or give them a group of their own, whose "
                    "learning rate a schedule sets to 0."
                )
            owner[p] = group
    for p, name in needed.items():
        if p not in owner:
            raise EtudeError(
                f"parameter `{name}` has no optimizer: give it one, or set requires_grad to False. A learner "
                "trains the parameters that a module has, unfrozen, when the learner is made."
            )
    for p, group in owner.items():
        if p not in names:
            raise ModuleError(
                f"optimizer `{group}` has a parameter of shape {tuple(p.shape)} that is not in the module, so "
                "it would not be saved. Register it in `make_module`, such as by "
                'module.register_parameter("scale", parameter).'
            )


# -- limits of gradients -------------------------------------------------------------------------------------------

ClipBy: TypeAlias = Literal["loss_norm", "global_norm", "norm", "value"]
"""How gradients are clipped. ``global_norm``: scale all gradients of an optimizer so that their joint L2 norm is at
most the limit (Pascanu et al. 2013). ``loss_norm``: the same, separately for the gradients of the policy's loss and of
the value's (see `etude.learners.optim.LossGroups`). ``norm``: the same for each tensor. ``value``: limit each
element."""


class Clipping(NamedTuple):
    """Gradients that are clipped together."""

    figure: str
    """Name of their norm among the metrics."""
    group: FlatParameters
    """The parameters that they belong to."""
    parts: Sequence[torch.Tensor]
    """Flat gradients, or slices of one."""
    limit: float | None


def scale_to(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """The factor that scales a norm down to ``limit``; 1 if it is no larger."""
    return limit / norm.clamp(min=limit)


Reached: TypeAlias = Sequence[frozenset[str]]
"""For each parameter, the sides of the loss (see `Loss.sides`) that have a gradient for it."""


class LossGroups:
    """Which parameters of an optimizer get gradients from which sides of the loss (policy, value, critic; see
    `Loss.sides`).

    If no parameter is reached by two sides, one backward pass computes all gradients, each side's in its own slices of
    the flat gradient. If layers are shared and each side is to be clipped, each side has its own backward pass and its
    own flat gradient, which are summed after clipping. Otherwise a large value loss would leave the policy almost no
    part in the gradient of the shared layers.

    Args:
        group: The parameters.
        reached: The sides that reach each parameter.
        limited: Whether each side's gradient is clipped.
    """

    def __init__(self, group: FlatParameters, reached: Reached, *, limited: bool) -> None:
        self._group, self.reached = group, reached
        self.names = sorted(frozenset().union(*reached))
        """The sides; a single one needs no separate treatment."""
        self.limited = limited and len(self.names) > 1
        self.separate_backward = self.limited and any(len(own) > 1 for own in reached)
        """Whether each side has its own backward pass and flat gradient."""
        if self.separate_backward:
            group.apart = [torch.zeros_like(group.grad) for _ in self.names[1:]]
        self.slices = self._slices()

    def _slices(self) -> dict[str, list[slice]]:
        """By side, the slices of the parameters that only it reaches; all others under ``all``."""
        owners = [next(iter(own)) if len(own) == 1 else "all" for own in self.reached]
        if self.limited and not self.separate_backward:  # parameters that no side has reached yet go to the first
            owners = [self.names[0] if owner == "all" else owner for owner in owners]
        slices: dict[str, list[slice]] = {}
        start = 0
        for owner, members in groupby(zip(owners, self._group.sizes, strict=True), key=itemgetter(0)):
            size = sum(own for _, own in members)
            slices.setdefault(owner, []).append(slice(start, start + size))
            start += size
        return slices

    def backward(self, loss: Loss, weight: float) -> None:
        """Add the gradients of each side, times ``weight``, to its flat gradient."""
        for name, side in loss.sides.items():
            if not side.requires_grad:
                continue
            grads = torch.autograd.grad(side * weight, self._group.parameters, retain_graph=True, allow_unused=True)
            views = self._group.split(self._group.grads[self.names.index(name)])
            for view, grad in zip(views, grads, strict=True):
                if grad is not None:
                    view.add_(grad)

    def parts(self, grads: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """The gradient of each side, as a list of tensors.

        Args:
            grads: The flat gradients: one for each side if they are separate, else one.
        """
        if self.separate_backward:
            return {name: [grad] for name, grad in zip(self.names, grads, strict=True)}
        return {name: [grads[0][own] for own in self.slices[name]] for name in self.names}


# -- all optimizers of a module --------------------------------------------------------------------------------------


DecayRates = Annotated[
    tuple[float, float],
    Rule(lambda betas: all(0 <= beta < 1 for beta in betas), "two numbers, each at least 0 and below 1"),
]
"""Decay rates of Adam's two moments."""


@settings
class OptimizerConfig:
    """Settings of the optimizer, besides `lr`."""

    everyday: ClassVar[tuple[str, ...]] = ()
    own_names: ClassVar[Mapping[str, str]] = {"eps": "adam_eps", "betas": "adam_betas"}

    actor_lr: Schedule | None = None
    """Learning rate of the parameters that only the policy loss reaches, or a schedule; None: `lr`."""

    critic_lr: Schedule | None = None
    """Learning rate of the parameters that only the value loss reaches, or a schedule; None: `lr`."""

    eps: FloatFrom0 = 1e-8
    """Adam's epsilon, added to the root of the second moment, at least 0. Default: Kingma & Ba 2015."""

    betas: DecayRates = (0.9, 0.999)
    """Decay rates of Adam's two moments, each at least 0 and below 1. Default: Kingma & Ba 2015."""

    grad_clip: FloatAbove0 | None = 0.5
    """Limit to which gradients are clipped, above 0, see `grad_clip_by`; None does not clip. Default: Huang et al.
    2022, detail 11."""

    grad_clip_by: ClipBy = "loss_norm"
    """What `grad_clip` limits. `loss_norm`: the gradient norms of the policy loss and of the value loss, separately, so
    that a large value gradient does not shrink the policy's to almost nothing; with several optimizers, the norm of
    each. `global_norm`: the norm of all gradients of an optimizer together. `norm`: the norm of each tensor. `value`:
    each element."""

    log_grad_norms: bool = False
    """Log the gradient norm as `grad_norm` even if nothing is clipped."""

    accumulate: IntFrom1 = 1
    """Minibatches whose gradients are averaged for one gradient step, at least 1: for batches that don't fit in memory.
    Settings that count gradient steps are not affected: each step uses this many minibatches. Minibatches left over at
    the end of an update (with `kl_target`, of an epoch) make a step of their own."""

    max_skipped: IntFrom1 = 10
    """Number of consecutive skipped gradient steps that raises an error, at least 1. A gradient step is skipped, and
    counted as `skipped_steps`, if its loss or gradients are not finite."""


RATE_OF = {"policy": "actor", "value": "critic", "critic": "critic"}
"""For each side of the loss, the name of the separate learning rate that its parameters can have."""


class Optimizers:
    """The optimizers of a module, with learning rates and gradient clipping.

    Args:
        module_id: The module's id, for messages.
        config: Their settings.
        own_lr: Learning rates of parts of the only optimizer: ``actor``, ``critic``.
    """

    def __init__(self, module_id: str, config: OptimizerConfig, own_lr: Mapping[str, Schedule]) -> None:
        self._module_id, self._config = module_id, config
        self.logs_norms = config.log_grad_norms or config.grad_clip is not None
        self.by_name: dict[str, Optimizer] = {}
        self.schedules: dict[str, Schedule] = dict(own_lr)
        self.lr: dict[str, float] = {}
        """The current learning rate of each optimizer, and those of ``own_lr``."""
        self._own_lr = frozenset(self.schedules)
        self._at = 0  # steps that schedules have counted
        self.sides: LossGroups | None = None
        """The sides of the loss, for a single optimizer; None before the first batch, or if they are not needed."""
        self.needs_sides = False
        """Whether it matters which parameters each side reaches."""
        self.known_parts: set[str] = set()
        """The parts of losses for which this was determined."""
        self._clippings: dict[str, list[Clipping]] | None = None  # None once gradients have moved in memory

    def register(self, name: str, make: MakeOptimizer | None, params: Sequence[nn.Parameter], lr: Schedule) -> None:
        """Add an optimizer, or replace the one with this name; its parameters are moved into flat memory.

        Args:
            name: Its name.
            make: Makes a torch optimizer; None: Adam.
            params: Its parameters.
            lr: Learning rate, or a `Schedule`.
        """
        if not params:
            raise EtudeError(f"optimizer `{name}` has no parameters: give it some, or leave it out.")
        check_schedule(f"the learning rate of optimizer `{name}`", lr)
        flat = FlatParameters(params)
        own = self._config
        self.by_name[name] = Adam(flat, betas=own.betas, eps=own.eps) if make is None else TorchOptimizer(flat, make)
        self.schedules[name] = lr
        self.lr[name] = value_at(lr, self._at)
        self.forget_sides()

    def forget_sides(self) -> None:
        """Find again, with the next batch, which parameters the sides of the loss reach."""
        self.sides = None
        self.needs_sides = list(self.by_name) == ["all"] and (self._limits_sides or bool(self._own_lr))
        self.forget_memory()

    def forget_memory(self) -> None:
        """Forget where gradients are in memory."""
        self._clippings = None

    # -- learning rates -----------------------------------------------------------------------------------------

    def follow(self, at: int) -> None:
        """Set learning rates to their schedules' values after ``at`` steps."""
        self._at = at
        self.lr.clear()
        for name in (*self.by_name, *sorted(self._own_lr)):
            self.lr[name] = value_at(self.schedules[name], at)

    def rates(self, name: str) -> Rates:
        """The current learning rate of an optimizer, or those of its slices."""
        if self.sides is None or not self._own_lr:
            return self.lr[name]
        rate_of = {side: self.lr.get(RATE_OF.get(side, ""), self.lr[name]) for side in self.sides.slices}
        return [(own, rate_of[side]) for side, slices in self.sides.slices.items() for own in slices]

    # -- sides of the loss --------------------------------------------------------------------------------------

    @property
    def _limits_sides(self) -> bool:
        return self._config.grad_clip_by == "loss_norm" and self._config.grad_clip is not None

    def reached_by(self, loss: Loss) -> Reached:
        """The sides of ``loss`` that reach each parameter of the only optimizer; the loss's graph is kept."""
        self.known_parts |= loss.parts.keys()
        (optimizer,) = self.by_name.values()
        found: list[set[str]] = [set() for _ in optimizer.parameters.parameters]
        for name, side in loss.sides.items():
            if side.requires_grad:
                parameters = optimizer.parameters.parameters
                grads = torch.autograd.grad(side, parameters, retain_graph=True, allow_unused=True)
                for own, grad in zip(found, grads, strict=True):
                    own |= {name} if grad is not None else set()
        return [frozenset(own) for own in found]

    def set_sides(self, reached: Reached) -> None:
        """Use the findings of `reached_by`.

        Raises:
            SettingsError: a learning rate applies to no parameter.
        """
        optimizer = self.by_name["all"]
        self.sides = LossGroups(optimizer.parameters, reached, limited=self._limits_sides)
        self.forget_memory()
        rated = {RATE_OF.get(side) for side in self.sides.slices} if len(self.sides.names) > 1 else set()
        for name in sorted(self._own_lr - rated):
            parts = "named `value` or `critic`" if name == "critic" else "beside `value` and `critic`"
            raise SettingsError(
                f"`{name}_lr` is set, but in module {self._module_id!r} no parameter has a gradient only from "
                f"parts of the loss {parts}: leave it out and set `lr`, or let policy and value share no layers."
            )
        if self._own_lr and not isinstance(optimizer, Adam):
            raise SettingsError("`actor_lr` and `critic_lr` go with Adam: give other optimizers their own parameters.")

    # -- steps --------------------------------------------------------------------------------------------------

    def backward(self, loss: Loss, weight: float) -> None:
        """Add the gradients of a loss, times ``weight``."""
        if self.sides is not None and self.sides.separate_backward:
            self.sides.backward(loss, weight)
            return
        total = loss.total
        (total if weight == 1.0 else total * weight).backward()  # type: ignore[no-untyped-call]

    def clippings(self, name: str, grads: Sequence[torch.Tensor]) -> list[Clipping]:
        """The flat gradients of an optimizer, in the groups that are clipped separately."""
        group, limit, sides = self.by_name[name].parameters, self._config.grad_clip, self.sides
        if sides is None or not sides.limited:
            return [Clipping("grad_norm" if name == "all" else f"grad_norm/{name}", group, [grads[0]], limit)]
        return [Clipping(f"grad_norm/{side}", group, parts, limit) for side, parts in sides.parts(grads).items()]

    def all_clippings(self, resting: frozenset[str]) -> list[Clipping]:
        """`clippings` of all optimizers except those in ``resting``."""
        if self._clippings is None:
            self._clippings = {n: self.clippings(n, o.parameters.grads) for n, o in self.by_name.items()}
        found: list[Clipping] = []
        for name, own in self._clippings.items():
            if name not in resting:
                found += own
        return found

    def norms(self, clippings: Sequence[Clipping]) -> list[torch.Tensor]:
        """The joint L2 norm of the gradients of each, a 0-d tensor."""
        norms = []
        for clipping in clippings:
            parts = list(map(torch.linalg.vector_norm, clipping.parts))
            norms.append(parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts)))
        return norms

    def norms_by_name(self, clippings: Sequence[Clipping], norms: Sequence[Any]) -> dict[str, Any]:
        """The norms to log; those of several sides of a loss also together, as the root of the sum of squares."""
        found: dict[str, Any] = {}
        if self.logs_norms:
            squares = 0.0
            for clipping, norm in zip(clippings, norms, strict=True):
                found[clipping.figure] = norm
                squares += norm * norm
            if len(norms) > 1 and clippings[0].group is clippings[-1].group:
                found["grad_norm"] = squares**0.5
        return found

    def clip(self, clippings: Sequence[Clipping], norms: Sequence[Any]) -> None:
        """Clip gradients in place, given their norms."""
        for clipping, norm in zip(clippings, norms, strict=True):
            limit, by = clipping.limit, self._config.grad_clip_by
            if limit is None:
                continue
            if by == "value":
                for part in clipping.parts:
                    part.clamp_(-limit, limit)
            elif by == "norm":
                for part in clipping.group.split(clipping.parts[0]):
                    part.mul_(scale_to(torch.linalg.vector_norm(part), limit))
            elif isinstance(norm, torch.Tensor) or norm > limit:
                scale = scale_to(norm, limit) if isinstance(norm, torch.Tensor) else limit / norm
                for part in clipping.parts:
                    part.mul_(scale)

    def join_sides(self) -> None:
        """Add up the gradients of the sides of the loss if they are separate."""
        for optimizer in self.by_name.values():
            for other in optimizer.parameters.apart:
                optimizer.parameters.grad.add_(other)

    def step(self, resting: frozenset[str]) -> None:
        """Step all optimizers except those in ``resting``."""
        for name, optimizer in self.by_name.items():
            if name not in resting:
                optimizer.step(self.rates(name) if self._own_lr else self.lr[name])

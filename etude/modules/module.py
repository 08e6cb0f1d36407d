# SPDX-License-Identifier: Apache-2.0
"""Module: a network with its spaces, action distribution and recurrent state; and acting through torch."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from etude.columns import ACTION, ACTION_MASK, DIST_INPUTS, OBS, SEPARATOR, STATE_IN, STATE_OUT, VALUE, Columns
from etude.display import short
from etude.errors import CheckpointError, DataError, ModuleError
from etude.experience import arrays
from etude.modules.acting import (
    CHUNK,
    Actor,
    NumPyActor,
    NumPyNetwork,
    SamplingActor,
    as_tensor,
    runs_in_numpy,
)
from etude.modules.distributions import Distribution, Floats, action_mask, distribution_for
from etude.modules.network import Network, NetworkConfig, Output
from etude.spaces import Flattener, Nester, Space, in_short, leaf_dtype, leaf_shape, leaves
from etude.urls import first_line

T = TypeVar("T")

Shapes = dict[str, tuple[int, ...]]
"""The shapes of the parts of a recurrent network's state, by name, without the batch axis."""


class Module(nn.Module):
    """A network with its spaces and its action distribution.

    A network is recurrent if it has a method `initial_state`, which returns the state of one row at the start of an
    episode: float32 zeros by name, such as ``{"h": torch.zeros(64)}``. It is then always called with a time axis, as
    ``net(obs, state=state)`` with observations ``[B, T, *shape]`` (T is 1 while acting) and the state ``[B, ...]``
    before the first of them. It returns ``Output(dist_inputs, value, state)`` of shapes ``[B, T, n]``, ``[B, T]`` and
    ``[B, ...]``, with the state after the last step. Other networks are called with observations ``[B, *shape]``.

    If the observation space is a Dict with the key `action_mask`, choices that the mask forbids have probability 0,
    whatever the network returns (see `etude.modules.distributions.ActionMask`).

    Args:
        net: The network. It is called with observations nested as in the space, with float64 converted to float32, and
            returns an `Output`.
        obs_space: The space of its observations, after the connectors.
        action_space: The space of its actions, before the connectors.
        dist: The distribution that its ``dist_inputs`` parameterise.

    Raises:
        ModuleError: the initial state or the action mask is not valid.
    """

    def __init__(self, net: nn.Module, obs_space: Space, action_space: Space, dist: Distribution) -> None:
        super().__init__()
        self.net = net
        self.obs_space = obs_space
        self.action_space = action_space
        self.dist = dist
        self.obs_from = Nester(obs_space, OBS)
        """Maps flat columns ``obs...`` to the nested observation."""
        self.action_from = Nester(action_space, ACTION)
        """Maps flat columns ``action...`` to the nested action."""
        self.columns_of = Flattener(obs_space, OBS)
        """Maps a nested observation to its flat columns ``obs...``: the inverse of `obs_from`."""
        self._float64 = {n for n, leaf in leaves(obs_space, OBS).items() if leaf_dtype(leaf) == np.float64}
        self._takes_state = "state" in inspect.signature(net.forward).parameters
        self._state = declared_state(net)
        self.recurrent = bool(self._state)
        """Whether the network has a state from step to step."""
        self.mask = action_mask(obs_space, dist)
        """The action mask of the observations; None if they have none."""
        self.scheduled: dict[str, Tensor] = {}
        """Numbers that change during training, as tensors, so that the loss is compiled only once."""
        self._checked = False
        self._numpy: NumPyNetwork | None = None

    def __repr__(self) -> str:
        """In one line; ``print(module.net)`` shows the layers."""
        spaces = f"{in_short(self.obs_space)} -> {in_short(self.action_space)}"
        return short(self, spaces, net=type(self.net).__name__, parameters=sum(p.numel() for p in self.parameters()))

    def train(self, mode: bool = True) -> "Module":
        """Like torch's, but in less than half the time, since acting and learning may alternate after every step."""
        parts = list(self.modules())
        for part in parts[1:]:
            if type(part).train is not nn.Module.train:
                return super().train(mode)
        for part in parts:
            part.__dict__["training"] = mode
        return self

    @property
    def device(self) -> torch.device:
        """The device of the parameters; the CPU if there are none."""
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    @property
    def has_own_actor(self) -> bool:
        """Whether the module overrides `actor`, which must then be used for observations that are tensors, too."""
        return type(self).actor is not Module.actor

    can_be_exported: ClassVar[bool] = True
    """Whether `Policy.export` can write what `actor` does, in torch operations."""

    @property
    def own_loss(self) -> Callable[["Module", Any], Any] | None:
        """The network's method ``own_loss(batch)``, which replaces the algorithm's loss; None if it has none."""
        own = getattr(self.net, "own_loss", None)
        return (lambda module, batch: own(batch)) if callable(own) else None

    def own_learner_connectors(self) -> list[Any]:
        """The learner connectors that a network with an `own_loss` needs, from its ``learner_connectors()``."""
        make = getattr(self.net, "learner_connectors", None)
        return list(make()) if callable(make) else []

    def initial_state(self) -> Columns:
        """The state of one row at the start of an episode: float32 zeros by name; {} if not recurrent."""
        return {name: np.zeros(shape, np.float32) for name, shape in self._state.items()}

    def forward(self, obs: Any, state: dict[str, Tensor] | None = None) -> Output:
        """Call the network with tensors nested as in the observation space, each ``[B, *shape]``.

        A recurrent network takes ``[B, T, *shape]`` and ``state`` ``[B, ...]``; None is the initial state.

        Raises:
            ModuleError: the output does not fit the spaces (checked in the first call); the observations are not
                tensors of these shapes; or the network is recurrent and there is no time axis.
        """
        try:
            if self._float64:
                columns = self.columns_of(obs)
                obs = self.obs_from({n: c.float() if n in self._float64 else c for n, c in columns.items()})
            lead = self._sequences(obs) if self._state else None
            if lead is not None and state is None:
                state = {name: torch.zeros(lead[0], *shape, device=self.device) for name, shape in self._state.items()}
            output = self.net(obs, state=state) if self._takes_state else self.net(obs)
            if not self._checked:
                self._check(output, lead, obs)
                self._checked = True
            result: Output = output
            value, inputs = result.value, result.dist_inputs
            if value is not None and value.dim() > 1 and value.shape[-1] == 1:
                # [B, T] with T = 1 has one axis less than the inputs, and is not squeezed.
                axes = inputs.dim() if inputs is not None else value.dim() if lead is None else len(lead) + 1
                result.value = value.squeeze(-1) if value.dim() == axes else value
            if result.value is not None and result.value.dtype == torch.bfloat16:
                result.value = result.value.float()
            if inputs is not None and inputs.dtype == torch.bfloat16:  # densities would lose most of their digits
                result.dist_inputs = inputs = inputs.float()
            if inputs is not None and self.mask is not None:
                result.dist_inputs = self.mask.apply(inputs, obs[ACTION_MASK])
            result.dist = self.dist
            return result
        except (AttributeError, TypeError, RuntimeError, LookupError, ValueError) as error:
            wrong = self._wrong_input(obs)
            if not wrong:
                raise
            raise ModuleError(wrong) from error

    def _sequences(self, obs: Any) -> tuple[int, int]:
        """The sizes ``(B, T)`` of an observation's first axes."""
        name, leaf = next(iter(self.columns_of.leaves.items()))
        shape = tuple(self.columns_of(obs)[name].shape)
        lead = shape[: len(shape) - len(leaf_shape(leaf))]
        if len(lead) != 2:
            raise ModuleError(
                f"{type(self.net).__name__} is recurrent, so its Module must be called with [B, T, ...], but `{name}` "
                f"has shape {shape}. In a loss, call batch.forward(module) rather than module(batch.obs)."
            )
        return lead

    def _wrong_input(self, obs: Any) -> str:
        """The error message for observations that are not tensors ``[B, *shape]``; empty if they are."""
        axes = ("B", "T") if self._state else ("B",)
        try:
            columns = self.columns_of(obs)
            shapes = {name: tuple(np.shape(column)) for name, column in columns.items()}
        except (LookupError, TypeError, ValueError):
            return (
                f"the observation is a {type(obs).__name__}, but must be nested as {self.obs_space}, of torch tensors."
            )
        for name, leaf in self.columns_of.leaves.items():
            there, shape = shapes[name], leaf_shape(leaf)
            own = len(there) - len(shape)
            if not isinstance(columns[name], Tensor) or own < len(axes) or there[own:] != shape:
                wanted = ", ".join(map(str, (*axes, *shape)))
                batch = f"[{', '.join(['None'] * len(axes))}]"
                write = (
                    f"module(torch.as_tensor(obs){batch})" if name == OBS else f"torch.as_tensor(part){batch} for each"
                )
                return (
                    f"a module is called with torch tensors [{wanted}], but `{name}` is a "
                    f"{type(columns[name]).__name__} of shape {there}. For a single observation, write {write}."
                )
        return ""

    def _check(self, output: Any, lead: tuple[int, ...] | None, obs: Any) -> None:
        name = type(self.net).__name__
        if not isinstance(output, Output):
            raise ModuleError(
                f"the forward of {name} returned a {type(output).__name__}: it must return an Output, such as "
                "etude.modules.Output(dist_inputs=..., value=...)."
            )
        inputs, value, wanted = output.dist_inputs, output.value, self.dist.num_inputs
        if inputs is not None and (
            inputs.dim() < 2 or inputs.shape[-1] != wanted or lead not in (None, tuple(inputs.shape[:-1]))
        ):
            axes = "batch" if lead is None else f"{lead[0]}, {lead[1]}"
            raise ModuleError(
                self._wrong_input(obs)
                or f"the forward of {name} gave `dist_inputs` of shape {tuple(inputs.shape)}; the action space "
                f"{self.action_space} with its {type(self.dist).__name__} needs [{axes}, {wanted}]: keep the axes "
                f"that observations have in front, and let the last layer have {wanted} outputs."
            )
        if lead is not None:
            self._check_state(output.state, lead[0])
        elif inputs is not None:
            lead = tuple(inputs.shape[:-1])
        if value is not None and lead is not None and tuple(value.shape) not in (lead, (*lead, 1)):
            raise ModuleError(
                f"the forward of {name} gave `value` of shape {tuple(value.shape)} for a batch of {lead}: it must have "
                f"shape {lead} or {(*lead, 1)}, one number for each observation."
            )

    def _check_state(self, state: Any, rows: int) -> None:
        wanted, found = {name: (rows, *shape) for name, shape in self._state.items()}, None
        if isinstance(state, Mapping):
            found = {name: tuple(getattr(value, "shape", ())) for name, value in state.items()}
        if found != wanted:
            raise ModuleError(
                f"the forward of {type(self.net).__name__} gave a `state` of shapes {found}, but its initial_state "
                f"and this batch need {wanted}: return Output(..., state=...) with the state after the last step."
            )

    def state_from(self, columns: Mapping[str, T]) -> dict[str, T]:
        """The state, by name, of flat columns ``state_in/...``.

        Raises:
            DataError: a part of the state is missing.
        """
        try:
            return {name: columns[f"{STATE_IN}{SEPARATOR}{name}"] for name in self._state}
        except KeyError as error:
            raise DataError(
                f"{type(self.net).__name__} is recurrent, but its state is unknown: there is no column {error}. "
                "Collect the experience with this module."
            ) from None

    def value_of(self, obs_columns: Columns, state_columns: Columns | None = None) -> Floats:
        """The values of flat observation columns ``[n, ...]``, float32 ``[n]``, without gradients, in chunks.

        Tensors give a tensor on their device.

        Args:
            obs_columns: The observations.
            state_columns: For a recurrent module: columns ``state_in/...`` with the state in each row.

        Raises:
            ModuleError: the network has no values.
            DataError: the module is recurrent, and a column of its state is missing.
        """
        net = self.net
        is_host = isinstance(next(iter(obs_columns.values())), np.ndarray)
        if is_host and runs_in_numpy(net) and net.value_head is not None:
            if self._numpy is None:
                self._numpy = NumPyNetwork(net)
            self._numpy.refresh()
            return self._numpy.value(obs_columns)
        return self._evaluated(*self._in_time(obs_columns, state_columns))[1]

    def value_after(self, obs_columns: Columns, state_columns: Columns, following: Columns) -> Floats:
        """For a recurrent module, the values of the observations after ``obs_columns``, float32 ``[n]``.

        Args:
            obs_columns: Flat observation columns ``[n, ...]``.
            state_columns: Columns ``state_in/...``: the state before ``obs_columns``.
            following: The next observations, in the same form as ``obs_columns``.
        """
        time = {
            name: arrays.library(column).stack([column, following[name]], 1) for name, column in obs_columns.items()
        }
        return self._evaluated(time, self.state_from(state_columns))[1]

    def logp_and_value(
        self, obs_columns: Columns, action_columns: Columns, state_columns: Columns | None = None
    ) -> tuple[Floats, Floats]:
        """The log-probabilities of actions and the values, float32 ``[n]`` each; without gradients, in chunks.

        Args:
            obs_columns: Flat observation columns ``[n, ...]``.
            action_columns: Flat action columns ``[n, ...]``.
            state_columns: For a recurrent module: columns ``state_in/...`` with the state in each row.

        Raises:
            ModuleError: the network has no values, or no ``dist_inputs``.
            DataError: the module is recurrent, and a column of its state is missing.
        """
        return self._evaluated(*self._in_time(obs_columns, state_columns), action_columns)

    def _in_time(self, obs: Columns, state: Columns | None) -> tuple[Columns, Columns]:
        """Observations, with a time axis of 1 if the module is recurrent, and the state by name, or {}."""
        if not self._state:
            return obs, {}
        return {name: column[:, None] for name, column in obs.items()}, self.state_from(state or {})

    def _evaluated(self, obs: Columns, state: Columns, action: Columns | None = None) -> tuple[Floats, Floats]:
        """Log-probabilities (0 without actions) and values, ``[n]`` each; of the last step if there is a time axis."""
        first, last = next(iter(obs.values())), (slice(None), -1) if state else slice(None)
        n, is_host = len(first), isinstance(first, np.ndarray)
        logp: Any = np.zeros(n, np.float32) if is_host else torch.zeros(n, device=first.device)
        value = arrays.copied(logp)

        def part(columns: Columns, rows: slice) -> dict[str, Tensor]:
            return {name: as_tensor(column[rows]).to(self.device) for name, column in columns.items()}

        with evaluating(self), torch.inference_mode():
            for start in range(0, n, CHUNK):
                rows = slice(start, start + CHUNK)
                output: Output = self(self.obs_from(part(obs, rows)), part(state, rows) or None)
                if output.value is None:
                    raise ModuleError(
                        f"{type(self.net).__name__} gives no values, which are needed here: return Output(value=...) "
                        "from its forward."
                    )
                found = output.value[last].float()
                value[rows] = arrays.host(found) if is_host else found
                if action is not None:
                    dist, inputs = output.bound()
                    found = dist.logp(inputs[last], part(action, rows)).float()
                    logp[rows] = arrays.host(found) if is_host else found
        return logp, value

    def without_value(self) -> "Module":
        """The same module with shared parameters, but without the value function where possible: enough to act."""
        net = self.net
        if type(self) is not Module or type(net) is not Network or net.value_head is None:
            return self
        return Module(net.without_value(), self.obs_space, self.action_space, self.dist)

    def actor(self, *, explore: bool) -> Actor:
        """An actor for this module: it samples if ``explore``, and otherwise takes the modes.

        See `etude.modules.actors.tensor_actor` for observations that are tensors.
        """
        if runs_in_numpy(self.net):
            return NumPyActor(self.net, self.dist, self.mask, explore=explore)
        return TorchActor(self, explore=explore)


def forward_step(module: Module, obs: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output of a module for one step, as float32 columns ``[N, ...]``.

    Args:
        module: The module.
        obs: Flat observation columns ``[N, ...]``.
        state: For a recurrent module: its state before the step, by name.

    Returns:
        ``dist_inputs``; ``value`` if the module returns one; and ``state_out/...`` if it is recurrent.
    """
    if not state:
        output: Any = module(module.obs_from(obs))
    else:
        output = module(module.obs_from({name: tensor.unsqueeze(1) for name, tensor in obs.items()}), state)
    found = {DIST_INPUTS: output.bound()[1]} | ({} if output.value is None else {VALUE: output.value})
    if state:
        found = {name: tensor[:, 0] for name, tensor in found.items()}
        found |= {f"{STATE_OUT}{SEPARATOR}{name}": output.state[name] for name in state}
    return {name: tensor.float() for name, tensor in found.items()}


class TorchActor(SamplingActor):
    """Acts with any module through torch, on the module's device.

    It records ``value`` if the module has one, and the state after each step if the module is recurrent.
    """

    def __init__(self, module: Module, *, explore: bool) -> None:
        super().__init__(module.dist, explore=explore)
        self._module = module
        self._device = module.device
        # parameters stay the same objects on any device; a search through the module takes as long as a small layer
        self._parameter = next(module.parameters(), None)

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        if self._parameter is not None:
            self._device = self._parameter.device
        super().start(rng, num_rows)

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        module = self._module
        if module.mask is not None:
            module.mask.check(obs, ends)
        if module.recurrent and state is None:
            raise ModuleError(
                f"{type(module.net).__name__} is recurrent: give step() its state, as columns {STATE_IN}/... that hold "
                f"module.initial_state() at the start of an episode, and then what came as {STATE_OUT}/... ."
            )
        before = module.state_from(state or {})
        with torch.inference_mode():
            found = forward_step(module, self._tensors(obs), self._tensors(before))
            extras: Columns = {name: tensor.cpu().numpy() for name, tensor in found.items()}
        inputs = extras[DIST_INPUTS]
        return module.dist.act(inputs, self.noise(len(inputs))), extras

    def _tensors(self, columns: Columns) -> dict[str, Tensor]:
        tensors = {name: as_tensor(column) for name, column in columns.items()}
        if self._device.type != "cpu":
            tensors = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        return tensors


@contextmanager
def evaluating(module: Module) -> Iterator[None]:
    """Keep a module in evaluation mode within the ``with`` block."""
    was_training = module.training
    if was_training:
        module.eval()
    try:
        yield
    finally:
        if was_training:
            module.train()


def make_module(
    module: nn.Module | Callable[[Space, Space], nn.Module] | None,
    obs_space: Space,
    action_space: Space,
    config: NetworkConfig | None = None,
    *,
    squash: bool = False,
    value: bool = True,
) -> Module:
    """Make a Module.

    Args:
        module: None for the built-in `Network`; a class or function, called with ``(obs_space, action_space)``; or a
            network, used itself.
        obs_space: The space of its observations, after the connectors.
        action_space: The space of its actions, before the connectors.
        config: The shape of the built-in network; ignored for others.
        squash: Keep the actions of Boxes inside their bounds with tanh.
        value: Give the built-in network a value function; ignored for others.

    Raises:
        SpaceError: a space is not supported.
        ModuleError: ``module`` does not make a network, or can't be called with two spaces; or the built-in network
            does not fit into memory.
    """
    dist = distribution_for(action_space, squash=squash)
    if module is None:
        try:
            net: Any = Network(obs_space, action_space, config, dist, value)
        except RuntimeError as error:  # of torch
            raise ModuleError(
                f"the built-in network for {in_short(obs_space)} -> {in_short(action_space)} can't be made "
                f"({first_line(error)}). Make these spaces smaller by a wrapper, or give a network of your own as "
                "`module`."
            ) from error
    elif isinstance(module, nn.Module):
        net = module
    else:
        net = _made(module, obs_space, action_space)
    return net if isinstance(net, Module) else Module(net, obs_space, action_space, dist)


def _made(make: Callable[[Space, Space], nn.Module], obs_space: Space, action_space: Space) -> nn.Module:
    call = f"{getattr(make, '__name__', repr(make))}(obs_space, action_space)"
    try:
        net = make(obs_space, action_space)
    except Exception as error:
        raise ModuleError(
            f"`module`: {call} fails: {type(error).__name__}: {error}. Give a torch.nn.Module, or a class or a "
            "function that makes one for both spaces."
        ) from error
    if not isinstance(net, nn.Module):
        raise ModuleError(f"`module`: {call} gave a {type(net).__name__}, not a torch.nn.Module.")
    return net


def declared_state(net: nn.Module) -> Shapes:
    """The shape of each part of one row's state, from the network's method `initial_state`; {} if it has none.

    Raises:
        ModuleError: the method does not return float32 zeros by name, or the network's forward takes no `state`.
    """
    name, declare = type(net).__name__, getattr(net, "initial_state", None)
    if declare is None:
        return {}
    parts = declare() if callable(declare) else declare
    for part, value in parts.items() if isinstance(parts, Mapping) else [(None, parts)]:
        is_named = isinstance(part, str) and part and SEPARATOR not in part
        if not is_named or not isinstance(value, Tensor) or value.dtype != torch.float32 or bool(value.any()):
            raise ModuleError(
                f"initial_state of {name} gave {part!r}: {str(value)[:80]}, but must give zeros of float32 by names "
                f'without {SEPARATOR!r}, such as {{"h": torch.zeros(64)}}: the state of one row at the start of an '
                "episode. To start from other values (a learned start, for example), add them to the zeros in forward."
            )
    if parts and "state" not in inspect.signature(net.forward).parameters:
        raise ModuleError(
            f"{name} has an initial_state, but its forward has no argument named `state`: write "
            "forward(self, obs, state)."
        )
    return {part: tuple(value.shape) for part, value in parts.items()}


def load_weights(module: nn.Module, weights: Mapping[str, torch.Tensor], *, shared: bool = False) -> None:
    """Copy weights into a module, in place.

    Args:
        module: The module.
        weights: The weights, as in its ``state_dict()``.
        shared: Use the given memory for parameters instead of copying it, if device, dtype and strides are equal. It
            must not be written to then. Buffers, which a module may write to, are always copied.

    Raises:
        CheckpointError: a weight is missing or unknown, or has another shape.
    """
    own = module.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        there, here = (tuple(of[name].shape) if name in of else "none" for of in (weights, own))
        if there != here:
            raise CheckpointError(
                f"weight `{name}` has the shape {there} in the checkpoint, but {here} in the module: the checkpoint is "
                "of another module."
            )
    parameters = dict(module.named_parameters(remove_duplicate=False)) if shared else {}
    with torch.no_grad():
        for name, value in own.items():
            given = weights[name]
            form = value.device, value.dtype, value.stride()
            if name in parameters and (given.device, given.dtype, given.stride()) == form:
                parameters[name].data = given
            else:
                value.copy_(given)

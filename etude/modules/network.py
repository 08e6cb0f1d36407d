# SPDX-License-Identifier: Apache-2.0
"""The built-in network: encoders for all spaces, recurrent layers, fully connected layers; and its output."""

import copy
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from etude.columns import ACTION_MASK, OBS, OBS_MASK
from etude.display import short
from etude.errors import ModuleError, SettingsError
from etude.modules.distributions import Distribution, Floats, distribution_for
from etude.settings import IntFrom1, Rule, settings
from etude.spaces import (
    SMALLEST_IMAGE,
    Flattener,
    Space,
    channels_come_first,
    has_pixels,
    is_image,
    leaf_shape,
    leaves,
)

_log = logging.getLogger("etude.modules")


@dataclass(slots=True, repr=False)
class Output:
    """The output of a module for a batch of observations. All fields are optional, for a critic or a policy alone."""

    dist_inputs: Tensor | None = None
    """``[B, dist.num_inputs]`` (``[B, T, ...]`` if recurrent): logits, or means and log standard deviations."""
    value: Tensor | None = None
    """The expected return, ``[B]``; a network may return ``[B, 1]``."""
    state: dict[str, Tensor] | None = None
    """The state of a recurrent module after the last step, each ``[B, ...]``."""
    dist: Distribution | None = None
    """The distribution that `dist_inputs` parameterise; set by `Module.forward`."""

    def __repr__(self) -> str:
        shapes = {name: list(getattr(getattr(self, name), "shape", ())) for name in ("dist_inputs", "value")}
        return short(self, **{name: shape for name, shape in shapes.items() if shape}, state=sorted(self.state or ()))

    def logp(self, action: Any) -> Tensor:
        """The log-probability of actions, tensors nested as in the action space: ``[B]``."""
        dist, inputs = self.bound()
        return dist.logp(inputs, dist.flatten(action))

    def entropy(self) -> Tensor:
        """The entropy of the action distribution, ``[B]``."""
        dist, inputs = self.bound()
        return dist.entropy(inputs)

    def kl(self, other_dist_inputs: Tensor) -> Tensor:
        """KL(other || self), ``[B]``; with recorded ``dist_inputs``, from the behaviour policy to the current one."""
        dist, inputs = self.bound()
        return dist.kl(other_dist_inputs, inputs)

    def bound(self) -> tuple[Distribution, Tensor]:
        """The distribution and its inputs.

        Raises:
            ModuleError: one of them is missing.
        """
        if self.dist_inputs is None:
            raise ModuleError(
                "the module's forward gave no `dist_inputs`, so its actions have no probabilities: return "
                "Output(dist_inputs=...) from forward."
            )
        if self.dist is None:
            raise ModuleError(
                "this Output has no distribution, because a plain network returned it. Wrap the network with "
                "`make_module`, and call the Module."
            )
        return self.dist, self.dist_inputs


class Activation(NamedTuple):
    """An activation function: as a torch module, and for NumPy arrays."""

    torch: Callable[[], nn.Module]
    write: Callable[[Floats, Floats], object] | None
    """``write(x, out)`` writes the result for ``x`` to ``out``, which may be ``x``. None: the identity."""


def _relu(x: Floats, out: Floats) -> None:
    np.maximum(x, 0.0, out=out)


def _silu(x: Floats, out: Floats) -> None:
    # x * sigmoid(x), by tanh: exp would overflow
    np.multiply(x, 0.5 + 0.5 * np.tanh(0.5 * x), out=out)


def _gelu(x: Floats, out: Floats) -> None:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
    np.multiply(x, 0.5 + 0.5 * np.tanh(inner), out=out)


def _elu(x: Floats, out: Floats) -> None:
    below = np.expm1(np.minimum(x, 0.0))
    np.maximum(x, below, out=out)


ACTIVATIONS: dict[str, Activation] = {
    "tanh": Activation(nn.Tanh, np.tanh),
    "relu": Activation(nn.ReLU, _relu),
    "silu": Activation(nn.SiLU, _silu),
    "gelu": Activation(lambda: nn.GELU(approximate="tanh"), _gelu),
    "elu": Activation(nn.ELU, _elu),
    "linear": Activation(nn.Identity, None),
}


Conv: TypeAlias = tuple[int, int, int]
"""One convolution: channels, kernel size, stride."""

NATURE_CONV: tuple[Conv, ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""For images of at least 36 pixels a side: Mnih et al. 2015 (Nature 518), methods."""
SMALL_CONV: tuple[Conv, ...] = ((16, 3, 1), (32, 3, 1))
"""For smaller images (grid worlds)."""


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    """Orthogonal weights times ``gain`` and zero biases, in place (Huang et al. 2022, detail 2 of 37)."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _scale_of(space: Space) -> float | None:
    """The factor that maps the largest value of a uint8 Box, by its bounds, to 1; None for other spaces."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or not space.high.size:
        return None
    return 1.0 / max(int(space.high.max()), 1)


class Numbers(nn.Module):
    """Flattens a Box or MultiBinary to float32; a uint8 Box is divided by its largest bound, usually 255."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._axes = len(leaf_shape(space))
        self._scale = _scale_of(space)
        self.width = math.prod(leaf_shape(space))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., *shape]`` to ``[..., width]``."""
        if self._axes == 1 and x.dtype == torch.float32:
            return x
        x = x.reshape(*x.shape[: x.dim() - self._axes], self.width).float()
        return x if self._scale is None else x * self._scale

    def write(self, x: NDArray[Any], out: NDArray[np.float32]) -> None:
        """The same in NumPy: write ``[N, *shape]`` into ``out`` ``[N, width]``."""
        if self._scale is None:
            out[...] = x.reshape(out.shape)
        else:
            np.multiply(x.reshape(out.shape), np.float32(self._scale), out=out)


class OneHot(nn.Module):
    """One-hot encoding of a Discrete, or of all choices of a MultiDiscrete, concatenated."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__()
        self._axes = len(leaf_shape(space))
        sizes = np.atleast_1d(space.n if isinstance(space, spaces.Discrete) else space.nvec).reshape(-1)
        self._shift = (np.cumsum(sizes) - sizes - np.reshape(space.start, -1)).astype(np.int64)
        self.shift: Tensor
        self.register_buffer("shift", torch.from_numpy(self._shift), persistent=False)
        self.width = int(sizes.sum())

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., *shape]`` to ``[..., width]``."""
        lead = x.shape[: x.dim() - self._axes]
        index = x.reshape(*lead, len(self._shift)).long() + self.shift
        return torch.zeros(*lead, self.width, device=x.device).scatter_(-1, index, 1.0)

    def write(self, x: NDArray[Any], out: NDArray[np.float32]) -> None:
        """The same in NumPy: write ``[N, *shape]`` into ``out`` ``[N, width]``."""
        index = x.reshape(len(x), len(self._shift)) + self._shift
        out[...] = 0.0
        out[np.arange(len(x))[:, None], index] = 1.0


class Image(nn.Module):
    """Convolutions and one linear layer for a Box with three axes; uint8 is divided by its largest bound, usually 255.

    `etude.spaces.channels_come_first` says which axis holds the channels.
    """

    def __init__(self, space: spaces.Box, conv: Sequence[Conv] | None, width: int) -> None:
        super().__init__()
        shape = space.shape
        self._channels_first = channels_come_first(space)
        channels, *size = shape if self._channels_first else (shape[2], *shape[:2])
        self._scale = _scale_of(space)
        self.width = width
        parts: list[nn.Module] = []
        for out, kernel, stride in conv or (NATURE_CONV if min(size) >= 36 else SMALL_CONV):
            if min(size) < kernel:
                raise SettingsError(
                    f"`conv`: a kernel of {kernel} does not fit on the {size[0]} x {size[1]} pixels that it gets, for "
                    f"images of {shape}. Use smaller kernels or strides, or None for a default that fits."
                )
            layer = nn.Conv2d(channels, out, kernel, stride)
            orthogonal(layer, math.sqrt(2))
            parts += [layer, nn.ReLU()]
            channels, size = out, [(pixels - kernel) // stride + 1 for pixels in size]
        last = nn.Linear(channels * size[0] * size[1], width)
        orthogonal(last, math.sqrt(2))
        self.layers = nn.Sequential(*parts, nn.Flatten(), last, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., H, W, C]`` or ``[..., C, H, W]`` to ``[..., width]``."""
        lead, x = x.shape[:-3], x.reshape(-1, *x.shape[-3:])
        if not self._channels_first:
            x = x.permute(0, 3, 1, 2)
        x = x.float() if self._scale is None else x.float() * self._scale
        encoded: Tensor = self.layers(x)
        return encoded.reshape(*lead, self.width)


@functools.cache
def _warn_of_pixels(name: str, shape: tuple[int, ...]) -> None:
    """Warn, once, of images that convolutions can't encode, as they have two or four axes."""
    _log.warning(
        "`%s` of the shape %s looks like images, but only images with three axes are encoded by convolutions: its "
        "pixels go to fully connected layers. The connector `frame_stack:1` adds an axis to a grey image, and "
        "`frame_stack:4` stacks images, instead of a wrapper.",
        name,
        shape,
    )


@functools.cache
def _warn_of_conv(conv: tuple[tuple[int, int, int], ...]) -> None:
    """Warn, once, of convolutions without images."""
    _log.warning(
        "`network.conv` has no effect: no part of the observation has three axes and at least %d pixels per side.",
        SMALLEST_IMAGE,
    )


class ColumnEncoder(nn.Module):
    """Encodes columns, each by a module of its own, and concatenates the results.

    Args:
        parts: The module of each column by name; each has a ``width``.

    Attributes:
        width: The length of the vector.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.encoders = nn.ModuleList(self.parts.values())
        self.width: int = sum(part.width for part in self.parts.values())

    def forward(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Map columns ``[..., *shape]`` to ``[..., width]``."""
        encoded: list[Tensor] = [part(columns[name]) for name, part in self.parts.items()]
        return encoded[0] if len(encoded) == 1 else torch.cat(encoded, -1)


class ObsEncoder(ColumnEncoder):
    """Encodes the leaves of an observation, except its `action_mask`.

    Attributes:
        vector: Whether no leaf is an image.
    """

    def __init__(self, obs_space: Space, conv: Sequence[Conv] | None, conv_width: int) -> None:
        parts: dict[str, Numbers | OneHot | Image] = {}
        for name, leaf in leaves(obs_space, OBS).items():
            if name == OBS_MASK:
                continue  # it is applied to the logits, not an input
            if isinstance(leaf, spaces.Box) and is_image(leaf):
                parts[name] = Image(leaf, conv, conv_width)
            elif isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
                parts[name] = OneHot(leaf)
            else:
                parts[name] = Numbers(leaf)
                if has_pixels(leaf):
                    _warn_of_pixels(name, leaf_shape(leaf))
        if not parts:
            raise ModuleError(
                f"the observation has no part except {ACTION_MASK!r}, so the network has no input. Add another part to "
                "the observation; a constant is enough."
            )
        super().__init__(parts)
        self.vector = not any(isinstance(part, Image) for part in parts.values())


class RecurrentLayer(nn.Module):
    """One layer of ``nn.LSTM`` (Hochreiter & Schmidhuber 1997, with forget gates) or ``nn.GRU`` (Cho et al. 2014).

    Its state is ``h``, which is also its output, and for an LSTM the cell ``c``; each ``[B, width]``.

    Weights are orthogonal over all gates together, and biases are zero.

    Args:
        inputs: The width of the input.
        kind: LSTM or GRU.
        width: The width of the output.
    """

    def __init__(self, inputs: int, kind: Literal["lstm", "gru"], width: int) -> None:
        super().__init__()
        self.width = width
        self.cell: nn.LSTM | nn.GRU
        self.cell = (nn.LSTM if kind == "lstm" else nn.GRU)(inputs, width, batch_first=True)
        self.names = ("h", "c") if kind == "lstm" else ("h",)
        for parameter in self.cell.parameters():
            if parameter.dim() == 2:
                nn.init.orthogonal_(parameter, 1.0)
            else:
                nn.init.zeros_(parameter)

    def draw_by_gate(self) -> None:
        """Initialise the weights of each gate like a separate layer, instead of all gates together.

        Input weights are normal with variance 1 / ``inputs``, state weights orthogonal, so the scale of the gates does
        not depend on the number of inputs. With the default initialisation, input weights of wide layers are small, and
        small changes of the inputs, such as a velocity, have little effect.
        """
        of_inputs, of_state = self.cell.all_weights[0][:2]
        nn.init.normal_(of_inputs, std=1.0 / math.sqrt(self.cell.input_size))
        for gate in of_state.data.chunk(len(of_state) // self.width):
            nn.init.orthogonal_(gate)

    def initial_state(self) -> dict[str, Tensor]:
        """The initial state: zeros, ``[width]`` each."""
        return {name: torch.zeros(self.width) for name in self.names}

    def forward(self, x: Tensor, state: Mapping[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Map ``[B, T, inputs]`` to ``[B, T, width]`` and the state after it; ``state`` None is the initial state."""
        if state is not None and x.shape[1] == 1 and not torch.is_grad_enabled():
            return self._step(x[:, 0], state)
        before = None if state is None else tuple(state[name].unsqueeze(0) for name in self.names)
        if isinstance(self.cell, nn.GRU):
            out, last = self.cell(x, None if before is None else before[0])
            return out, {"h": last[0]}
        out, after = self.cell(x, before)
        return out, {name: last[0] for name, last in zip(self.names, after, strict=True)}

    def _step(self, x: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Make one step ``[B, inputs]`` while acting, several times faster than ``cell``."""
        weights = self.cell.all_weights[0]
        if isinstance(self.cell, nn.GRU):
            h = torch.gru_cell(x, state["h"], *weights)
            return h.unsqueeze(1), {"h": h}
        h, c = torch.lstm_cell(x, (state["h"], state["c"]), *weights)
        return h.unsqueeze(1), {"h": h, "c": c}


State = dict[str, Tensor]
"""The state of recurrent layers by name, ``[B, width]`` each."""

OF_VALUE = "value_"
"""Prefix of the state's names for the value function's own recurrent layer."""


@settings
class NetworkConfig:
    """Shape of the built-in network."""

    everyday: ClassVar[tuple[str, ...]] = ("hidden", "activation", "recurrent")

    hidden: Annotated[
        tuple[int, ...], Rule(lambda widths: all(width >= 1 for width in widths), "widths of at least 1")
    ] = (64, 64)
    """Widths of the fully connected layers, each at least 1; empty: a linear map. Default: Schulman et al. 2017."""

    activation: Literal["tanh", "relu", "silu", "gelu", "elu", "linear"] = "tanh"
    """Activation function after each of these layers; gelu in its tanh form. Default: Schulman et al. 2017 (PPO)."""

    separate: bool = True
    """Whether policy and value function have separate layers. Default: Huang et al. 2022, detail 13 of 37."""

    weight_init: Literal["orthogonal", "torch"] = "orthogonal"
    """Initial weights of the policy and the value function: `orthogonal`, with zero biases (Huang et al. 2022, detail
    2), so that actions begin near the middle; or `torch`, torch's own default, like Stable-Baselines3's
    `ortho_init=False`."""

    log_std_init: float = 0.0
    """Initial logarithm of the standard deviations of Box actions. Default: Huang et al. 2022."""

    state_dependent_std: bool | None = None
    """Whether the standard deviations of Box actions are outputs of the network; otherwise they are separate
    parameters. None: the default of the algorithm, which is True only for SAC and CQL."""

    squash: bool | None = None
    """Whether tanh keeps Box actions inside their bounds. Otherwise they are drawn from a plain Gaussian and clipped
    for the env. None: the default of the algorithm, which is True only for SAC, TD3, CQL and TD3+BC. Source: Haarnoja
    et al. 2018, appendix C."""

    conv: tuple[tuple[int, int, int], ...] | None = None
    """Convolutions for images, each (channels, kernel size, stride). None: Mnih et al. 2015 (DQN), or two small ones if
    a side has fewer than 36 pixels."""

    conv_width: IntFrom1 = 512
    """Width of an encoded image, at least 1. Default: Mnih et al. 2015 (DQN)."""

    recurrent: Literal["lstm", "gru"] | None = None
    """A recurrent layer between the encoder and the `hidden` layers, for partially observable envs. With `separate`,
    policy and value function have one each."""

    recurrent_size: IntFrom1 = 64
    """Width of each recurrent layer, at least 1; an LSTM's state is twice as wide."""


class Trunk(nn.Module):
    """An encoder, a recurrent layer if the config has one, and fully connected layers."""

    def __init__(self, obs_space: Space, config: NetworkConfig) -> None:
        super().__init__()
        self.encoder = ObsEncoder(obs_space, config.conv, config.conv_width)
        if config.conv is not None and self.encoder.vector:
            _warn_of_conv(config.conv)
        self.memory: RecurrentLayer | None = None
        self.linears = nn.ModuleList()
        self.activation = ACTIVATIONS[config.activation].torch()
        self.width = self.encoder.width
        if config.recurrent is not None:
            self.memory = RecurrentLayer(self.width, config.recurrent, config.recurrent_size)
            self.width = config.recurrent_size
        for width in config.hidden:
            layer = nn.Linear(self.width, width)
            orthogonal(layer, 1.0 if config.activation == "linear" else math.sqrt(2))
            self.linears.append(layer)
            self.width = width

    def forward(self, columns: Mapping[str, Tensor], state: State | None = None) -> tuple[Tensor, State]:
        """Map columns of observations to ``[..., width]``, and return the recurrent state after them; {} without
        one."""
        x: Tensor = self.encoder(columns)
        after: State = {}
        if self.memory is not None:
            x, after = self.memory(x, state)
        for layer in self.linears:
            x = self.activation(layer.forward(x))  # calling the layer would double the cost
        return x, after


class Network(nn.Module):
    """Policy and value function for all spaces that Etude supports.

    Weights are orthogonal, with gain sqrt(2) in hidden layers, 0.01 in the policy's head (0.3 where it computes the
    values of actions, see `Distribution.head_gain`) and 1 in the value's. Biases are zero (Huang et al. 2022, "The 37
    implementation details of PPO"). `NetworkConfig.weight_init` chooses torch's own initial weights instead.

    Args:
        obs_space: Boxes, MultiBinary, Discrete and MultiDiscrete (one-hot), and Dict and Tuple of them.
        action_space: An action space that `distribution_for` supports.
        config: The shape; None: the default.
        dist: The action distribution; None: that of `distribution_for`.
        value: Whether it has a value function.
    """

    def __init__(
        self,
        obs_space: Space,
        action_space: Space,
        config: NetworkConfig | None = None,
        dist: Distribution | None = None,
        value: bool = True,
    ) -> None:
        super().__init__()
        config = config or NetworkConfig()
        dist = dist or distribution_for(action_space)
        self.activation = config.activation
        self._flatten = Flattener(obs_space, OBS)
        self.policy = Trunk(obs_space, config)
        self._make_head(dist, config)
        self.critic = Trunk(obs_space, config) if value and config.separate else None
        self.value_head: nn.Linear | None = None
        if value:
            self.value_head = nn.Linear((self.critic or self.policy).width, 1)
            orthogonal(self.value_head, 1.0)
        if config.weight_init == "torch":
            for layer in self.modules():
                if isinstance(layer, nn.Linear | nn.Conv2d | nn.RNNBase):
                    layer.reset_parameters()
        if len(dist.log_std) and self.log_std is None:
            with torch.no_grad():
                self.policy_head.bias[torch.from_numpy(dist.log_std)] = config.log_std_init

    def initial_state(self) -> State:
        """The state of one row at the start of an episode: zeros; {} if not recurrent."""
        state = {} if self.policy.memory is None else self.policy.memory.initial_state()
        if self.critic is not None:
            state |= {OF_VALUE + name: zeros for name, zeros in state.items()}
        return state

    def without_value(self) -> "Network":
        """The policy alone, with shared parameters: it returns no value, and lacks the value function's recurrent
        state."""
        policy = copy.copy(self)
        policy.__dict__["_modules"] = {**self._modules, "critic": None, "value_head": None}
        return policy

    def _make_head(self, dist: Distribution, config: NetworkConfig) -> None:
        own_std = len(dist.log_std) > 0 and not config.state_dependent_std
        outputs = dist.num_inputs - (len(dist.log_std) if own_std else 0)
        self.policy_head = nn.Linear(self.policy.width, outputs)
        orthogonal(self.policy_head, dist.head_gain)
        self.log_std: nn.Parameter | None = None
        self.order: Tensor | None
        self.register_buffer("order", None, persistent=False)
        if own_std:
            self.log_std = nn.Parameter(torch.full((len(dist.log_std),), config.log_std_init))
            others = np.setdiff1d(np.arange(dist.num_inputs), dist.log_std)
            order = np.argsort(np.concatenate([others, dist.log_std]))
            if (order != np.arange(dist.num_inputs)).any():
                self.order = torch.from_numpy(order)

    def forward(self, obs: Any, state: State | None = None) -> Output:
        """Compute ``dist_inputs`` and ``value`` of tensors nested as in the observation space, each ``[..., *shape]``.

        If recurrent, tensors are ``[B, T, *shape]``, and ``state`` is the state before the first of the T steps.
        """
        columns = self._flatten(obs)
        hidden, after = self.policy(columns, state)
        inputs: Tensor = self.policy_head(hidden)
        if self.log_std is not None:
            inputs = torch.cat([inputs, self.log_std.expand(*inputs.shape[:-1], -1)], -1)
            if self.order is not None:
                inputs = inputs.index_select(-1, self.order)
        value = None
        if self.value_head is not None:
            if self.critic is not None:
                own = state and {name: state[OF_VALUE + name] for name in after}
                hidden, of_value = self.critic(columns, own)
                for name, part in of_value.items():
                    after[OF_VALUE + name] = part
            value = self.value_head(hidden).squeeze(-1)
        return Output(inputs, value, after or None)

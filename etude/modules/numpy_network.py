# SPDX-License-Identifier: Apache-2.0
"""The forward of the built-in network in NumPy, on the memory of its torch parameters: no dispatch, no copies."""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from etude.columns import Columns
from etude.modules.activations import ACTIVATIONS
from etude.modules.encoders import Encoder, Image, Numbers
from etude.modules.memory import NumPyMemory
from etude.modules.networks import OF_VALUE, Network, Trunk
from etude.modules.tensors import as_tensor

Floats: TypeAlias = NDArray[np.float32]

CHUNK = 1024
"""Rows that are computed at once where there are many: the layers' results stay in the processor's cache."""

_ACROSS_AT_MOST = 128  # rows
_ACROSS_FROM = 1536  # rows times the widest layer


def runs_in_numpy(net: nn.Module) -> bool:
    """Whether `NumPyNetwork` computes what ``net`` computes: a `Network` itself, without images."""
    return type(net) is Network and net.policy.encoder.vector


def _view(parameter: torch.Tensor) -> Floats:
    return parameter.detach().to("cpu", torch.float32).numpy()


class _Layers:
    """One trunk: its memory, its linear layers, and buffers for what these compute."""

    def __init__(self, trunk: Trunk, activation: str) -> None:
        self._encoder: Encoder = trunk.encoder
        self._linears: list[nn.Linear] = list(trunk.linears)  # type: ignore[arg-type]
        self._activate = ACTIVATIONS[activation].in_place
        self.memory = None if trunk.memory is None else NumPyMemory(trunk.memory)
        (name, part), *others = trunk.encoder.parts.items()
        self._direct = name if not others and isinstance(part, Numbers) else None
        self.names = list(trunk.encoder.parts)
        self._size = self._capacity = 0
        self._across = False
        self._steps: list[tuple[Floats, Floats, Floats]] = []
        self.take_views()

    def take_views(self) -> None:
        """Look where the parameters are now."""
        self._views = [(_view(layer.weight), _view(layer.bias)) for layer in self._linears]
        self._size = 0

    def _resize(self, n: int) -> None:
        """Choose buffers and a layout for ``n`` rows.

        A layer is x W^T: either so, or across, as (W x^T)^T. BLAS is quicker with W as it lies in memory, but NumPy
        adds biases slowly to short columns. The limits were measured with layers of 64 to 256.
        """
        if n > self._capacity:
            self._input = np.empty((n, self._encoder.width), np.float32)
            self._buffers = [np.empty(n * layer.out_features, np.float32) for layer in self._linears]
            self._capacity = n
        self._size = n
        self._rows = self._input[:n]
        widths = [layer.out_features for layer in self._linears]
        self._across = n <= _ACROSS_AT_MOST and n * max(widths, default=0) >= _ACROSS_FROM
        self._steps = []
        for width, buffer, (weight, bias) in zip(widths, self._buffers, self._views, strict=True):
            if self._across:
                self._steps.append((weight, bias[:, None], buffer[: n * width].reshape(width, n)))
            else:
                self._steps.append((weight.T, bias, buffer[: n * width].reshape(n, width)))

    def __call__(self, obs: Columns, n: int) -> Floats:
        """``[n, width]``, without a memory: valid until the next call."""
        if n != self._size:
            self._resize(n)
        return self._through(self._encode(obs))

    def step(self, obs: Columns, n: int, state: Mapping[str, Floats]) -> tuple[Floats, dict[str, Floats]]:
        """With a memory: ``[n, width]``, valid until the next call, and the state after."""
        assert self.memory is not None
        if n != self._size:
            self._resize(n)
        after = self.memory(self._encode(obs), state)
        return self._through(after["h"]), after

    def _through(self, x: Floats) -> Floats:
        activate = self._activate
        if self._across:
            x = x.T
            for weight, bias, out in self._steps:
                weight.dot(x, out)
                out += bias
                if activate is not None:
                    activate(out)
                x = out
            return x.T
        for weight, bias, out in self._steps:
            x.dot(weight, out)
            out += bias
            if activate is not None:
                activate(out)
            x = out
        return x

    def many(self, obs: Columns, n: int) -> torch.Tensor:
        """``[n, width]`` for many rows at once, in torch: its matrices are a quarter quicker there than NumPy's."""
        if n != self._size:
            self._resize(n)
        x = as_tensor(self._encode(obs))
        for weight, bias in self._views:
            x = torch.addmm(torch.from_numpy(bias), x, torch.from_numpy(weight).t())
            if self._activate is not None:
                self._activate(x.numpy())
        return x

    def _encode(self, obs: Columns) -> Floats:
        if self._direct is not None:
            x = obs[self._direct]
            if x.dtype == np.float32 and x.ndim == 2:
                return x
        out, start = self._rows, 0
        for name, part in self._encoder.parts.items():
            assert not isinstance(part, Image)
            part.write(obs[name], out[:, start : start + part.width])
            start += part.width
        return out


class NumPyNetwork:
    """Computes what a `Network` of vector-like observations computes.

    Views of the parameters' memory are used, so that an update in place is seen at once. `refresh` takes new views
    where a parameter's memory moved; parameters on another device, or of another dtype, are copied by each `refresh`,
    as are those of a recurrent network's memory.
    """

    def __init__(self, net: Network) -> None:
        self._net = net
        self._policy = _Layers(net.policy, net.activation)
        self._critic = None if net.critic is None else _Layers(net.critic, net.activation)
        self._trunks = [layers for layers in (self._policy, self._critic) if layers is not None]
        self._parameters = list(net.parameters())
        self._first = next(iter(self._policy.names))
        self._order = None if net.order is None else net.order.cpu().numpy()
        self._width = net.policy_head.out_features
        self.has_value = net.value_head is not None
        self.recurrent = self._policy.memory is not None
        self._pointers: list[int] = []
        self.refresh()

    def refresh(self) -> None:
        """See parameters whose memory moved, or that are copied."""
        for layers in self._trunks:
            if layers.memory is not None:
                layers.memory.refresh()
        pointers = [parameter.data_ptr() for parameter in self._parameters]
        shared = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in self._parameters)
        if shared and pointers == self._pointers:
            return
        self._pointers = pointers
        net = self._net
        for layers in self._trunks:
            layers.take_views()
        self._weight, self._bias = _view(net.policy_head.weight).T, _view(net.policy_head.bias)
        self._log_std = None if net.log_std is None else _view(net.log_std)
        if net.value_head is not None:
            self._value_weight, self._value_bias = _view(net.value_head.weight).T, _view(net.value_head.bias)

    def dist_inputs(self, obs: Columns) -> Floats:
        """float32 ``[N, num_inputs]``, an array of its own; ``obs`` are flat columns ``[N, *shape]``."""
        return self._head(self._policy(obs, len(obs[self._first])))

    def step(self, obs: Columns, state: Mapping[str, Floats]) -> tuple[Floats, Floats | None, dict[str, Floats]]:
        """For a recurrent network: what `dist_inputs` and `value` are of ``[N, *shape]``, and the state after."""
        n = len(obs[self._first])
        hidden, after = self._policy.step(obs, n, state)
        inputs, value = self._head(hidden), None
        if self.has_value:
            if self._critic is not None:
                own = {name: state[OF_VALUE + name] for name in after}
                hidden, of_value = self._critic.step(obs, n, own)
                after |= {OF_VALUE + name: part for name, part in of_value.items()}
            value = hidden.dot(self._value_weight)[:, 0]
            value += self._value_bias
        return inputs, value, after

    def _head(self, hidden: Floats) -> Floats:
        n = len(hidden)
        if self._log_std is None:
            inputs: Floats = hidden.dot(self._weight)
            inputs += self._bias
            return inputs
        inputs = np.empty((n, self._width + len(self._log_std)), np.float32)
        inputs[:, : self._width] = hidden.dot(self._weight)
        inputs[:, : self._width] += self._bias
        inputs[:, self._width :] = self._log_std
        return inputs if self._order is None else inputs.take(self._order, axis=1)

    def value(self, obs: Columns) -> Floats:
        """float32 ``[N]``: the values of any number of observations, in chunks."""
        n = len(obs[self._first])
        out = np.empty((n, 1), np.float32)
        layers = self._critic or self._policy
        for start in range(0, n, CHUNK):
            stop = min(start + CHUNK, n)
            hidden = layers.many({name: obs[name][start:stop] for name in layers.names}, stop - start)
            np.add(hidden.numpy().dot(self._value_weight), self._value_bias, out=out[start:stop])
        return out[:, 0]

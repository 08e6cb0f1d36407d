# SPDX-License-Identifier: Apache-2.0
"""Memory of the built-in network: an LSTM or a GRU, in torch over sequences, and in NumPy a step at a time."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Floats: TypeAlias = NDArray[np.float32]

_HALF = np.float32(0.5)


class Memory(nn.Module):
    """One layer of ``nn.LSTM`` (Hochreiter & Schmidhuber 1997, with forget gates) or ``nn.GRU`` (Cho et al. 2014).

    Its state is ``h``, which is also what it gives out, and for an LSTM the cell ``c``; each ``[B, width]``.

    Args:
        inputs: The width of what goes in.
        kind: Which of the two.
        width: The width of what comes out.
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

    def initial_state(self) -> dict[str, Tensor]:
        """Zeros, ``[width]`` each."""
        return {name: torch.zeros(self.width) for name in self.names}

    def forward(self, x: Tensor, state: Mapping[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
        """``[B, T, inputs]`` to ``[B, T, width]`` and the state after; None is the state at the start of an episode."""
        before = None if state is None else tuple(state[name].unsqueeze(0) for name in self.names)
        if isinstance(self.cell, nn.GRU):
            out, last = self.cell(x, None if before is None else before[0])
            return out, {"h": last[0]}
        out, after = self.cell(x, before)
        return out, {name: last[0] for name, last in zip(self.names, after, strict=True)}


class NumPyMemory:
    """One step of a `Memory`, on a copy of its weights that `refresh` makes.

    All gates come from one product ``[x, h, 1] W``, and all sigmoids from one tanh: sigmoid(a) = (1 + tanh(a / 2)) / 2,
    with the halves of ``a`` made in W. The four blocks of W are, with the sigmoids first, the LSTM's input, forget,
    output gate and candidate; and the GRU's reset and update gate, then what ``x`` and what ``h`` bring to its
    candidate, which the reset gate keeps apart.
    """

    def __init__(self, memory: Memory) -> None:
        self._cell = memory.cell
        self._width = memory.width
        self._lstm = isinstance(memory.cell, nn.LSTM)
        self._gates = 3 if self._lstm else 2
        self._inputs = memory.cell.input_size
        self._rows = np.ones((0, self._inputs + self._width + 1), np.float32)
        self._out = np.empty((0, 4 * self._width), np.float32)
        self.refresh()

    def refresh(self) -> None:
        """Take the weights as they are now."""
        width, inputs = self._width, self._inputs
        parameters = (p.detach().to("cpu", torch.float32).numpy() for p in self._cell.parameters())
        from_x, from_h, bias_x, bias_h = parameters
        w = np.zeros((4, width, inputs + width + 1), np.float32)
        for block, gate in enumerate((0, 1, 3, 2) if self._lstm else (0, 1, 2, 2)):
            rows = slice(gate * width, (gate + 1) * width)
            if self._lstm or block != 3:
                w[block, :, :inputs] = from_x[rows]
                w[block, :, -1] = bias_x[rows]
            if self._lstm or block != 2:
                w[block, :, inputs:-1] = from_h[rows]
                w[block, :, -1] += bias_h[rows]
        w[: self._gates] *= _HALF
        self._weights = np.ascontiguousarray(w.reshape(4 * width, -1).T)

    def __call__(self, x: Floats, state: Mapping[str, Floats]) -> dict[str, Floats]:
        """``x`` ``[N, inputs]`` and the state before, ``[N, width]`` each, to the state after, in arrays of its own."""
        n, width, inputs = len(x), self._width, self._inputs
        if n > len(self._rows):
            self._rows = np.ones((n, inputs + width + 1), np.float32)
            self._out = np.empty((n, 4 * width), np.float32)
        rows, out, h = self._rows[:n], self._out[:n], state["h"]
        rows[:, :inputs] = x
        rows[:, inputs:-1] = h
        rows.dot(self._weights, out)
        halves = out if self._lstm else out[:, : 2 * width]
        np.tanh(halves, halves)
        gates = out[:, : self._gates * width]
        gates *= _HALF
        gates += _HALF
        first, second, third, fourth = (out[:, i * width : (i + 1) * width] for i in range(4))
        if self._lstm:
            c = second * state["c"]
            c += np.multiply(first, fourth, fourth)
            after = np.tanh(c)
            after *= third
            return {"h": after, "c": c}
        fourth *= first
        third += fourth
        np.tanh(third, third)
        after = h - third
        after *= second
        after += third
        return {"h": after}

# SPDX-License-Identifier: Apache-2.0
"""What a runner must give on `Numbered` envs, by a naive loop; and a module that does not care what it sees."""

from typing import Any

import numpy as np
import torch
from some_envs import is_terminated, length_of, reward_of
from torch import nn

from etude.experience import Experience
from etude.modules import Module, Output, make_module
from etude.modules.distributions import distribution_for


class Constant(nn.Module):
    """The same policy for all observations."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.inputs = nn.Parameter(torch.zeros(distribution_for(action_space).num_inputs))

    def forward(self, obs: Any) -> Output:
        leaf = obs
        while not isinstance(leaf, torch.Tensor):
            leaf = next(iter(leaf.values())) if isinstance(leaf, dict) else leaf[0]
        n = len(leaf)
        return Output(dist_inputs=self.inputs.expand(n, -1), value=torch.zeros(n))


def module_for(arena: Any) -> Module:
    return make_module(Constant, arena.obs_space, arena.action_space)


def numbers(exp: Experience, columns: Any = None) -> Any:
    """(copy, episode, t) of each row, out of whatever form the observation has."""
    columns = exp.steps if columns is None else columns
    name = next(n for n in ("obs", "obs/a/numbers", "obs/0") if n in columns)
    values = columns[name].astype(int)
    if "obs/t" in columns:
        np.testing.assert_array_equal(columns["obs/t"], values[:, 2])
    if "obs/1" in columns:
        np.testing.assert_array_equal(columns["obs/1"], values[:, 1:])
    return values


def check_segments(exp: Experience) -> None:
    """Each segment is a run of one episode's steps, with the right end and the true last observation."""
    exp.validate()
    rows, finals = numbers(exp), numbers(exp, exp.final_obs)
    assert exp.segments.has_final_obs.all()
    for i in range(exp.num_segments):
        start, stop = exp.offsets[i], exp.offsets[i + 1]
        copy, episode, t = rows[start]
        for n, row in enumerate(range(start, stop)):
            assert tuple(rows[row]) == (copy, episode, t + n)
            assert exp.steps["reward"][row] == np.float32(reward_of(copy, episode, t + n))
        assert exp.segments.t_start[i] == t
        assert tuple(finals[i]) == (copy, episode, t + stop - start)
        ended = t + stop - start == length_of(copy, episode)
        assert exp.segments.terminated[i] == (ended and is_terminated(copy, episode))
        assert exp.segments.truncated[i] == (ended and not is_terminated(copy, episode))


def lived(exp: Experience, copy: int) -> list[tuple[int, int]]:
    """(episode, t) of all steps of one copy, lookback left out, in the order given."""
    rows = numbers(exp)[exp.trained()]
    return [(int(e), int(t)) for c, e, t in rows if c == copy]


def life(copy: int, steps: int, first: int = 0) -> list[tuple[int, int]]:
    """The first steps of a copy's life: (episode, t)."""
    out: list[tuple[int, int]] = []
    episode = first
    while len(out) < steps:
        out += [(episode, t) for t in range(length_of(copy, episode))]
        episode += 1
    return out[:steps]

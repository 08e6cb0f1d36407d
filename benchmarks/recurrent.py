# SPDX-License-Identifier: Apache-2.0
"""Recurrent modules while they act."""

from collections.abc import Iterator
from typing import TypeAlias

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from benchmarks.harness import ENV, ETUDE, STEPS_A_SECOND, Figure, Options, Reach, Row, Work, race
from etude import Runner, VectorArena
from etude.modules import NetworkConfig, make_module

TURNS = 128
BARE = "bare torch loop"
State: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def rows(options: Options) -> Iterator[Row]:
    """Steps a second where policy and value each have an LSTM of 64 before two layers of 64."""
    for num_envs in (8, 64):
        rates = race({ETUDE: collecting(num_envs), BARE: bare(num_envs)}, options)
        yield Row(
            f"sampling {ENV}, built-in 2x64 with an LSTM of 64, {num_envs} envs",
            STEPS_A_SECOND,
            [Figure(ETUDE, rates[ETUDE], "etude"), Figure(BARE, rates[BARE])],
            Reach(0.6, BARE),
        )


def collecting(num_envs: int) -> Work:
    """Etude's runner, with states kept for each slot and recorded."""
    arena = VectorArena(ENV, num_envs)
    torch.manual_seed(0)
    config = NetworkConfig(recurrent="lstm", recurrent_size=64)
    runner = Runner(arena, make_module(None, arena.obs_space, arena.action_space, config), seed=0)
    return lambda: runner.collect(num_steps=num_envs * TURNS).num_steps


class _Trunk(nn.Module):
    """What a policy's or value's head reads: an LSTM of 64, then two layers of 64, as the built-in network has."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 64)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def forward(self, obs: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        h, c = self.cell(obs, state)
        return self.layers(h), (h, c)


class _Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunks = nn.ModuleList([_Trunk(), _Trunk()])
        self.heads = nn.ModuleList([nn.Linear(64, 2), nn.Linear(64, 1)])

    def forward(self, obs: torch.Tensor, states: list[State]) -> tuple[list[torch.Tensor], list[State]]:
        made = [trunk(obs, state) for trunk, state in zip(self.trunks, states, strict=True)]
        return [head(out) for head, (out, _) in zip(self.heads, made, strict=True)], [state for _, state in made]


def bare(num_envs: int) -> Work:
    """Policy, value, state and a draw by Gumbel-max in torch; nothing is kept."""
    env = gym.make_vec(ENV, num_envs=num_envs, vectorization_mode="vector_entry_point")
    obs, _ = env.reset(seed=0)
    net = _Policy()
    states = [(torch.zeros(num_envs, 64), torch.zeros(num_envs, 64)) for _ in range(2)]

    @torch.inference_mode()
    def work() -> int:
        nonlocal obs, states
        for _ in range(TURNS):
            (logits, _), states = net(torch.from_numpy(obs), states)
            action = (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)
            logits.log_softmax(-1).gather(-1, action.unsqueeze(-1))
            obs, _, terminated, truncated, _ = env.step(action.numpy())
            done = terminated | truncated
            if done.any():
                keep = torch.from_numpy(np.where(done, 0.0, 1.0).astype(np.float32))[:, None]
                states = [(h * keep, c * keep) for h, c in states]
        return TURNS * num_envs

    return work

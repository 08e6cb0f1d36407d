# SPDX-License-Identifier: Apache-2.0
"""Sampling: Etude's runner beside bare loops and SB3's, at 1, 8 and 64 envs."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks import nets, sb3
from benchmarks.harness import ENV, ETUDE, STEPS_A_SECOND, Figure, Options, Reach, Row, Work, race
from etude import Runner, make_arena
from etude.modules import make_module

TURNS = {1: 2048, 8: 256, 64: 128}
"""Steps of each env in one collection, by the number of envs."""
REACH = {1: 20 / 30, 8: 160 / 232, 64: 1000 / 1433}
USERS_REACH = 0.7
ALONE, NUMPY, TORCH, SB3 = "env alone", "env + NumPy forward", "env + bare torch", "SB3 collect_rollouts"
PLAIN = "plain env + NumPy forward"


def rows(options: Options) -> Iterator[Row]:
    """Steps a second, with the built-in network and with a user's own."""
    for num_envs, turns in TURNS.items():
        users = "Etude, user's module"
        works = {
            ETUDE: collecting(num_envs, None),
            NUMPY: _loop(num_envs, numpy_policy(num_envs)),
            SB3: sb3.collecting(num_envs, turns),
            users: collecting(num_envs, nets.UsersNet()),
            TORCH: _loop(num_envs, _torch_policy()),
            ALONE: _loop(num_envs, _random_policy(num_envs)),
        }
        if num_envs == 1:
            works[PLAIN] = _plain_loop(numpy_policy(1))
        rates = race(works, options)
        limits = [Figure(name, rates[name]) for name in (NUMPY, ALONE, PLAIN) if name in rates]
        peer = Figure(SB3, rates[SB3], "peer")
        envs = f"{num_envs} env{'s' if num_envs > 1 else ''}"
        yield Row(
            f"sampling {ENV}, built-in 2x64, {envs}",
            STEPS_A_SECOND,
            [Figure(ETUDE, rates[ETUDE], "etude"), *limits, peer],
            Reach(REACH[num_envs], NUMPY),
        )
        yield Row(
            f"sampling {ENV}, a user's torch module, {envs}",
            STEPS_A_SECOND,
            [Figure(ETUDE, rates[users], "etude"), Figure(TORCH, rates[TORCH]), peer],
            Reach(USERS_REACH, TORCH),
        )


def collecting(num_envs: int, net: torch.nn.Module | None) -> Work:
    """Etude's runner: stochastic, with log-probabilities and values, into columns."""
    arena = make_arena(ENV, num_envs)
    kind = arena.kinds[0]
    torch.manual_seed(0)
    runner = Runner(arena, make_module(net, kind.obs_space, kind.action_space), seed=0)
    num_steps = num_envs * TURNS[num_envs]
    return lambda: runner.collect(num_steps=num_steps).num_steps


def _loop(num_envs: int, policy: Callable[[Any], Any]) -> Work:
    """The barest loop over the env's own vectorised version: nothing is kept.

    The env resets a copy in the turn after its end; as everywhere, this is not counted as a step.
    """
    env = gym.make_vec(ENV, num_envs=num_envs, vectorization_mode="vector_entry_point")
    obs, _ = env.reset(seed=0)
    turns = TURNS[num_envs]

    def work() -> int:
        nonlocal obs
        ends = []
        for _ in range(turns):
            obs, _, terminated, truncated, _ = env.step(policy(obs))
            ends += terminated, truncated
        return turns * num_envs - int(np.count_nonzero(ends))

    return work


def _plain_loop(policy: Callable[[Any], Any]) -> Work:
    """One env that is not vectorised: for a single copy that is quicker."""
    env = gym.make(ENV)
    obs, _ = env.reset(seed=0)

    def work() -> int:
        nonlocal obs
        for _ in range(TURNS[1]):
            obs, _, terminated, truncated, _ = env.step(policy(obs[None])[0])
            if terminated or truncated:
                obs, _ = env.reset()
        return TURNS[1]

    return work


def _random_policy(num_envs: int) -> Callable[[Any], Any]:
    actions = np.random.default_rng(0).integers(0, 2, (64, num_envs))
    turn = 0

    def policy(obs: Any) -> Any:
        nonlocal turn
        turn = (turn + 1) % 64
        return actions[turn]

    return policy


def numpy_policy(num_envs: int) -> Callable[[Any], Any]:
    """The policy's forward in NumPy and nothing else: the action is the larger logit; nothing is drawn."""
    layers = [layer for layer in nets.seeded_net().policy if isinstance(layer, torch.nn.Linear)]
    (w0, b0), (w1, b1), (w2, b2) = [(x.weight.detach().numpy(), x.bias.detach().numpy()[:, None]) for x in layers]
    x, y, z = (np.empty((width, num_envs), np.float32) for width in (64, 64, 2))

    def policy(obs: Any) -> Any:
        np.dot(w0, obs.T, out=x)
        np.add(x, b0, out=x)
        np.tanh(x, out=x)
        np.dot(w1, x, out=y)
        np.add(y, b1, out=y)
        np.tanh(y, out=y)
        np.dot(w2, y, out=z)
        np.add(z, b2, out=z)
        return z.argmax(0)

    return policy


def _torch_policy() -> Callable[[Any], Any]:
    """Policy, value, Gumbel-max and log-probability in torch, without distribution objects."""
    net = nets.seeded_net()

    @torch.inference_mode()
    def policy(obs: Any) -> Any:
        logits, _ = net(torch.from_numpy(obs))
        action = (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)
        logits.log_softmax(-1).gather(-1, action.unsqueeze(-1))
        return action.numpy()

    return policy

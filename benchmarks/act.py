# SPDX-License-Identifier: Apache-2.0
"""A policy in a loop of one's own: `Policy.act` against its network alone, called with tensors that lie ready."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from benchmarks.harness import ETUDE, Figure, Options, Reach, Row, Work, race
from etude.connectors import Pipeline
from etude.modules import NetworkConfig, make_module
from etude.policies import Policy

BARE = "bare network in torch"
CALLS = 32

_VECTOR = spaces.Box(-1, 1, (17,), np.float32)
_PIXELS = spaces.Box(0, 255, (84, 84, 1), np.uint8)

KINDS: dict[str, tuple[spaces.Space[Any], list[str], NetworkConfig]] = {
    "2x64, normalize_obs": (_VECTOR, ["clip_action", "normalize_obs"], NetworkConfig()),
    "2x64 with an LSTM of 64": (_VECTOR, ["clip_action"], NetworkConfig(recurrent="lstm")),
    "84x84 pixels, frame_stack:4": (_PIXELS, ["frame_stack:4"], NetworkConfig()),
}


def rows(options: Options) -> Iterator[Row]:
    """Microseconds a call, for 1, 8 and 64 observations."""
    for kind, (obs_space, connectors, config) in KINDS.items():
        for size in (1, 8, 64):
            policy = _policy(obs_space, connectors, config)
            rates = race({ETUDE: acting(policy, size), BARE: bare(policy, size)}, options)
            times = {name: [1e6 / rate for rate in found] for name, found in rates.items()}
            yield Row(
                f"Policy.act, {kind}, batch of {size}",
                "us",
                [Figure(ETUDE, times[ETUDE], "etude"), Figure(BARE, times[BARE])],
                Reach(1.3, BARE),
            )


def _policy(obs_space: spaces.Space[Any], connectors: list[str], config: NetworkConfig) -> Policy:
    torch.manual_seed(0)
    pipeline, actions = Pipeline(connectors), spaces.Discrete(6)
    module = make_module(None, *pipeline.spaces(obs_space, actions), config)
    return Policy(module.eval(), pipeline, obs_space=obs_space, action_space=actions)


def acting(policy: Policy, size: int) -> Work:
    """What a user writes: NumPy in, NumPy out."""
    obs, state = np.stack([policy.obs_space.sample() for _ in range(size)]), policy.initial_state(size)

    def work() -> int:
        nonlocal state
        for _ in range(CALLS):
            _, state = policy.act(obs, state)
        return CALLS

    return work


def bare(policy: Policy, size: int) -> Work:
    """The forward of the network and the best choice, for observations as the network sees them."""
    module = policy.module
    obs = torch.from_numpy(np.stack([module.obs_space.sample() for _ in range(size)]))
    state = {name: torch.zeros(size, *part.shape) for name, part in module.initial_state().items()}
    net, given = module.net, (obs[:, None], state) if state else (obs,)

    @torch.inference_mode()
    def work() -> int:
        for _ in range(CALLS):
            net(*given).dist_inputs.argmax(-1)
        return CALLS

    return work

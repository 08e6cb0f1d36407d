# SPDX-License-Identifier: Apache-2.0
"""Steps that older weights made, on purpose; and an env in which it shows who made them."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from etude import columns as col
from etude.connectors import Connector
from etude.experience import Experience
from etude.learners import load_weights


class Lagging:
    """An algorithm, mixed in before its class, that acts with the weights of ``lag`` iterations ago."""

    lag = 4

    def collect(self: Any, **how: Any) -> dict[str, Experience]:
        now = {name: value.clone() for name, value in self.module.state_dict().items()}
        self.weights = [*getattr(self, "weights", ()), now][-self.lag - 1 :]
        load_weights(self.module, self.weights[0])
        try:
            parts: dict[str, Experience] = super().collect(**how)  # type: ignore[misc]
            return parts
        finally:
            load_weights(self.module, now)


class Pretend(Connector):
    """Says that the present weights made the steps, so that nothing is corrected."""

    uses_module = True

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        columns = [col.subtree(exp.steps, root) for root in (col.OBS, col.ACTION, col.STATE_IN)]
        return exp.with_steps(logp=module.logp_and_value(*columns)[0])


class Fork(gym.Env[Any, Any]):
    """At once 0.7; or up, where action 1 earns 1 and action 0 nothing.

    Who draws up there has 0.5 of it, so that going up does not pay where values are those of who draws.
    """

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.is_up = False
        return np.float32([1, 0]), {}

    def step(self, action: Any) -> Any:
        if self.is_up:
            return np.zeros(2, np.float32), float(action), True, False, {}
        self.is_up = bool(action)
        return np.float32([0, self.is_up]), 0.0 if self.is_up else 0.7, not self.is_up, False, {}

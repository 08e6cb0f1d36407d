# SPDX-License-Identifier: Apache-2.0
"""OnPolicyAlgorithm: collect, learn from exactly that, forget."""

from typing import Any, TypeVar

from gymnasium import Env
from gymnasium.vector import VectorEnv

from etude.algorithms.base import Algorithm
from etude.algorithms.config import OnPolicyConfig
from etude.envs import EnvLike, VectorArena
from etude.errors import SettingsError
from etude.experience import Experience
from etude.learners import Update
from etude.runners import Runner
from etude.spaces import Space

C = TypeVar("C", bound=OnPolicyConfig)


class OnPolicyAlgorithm(Algorithm[C]):
    """Learns from the steps that its own module has just made. Define `loss` and `learner_connectors`."""

    def env_spaces(self) -> tuple[Space, Space]:
        """The spaces of the config's env, which is made here."""
        if self.config.env is None:
            raise SettingsError(f"{type(self).__name__} needs an env to act in: set `env`, such as env='CartPole-v1'.")
        self.arena = VectorArena(self.config.env, self.config.num_envs)
        return self.arena.obs_space, self.arena.action_space

    def setup(self) -> None:
        """Make the runner and the learner's connectors."""
        self.runner = Runner(self.arena, self.module, self.connectors, seed=self._seed)
        self.to_learner = self.make_learner_connectors()

    @property
    def window(self) -> int:
        """How many episodes the returns in results are over."""
        return self.config.window

    def training_step(self) -> Update:
        """Collect, prepare, update: one iteration."""
        with self.timed("sample"):
            exp = self.runner.collect(num_steps=self.config.num_steps)
        self.env_steps += self.config.num_steps
        finished = self.runner.take_finished()
        self.returns.add(finished.returns)
        self.lengths.add(finished.lengths)
        self.episodes += len(finished.returns)
        with self.timed("connect"):
            seen = self.connectors.offline(exp)
            batch = self.to_learner.offline(seen, self.module)
        with self.timed("update"):
            update = self.update(batch)
        self.connectors.update(exp)
        self.to_learner.update(seen)
        return update

    def update(self, exp: Experience) -> Update:
        """Learn from prepared experience: ``epochs`` times over, in shuffled minibatches."""
        return self.learner.update(exp, minibatch_size=self.config.minibatch_size, epochs=self.config.epochs)

    def in_use(self, env: EnvLike) -> bool:
        """Whether ``env`` is an object that training acts in."""
        return isinstance(env, Env | VectorEnv)

    def state_dict(self) -> dict[str, Any]:
        """Also the runner's state: running episodes, random streams, connectors."""
        return {**super().state_dict(), "runner": self.runner.state_dict(), "to_learner": self.to_learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        super().load_state_dict(state)
        self._resumed = self.runner.load_state_dict(state["runner"])
        self.to_learner.load_state_dict(state["to_learner"])

    def close(self) -> None:
        """Close the envs."""
        self.arena.close()

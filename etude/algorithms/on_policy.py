# SPDX-License-Identifier: Apache-2.0
"""OnPolicyAlgorithm: collect, learn from exactly that, forget."""

from typing import Any, TypeVar

from gymnasium import Env
from gymnasium.vector import VectorEnv

from etude.algorithms.base import Algorithm, together
from etude.algorithms.config import OnPolicyConfig
from etude.algorithms.playing import by_student, copied, make_runner, workers_of
from etude.algorithms.students import Spaces, modules_given, spaces_in
from etude.envs import Arena, EnvLike, env_name, make_arena
from etude.errors import CheckpointError, SettingsError
from etude.experience import Experience
from etude.learners import Learner, Update
from etude.runners import Lengths, Runner

C = TypeVar("C", bound=OnPolicyConfig)


class OnPolicyAlgorithm(Algorithm[C]):
    """Learns from the steps that its own module has just made. Define `loss` and `learner_connectors`."""

    _arena: Arena | None = None
    _runner: Runner | None = None
    _saved_runner: dict[str, Any] | None = None
    """Where a loaded run stood, until its envs are made."""

    def module_spaces(self) -> dict[str, Spaces]:
        """The spaces of the config's env, which is made here unless a checkpoint has them."""
        return self._spaces_there() if self._saved_spaces is None else self._saved_spaces

    def setup(self) -> None:
        """Make the runner, unless this is loaded from a checkpoint, perhaps only to play."""
        if self._saved_spaces is None:
            self.prepare()

    def prepare(self) -> None:
        """Make the envs and what acts in them, if they are not there yet; a loaded run goes on where it stood."""
        if self._runner is not None:
            return
        try:
            if self._arena is None:
                self._fit_to(self._spaces_there())
            assert self._arena is not None
            lengths = Lengths(self.config.min_trajectory_length, self.config.max_trajectory_length)
            self._runner = make_runner(self.config, self._arena, self.students, self._seed, self.callbacks, lengths)
            self._go_on()
        except BaseException:
            self.close()
            self._arena = self._runner = None
            raise

    @property
    def runner(self) -> Runner:
        """What collects experience; made when it is first asked for."""
        self.prepare()
        assert self._runner is not None
        return self._runner

    def _spaces_there(self) -> dict[str, Spaces]:
        if self.config.env is None:
            raise SettingsError(f"{type(self).__name__} needs an env to act in: set `env`, such as env='CartPole-v1'.")
        self._arena = make_arena(self.config.env, self.config.num_envs, workers_of(self.config))
        try:
            return spaces_in(self._arena, list(modules_given(self.config)), self.config.module_of)
        except BaseException:
            self.close()
            raise

    def _fit_to(self, spaces: dict[str, Spaces]) -> None:
        """Let the connectors of a loaded run fit an env with other spaces, if that was given."""
        assert self.config.env is not None
        for name, student in self.students.items():
            if spaces[name] != self.spaces[name]:
                self.students[name] = copied(student, spaces[name], env_name(self.config.env))
        self.spaces = spaces

    def _go_on(self) -> None:
        """Let the runner go on from where a loaded run stood."""
        if self._runner is None or self._saved_runner is None:
            return
        try:
            self._resumed = self._runner.load_state_dict(self._saved_runner)
        except KeyError as error:
            raise CheckpointError(
                f"the checkpoint holds no {error} of the running episodes: it was saved by another version of Etude."
            ) from error
        self._saved_runner = None

    @property
    def window(self) -> int:
        """How many episodes the returns in results are over."""
        return self.config.window

    def training_step(self) -> Update:
        """Collect, prepare, update: one iteration."""
        with self.timed("sample"):
            parts = self.runner.collect_each(num_steps=self.config.num_steps, whole_episodes=self.config.whole_episodes)
        self.env_steps, self.agent_steps = self.runner.env_steps, self.runner.agent_steps
        self.take_finished(self.runner.take_finished())
        self.figures.add_turns(self.runner.times, self.runner.turns)
        if not any(exp.num_steps for exp in parts.values()) and self.config.min_trajectory_length > 1:
            raise SettingsError(
                f"every segment of this iteration was shorter than `min_trajectory_length` "
                f"({self.config.min_trajectory_length}), so that there is nothing to learn from: lower it, or raise "
                "`num_steps`, or set `whole_episodes`."
            )
        counts = self.runner.stats()
        self.faulty_episodes += int(counts.pop("faulty_episodes", 0))
        updates = {}
        for name, exp in by_student(parts).items():
            student = self.students[name]
            with self.timed("connect"):
                seen = student.connectors.offline(exp)
                batch = student.to_learner.offline(seen, student.module)
            with self.timed("update"):
                updates[name] = self.update(student.learner, batch)
            student.connectors.update(exp)
            student.to_learner.update(seen)
        several = len(self.students) > 1
        return Update(
            together({name: update.losses for name, update in updates.items()}, several=several),
            together({name: update.metrics for name, update in updates.items()}, several=several) | counts,
        )

    def update(self, learner: Learner, exp: Experience) -> Update:
        """Let one module learn from prepared experience: ``epochs`` times over, in shuffled minibatches."""
        config = self.config
        return learner.update(
            exp, minibatch_size=config.minibatch_size, epochs=config.epochs, max_seq_len=config.max_seq_len
        )

    def in_use(self, env: EnvLike) -> bool:
        """Whether ``env`` is an object that training acts in."""
        return isinstance(env, Env | VectorEnv)

    def state_dict(self) -> dict[str, Any]:
        """Also the runner's state: running episodes, random streams, connectors."""
        saved = self._saved_runner if self._saved_runner is not None else self.runner.state_dict()
        return {**super().state_dict(), "runner": saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. The envs are not made for it: that is for `prepare`, or the next iteration."""
        super().load_state_dict(state)
        for student, track in zip(self.students.values(), state["runner"]["tracks"], strict=True):
            student.connectors.load_state_dict(track["connectors"])
        self._saved_runner = state["runner"]
        self._go_on()

    def close(self) -> None:
        """Close the envs."""
        if self._arena is not None:
            self._arena.close()

# SPDX-License-Identifier: Apache-2.0
"""OffPolicyAlgorithm: the base class of algorithms that learn from a replay buffer."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from etude import columns as col
from etude.algorithms.acting import ActingAlgorithm
from etude.algorithms.checkpoint import Component
from etude.algorithms.config import SEQUENCES, ActingConfig, MetricsConfig, ReplayConfig, SequenceConfig
from etude.algorithms.policies import spawned
from etude.algorithms.results import joined, together
from etude.columns import Columns
from etude.connectors import Pipeline
from etude.connectors.connector import overrides
from etude.connectors.rewards import RewardMap, with_summed_rewards
from etude.errors import CheckpointError, DataError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import host
from etude.experience.experience import without_lookback
from etude.experience.priorities import Priorities
from etude.experience.replay import Replay
from etude.learners import Update, mean_of, value_at
from etude.learners.loss import Figures
from etude.settings import FloatAbove0, IntFrom1, check_rules, settings
from etude.spaces import Spaces


@settings
class OffPolicyConfig(ActingConfig):
    """Settings of algorithms that learn from a replay buffer."""

    everyday: ClassVar[tuple[str, ...]] = ("batch_size", "updates_per_step")

    unused: ClassVar[Mapping[str, str]] = {
        "trajectories.whole_episodes": "steps are learned from as soon as the replay has them"
    }

    needs: ClassVar[Mapping[str, str]] = SEQUENCES | dict.fromkeys(
        ("replay.priority_alpha", "replay.priority_beta"), "replay.prioritized"
    )

    num_envs: int = 1
    """Copies of the env that step together, at least 1."""

    num_steps: int = 16
    """Steps collected at a time, over all envs, at least 1, before the gradient steps that `updates_per_step` asks for.
    Small numbers cost time: starting and ending a collection takes about as long as ten steps."""

    updates_per_step: FloatAbove0 = 1.0
    """Gradient steps of each module per env step (the update-to-data ratio), above 0. Fractions of a gradient step are
    carried over. Default: Haarnoja et al. 2018."""

    iteration_steps: IntFrom1 = 1000
    """Env steps between two results, at least 1."""

    batch_size: IntFrom1 = 256
    """Steps in each batch, at least 1; for recurrent modules about this many, in whole sequences."""

    sequences: SequenceConfig = SequenceConfig(max_len=16, burn_in=8)
    """How recurrent modules are trained; sequences are then sampled from the replay buffer."""

    replay: ReplayConfig = ReplayConfig()
    """Size of the replay buffer, and how steps are sampled from it."""

    n_step: IntFrom1 = 1
    """Rewards summed before a target bootstraps, at least 1."""

    metrics: MetricsConfig = MetricsConfig(window=20)
    """How results average the figures of episodes. Default of `window`: small, as runs have few episodes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        capacity, lengths = self.replay.capacity, self.trajectories
        check_rules(
            self.replay, "replay", capacity=(capacity >= self.batch_size, f"at least `batch_size` ({self.batch_size})")
        )
        check_rules(
            lengths,
            "trajectories",
            min_length=(lengths.min_length == 1, "1, as steps reach the replay buffer a few at a time"),
            max_length=(
                lengths.max_length is None or lengths.at_max_length == "reset",
                "none, or `at_max_length` be 'reset': a replay buffer joins segments that were cut",
            ),
        )


C = TypeVar("C", bound=OffPolicyConfig)


class OffPolicyAlgorithm(ActingAlgorithm[C]):
    """Base class of algorithms that learn from steps sampled from a replay buffer, whichever policy collected them.

    Define `loss`.

    An iteration of `iteration_steps` env steps consists of rounds: `num_steps` steps, then the gradient steps due for
    them. The loss gets the columns of `Replay.sample`: ``reward``, the discounted sum over ``n_step`` steps;
    ``next_obs``, observed after these; ``discount``, the factor of the value of ``next_obs``, 0 if the episode
    terminated. With `prioritized`, there is a ``weight`` for each row. The loss must multiply the row's error by it,
    and keep its ``td_error``: ``Loss(...).keep(td_error=...)``.

    A recurrent module learns from sequences. A loss that uses ``batch.forward(module)`` and
    ``batch.forward_next(module)`` works with and without recurrence.

    Steps are stored as the connectors before the first one that learns, such as `NormalizeObs`, return them. That
    connector and those after it are applied to each sampled batch. The learner's connectors are applied before storing,
    to the pieces of episodes in one collection of `num_steps` steps, not to whole episodes.
    """

    Config = OffPolicyConfig
    needs_value = False
    collects_in_background = True

    stored: ClassVar[tuple[str, ...]] = (col.OBS, col.ACTION, col.REWARD)
    """The columns that the replay buffer stores, in addition to ``state_in`` and those that the learner's connectors
    add."""

    def setup(self) -> None:
        """Make the replay buffers, then what `ActingAlgorithm.setup` makes."""
        self.replays: dict[str, Replay] = {}
        """The replay buffer of each module, by module id."""
        self._owed: dict[str, float] = {}
        """Fraction of a gradient step carried over, by module id."""
        self._learning: set[str] = set()
        """The modules that are to learn from their newest experience."""
        self._fit_to_policies()
        super().setup()

    def _fit_to_policies(self) -> None:
        """Make a replay buffer for each module that has none, and split the modules' connectors."""
        held = self.replays
        self.replays = {}
        for name in self.policies:
            with self.settings_of(name):
                self.replays[name] = held[name] if name in held else self._new_replay(name)
        for learner in self.learner.modules.values():
            if users := [connector.name for connector in learner.connectors.connectors if connector.uses_module]:
                raise SettingsError(
                    f"learner_connectors() of {type(self).__name__} has {users[0]}, which uses the module. Here they "
                    "run once, when steps are stored, with weights and observations that are not those of later "
                    "updates: compute it in `loss`."
                )
        self._split = {name: split(policy.connectors) for name, policy in self.policies.items()}
        trained = self.learner.modules_to_train
        for name, (_, after_sampling) in self._split.items():
            if trained is not None and (callable(trained) or name not in trained):
                continue  # it may never learn; if it does, `as_seen` raises this
            with self.settings_of(name):
                n_step, maps = self.config.n_step, any(isinstance(one, RewardMap) for one in after_sampling.connectors)
                if maps and n_step > 1 and not self.policies[name].module.recurrent:
                    raise _changes_sums(after_sampling, n_step)
        self._follow_schedules(self.env_steps)

    def _new_replay(self, name: str) -> Replay:
        config, module = self.config, self.policies[name].module
        if module.recurrent and config.replay.prioritized:
            raise SettingsError(
                f"`replay.prioritized` is set, but {type(module.net).__name__} is recurrent: it learns from "
                "sequences, which are drawn uniformly. Leave one of them out."
            )
        return Replay(
            config.replay.capacity,
            n_step=config.n_step,
            gamma=config.gamma,
            priorities=Priorities(alpha=config.replay.priority_alpha) if config.replay.prioritized else None,
            seed=int(spawned(self._draws, name).generate_state(1, np.uint64)[0] >> 1),
        )

    def _set_policies(self) -> None:
        super()._set_policies()
        self._fit_to_policies()

    def _fit_to(self, spaces: dict[str, Spaces]) -> None:
        super()._fit_to(spaces)
        self._fit_to_policies()

    @property
    def replay(self) -> Replay:
        """The replay buffer of the only module."""
        return self.replays[self.learner.only.name]

    def _follow_schedules(self, env_steps: int) -> None:
        """Set everything that follows a schedule to its value after ``env_steps``."""
        for name, replay in self.replays.items():
            if replay.priorities is not None:
                with self.settings_of(name):
                    replay.beta = min(1.0, value_at(self.config.replay.priority_beta, env_steps))
        self.before_collect(env_steps)

    # -- an iteration -------------------------------------------------------------------------------------------

    def training_step(self) -> Update:
        """Run one iteration: rounds of collecting and learning."""
        end = self.env_steps + self.config.iteration_steps
        done: dict[str, list[tuple[Update, int]]] = {}
        counts: Counter[str] = Counter()
        self.before_update(self.env_steps)
        while self.env_steps < end:
            begin = self.env_steps
            self.learner.set_env_steps(begin)
            self._follow_schedules(begin)
            self.store(self.collect(num_steps=min(self.config.num_steps, end - begin)))
            counts.update(self.counts)
            due = self._due(begin)
            if any(due.values()):
                with self.timed("update"):
                    for name, update in self.make_updates(due).items():
                        done.setdefault(name, []).append((update, due[name]))
        updates = {name: mean_of(*zip(*rounds, strict=True)) for name, rounds in done.items()}
        several = len(self.policies) > 1
        sizes = {name: {"replay_steps": float(replay.num_steps)} for name, replay in self.replays.items()}
        return joined(updates, together(sizes, several=several), counts, self.engine.stats(), several=several)

    def _due(self, begin: int) -> dict[str, int]:
        """Gradient steps of each module that are due for the env steps since ``begin``."""
        due = {}
        for name in self.policies:
            with self.settings_of(name):
                config = self.config
                learned_from = max(0, self.env_steps - max(begin, config.replay.learning_starts))
                owed = self._owed.get(name, 0.0) + config.updates_per_step * learned_from
                due[name], self._owed[name] = int(owed), owed % 1.0
        return due

    def store(self, parts: dict[str, Experience]) -> None:
        """Add raw experience to the modules' replay buffers, and update the connectors of those that are trained on
        it."""
        learning = self.learner.chosen(parts)
        self._learning = self._learning - parts.keys() | learning.keys()
        with self.timed("store"):
            for name, exp in parts.items():
                learner = self.learner.modules[name]
                connected = self._split[name].before_storing.offline(exp)
                added = learner.connectors.offline(connected, learner.module)
                if added.num_steps > connected.num_steps:
                    _refuse_copies(added)
                with self.settings_of(name):
                    self.replays[name].add(self._kept(name, exp, added))
                if name in learning:
                    self.policies[name].connectors.update(exp)
                    learner.connectors.update(connected)

    def _kept(self, name: str, exp: Experience, added: Experience) -> Experience:
        roots = set(self.stored)
        if self._stores_states(name):
            roots.add(col.STATE_IN)
        kept = {
            name: column
            for name, column in added.steps.items()
            if name not in exp.steps or name.partition(col.SEPARATOR)[0] in roots
        }
        return Experience(kept, added.offsets, added.segments, added.final_obs)

    def make_updates(self, num_updates: int | Mapping[str, int]) -> dict[str, Update]:
        """Make ``num_updates`` gradient steps of each module that is trained and whose replay buffer has a full
        batch."""
        if isinstance(num_updates, int):
            num_updates = dict.fromkeys(self.policies, num_updates)
        if callable(self.learner.modules_to_train):  # it was called when there was new experience
            learning = {name: replay for name, replay in self.replays.items() if name in self._learning}
        else:
            learning = self.learner.chosen(self.replays)
        updates = {}
        for name, replay in learning.items():
            with self.settings_of(name):
                if num_updates[name] and replay.can_sample(self.config.batch_size):
                    num = num_updates[name] * self.config.optimizer.accumulate
                    updates[name] = self._update_from_replay(name, num)
        return updates

    def _update_from_replay(self, name: str, num_batches: int) -> Update:
        replay = self.replays[name]
        waiting: deque[Columns] = deque()  # batches as stored, until they were learned from

        def batches() -> Iterator[Columns | Experience]:
            for _ in range(num_batches):
                stored, seen = self.drawn(name)
                waiting.append(stored)
                yield seen

        def set_priorities(kept: Figures) -> None:
            batch = waiting.popleft()
            if replay.priorities is None:
                return
            if "td_error" not in kept:
                raise SettingsError(
                    "`replay.prioritized` is set, but the loss reports no errors: return "
                    "Loss(...).keep(td_error=...), a number for each row of the batch."
                )
            errors = kept["td_error"].abs().float().cpu().numpy()
            if np.isfinite(errors).all():  # else the gradient step was skipped
                replay.update_priorities(batch["index"], errors)

        return self.engine.update_from(name, batches(), set_priorities)

    def drawn(self, name: str) -> tuple[Columns, Columns | Experience]:
        """Sample a batch from a module's replay buffer.

        Returns the batch as stored, and as the module sees it. For a recurrent module, these are {} and Experience with
        sequences.
        """
        config, behind, replay = self.config, self._split[name].after_sampling, self.replays[name]
        if self.policies[name].module.recurrent:
            num = max(1, config.batch_size // config.sequences.max_len)
            exp = behind.offline(replay.sample_sequences(num, config.sequences.max_len, config.sequences.burn_in))
            return {}, with_n_step_returns(exp, config.n_step, config.gamma)
        batch = replay.sample(config.batch_size)
        return batch, as_seen(behind, batch, replay, config.n_step) if behind.connectors else batch

    # -- state --------------------------------------------------------------------------------------------------

    def components(self) -> dict[str, Component]:
        """Also ``replay/NAME``, the contents of a module's replay buffer; ``owed``, fractions of gradient steps carried
        over; and ``learning``, the modules that learn from their newest experience."""
        replays = {
            f"replay/{name}": Component(replay.state_dict, partial(self._load_replay, name))
            for name, replay in self.replays.items()
        }
        owed = Component(lambda: dict(self._owed), self._set_owed)
        learning = Component(lambda: sorted(self._learning), self._set_learning)
        return {**super().components(), **replays, "owed": owed, "learning": learning}

    def _load_replay(self, name: str, state: Mapping[str, Any]) -> None:
        columns = state["storage"]["columns"]
        with self.settings_of(name):
            is_stored = any(col.is_under(column, col.STATE_IN) for column in columns)
            if columns and self.policies[name].module.recurrent and is_stored != self._stores_states(name):
                raise CheckpointError(
                    f"`sequences.start` is {self.config.sequences.start!r}, but the steps in the saved replay "
                    f"{'have' if is_stored else 'lack'} the module's states: leave it as it was."
                )
        self.replays[name].load_state_dict(state)

    def _stores_states(self, name: str) -> bool:
        return self.policies[name].module.recurrent and self.config.sequences.start == "stored"

    def _set_learning(self, names: Iterable[str]) -> None:
        self._learning = set(names)

    def _set_owed(self, owed: Mapping[str, float]) -> None:
        self._owed = {name: float(left) for name, left in owed.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `get_state` returned."""
        super().set_state(state)
        self._follow_schedules(self.env_steps)


def _refuse_copies(exp: Experience) -> None:
    """Raise a DataError if a step of an episode occurs twice with different values, as a replay buffer would mix up the
    steps that follow them."""
    exp = without_lookback(exp)
    of, ids = exp.segment_of_step(), exp.segments.episode_id
    keys = [exp.t(), *(names.codes[of] for names in (exp.segments.module_id, exp.segments.agent_id, ids))]
    order = np.lexsort(keys)
    again = np.flatnonzero(np.all([key[order[1:]] == key[order[:-1]] for key in keys], axis=0))
    one, other = order[again], order[again + 1]
    pairs = ((column[one], column[other]) for column in map(host, exp.steps.values()))
    if any(((a != b) & ((a == a) | (b == b))).any() for a, b in pairs):  # NaN equals NaN here
        raise DataError(
            f"the learner's connectors return steps of episode {ids[of[one[0]]]!r} twice, with other values. Give "
            "changed copies another episode_id, so that a replay does not join their steps to the others."
        )


class SplitConnectors(NamedTuple):
    """A policy's connectors, split before the first one that learns from experience."""

    before_storing: Pipeline
    """Those before it, applied to experience before a replay stores it."""
    after_sampling: Pipeline
    """That one and those after it, applied to batches from the replay."""


def split(connectors: Pipeline) -> SplitConnectors:
    """Split connectors into those before the first that learns from experience, and that one with those after it.

    Raises:
        SettingsError: one of the latter needs earlier steps, which a single step from a replay buffer does not have.
    """
    every = connectors.connectors
    first = next((i for i, connector in enumerate(every) if overrides(connector, "update")), len(every))
    for connector in every[first:]:
        if connector.context:
            raise SettingsError(
                f"`connectors`: {connector.name} comes after {every[first].name}, which changes while it learns. Both "
                f"are therefore applied to single steps from the replay, but {connector.name} needs the steps before. "
                f"Put {connector.name} before {every[first].name}."
            )
    return SplitConnectors(Pipeline(every[:first]), Pipeline(every[first:]))


def with_n_step_returns(exp: Experience, n_step: int, gamma: float) -> Experience:
    """Add to sequences from a replay buffer what a loss needs about the ``n_step`` steps from each step on.

    ``reward``, ``terminated`` and ``discount`` are as in `Replay.sample`. ``steps_ahead``, int64, replaces
    ``next_obs``: the number of steps to the next observation, which is at most the one after the sequence, since a
    recurrent module's output for it depends on the steps before.
    """
    summed, sums = with_summed_rewards(exp, n_step, gamma, "the replay")
    return summed.with_steps(**{col.STEPS_AHEAD: sums.steps})


def as_seen(connectors: Pipeline, batch: Columns, replay: Replay, n_step: int) -> Columns:
    """A batch from a replay buffer as the module sees it: each row is treated as a segment of one step.

    Raises:
        SettingsError: a connector changes rewards that are already n-step sums.
    """
    size = len(batch[col.REWARD])
    following = col.renamed(batch, col.NEXT_OBS, col.OBS)
    steps = {name: column for name, column in batch.items() if not col.is_under(name, col.NEXT_OBS)}
    segments = replay.places(batch["index"]).replace(terminated=batch[col.TERMINATED])
    raw = Experience(steps, np.arange(size + 1), segments, following)
    exp = connectors.offline(raw)
    if n_step > 1 and exp.steps[col.REWARD] is not batch[col.REWARD]:
        raise _changes_sums(connectors, n_step)
    ends = exp
    if n_step > 1 and not all(type(connector).__module__.startswith("etude.") for connector in connectors.connectors):
        # your own connectors may use `t`, and the observation after n steps is not that of the next step
        later = segments.replace(t_start=segments.t_start + replay.steps_ahead(batch["index"]) - 1)
        ends = connectors.offline(Experience(steps, raw.offsets, later, following))
    return {**exp.numpy().steps, **col.renamed(ends.numpy().final_obs, col.OBS, col.NEXT_OBS)}


def _changes_sums(connectors: Pipeline, n_step: int) -> SettingsError:
    names = [connector.name for connector in connectors.connectors]
    return SettingsError(
        f"`connectors`: one of {names} changes rewards. {names[0]} changes while it learns, so all of them are "
        f"applied to sums of {n_step} rewards: set `n_step` to 1, or put before it one that changes rewards but "
        "does not learn."
    )

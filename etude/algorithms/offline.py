# SPDX-License-Identifier: Apache-2.0
"""OfflineAlgorithm: the base class of algorithms that learn from a recording."""

import copy
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from etude import columns as col
from etude.algorithms.algorithm import Algorithm
from etude.algorithms.checkpoint import Component
from etude.algorithms.config import OfflineConfig
from etude.algorithms.engine import OfflineUpdate
from etude.algorithms.play import BackgroundEvaluation, Played, dropped_by, played_once, runner_for
from etude.algorithms.policies import modules_given, spaces_in
from etude.algorithms.results import Stop, joined
from etude.connectors import Pipeline, overrides
from etude.envs import make_arena
from etude.errors import DataError, SettingsError, SpaceError
from etude.files import shown
from etude.learners import ScheduleBy, Update
from etude.policies import Policy
from etude.runners import Runner
from etude.spaces import Space, Spaces, space_from_json, space_to_json, without

if TYPE_CHECKING:
    from etude.algorithms.feed import Feed
    from etude.recordings import Recording

_log = logging.getLogger("etude.algorithms")

C = TypeVar("C", bound=OfflineConfig)


class OfflineAlgorithm(Algorithm[C]):
    """Base class of algorithms that learn from a recording, in batches that cover every step once per epoch.

    Define `loss`, and the `columns` that it needs. If one of the `learner_connectors` uses the module, as `GAE` does,
    batches consist of segments. That connector and those after it are applied to each batch just before its gradient
    step, so that what they add is never stale.
    """

    Config = OfflineConfig
    schedules_by: ClassVar[ScheduleBy] = "updates"

    _recorded_action_space: Space | None = None
    """The action space of the recording; None if it has not been opened and no checkpoint states it."""

    columns: ClassVar[tuple[str, ...]] = (col.OBS, col.ACTION)
    """The columns that the loss needs; may include ``next_obs``, ``terminated`` and ``truncated``."""

    def module_spaces(self) -> dict[str, Spaces]:
        """The spaces of the recording, or of a checkpoint; the env is not needed if there is a recording."""
        if self._saved_spaces is not None:
            return self._saved_spaces
        names = list(modules_given(self.config))
        if self.config.data is None:
            return self._spaces_in_env
        self._recorded_action_space = self.recording.action_space
        return {name: (self.recording.obs_space, self._action_space_outside(name)) for name in names}

    def _action_space_outside(self, name: str) -> Space:
        """The action space on the env's side of the connectors: that of the env, or of the env that the recording
        states, if the connectors map it to the recorded space; otherwise the recorded space."""
        recorded, outside = self.recording.action_space, self._action_space_of_recorded_env(name)
        with self.settings_of(name):
            pipeline = Pipeline(self.config.connectors).copy()
        if self.config.env is not None and any(overrides(connector, "act") for connector in pipeline.connectors):
            outside = self._spaces_in_env[name][1]
        if outside is None or outside == recorded:
            return recorded
        if pipeline.spaces(self.recording.obs_space, outside)[1] == recorded:
            return outside
        self._warn_of_units(f"the env's {outside}")
        return recorded

    def _warn_of_units(self, whose: str) -> None:
        _log.warning(
            "%s: holds actions as they were chosen, in %s, before connectors mapped them to %s. What learns from them "
            "acts as they were chosen, too: add a connector such as `rescale_action`. If they are in the env's units, "
            "open the recording with the env's `action_space` instead.",
            *(shown(self.config.data), self.recording.action_space, whose),
        )

    def _action_space_of_recorded_env(self, name: str) -> Space | None:
        from etude.recordings.action_units import env_action_space

        meta = self.recording.meta
        found = env_action_space(meta)
        if isinstance(found, Mapping) and "type" not in found:  # by module id
            found = found.get(name)
        if found is None and self.config.env is None and "rescale_action" in str(meta.get("connectors")):
            self._warn_of_units("those of the env, which the recording does not state: set `env`")  # an older version
        try:
            return None if found is None else space_from_json(found)
        except SpaceError:  # another tool's key of this name
            return None

    @cached_property
    def _spaces_in_env(self) -> dict[str, Spaces]:
        env = self.config.env
        assert env is not None  # the config has checked it
        arena = make_arena(env, 1, exact=False, drop=dropped_by(self.config))
        try:
            return spaces_in(arena, list(modules_given(self.config)), self.config.agents.module_of)
        finally:
            if isinstance(env, type) or not hasattr(env, "reset"):  # it was made here; a user's own env stays open
                arena.close()

    def _spaces_of_env(self, columns: Sequence[str] = ()) -> tuple[Space | None, Space | None]:
        """The env's spaces, for data that does not state any; None without an env, or if its agents have different
        ones.

        Parts of observations that `drop` removes, and that are not among the data's ``columns``, are left out.
        """
        found = [] if self.config.env is None else list(self._spaces_in_env.values())
        if not found or any(own != found[0] for own in found):
            return None, None
        obs_space, action_space = found[0]
        lost = [path for path in dropped_by(self.config) if not col.under(columns, f"{col.OBS}{col.SEPARATOR}{path}")]
        return without(obs_space, lost) if columns and lost else obs_space, action_space

    @cached_property
    def recording(self) -> "Recording":
        """The recording, opened on first use.

        Raises:
            DataError: it is missing or broken, or its spaces differ from those that a saved run learned from.
        """
        from etude.recordings import Recording  # needs pyarrow, which acting does not
        from etude.recordings.where import RowFilter

        if self.config.filter is not None:
            RowFilter(self.config.filter)  # raises for a wrong filter before anything is read
        if self.config.data is None:
            raise SettingsError("there is no recording to learn from: set `data`, or give batches to `learn_from`.")
        data, on_bad = self.config.data, self.config.reading.on_bad
        saved = None if self._saved_spaces is None else next(iter(self._saved_spaces.values()))
        if saved is not None and self._recorded_action_space is not None:  # which may be in other units
            saved = saved[0], self._recorded_action_space
        drops = saved is None and self.config.env is not None and dropped_by(self.config)
        held = Recording.open(data, on_bad=on_bad) if drops and not isinstance(data, Recording) else data
        columns = held.columns if isinstance(held, Recording) else ()
        # the saved spaces also keep the numbers of named choices
        given = cache(partial(self._spaces_of_env, columns) if saved is None else lambda: saved)
        if isinstance(held, Recording):
            held.check_on_bad(on_bad)
            recording = held.with_spaces(given, of_env=saved is None)
        else:
            recording = Recording.open_with(held, on_bad, given, of_env=saved is None)
        recording.warn_of_mapped_actions()
        if saved not in (None, (recording.obs_space, recording.action_space)):
            raise DataError(
                f"{shown(self.config.data)} has the spaces {recording.obs_space} and {recording.action_space}, but "
                f"this run learned from {saved}: go on with a recording of the same env."
            )
        return recording

    def setup(self) -> None:
        """Open the recording and the envs of evaluations, unless the algorithm is being loaded: it may only be needed
        to act."""
        self._feeds: dict[str, Feed] | None = None
        self._given: dict[str, Feed] | None = None
        self.epoch_sizes: dict[str, int] = {}
        """Steps in an epoch of each module, if an earlier run has counted them."""
        self.has_seen_data = False
        """Whether the connectors have learned from the recording."""
        self._evaluator: Runner | None = None
        self._beside: BackgroundEvaluation | None = None
        if self._saved_spaces is None:
            self.prepare()

    def prepare(self) -> None:
        """Open the recording and the envs of evaluations, if this process uses them, so that their errors come before
        training."""
        if self.config.engine != "local":
            return
        if self.config.data is not None and self._given is None:
            self.opened_feeds()
        if self._evaluates and self._evaluator is None and not self.config.evaluation.beside:
            self._evaluator = self._new_evaluator(self.policies, self.config.evaluation.episodes)

    @property
    def _evaluates(self) -> bool:
        return self.config.env is not None and self.config.evaluation.interval > 0

    def check_stop(self, stop: Stop) -> None:
        """Also check for goals that offline runs never measure."""
        if stop.return_mean is not None and not self._evaluates:
            raise SettingsError(
                "`stop.return_mean` is set, but returns are measured only where there is an `env` and "
                "`evaluation.interval` is at least 1."
            )
        if stop.env_steps is not None:
            raise SettingsError("`stop.env_steps` is set, but no steps are sampled here: use `updates` or `seconds`.")
        super().check_stop(stop)

    # -- learning -----------------------------------------------------------------------------------------------

    def learn_from(self, batches: Iterable[Any] | Mapping[str, Iterable[Any]] | None) -> None:
        """Learn from these batches instead of the recording; None: from the recording again.

        Args:
            batches: Columns ``[B, ...]`` by name, as the module sees them, or Experience for a recurrent module; by
                module id if there are several modules. They are not part of a checkpoint.

        Raises:
            SettingsError: the module ids are others than the algorithm's.
        """
        from etude.algorithms.feed import Feed

        if batches is None:
            self._given = None
            return
        given = batches if isinstance(batches, Mapping) else {next(iter(self.policies)): batches}
        if given.keys() != self.policies.keys():
            raise SettingsError(f"there are batches for {sorted(given)}, but the modules are {sorted(self.policies)}.")
        self._given = {name: Feed(own, self.policies[name].module) for name, own in given.items()}

    def training_step(self) -> Update:
        """Run one iteration: ``updates_per_iteration`` gradient steps of each module."""
        self.before_update(self.env_steps)
        done = self.engine.train() if self._given is None else self.train_on(self._given)
        self.data_flow, self.bottleneck = done.data, done.bottleneck
        wait = done.data["wait"]
        self.times |= {"wait": wait, "update": done.seconds - wait}
        return joined(done.updates, self._left_out(), self.engine.stats(), several=len(self.policies) > 1)

    def train_on(self, feeds: "Mapping[str, Feed]") -> OfflineUpdate:
        """Make an iteration's gradient steps of each module, with batches of its feed."""
        from etude.algorithms.feed import report

        begin, updates = time.perf_counter(), {}
        for name in self.learner.chosen(dict.fromkeys(feeds)):
            with self.settings_of(name):
                feed = feeds[name]
                batches = feed.take(self.config.updates_per_iteration * self.config.optimizer.accumulate)
                updates[name] = self.engine.update_from(name, batches)
        seconds = time.perf_counter() - begin
        return OfflineUpdate(updates, *report(feeds, seconds, self.config.reading.num_workers), seconds)

    def mean_over_learners(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of ``values``, of any shape, over the batches of all learners: a scalar tensor without gradient.

        All learners must call it, as each waits for the others. Use it in losses that are not plain means over rows.
        """
        values, team = values.detach(), next(iter(self.learner.modules.values())).team
        if team is None:
            return values.mean()
        sums = torch.stack((values.sum(dtype=torch.float64), values.new_tensor(values.numel(), dtype=torch.float64)))
        team.sum_(sums)
        return (sums[0] / sums[1]).to(values.dtype)

    def _left_out(self) -> dict[str, float]:
        """Numbers of steps and of unreadable parts that could not be learned from, over the lifetime, by kind."""
        if self._given is not None:
            return {}
        early = sum(feed.pipeline.left_out for feed in (self._feeds or {}).values() if feed.pipeline)
        found = {"early_or_dropped": early, "unread_parts": self.recording.unread_parts} | self.recording.left_out
        return {f"left_out/{kind}": float(count) for kind, count in found.items() if count}

    def evaluated(self, num_episodes: int, seed: int) -> Played | None:
        """Play whole episodes in this process, without exploration.

        If `evaluation.beside` is set, they are played in a thread during training, and the previous evaluation is
        returned, or None if there is none.
        """
        if not self.config.evaluation.beside:
            runner, self._evaluator = self._evaluator or self._new_evaluator(self.policies, num_episodes), None
            try:
                for ours, plays in zip(self.policies.values(), runner.policies.values(), strict=True):
                    plays.connectors.load_state_dict(ours.connectors.state_dict())
                runner.restart_episodes(seed)
                played = played_once(runner, num_episodes, self.updates)
            except BaseException:
                runner.close()
                raise
            self._evaluator = runner
            return self._recorded(played)
        last, policies = self.evaluated_beside(), {}
        for name, own in self.policies.items():
            spaces = {"obs_space": own.obs_space, "action_space": own.action_space}
            policies[name] = Policy(copy.deepcopy(own.module), own.connectors, **spaces)
        runner = self._new_evaluator(policies, num_episodes)
        runner.restart_episodes(seed)
        self._beside = BackgroundEvaluation(runner, num_episodes, self.updates)
        return last

    def evaluated_beside(self) -> Played | None:
        """Wait for the evaluation that runs in parallel with training, and return it; None if there is none."""
        if self._beside is None:
            return None
        try:
            played = self._beside.result()
        except Exception:
            self._beside = None
            raise
        self._beside = None  # only now, so that Ctrl-C while waiting does not lose it
        return self._recorded(played)

    def _recorded(self, played: Played) -> Played:
        """Record the episodes of an evaluation, before anything else can fail."""
        # episodes have the same ids in all evaluations
        self.recorder.take(played.parts, tag=f"@{played.evaluation.updates}")
        return played

    def take_evaluation(self, played: Played) -> None:
        """Also add the episodes of an evaluation to the figures of results."""
        super().take_evaluation(played)
        if played.finished is not None:
            self.take_finished(played.finished)

    def _new_evaluator(self, policies: Mapping[str, Policy], num_episodes: int) -> Runner:
        assert self.config.env is not None
        return runner_for(self.config, self.config.env, num_episodes, policies, None, self.callbacks)

    def opened_feeds(self) -> "dict[str, Feed]":
        """The feed of each module, which reads the recording in this process; opened on first use."""
        from etude.algorithms.feed import Read, feed_of

        if self._feeds is None:
            with self.timed("open"):
                read: Read = {}
                self._feeds = {name: feed_of(self, name, read) for name in self.policies}
            self.has_seen_data = True
        return self._feeds

    # -- state --------------------------------------------------------------------------------------------------

    def components(self) -> dict[str, Component]:
        """Also ``data``: whether the connectors have learned from the recording, its action space, and the sizes of
        epochs."""
        return {**super().components(), "data": Component(self._data_state, self._set_data)}

    def _data_state(self) -> dict[str, Any]:
        found = {name: feed.pipeline.epoch_size for name, feed in (self._feeds or {}).items() if feed.pipeline}
        known = {name: size for name, size in found.items() if size is not None}
        recorded = self._recorded_action_space
        return {
            "was_seen": self.has_seen_data,
            "epochs": self.epoch_sizes | known,
            "action_space": None if recorded is None else space_to_json(recorded),
        }

    def _set_data(self, state: Mapping[str, Any]) -> None:
        self.has_seen_data, self.epoch_sizes = state["was_seen"], dict(state["epochs"])
        if self._recorded_action_space is None and (recorded := state.get("action_space")) is not None:
            self._recorded_action_space = space_from_json(recorded)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `get_state` returned."""
        restores = any(name.partition("/")[0] == "connectors" for name in state) and "data" not in state
        if restores and self.config.data is not None and not self.has_seen_data:
            # Let connectors learn from the recording now, so that this is not added to the restored state later.
            from etude.algorithms.feed import plan_of

            for name in self.policies:
                plan_of(self, name, {}, loads_here=False)
            self.has_seen_data = True
        super().set_state(state)
        self._close_feeds()  # they reopen at the restored position

    def _close_feeds(self) -> None:
        for feed in (self._feeds or {}).values():
            feed.close()
        self._feeds = None

    def close(self) -> None:
        """Close the feeds, an evaluation that is running, and the recorder."""
        if hasattr(self, "_feeds"):  # not if making the modules failed
            self._close_feeds()
            if self._beside is not None:
                self._beside.close()
            if self._evaluator is not None:
                self._evaluator.close()
                self._evaluator = None
        super().close()

# SPDX-License-Identifier: Apache-2.0
"""PolicyService: answers requests for actions with policies, and records the episodes that clients report."""

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from etude import columns as col
from etude.algorithms.loading import load_policy
from etude.algorithms.saving import saved_env_name
from etude.checkpoints import Where, load_meta, state_name
from etude.columns import Columns
from etude.errors import EnvError, EtudeError, ModuleError, SettingsError, SpaceError
from etude.policies import Chosen, Policy, PolicyState
from etude.policies.export import state_leaves
from etude.policies.policy import LARGEST_REWARD
from etude.serving.protocol import POLICY, SESSION, RequestError, Step, as_lists, check_fields, read_step, read_value
from etude.serving.recorder import EpisodeRecorder, ServedEpisode
from etude.serving.web import ServingMetrics, Session, Sessions, repeating
from etude.settings import FloatAbove0, FloatFrom0, IntFrom0, IntFrom1, Port, settings
from etude.spaces import Nester, space_to_json
from etude.urls import LOCAL_HOSTS

Policies: TypeAlias = Policy | Mapping[str, Policy] | Where
"""A policy; a mapping of names to policies; or the path or URL of a run, whose newest checkpoint is served."""

HOUSEKEEPING: Final = 1.0
"""Seconds between two calls of `PolicyService.housekeeping`."""

_log = logging.getLogger("etude.serving")


@settings
class ServingConfig:
    """Settings of a server of policies."""

    host: str = "127.0.0.1"
    """Address to listen at: `127.0.0.1` accepts requests from this machine only, `0.0.0.0` from any machine."""

    port: Port = 8080
    """Port to listen at; 0 is any free port."""

    record: str | None = None
    """Folder or URL of a recording. A session's episode is added to it when the client reports its end."""

    explore: bool = False
    """Sample actions from the policy instead of taking the most likely ones."""

    seed: int | None = None
    """Seed for sampling actions. None: a random one."""

    max_body: IntFrom1 = 16 * 2**20
    """Maximum size of a request in bytes, at least 1."""

    max_batch: IntFrom1 = 1024
    """Maximum number of observations in a request, and in one call of a policy, at least 1."""

    max_sessions: IntFrom0 = 1000
    """Maximum number of open sessions, at least 0."""

    session_seconds: FloatAbove0 = 600.0
    """Seconds after which an unused session is closed; its unfinished episode is dropped."""

    max_episode_steps: IntFrom1 = 100_000
    """Maximum length of a recorded episode in steps, at least 1. It is held in memory until its end."""

    flush_seconds: FloatFrom0 = 60.0
    """Maximum time between the end of a recorded episode and its being written to disk, in seconds, at least 0."""


@dataclasses.dataclass(eq=False)
class ServedSession(Session):
    """A session of one policy."""

    policy: str
    state: PolicyState
    episode: ServedEpisode


@dataclasses.dataclass
class _WaitingRows:
    """Observations that wait for a policy's actions."""

    obs: Columns
    rows: int
    state: PolicyState
    reward: float | None
    is_recorded: bool
    result: "asyncio.Future[Chosen]"


class PolicyService:
    """Answers requests with policies; see `etude.serving.web.Service` for the methods.

    All requests that wait when a policy is called are answered by that one call, if they fit into ``max_batch``.

    Args:
        policies: The policies to serve.
        config: The settings.

    Raises:
        CheckpointError: the run can't be loaded.
        DataError: the recording can't be written.
        SettingsError: there is no policy, or one is something else.
    """

    def __init__(self, policies: Policies, config: ServingConfig) -> None:
        self.config = config
        self.max_body, self.is_local = config.max_body, config.host in LOCAL_HOSTS
        self.metrics = ServingMetrics()
        self.run: Where | None = None
        self.saved_as = ""
        """Name of the served checkpoint's file; empty if ``policies`` is not a run."""
        self._refused = ""  # the file of a checkpoint that does not fit
        self._last_warning = ""
        """The last warning of `housekeeping`, so that it is not repeated."""
        self._meta: dict[str, Any] = {}
        if isinstance(policies, str | os.PathLike):
            self.run = policies
            self.saved_as, self._meta, self.policies = _loaded(policies)
        else:
            self.policies = _by_name(policies)
        if not self.policies:
            raise SettingsError("there is no policy to serve.")
        self._is_batchable = {name: _can_join(policy) for name, policy in self.policies.items()}
        self._rng = np.random.default_rng(config.seed)
        self._jobs: dict[str, list[_WaitingRows]] = {}
        self.sessions: Sessions[ServedSession] = Sessions(config.max_sessions, config.session_seconds, self._dropped)
        self.recorder: EpisodeRecorder | None = None
        if config.record is not None:
            self.recorder = EpisodeRecorder(
                config.record,
                self.policies,
                env=saved_env_name(self._meta.get("config", {})),
                explore=config.explore,
                flush_seconds=config.flush_seconds,
            )

    # -- requests -------------------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        policies = {
            name: {
                "obs_space": space_to_json(policy.obs_space),
                "action_space": space_to_json(policy.action_space),
                "needs_session": policy.remembers,
                "needs_reward": self._needs_reward(policy),
            }
            for name, policy in self.policies.items()
        }
        checkpoint = {name: self._meta.get(name) for name in ("time", "env_steps")} if self._meta else None
        return {"policies": policies, "explore": self.config.explore, "checkpoint": checkpoint}

    def gauges(self) -> dict[str, float]:
        found: dict[str, float] = {"etude_sessions": len(self.sessions)}
        for gauge, name in (("time_seconds", "time"), ("env_steps", "env_steps")):
            if isinstance(value := self._meta.get(name), int | float):
                found[f"etude_checkpoint_{gauge}"] = value
        return found

    def open(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        check_fields(fields, (POLICY,))
        name = self._name_of(fields)
        session = self.sessions.add(ServedSession(name, self.policies[name].initial_state(1), ServedEpisode()))
        return {SESSION: session.id, POLICY: name, "seconds": self.sessions.seconds}

    def close(self, session_id: str) -> dict[str, Any]:
        self.sessions.drop(self.sessions.find(session_id))
        return {SESSION: session_id}

    async def act(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        if fields.get(SESSION) is not None:
            return await self._act_in(self.sessions.find(fields[SESSION]), fields)
        check_fields(fields, (col.OBS, POLICY, SESSION))
        name = self._name_of(fields)
        policy = self.policies[name]
        if policy.remembers:
            raise RequestError(SESSION, f"is missing: the policy {name!r} remembers earlier steps; open a session.")
        if fields.get(col.OBS) is None:
            raise RequestError(col.OBS, "is missing.")
        obs, is_batch = read_value(policy.obs_space, fields[col.OBS], col.OBS, self.config.max_batch)
        choice = await self._choose(name, obs, {}, None, is_recorded=False)
        return {col.ACTION: _nested(policy, choice.action, is_batch=is_batch)}

    async def _act_in(self, session: ServedSession, fields: Mapping[str, Any]) -> dict[str, Any]:
        policy, episode = self.policies[session.policy], session.episode
        needs_reward = self.recorder is not None or self._needs_reward(policy)
        is_first = not episode.num_steps
        step = read_step(fields, policy.obs_space, is_first=is_first, needs_reward=needs_reward)
        session.is_busy = True
        try:
            if step.done:
                return await self._end(session, step)
            assert step.obs is not None
            if abs(step.reward or 0.0) > LARGEST_REWARD and self._needs_reward(policy):
                raise RequestError(col.REWARD, "is outside the range of float32, in which the policy reads it.")
            is_recorded = self.recorder is not None
            if is_recorded and episode.num_steps >= self.config.max_episode_steps:
                raise RequestError(
                    SESSION, f"has an episode of {episode.num_steps} steps, the maximum (`max_episode_steps`): end it."
                )
            choice = await self._choose(session.policy, step.obs, session.state, step.reward, is_recorded=is_recorded)
            session.state = choice.state
            episode.add(step, choice if is_recorded else None)
            return {col.ACTION: _nested(policy, choice.action, is_batch=False)}
        finally:
            session.is_busy = False
            self.sessions.touch(session)

    async def _end(self, session: ServedSession, step: Step) -> dict[str, Any]:
        policy, episode = self.policies[session.policy], session.episode
        if self.recorder is not None:
            await asyncio.wrap_future(self.recorder.write(episode, step, policy, session.policy))
        self.metrics.count("etude_episodes_total", how="ended" if self.recorder is None else "recorded")
        session.state, session.episode = policy.initial_state(1), ServedEpisode()
        return {col.ACTION: None, col.EPISODE_ID: episode.id}

    def _dropped(self, session: ServedSession) -> None:
        if session.episode.num_steps:
            self.metrics.count("etude_episodes_total", how="dropped")

    def _name_of(self, fields: Mapping[str, Any]) -> str:
        name = fields.get(POLICY)
        if name is None and len(self.policies) == 1:
            return next(iter(self.policies))
        if not isinstance(name, str) or name not in self.policies:
            found = "is missing" if name is None else f"is {str(name)[:50]!r}"
            raise RequestError(POLICY, f"{found}; there are {', '.join(self.policies)}.", 400 if name is None else 404)
        return name

    def _needs_reward(self, policy: Policy) -> bool:
        return bool(policy.readers(col.REWARD))

    # -- acting ---------------------------------------------------------------------------------------------------

    def _choose(
        self, name: str, obs: Columns, state: PolicyState, reward: float | None, *, is_recorded: bool
    ) -> "asyncio.Future[Chosen]":
        """Queue observations for a policy; `_act` sets the result."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Chosen] = loop.create_future()
        if not self._jobs:
            loop.call_soon(self._act)  # after the requests that have already been read, so that they join the batch
        rows = len(next(iter(obs.values())))
        self._jobs.setdefault(name, []).append(_WaitingRows(obs, rows, state, reward, is_recorded, result))
        return result

    def _act(self) -> None:
        """Call each policy with its queued observations, at most ``max_batch`` at a time."""
        waiting, self._jobs = self._jobs, {}
        for name, jobs in waiting.items():
            most = self.config.max_batch if self._is_batchable[name] else 1
            start, rows = 0, 0
            for i, job in enumerate(jobs):
                if i > start and rows + job.rows > most:
                    self._answer(name, jobs[start:i])
                    start, rows = i, 0
                rows += job.rows
            self._answer(name, jobs[start:])

    def _answer(self, name: str, jobs: Sequence[_WaitingRows]) -> None:
        policy = self.policies[name]
        try:
            found = self._chosen(policy, jobs)
        except Exception as error:  # noqa: BLE001  it is raised where the request is answered
            if len(jobs) > 1:  # one by one, so that only the request at fault fails
                for job in jobs:
                    self._answer(name, [job])
            elif not jobs[0].result.done():
                if isinstance(error, EnvError | SpaceError):  # such as a mask that forbids all actions
                    field = col.OBS_MASK if policy.module.mask is not None else col.OBS
                    error = RequestError(field, f"can't be acted on: {error}")
                jobs[0].result.set_exception(error)
            return
        for job, choice in zip(jobs, found, strict=True):
            if not job.result.done():  # it is cancelled when the server stops
                job.result.set_result(choice)

    def _chosen(self, policy: Policy, jobs: Sequence[_WaitingRows]) -> list[Chosen]:
        rows = sum(job.rows for job in jobs)
        self.metrics.observe("etude_batch_rows", rows)
        obs, state = jobs[0].obs, jobs[0].state
        if len(jobs) > 1:
            obs, state = _joined([job.obs for job in jobs]), _joined([job.state for job in jobs])
        all_chosen = policy.choose(
            obs,
            state,
            reward=np.array([job.reward or 0.0 for job in jobs]) if policy.remembers else None,
            explore=self.config.explore,
            rng=self._rng,
            with_logp=any(job.is_recorded for job in jobs),
        )
        for action_name, column in all_chosen.action.items():
            if column.dtype.kind == "f" and not np.isfinite(column).all():
                raise ModuleError(f"the policy gave an `{action_name}` that is not finite.")
        if len(jobs) == 1:
            return [all_chosen]
        stops = np.cumsum([job.rows for job in jobs]).tolist()
        return [_rows(all_chosen, slice(stop - job.rows, stop)) for job, stop in zip(jobs, stops, strict=True)]

    # -- the checkpoint -------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with repeating(HOUSEKEEPING, self.housekeeping):
                yield
        finally:
            self.sessions.clear()
            await asyncio.to_thread(self.finish_recording)

    def finish_recording(self) -> None:
        """Write all finished episodes to disk, and close the recording. Further calls do nothing."""
        if self.recorder is not None:
            self.recorder.close()

    async def housekeeping(self) -> None:
        """Drop expired sessions, finish files that are due, and load a newer checkpoint if there is one."""
        self.sessions.expire()
        try:
            if self.recorder is not None and (flushed := self.recorder.flush_if_due()) is not None:
                await asyncio.wrap_future(flushed)
            await self._reload()
            self._last_warning = ""
        except Exception as error:  # noqa: BLE001  keep serving, and try again next time
            if str(error) != self._last_warning:
                self._last_warning = str(error)
                _log.warning("%s", error)

    async def _reload(self) -> None:
        if self.run is None:
            return
        newest = await asyncio.to_thread(state_name, self.run)
        if newest in (self.saved_as, self._refused):
            return
        try:
            saved_as, meta, policies = await asyncio.to_thread(_loaded, self.run)
            for name, policy in self.policies.items():
                if name not in policies or _form(policies[name]) != _form(policy):
                    raise SettingsError(
                        f"the policy {name!r} is missing in the new checkpoint of {self.run}, or has other spaces or "
                        "another memory there. The previous checkpoint is still served. Restart the server to use the "
                        "new one."
                    )
        except EtudeError:
            self._refused = newest
            self.metrics.count("etude_reloads_total", taken="no")
            raise
        self.saved_as, self._meta, self.policies = saved_as, meta, {name: policies[name] for name in self.policies}
        if self.recorder is not None:
            self.recorder.set_policies(self.policies)
        self.metrics.count("etude_reloads_total", taken="yes")
        _log.info("%s: a newer checkpoint is served.", self.run)


def _by_name(policies: Policy | Mapping[str, Policy]) -> dict[str, Policy]:
    named = {"main": policies} if isinstance(policies, Policy) else policies
    for one in named.values() if isinstance(named, Mapping) else [named]:
        if not isinstance(one, Policy):
            raise SettingsError(
                f"a {type(one).__name__} can't be served: give a policy, several by name, or the folder of a run. The "
                "policy of an algorithm is algorithm.policy."
            )
    return dict(named)


def _loaded(run: Where) -> tuple[str, dict[str, Any], dict[str, Policy]]:
    """Load the newest checkpoint: the name of its file, its metadata and its policies, all from the same save."""
    while True:
        saved_as, meta = state_name(run), load_meta(run)
        names = list(meta["spaces"]) if isinstance(meta, dict) and isinstance(meta.get("spaces"), dict) else []
        policies = {name: load_policy(run, name) for name in names} or {"main": load_policy(run)}
        if state_name(run) == saved_as:
            assert isinstance(meta, dict)
            return saved_as, meta, policies


def _form(policy: Policy) -> tuple[Any, ...]:
    """The spaces and the shapes of the state: a policy can be replaced by one for which they are equal."""
    spaces = (policy.obs_space, policy.action_space, policy.module.action_space)
    shapes = {path: np.asarray(leaf).shape for path, leaf in state_leaves(policy.initial_state(1))}
    return *(repr(space_to_json(space)) for space in spaces), shapes


# -- states as trees of arrays ----------------------------------------------------------------------------------------


def _can_join(policy: Policy) -> bool:
    """Whether states of several rows can be joined: every array has the rows as its first axis."""
    return all(
        isinstance(leaf, np.ndarray) and leaf.shape[:1] == (rows,)
        for rows in (2, 3)
        for _, leaf in state_leaves(policy.initial_state(rows))
    )


def _joined(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        key: _joined([tree[key] for tree in trees])
        if isinstance(part, Mapping)
        else np.concatenate([tree[key] for tree in trees])
        for key, part in trees[0].items()
    }


def _cut(tree: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    return {key: _cut(part, rows) if isinstance(part, Mapping) else part[rows] for key, part in tree.items()}


def _rows(choice: Chosen, rows: slice) -> Chosen:
    action, chosen, state = (_cut(columns, rows) for columns in choice[:3])
    return Chosen(action, chosen, state, None if choice.logp is None else choice.logp[rows])


def _nested(policy: Policy, action: Columns, *, is_batch: bool) -> Any:
    """Convert actions ``[B, ...]`` to nested lists: all if ``is_batch``, else the only one."""
    lists = as_lists(policy.action_space, action, col.ACTION)
    nest = Nester(policy.action_space, col.ACTION)
    return nest(lists if is_batch else {name: rows[0] for name, rows in lists.items()})

# SPDX-License-Identifier: Apache-2.0
"""Multi-agent envs: PettingZoo's, and those whose observations and actions are dicts keyed by agent."""

import copy
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Literal, Protocol

import gymnasium as gym

from etude.columns import ACTION_MASK
from etude.envs import adapters
from etude.envs.adapters import FLAGS, NUMBERS, OFF_POLICY_ACTION, AgentStep, EnvAdapter, EnvValueError, GymAdapter
from etude.errors import EnvError
from etude.settings import foreign_env
from etude.spaces import Space, find_part

_log = logging.getLogger("etude.envs")

ALL: Final = "__all__"
"""The key in ``terminated`` and ``truncated`` that ends the episode for every agent."""
MAX_IDLE: Final = 1000
"""The maximum number of steps, or episodes, in a row in which no agent acts; more are an error."""


_WARNED: Final[set[tuple[str, str]]] = set()


def _warn_once(text: str, env_name: str, *rest: Any) -> None:
    """Log a warning, unless this process has logged it for an env of this name: there may be many copies."""
    if (text, env_name) not in _WARNED:
        _WARNED.add((text, env_name))
        _log.warning(text, env_name, *rest)


class MultiAgentEnv(Protocol):
    """An env in which several agents act: together, in turns, or at irregular times. Inheriting from it is not needed.

    Exactly the agents in the obs dict act next, so an agent may start late, skip steps and leave early. A reward
    between two of an agent's actions belongs to the first of them; a reward before its first action belongs to that
    action. An agent's episode ends by its own flag, or with everybody's by ``__all__``; the observation returned
    with the flag, if there is one, is its final one. An agent that ended stays away until the next reset.
    """

    possible_agents: list[str]
    """Every agent that may ever take part."""

    def observation_space(self, agent: str) -> Space:
        """The space of an agent's observations. A dict ``observation_spaces`` works too."""

    def action_space(self, agent: str) -> Space:
        """The space of an agent's actions. A dict ``action_spaces`` works too."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode. Returns the observations of the agents that act first, and infos."""

    def step(
        self, action: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Any]]:
        """Make a step with the actions of exactly the agents in the last obs dict; ``{}`` if it was empty.

        Returns:
            ``(obs, reward, terminated, truncated, info)``, each keyed by agent. An agent that is not in ``reward`` gets
            0; one that is not in a dict of flags goes on. ``terminated["__all__"]`` or ``truncated["__all__"]`` ends
            the episode; it applies to agents without a flag of their own. ``info[agent]["off_policy_action"]`` is the
            action that the env took instead of the given one; ``info["__common__"]`` may hold infos of no single agent.
        """


# -- one adapter for each API ---------------------------------------------------------------------------------------

# The state of an agent: before its first row; between its first row and its end; ended; ended without having acted.
_AWAY, _IN, _ENDED, _NEVER = range(4)


class ManyAgentsAdapter(EnvAdapter):
    """The adapter of an env with several agents: call `reset` first, then `step` until it is ``over``.

    It tracks which agents have begun, which wait for an action, and the rewards that are not in their rows yet.

    Args:
        env: Has ``possible_agents``, and ``observation_space(agent)`` or a dict ``observation_spaces``, and the same
            for actions.
        name: The env's name in errors.

    Raises:
        EnvError: the env does not declare its agents or their spaces.
    """

    def __init__(self, env: Any, name: str) -> None:
        self.env_name = name
        self.ids: list[Any] = _agent_ids(env, name)
        self.waiting: set[int] = set()
        self._begin()
        obs_spaces = tuple(_space(env, "observation_space", agent, name) for agent in self.ids)
        action_spaces = tuple(_space(env, "action_space", agent, name) for agent in self.ids)
        super().__init__(env, tuple(map(str, self.ids)), obs_spaces, action_spaces)
        self.max_steps: int | None = None
        """The maximum length of an episode. The caller truncates it; here, it only ends a wait for an agent to act."""
        self.ends: list[AgentStep] = []
        """If a step fails: the rows of agents that had ended in it before; else empty."""
        self._is_checked = False
        self._index = {agent: i for i, agent in enumerate(self.ids)}
        self._masks_seen: set[Any] = set()

    def reset(self, seed: int | None) -> list[AgentStep]:
        """Begin an episode: a ``first`` row for each agent that waits, at least one."""
        raise NotImplementedError

    def step(self, actions: dict[int, Any]) -> list[AgentStep]:
        """Act for exactly the agents whose last row waits; actions are nested like their spaces.

        Returns a row for each agent that waits now, at least one unless the env is over or has made ``max_steps``, and
        one for each agent that ended. All other agents get their rows later.
        """
        raise NotImplementedError

    def truncate(self, rows: list[AgentStep]) -> list[AgentStep]:
        """Truncate the episode after the step that returned ``rows``; then it is over.

        Returns the same rows as ends, except those that are ``first``, as their agents never act; and for each other
        agent with a running episode, an end with its remaining reward and without an observation.
        """
        self.over = True
        self.waiting.clear()
        for row in rows:
            self._state[row.agent] = _NEVER if row.first else _ENDED
        ends = [row if row.terminated else row._replace(truncated=True) for row in rows if not row.first]
        for agent in self._inside():
            ends += self._end(agent, None, False, True)
        return ends

    # -- what the APIs have in common -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a new episode, in which no agent has a row yet."""
        self.waiting.clear()
        self._state = [_AWAY] * len(self.ids)
        self._owed = [0.0] * len(self.ids)
        self._paid: set[Any] = set()
        self._taken: dict[int, Any] = {}
        self.env_t, self.over = 0, False

    def _reset_dicts(self, seed: int | None) -> dict[Any, Any]:
        """Reset an env that returns dicts by agent; return the observations."""
        obs: dict[Any, Any]
        obs, self.infos = self._dicts("reset", ("obs", "info"), self.env.reset(seed=seed))
        self._begin()
        return obs

    def _step_dicts(self, actions: dict[Any, Any]) -> tuple[Any, Any, Any]:
        """Step an env that returns dicts by agent; return the observations, ``terminated`` and ``truncated``."""
        given = self.env.step(actions)
        if not self._is_checked:
            self._dicts("step", ("obs", "reward", "terminated", "truncated", "info"), given)
            self._is_checked = True
        obs, reward, terminated, truncated, self.infos = given
        if not FLAGS.issuperset(map(type, (*terminated.values(), *truncated.values()))):
            for agent in {**terminated, **truncated}:
                _check_flags(agent, terminated.get(agent, False), truncated.get(agent, False))
        self.env_t += 1
        self._pay(reward)
        self._note(self.infos)
        return obs, terminated, truncated

    def _dicts(self, method: str, names: tuple[str, ...], given: Any) -> Any:
        """Check that a method of the env returned one dict for each of ``names``, and return them."""
        if isinstance(given, tuple) and len(given) == len(names) and all(isinstance(x, Mapping) for x in given):
            return given
        types = [type(x).__name__ for x in given] if isinstance(given, tuple) else type(given).__name__
        raise EnvError(
            f"{self.env_name}: {method} must return ({', '.join(names)}), each a dict keyed by agent, but "
            f"returned {types}."
        )

    def _act(self, actions: Mapping[int, Any]) -> dict[Any, Any]:
        """The actions under the env's own agent ids. Afterwards no agent waits."""
        if actions.keys() != self.waiting:
            given, wanted = ([self.agents[i] for i in sorted(some)] for some in (actions, self.waiting))
            raise EnvError(f"{self.env_name}: there are actions for the agents {given}, but {wanted} wait for one.")
        self.waiting.clear()
        ids = self.ids
        return {ids[i]: action for i, action in actions.items()}

    def _pay(self, rewards: Mapping[Any, float]) -> None:
        """Add rewards to the agents' next rows.

        Raises:
            EnvError: an agent is unknown or has ended, or a reward is not a number.
        """
        self._paid.update(rewards)
        for agent, reward in rewards.items():
            if reward.__class__ not in NUMBERS:
                adapters.check_reward(reward, f" of agent {agent!r}")
            if reward:
                i = self._number(agent)
                if self._state[i] >= _ENDED:
                    raise EnvError(
                        f"{self.env_name}: agent {agent!r} got the reward {reward} after its end, when no step is "
                        "left to add it to. Give it in the step in which the agent ends."
                    )
                self._owed[i] += float(reward)

    def _note(self, infos: Mapping[Any, Any]) -> None:
        """Keep the ``off_policy_action`` of infos for the agents' next rows."""
        for agent, info in infos.items():
            if not isinstance(info, dict) or not info or agent not in self._index:
                continue
            if OFF_POLICY_ACTION in info:
                self._taken[self._index[agent]] = info[OFF_POLICY_ACTION]
            if ACTION_MASK in info and agent not in self._masks_seen:
                self._see_mask(agent)

    def _show(self, agent: Any, obs: Any) -> AgentStep:
        """The row of an agent that acts next.

        Raises:
            EnvError: the agent is unknown or has ended, or there is no observation for it.
        """
        i = self._number(agent)
        if obs is None:
            raise EnvError(f"{self.env_name}: it is the turn of agent {agent!r}, but there is no observation for it.")
        self.waiting.add(i)
        taken = self._taken.pop(i, None) if self._taken else None
        if self._state[i] == _IN:
            reward, self._owed[i] = self._owed[i], 0.0
            return AgentStep(i, obs, reward, False, False, False, taken)
        if self._state[i] >= _ENDED:
            raise EnvError(
                f"{self.env_name}: agent {agent!r} ended and appears again in the same episode. Let it skip steps "
                "instead of ending it, or add an agent for its next life to possible_agents."
            )
        self._state[i] = _IN
        return AgentStep(i, obs, 0.0, False, False, True)  # earlier rewards go to its first step

    def _end(self, agent: Any, obs: Any, terminated: bool, truncated: bool) -> list[AgentStep]:
        """The last row of an agent; [] if it has none, because it never acted or has ended before.

        Raises:
            EnvError: the agent is unknown.
        """
        i = self._number(agent)
        if self._state[i] != _IN:
            self._state[i] = _ENDED if self._state[i] == _ENDED else _NEVER
            return []
        self._state[i] = _ENDED
        reward, self._owed[i] = self._owed[i], 0.0
        return [AgentStep(i, obs, reward, terminated, truncated, False, self._taken.pop(i, None))]

    def unacted_reward(self) -> dict[int, float]:
        """The rewards, including 0, of agents that never acted in an episode that is over, by their indices.

        Raises:
            EnvValueError: a reward is not finite.
        """
        found = {}
        for i, state in enumerate(self._state):
            if state in (_AWAY, _NEVER) and (self._owed[i] or self.ids[i] in self._paid):
                if not math.isfinite(self._owed[i]):
                    raise EnvValueError(f"agent {self.ids[i]!r}: `reward` is {self._owed[i]}, not a finite number.")
                found[i] = self._owed[i]
                if self._owed[i]:
                    _warn_once(
                        "%s: agent %r got the reward %s in an episode in which it never acted. Returns in results "
                        "include such rewards, but no step can hold them: recordings and learners do not get them.",
                        *(self.env_name, self.ids[i], self._owed[i]),
                    )
        return found

    def _see_mask(self, agent: Any) -> None:
        """Warn once that an agent's infos hold an action mask, but its observations do not."""
        self._masks_seen.add(agent)
        if find_part(self.obs_spaces[self._index[agent]], ACTION_MASK) is None:
            self._masks_seen.update(self.ids)
            _warn_once(
                "%s: the infos hold an `%s`, but observations do not, so actions that it forbids are taken. Put it "
                "into the observation: a Dict with the parts `observation` and `%s`.",
                *(self.env_name, ACTION_MASK, ACTION_MASK),
            )

    def _inside(self) -> list[Any]:
        """The ids of the agents that have begun and not ended."""
        return [agent for agent, state in zip(self.ids, self._state, strict=True) if state == _IN]

    def _number(self, agent: Any) -> int:
        try:
            return self._index[agent]
        except KeyError:
            raise EnvError(
                f"{self.env_name} gave an observation, a reward or an end for agent {agent!r}, who is not in its "
                f"possible_agents {self.ids}. Name there every agent that may ever appear."
            ) from None


def _agent_ids(env: Any, env_name: str) -> list[Any]:
    agents = getattr(env, "possible_agents", None)
    if isinstance(agents, set | frozenset):
        agents = sorted(agents, key=str)  # their own order differs between processes
    if not isinstance(agents, Iterable) or not (ids := list(agents)):
        raise EnvError(
            f"{env_name} has no `possible_agents`: set it to the list of all agents that may ever appear, so that "
            "their spaces are known before the first step."
        )
    if len({str(agent) for agent in ids}) < len(ids):
        raise EnvError(f"{env_name}: `possible_agents` has an agent twice: {ids}.")
    if named := [agent for agent in ids if not isinstance(agent, str)]:
        _warn_once(
            "%s: agents are named by strings in Etude: module_of, callbacks and recordings get %r, not %r. The env "
            "itself gets its own names.",
            *(env_name, str(named[0]), named[0]),
        )
    return ids


def _space(env: Any, name: str, agent: Any, env_name: str) -> Space:
    of = getattr(env, name, None)
    try:
        if callable(of):
            space = of(agent)
        else:  # in PettingZoo, whose envs have the method, `observation_spaces` warns
            by_agent = getattr(env, name + "s", {})
            if isinstance(of, gym.Space) and not (isinstance(by_agent, Mapping) and agent in by_agent):
                parts = of.spaces if isinstance(of, gym.spaces.Dict) else {}
                by_agent = parts if {*parts} & {*env.possible_agents} else {agent: of}
            space = by_agent[agent]
        found = f"a {type(space).__name__}"
    except (AttributeError, LookupError, NotImplementedError) as error:
        space, found = None, repr(error)
    if isinstance(space, gym.Space):
        return space
    raise EnvError(
        f"{env_name} has no {name} for agent {agent!r}, but {found}: add a method `{name}(agent)` or a dict `{name}s` "
        "with a Gymnasium space for each of possible_agents, or one space for all of them."
    )


class DictAdapter(ManyAgentsAdapter):
    """The adapter of an env that follows `MultiAgentEnv`.

    While no agent acts next, the env is stepped with ``{}``. An episode that ends, or makes ``max_steps``, before any
    agent acts is skipped.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env, type(env).__name__)

    def reset(self, seed: int | None) -> list[AgentStep]:
        """Begin an episode; return the first rows of the agents that act first."""
        for _ in range(MAX_IDLE):
            rows = [self._show(agent, value) for agent, value in self._reset_dicts(seed).items()]
            if not self.waiting:
                rows = self._step({})
            if self.waiting and self.env_t != self.max_steps:
                return rows
            seed = None  # episodes without a step don't count
        limit = "" if self.max_steps is None else f" They end after `max_steps` ({self.max_steps}) at the latest."
        raise EnvError(
            f"{self.env_name}: {MAX_IDLE} episodes in a row ended before any agent got an observation to act on.{limit}"
        )

    def step(self, actions: dict[int, Any]) -> list[AgentStep]:
        """Act for the agents that wait; return rows of those that act next and of those that ended."""
        return self._step(self._act(actions))

    def _step(self, actions: dict[Any, Any]) -> list[AgentStep]:
        self.ends = []
        for _ in range(MAX_IDLE):
            new = self._rows(*self._step_dicts(actions))
            rows = self.ends + new
            if self.waiting or self.over or self.env_t == self.max_steps:
                self.ends = []
                return rows
            self.ends += copy.deepcopy(new)  # the env may reuse its arrays
            actions = {}
        raise EnvError(
            f"{self.env_name}: no agent has acted for {MAX_IDLE} steps, and the episode is not over. Return an "
            "observation for some agent, or end the episode with terminated['__all__'] or truncated['__all__']."
        )

    def _rows(self, obs: Any, terminated: Any, truncated: Any) -> list[AgentStep]:
        all_flags = bool(terminated.get(ALL)), bool(truncated.get(ALL))
        self.over = any(all_flags)
        ending = self._ending(terminated, truncated)
        rows = [self._show(agent, value) for agent, value in obs.items() if agent not in ending]
        for agent in ending:
            flags = bool(terminated.get(agent)), bool(truncated.get(agent))
            rows += self._end(agent, obs.get(agent), *(flags if any(flags) else all_flags))
        self.over = self.over or (bool(ending) and all(state >= _ENDED for state in self._state))
        return rows

    def _ending(self, terminated: Any, truncated: Any) -> Collection[Any]:
        """The agents whose flags are set: those that end now, and those that ended before."""
        if self.over:
            return self.ids
        if not any(terminated.values()) and not any(truncated.values()):
            return ()
        return [agent for agent in {**terminated, **truncated} if terminated.get(agent) or truncated.get(agent)]


class ParallelAdapter(ManyAgentsAdapter):
    """The adapter of a PettingZoo ``ParallelEnv``: all its agents act at each step."""

    def __init__(self, env: Any) -> None:
        super().__init__(env, _name(env))

    def reset(self, seed: int | None) -> list[AgentStep]:
        """Begin an episode; return the first rows of the agents that are present."""
        rows = self._rows({}, self._reset_dicts(seed), {}, {})
        if not rows:
            raise _nobody(self.env_name)
        return rows

    def step(self, actions: dict[int, Any]) -> list[AgentStep]:
        """Act for all agents that are present; return rows of those that go on, those that ended, and new ones."""
        acting = self._act(actions)
        return self._rows(acting, *self._step_dicts(acting))

    def _rows(self, acting: Iterable[Any], obs: Any, terminated: Any, truncated: Any) -> list[AgentStep]:
        there = dict.fromkeys(self.env.agents)
        rows: list[AgentStep] = []
        for agent in {**dict.fromkeys(acting), **there}:
            flags = bool(terminated.get(agent)), bool(truncated.get(agent))
            if True in flags:
                rows += self._end(agent, obs.get(agent), *flags)
            elif agent in there:
                rows.append(self._show(agent, obs.get(agent)))
            else:
                raise _left(agent, self.env_name)
        self.over = not self.waiting
        return rows


class AECAdapter(ManyAgentsAdapter):
    """The adapter of a PettingZoo ``AECEnv``: its agents act in turns.

    Only steps of living agents count; the steps with ``None`` that remove ended agents are made here. Rewards are
    summed from ``env.rewards`` after each step, as PettingZoo's own env test does to check ``env.last()``. So no reward
    is lost when an agent leaves without another turn, or is truncated.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env, _name(env))
        self._there: list[Any] = []

    def reset(self, seed: int | None) -> list[AgentStep]:
        """Begin an episode; return the first row of the agent whose turn it is."""
        self.env.reset(seed=seed)
        self._begin()
        self.ends = []
        rows = self._rows()
        if self.over:
            raise _nobody(self.env_name)
        return rows

    def step(self, actions: dict[int, Any]) -> list[AgentStep]:
        """Act for the agent that waits; return rows of those that ended, then of the one whose turn it is."""
        (action,) = self._act(actions).values()
        self.ends = []
        self.env.step(action)
        self.env_t += 1
        self._pay(self.env.rewards)
        return self._rows()

    def truncate(self, rows: list[AgentStep]) -> list[AgentStep]:
        """See `ManyAgentsAdapter.truncate`. The other agents' final observations come from ``env.observe``."""
        env = self.env
        rows = copy.deepcopy(rows)
        shown = {row.agent for row in rows}
        ends: list[AgentStep] = []
        for agent in self._inside():
            if self.agents.index(str(agent)) not in shown:
                terminated, truncated = bool(env.terminations[agent]), bool(env.truncations[agent])
                ends += self._end(agent, copy.deepcopy(env.observe(agent)), terminated, truncated or not terminated)
        return super().truncate(rows) + ends

    def _rows(self) -> list[AgentStep]:
        env = self.env
        rows = self.ends
        self.infos = {}
        while there := env.agents:
            agent = env.agent_selection
            obs, _, terminated, truncated, info = env.last()
            if terminated.__class__ not in FLAGS or truncated.__class__ not in FLAGS:
                _check_flags(agent, terminated, truncated)
            self.infos[agent] = info
            self._note({agent: info})
            if not (terminated or truncated):
                rows.append(self._show(agent, obs))
                break
            rows += self._end(agent, copy.deepcopy(obs), bool(terminated), bool(truncated))  # envs may reuse it
            env.step(None)
            if agent in env.agents:
                raise EnvError(
                    f"{self.env_name}: agent {agent!r} ended and was stepped with None, but is still in env.agents: "
                    "call self._was_dead_step(action) in step() for agents that have ended."
                )
            self._pay(env.rewards)
        self.ends = []
        if there != self._there:
            self._there = list(there)
            rows += self._vanished()
        self.over = not there
        return rows

    def _vanished(self) -> list[AgentStep]:
        """The ends of agents that were removed without being selected again, and so have no final observation."""
        env = self.env
        rows: list[AgentStep] = []
        for agent in self._inside():
            if agent not in self._there:
                flags = bool(env.terminations.get(agent)), bool(env.truncations.get(agent))
                if True not in flags:
                    raise _left(agent, self.env_name)
                rows += self._end(agent, None, *flags)
        return rows


def _check_flags(agent: Any, terminated: Any, truncated: Any) -> None:
    adapters.check_flags(terminated, truncated, allow_numbers=True, of=f" of agent {agent!r}")


def _name(env: Any) -> str:
    return str((getattr(env, "metadata", None) or {}).get("name") or type(env.unwrapped).__name__)


def _nobody(env_name: str) -> EnvError:
    return EnvError(f"{env_name}: env.agents is empty after reset(), so no agent can act.")


def _left(agent: Any, env_name: str) -> EnvError:
    return EnvError(
        f"{env_name}: agent {agent!r} is no longer in env.agents, but was neither terminated nor truncated: set one of "
        "these flags for it in the step in which it leaves."
    )


# -- which adapter an env gets ----------------------------------------------------------------------------------------


def adapt_env(env: Any) -> GymAdapter | ManyAgentsAdapter:
    """The adapter of one env object, which may be a `ReducedEnv`.

    Raises:
        EnvError: Etude does not know this kind of env; the message says what it is.
        SpaceError: it is a `ReducedEnv`, and no agent's observation has a part to drop.
    """
    if isinstance(env, adapters.ReducedEnv):
        adapter = adapt_env(env.env)
        adapter.obs_spaces = adapters.reduced_spaces(adapter.obs_spaces, env.drop)
        return adapter
    api = api_of(env)
    if api is not None:
        return ParallelAdapter(env) if api == "parallel" else AECAdapter(env)
    if hasattr(env, "possible_agents") and all(callable(getattr(env, name, None)) for name in ("reset", "step")):
        return DictAdapter(env)  # before gymnasium.Env, which some frameworks' multi-agent envs inherit
    if isinstance(env, gym.Env):
        return GymAdapter(env)
    if isinstance(env, gym.vector.VectorEnv):
        raise adapters.not_one_env(env)
    if foreign := foreign_env(env):
        raise EnvError(foreign)
    if env is None or isinstance(env, type):
        what = "nothing: does it lack a `return`?" if env is None else f"the class {env.__name__}, not an object of it."
        raise EnvError(f"the function that makes the env returns {what}")
    raise EnvError(
        f"{type(env).__module__}.{type(env).__qualname__} is not an env: neither a gymnasium.Env, nor a PettingZoo "
        "ParallelEnv or AECEnv, nor does it have `possible_agents`, `reset` and `step` as in MultiAgentEnv. Let it "
        "inherit from gymnasium.Env, its reset return `(obs, info)`, and its step five values, `(obs, reward, "
        "terminated, truncated, info)`; an env of the package `gym` can be wrapped in shimmy's "
        "GymV26CompatibilityV0(env=env), or in GymV21CompatibilityV0 if its step returns four values."
    )


def api_of(env: object) -> Literal["parallel", "aec"] | None:
    """Which of PettingZoo's two APIs an env has, or None. PettingZoo is not imported for this."""
    names = {cls.__name__ for cls in type(env).__mro__ if cls.__module__.partition(".")[0] == "pettingzoo"}
    return "parallel" if "ParallelEnv" in names else "aec" if "AECEnv" in names else None

# SPDX-License-Identifier: Apache-2.0
"""Copy: one running env, whatever its make, as rows of what its agents are shown."""

from typing import Any, Final, NamedTuple, Protocol

import gymnasium as gym

from etude.errors import EnvError, SpaceError
from etude.settings import foreign_env
from etude.spaces import Space, find_part, is_handled, without

TAKEN: Final = "off_policy_action"
"""The key in infos under which an env says which action it took instead of the one that it was given."""


class Row(NamedTuple):
    """What one agent is shown at one moment. It waits for an action unless it is terminated or truncated."""

    agent: int
    """Its index in `Copy.agents`."""
    obs: Any
    """Nested, as the env gave it, which may write over it with its next step. None: the env never gave it; in rows
    that end only."""
    reward: float
    """All reward since the agent's last action; 0.0 where ``first``."""
    terminated: bool
    truncated: bool
    first: bool
    """It begins the agent's episode."""
    taken: Any = None
    """The action that the env took instead of the one sent, nested as the action space; None: it took that one."""


class Copy(Protocol):
    """One running env. `reset` first; `step` while it is not ``over``.

    Its state is kept in plain attributes, so that a snapshot finds it.
    """

    agents: tuple[str | None, ...]
    """Every agent that may ever appear, in a fixed order; ``(None,)`` where there is one without a name."""
    obs_spaces: tuple[Space, ...]
    """The space of each agent's observations."""
    action_spaces: tuple[Space, ...]
    """The space of each agent's actions."""
    env: Any
    """What the user brought."""
    env_t: int
    """Steps made in the running episode."""
    over: bool
    """The episode has ended for all agents: it must be reset before the next step."""
    infos: Any
    """What the env said beside its last step or reset, as it said it."""

    def reset(self, seed: int | None) -> list[Row]:
        """Begin an episode: a ``first`` row for each agent that waits. At least one does."""

    def step(self, actions: dict[int, Any]) -> list[Row]:
        """Act for exactly those agents whose last row waits; actions are nested as their spaces.

        A row for each agent that waits now, of which there is one unless the env is over, and one for each that ended;
        agents without a row are shown something later.
        """

    def truncate(self, rows: list[Row]) -> list[Row]:
        """Stop the episode after the step that gave ``rows``, since it was long enough; then it is over.

        The same rows, but all of them ends, without those that are ``first``; and an end for each other agent whose
        episode runs, with the reward that it was not yet given.
        """

    def close(self) -> None:
        """Close the env."""


class GymCopy:
    """A Gymnasium env as a `Copy`: one agent without a name, which waits after every step."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.agents: tuple[str | None, ...] = (None,)
        self.obs_spaces: tuple[Space, ...] = (env.observation_space,)
        self.action_spaces: tuple[Space, ...] = (env.action_space,)
        self.env = env
        self.env_t = 0
        self.over = True
        self.infos: Any = None

    def reset(self, seed: int | None) -> list[Row]:
        """See `Copy.reset`."""
        obs, self.infos = self.env.reset(seed=seed)
        self.env_t, self.over = 0, False
        return [Row(0, obs, 0.0, False, False, True)]

    def step(self, actions: dict[int, Any]) -> list[Row]:
        """See `Copy.step`."""
        obs, reward, terminated, truncated, self.infos = self.env.step(actions[0])
        self.env_t += 1
        self.over = bool(terminated or truncated)
        taken = self.infos.get(TAKEN) if self.infos else None
        return [Row(0, obs, float(reward), bool(terminated), bool(truncated), False, taken)]

    def truncate(self, rows: list[Row]) -> list[Row]:
        """See `Copy.truncate`."""
        self.over = True
        return [row._replace(truncated=True) for row in rows]

    def close(self) -> None:
        """See `Copy.close`."""
        self.env.close()


class Reduced(NamedTuple):
    """An env of which parts of the observation are left out that Etude can't handle."""

    env: Any
    drop: tuple[str, ...]
    """The parts, see `spaces.find_part`."""


def copy_of(env: Any) -> Copy:
    """The `Copy` that ``env``, one env object, perhaps `Reduced`, runs as.

    Raises:
        EnvError: it is of no kind that Etude knows; the message says what it is.
        SpaceError: it is `Reduced`, and no agent sees such a part.
    """
    if isinstance(env, Reduced):
        copy = copy_of(env.env)
        copy.obs_spaces = reduced(copy.obs_spaces, env.drop)
        return copy
    from etude.envs import agent_dicts, pettingzoo  # they need Row from here

    api = pettingzoo.api_of(env)
    if api is not None:
        return pettingzoo.ParallelCopy(env) if api == "parallel" else pettingzoo.AECCopy(env)
    if agent_dicts.has_agent_dicts(env):  # before gymnasium.Env, which some frameworks' multi-agent envs inherit
        return agent_dicts.DictCopy(env)
    if isinstance(env, gym.Env):
        return GymCopy(env)
    if foreign := foreign_env(env):
        raise EnvError(foreign)
    raise EnvError(
        f"{type(env).__module__}.{type(env).__qualname__} is no env: neither a gymnasium.Env, nor a PettingZoo "
        "ParallelEnv or AECEnv, nor has it `possible_agents`, `reset` and `step` as etude's MultiAgentEnv. Let it "
        "inherit from gymnasium.Env, its reset return `(obs, info)`, and its step five values, `(obs, reward, "
        "terminated, truncated, info)`; an env of the old Gym can be wrapped in shimmy.GymV21CompatibilityV0(env=env)."
    )


def reduced(obs_spaces: tuple[Space, ...], drop: tuple[str, ...]) -> tuple[Space, ...]:
    """The agents' spaces without those of the parts called ``drop`` that Etude can't handle.

    Raises:
        SpaceError: no agent sees a part of that name.
    """
    for path in drop:
        if all(find_part(space, path) is None for space in obs_spaces):
            raise SpaceError(f"there is no `{path}` to drop in the observation space {obs_spaces[0]}.")
    unhandled = [
        [path for path in drop if (part := find_part(space, path)) is not None and not is_handled(part)]
        for space in obs_spaces
    ]
    return tuple(without(space, paths) for space, paths in zip(obs_spaces, unhandled, strict=True))

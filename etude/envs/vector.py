# SPDX-License-Identifier: Apache-2.0
"""VectorArena: Gymnasium's vector envs as an Arena; every autoreset mode gives the same steps."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.envs import snapshot
from etude.envs.arena import Turn
from etude.envs.make import EnvLike, make_vector_env
from etude.errors import EnvError
from etude.spaces import Flattener, Nester, check_value, leaf_dtype, leaf_shape


class VectorArena:
    """All copies of an env step together, in this process. See `Arena` for the methods.

    Args:
        env: See `make_vector_env`.
        num_envs: How many copies; each is one slot.
        exact: See `make_vector_env`.

    Raises:
        EnvError: the env can't be made, or does not say its autoreset mode.
        SpaceError: a space is of a kind that Etude can't handle.
    """

    def __init__(self, env: EnvLike, num_envs: int = 1, *, exact: bool = True) -> None:
        self.env: VectorEnv[Any, Any, Any] = make_vector_env(env, num_envs, exact=exact)
        self._is_given = isinstance(env, gym.Env | VectorEnv)
        self.num_slots: int = self.env.num_envs
        self.obs_space = self.env.single_observation_space
        self.action_space = self.env.single_action_space
        self._mode = self._autoreset_mode()
        self._flatten = Flattener(self.obs_space, col.OBS)
        self._nest_action = Nester(self.action_space, col.ACTION)
        self._turn: Turn | None = None
        self._none_first = np.zeros(self.num_slots, bool)
        self._none_first.flags.writeable = False

    def _autoreset_mode(self) -> AutoresetMode:
        mode = (self.env.metadata or {}).get("autoreset_mode")
        if mode is None:
            raise EnvError(
                f"{type(self.env).__name__} does not say how it resets: set its metadata['autoreset_mode'] to one of "
                "gymnasium.vector.AutoresetMode. Without it, steps would be credited to wrong episodes."
            )
        return AutoresetMode(mode)

    def reset(self, seed: int | None = None) -> None:
        """See `Arena.reset`."""
        obs, _ = self.env.reset(seed=seed)
        columns = self._flatten(obs)
        check_value(self.obs_space, _row(obs, 0), col.OBS)
        n = self.num_slots
        self._turn = Turn(columns, np.zeros(n), np.zeros(n, bool), np.zeros(n, bool), np.ones(n, bool))

    def recv(self) -> Turn:
        """See `Arena.recv`."""
        if self._turn is None:
            raise EnvError("the arena was not reset: call reset() before recv().")
        return self._turn

    def send(self, action: Columns) -> None:
        """See `Arena.send`."""
        before = self.recv()
        obs, reward, terminated, truncated, info = self.env.step(self._nest_action(action))
        turn = Turn(self._flatten(obs), reward, terminated, truncated, self._none_first)
        if self._mode is AutoresetMode.NEXT_STEP:
            done = terminated | truncated
            if np.count_nonzero(done):
                turn.live = ~done
            if before.live is not None:
                turn.first = ~before.live
        elif terminated.any() or truncated.any():
            self._reset_within(turn, obs, terminated | truncated, info)
        self._turn = turn

    def _reset_within(self, turn: Turn, obs: Any, done: NDArray[np.bool_], info: dict[str, Any]) -> None:
        """The env was reset in the same step, or is reset here: the true last observations are kept apart."""
        rows = np.flatnonzero(done)
        turn.first, turn.final_rows = done, rows
        if self._mode is AutoresetMode.DISABLED:
            turn.final_obs = {name: column.take(rows, axis=0) for name, column in turn.obs.items()}
            # the reset may clear flags that the env lends
            turn.terminated, turn.truncated = turn.terminated.copy(), turn.truncated.copy()
            obs, _ = self.env.reset(options={"reset_mask": done.copy()})
            turn.obs = self._flatten(obs)
            return
        if "final_obs" not in info:
            raise EnvError(
                f"{type(self.env).__name__} resets in the same step, but its info has no 'final_obs' where an episode "
                f"ended (it has {sorted(info)}): the last observation would be lost."
            )
        turn.final_obs = self._final_columns(info["final_obs"], rows)

    def _final_columns(self, final: Any, rows: NDArray[np.int64]) -> Columns:
        if isinstance(final, np.ndarray) and final.dtype == object:
            parts = [self._flatten(final[row]) for row in rows]
            return {
                name: np.stack([np.asarray(part[name]) for part in parts]).astype(leaf_dtype(leaf), copy=False)
                for name, leaf in self._flatten.leaves.items()
            }
        batched = self._flatten(final)
        return {
            name: np.asarray(batched[name])[rows].reshape(len(rows), *leaf_shape(leaf))
            for name, leaf in self._flatten.leaves.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """See `Arena.state_dict`."""
        if self._turn is None:
            return {"how": "new episodes", "why": "the arena was not reset"}
        state = snapshot.capture_env(self.env)
        turn = self._turn
        return state | {
            "orders": {name: snapshot.order_of(np.asarray(column)) for name, column in turn.obs.items()},
            "turn": {
                "obs": {name: np.array(column) for name, column in turn.obs.items()},
                "reward": np.array(turn.reward),
                "terminated": np.array(turn.terminated),
                "truncated": np.array(turn.truncated),
                "first": np.array(turn.first),
                "live": None if turn.live is None else np.array(turn.live),
                "final_rows": turn.final_rows,
                "final_obs": turn.final_obs,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """See `Arena.load_state_dict`."""
        if state["how"] == "new episodes":
            return f"new episodes: {state['why']}"
        self.reset()  # makes the env's own attributes, for the state to be put into
        try:
            snapshot.restore_env(self.env, state)
        except snapshot.CannotRestoreError as error:
            self.reset()
            return f"new episodes: {error}"
        turn = Turn(**state["turn"])
        turn.obs = {name: np.array(column, order=state["orders"][name]) for name, column in turn.obs.items()}
        self._turn = turn
        return str(state["how"])

    def close(self) -> None:
        """See `Arena.close`. An Env or VectorEnv that was given ready-made is left to its giver."""
        if not self._is_given:
            self.env.close()


def _row(batched: Any, i: int) -> Any:
    if isinstance(batched, dict):
        return {key: _row(value, i) for key, value in batched.items()}
    if isinstance(batched, tuple):
        return tuple(_row(value, i) for value in batched)
    return batched[i]

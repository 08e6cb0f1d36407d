# SPDX-License-Identifier: Apache-2.0
"""An arena of scripted envs, which keeps a plain record of all that it showed and was sent."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scripted_envs import SPACES, Chances, Key, Life, Row, ScriptedEnv, obs_of, reward_of

from etude.columns import Columns
from etude.envs import Arena, Turn
from etude.envs.arena import Kind
from etude.spaces import leaf_shape


class ScriptedArena(Arena):
    """See `Arena`. What it lends is overwritten once all turns are answered.

    Args:
        num_envs: How many copies.
        agents: Their names; one None is an agent without a name.
        kinds: The kind of each agent, an index in `SPACES`.
        **chances: Of what happens, see `Chances`.
    """

    def __init__(
        self,
        num_envs: int = 3,
        agents: Sequence[str | None] = ("ann", "bob", "cid"),
        kinds: Sequence[int] | None = None,
        **chances: float,
    ) -> None:
        self.names, self.num_envs = list(agents), num_envs
        self.named = self.names != [None]
        self.kind_of = [0] * len(agents) if kinds is None else list(kinds)
        self.chances = Chances(**chances if self.named else {**chances, "end": 0.0, "turn": 1.0})
        self.copies = [ScriptedEnv(env, len(agents), self.chances) for env in range(num_envs)]
        self.seats = sorted(
            ((env, agent) for agent in range(len(agents)) for env in range(num_envs)), key=lambda s: self.kind_of[s[1]]
        )
        self.num_slots = len(self.seats)
        self.slot = {seat: slot for slot, seat in enumerate(self.seats)}
        self.env_of = np.array([env for env, _ in self.seats])
        self.agents = [self.names[agent] for _, agent in self.seats]
        ends = np.cumsum(np.bincount([self.kind_of[agent] for _, agent in self.seats])).tolist()
        self.kinds = tuple(Kind(*SPACES[i], range(([0, *ends])[i], end)) for i, end in enumerate(ends))
        self._rng = np.random.default_rng(0)
        self._turns: list[Turn] = []
        self._open: list[int] = []
        """The turns that wait for an answer."""
        self._mixed = False
        self._overs: list[int] = []
        self._lost: list[int] = []

        self.lives: dict[Key, Life] = {}
        self.steps: dict[tuple[int, int], int] = {}
        """Of each env's each episode."""
        self.over: set[tuple[int, int]] = set()
        """Those that ended for all agents."""
        self.broken: set[tuple[int, int]] = set()
        """Those that broke off."""
        self.last: list[Row] = []
        """What was shown last."""
        self.stamp: Callable[[Key], Any] = lambda key: None
        """Asked with each action, kept in `Life.stamps`."""
        self.sends_left = -1
        """So many more calls of `send`, then a KeyboardInterrupt."""

    def reset(self, seed: int | None = None) -> None:
        if seed is not None:
            own, *streams = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(self.num_envs + 1))
            self._rng = own
            for one, rng in zip(self.copies, streams, strict=True):
                one.rng = rng
        for env in range(self.num_envs):
            self._break_off(env)
        for life in self.lives.values():
            life.void = True
        self._turns, self._open = [], []

    def _break_off(self, env: int) -> list[int]:
        one = self.copies[env]
        agents, one.inside, one.due = list(one.inside), {}, True
        if agents:
            self.broken.add((env, one.episode))
        for agent in agents:
            self.lives.setdefault(Key(env, one.episode, agent), Life()).is_cut = True
        return [self.slot[env, agent] for agent in agents]

    # -- what is shown ------------------------------------------------------------------------------------------

    def recv(self) -> list[Turn]:
        if not self._open:
            self._overwrite()
            self._turns = self._next()
            self._open = [i for i, turn in enumerate(self._turns) if turn.waits]
        return self._turns

    def _happens(self, what: str) -> bool:
        return bool(self._rng.random() < getattr(self.chances, what))

    def _next(self) -> list[Turn]:
        self._mixed, self._overs, self._lost = self._happens("mixed"), [], []
        self.last = []
        order = self._rng.permutation(self.num_envs).tolist()
        ready = max(1, sum(self._happens("ready") for _ in order))
        for i, env in enumerate(order):
            if i < ready or all(row.ends for row in self.last):
                self.last += self._serve(env)
        if all(row.ends for row in self.last):
            self._mixed = False  # an end and what begins after it never stand in one turn
            self.last += self.copies[order[0]].reset()
        for row in self.last:
            self._keep(row)
        return self._tell()

    def _serve(self, env: int) -> list[Row]:
        one = self.copies[env]
        if one.due:
            return one.reset()
        rows = []
        if one.happens("fail"):
            self._lost += self._break_off(env)
        else:
            rows = one.step()
            self.steps[env, one.episode] = one.env_t
        if not one.due:
            return rows
        if rows:
            self._overs.append(env)
            self.over.add((env, one.episode))
        return rows if self._mixed or not self._happens("at_once") else rows + one.reset()

    def _keep(self, row: Row) -> None:
        life = self.lives.setdefault(row.key, Life())
        life.results = row.k
        if row.ends:
            life.end = row
        else:
            life.clock.append(row.env_t)

    def _tell(self) -> list[Turn]:
        turns = []
        for kind in range(len(self.kinds)):
            own = [row for row in self.last if self.kind_of[row.key.agent] == kind]
            groups = [own] if self._mixed else [[r for r in own if r.ends], [r for r in own if not r.ends]]
            turns += [self._turn(kind, part) for group in groups for part in self._split(group)]
        turns.sort(key=lambda turn: turn.waits)
        if self._overs and self.named:
            at = len(turns) if self._mixed else sum(not turn.waits for turn in turns)
            if self._mixed or self._happens("split"):
                turns.insert(at, self._turn(0, []))
                at += 1
            turns[at - 1].over = np.array(self._overs)
        if self._lost:
            turns[0].lost = np.array(self._lost)
        return turns

    def _split(self, rows: list[Row]) -> list[list[Row]]:
        rows = [rows[i] for i in self._rng.permutation(len(rows))]
        at = int(self._rng.integers(1, len(rows))) if len(rows) > 1 and self._happens("split") else 0
        return [part for part in (rows[:at], rows[at:]) if part]

    def _turn(self, kind: int, rows: list[Row]) -> Turn:
        def flags(name: str) -> Any:
            some = np.array([getattr(row, name) for row in rows], bool)
            return some if some.any() or self._rng.random() < 0.5 else None

        turn = Turn(
            np.array([self.slot[row.key.env, row.key.agent] for row in rows], np.int64),
            obs_of(kind, rows),
            np.array([np.nan if row.first else reward_of(row.key, row.k - 1) for row in rows]),
            flags("terminated"),
            flags("truncated"),
            flags("first"),
            kind,
            waits=not all(row.ends for row in rows),
            blind=flags("blind"),
        )
        if self.named:
            turn.env_t = np.array([row.env_t for row in rows], np.int64)
            turn.episode = np.array([row.key.episode for row in rows], np.int64)
        taken = [i for i, row in enumerate(rows) if not row.first and self._happens("taken")]
        if taken:
            turn.taken = np.array(taken), self._take(kind, [rows[i] for i in taken])
        return turn

    def _take(self, kind: int, rows: list[Row]) -> Columns:
        n, (_, space) = len(rows), SPACES[kind]
        values = self._rng.integers(5, size=n) if kind == 0 else self._rng.uniform(space.low, space.high, (n, 2))
        values = values.astype(space.dtype)
        for i, row in enumerate(rows):
            self.lives[row.key].actions[-1:] = [{"action": values[i].copy()}]
        return {"action": values}

    def _overwrite(self) -> None:
        """Let nobody get away with not having copied."""
        for turn in self._turns:
            lent = (turn.slots, turn.reward, turn.terminated, turn.truncated, turn.first, turn.blind, turn.env_t)
            for column in (*turn.obs.values(), *lent, turn.episode):
                if column is not None:
                    column[:] = True if column.dtype == bool else -7

    # -- what is done about it ----------------------------------------------------------------------------------

    def send(self, turn: Turn, action: Columns) -> None:
        self.sends_left -= 1
        if self.sends_left == 0:
            raise KeyboardInterrupt
        self._open.remove(next(i for i, one in enumerate(self._turns) if one is turn))
        space = SPACES[turn.kind][1]
        assert list(action) == ["action"]
        assert action["action"].shape == (len(turn.slots), *leaf_shape(space))
        assert action["action"].dtype == space.dtype
        ended = np.zeros(len(turn.slots), bool)
        for flags in (turn.terminated, turn.truncated):
            ended |= False if flags is None else flags
        for i in np.flatnonzero(~ended):
            env, agent = self.seats[turn.slots[i]]
            key = Key(env, self.copies[env].episode, agent)
            self.lives[key].actions.append({"action": action["action"][i].copy()})
            self.lives[key].stamps.append(self.stamp(key))

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        turns = [{f.name: getattr(turn, f.name) for f in dataclasses.fields(turn)} for turn in self._turns]
        return {
            "how": "get_state",
            "turns": copy.deepcopy(turns),
            "open": list(self._open),
            "copies": [one.state_dict() for one in self.copies],
            "rng": copy.deepcopy(self._rng.bit_generator.state),
        }

    def load_state_dict(self, state: dict[str, Any]) -> str:
        self._turns = [Turn(**turn) for turn in state["turns"]]
        self._open = list(state["open"])
        for one, its in zip(self.copies, state["copies"], strict=True):
            one.load_state_dict(its)
            for agent, steps in one.inside.items():  # what was done before is kept elsewhere
                self.lives[Key(one.number, one.episode, agent)] = Life(actions=[{}] * steps, stamps=[None] * steps)
        self._rng.bit_generator.state = state["rng"]
        return str(state["how"])

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass

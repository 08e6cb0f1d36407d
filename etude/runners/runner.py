# SPDX-License-Identifier: Apache-2.0
"""Runner: Arena + Module + Connectors → Experience."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.connectors import Inputs, Pipeline
from etude.envs import Arena, Columns, Turn
from etude.errors import DataError, EnvError, EtudeError, ModuleError
from etude.experience import Experience
from etude.experience.check import check_finite
from etude.modules import Actor, Module
from etude.runners.buffers import Buffers
from etude.runners.episodes import EpisodeBook, Finished, Quota
from etude.runners.lookback import Lookback
from etude.spaces import leaf_dtype, leaf_shape, leaves

_SEEN = "module/"  # what the module saw, where connectors changed it; kept for Actor.finish only
_ORDER = {name: i for i, name in enumerate((col.OBS, col.ACTION, col.REWARD))}  # others behind them, as written
_SKIPPED = "skipped"  # no step was made here, or it was delivered already


@dataclasses.dataclass(slots=True)
class _Rollout:
    """The turns of one collection. Column t of the buffers is what slots saw at time t and what their act brought."""

    buffers: Buffers
    t: int
    """The columns filled so far; the first ``old`` of them by an earlier collection."""
    old: int
    finals: list[tuple[int, NDArray[np.int64], Columns]]
    """Final observations that the arena gave apart: the time of the step before, the slots, the columns."""

    def column(self, t: int) -> Columns:
        """All that was written at time ``t``."""
        return {name: column[:, t].copy() for name, column in self.buffers.columns.items()}


class Runner:
    """Lets a module act in an arena and gives what was lived through as Experience.

    Args:
        arena: Where to act. It is reset, with a seed derived from ``seed``, when first collected from.
        module: What acts. It is used as it is: an update of its weights is seen by the next collection.
        connectors: What stands between the two.
        seed: Of the arena, the actions drawn and the episodes' ids. None draws one from the operating system.

    The same seed gives the same Experience, bit for bit.
    """

    def __init__(
        self, arena: Arena, module: Module, connectors: Pipeline | None = None, *, seed: int | None = None
    ) -> None:
        self.arena = arena
        self.module = module
        self.connectors = connectors if connectors is not None else Pipeline([])
        env_seed, draws, ids = np.random.SeedSequence(seed).spawn(3)
        self._env_seed: int | None = int(env_seed.generate_state(1)[0] >> 1)
        self._rng = np.random.default_rng(draws)
        self._book = EpisodeBook(arena.num_slots, f"{ids.generate_state(1, np.uint64)[0]:016x}")
        self._actors: dict[bool, Actor] = {}
        self._carried: _Rollout | None = None
        self._lookback = Lookback(self.connectors.context, arena.num_slots)
        self._must_reset = True
        self._turns = 0
        self._prev: tuple[Columns, NDArray[np.float64]] | None = None
        self._nothing: Columns = {
            name: np.zeros((arena.num_slots, *leaf_shape(leaf)), leaf_dtype(leaf))
            for name, leaf in leaves(module.action_space, col.ACTION).items()
        }
        self.connectors.start(arena.num_slots)

    # -- collecting ---------------------------------------------------------------------------------------------

    def collect(
        self, *, num_steps: int | None = None, num_episodes: int | None = None, explore: bool = True
    ) -> Experience:
        """Act, and give the steps as raw Experience: what the env said and what the module chose.

        Args:
            num_steps: Exactly this many steps. Episodes go on from one collection to the next; one that is cut has its
                last observation in ``final_obs`` like any other, and connectors that need it get ``lookback`` rows,
                which count apart. All slots step together: the steps that are too many, fewer than there are slots,
                are kept for the next collection, with the ``logp`` and ``value`` of the weights that made them.
            num_episodes: This many whole episodes, dealt out to the slots beforehand so that short ones are not
                favoured. Running episodes are abandoned: every slot begins a new one, now and after.
            explore: Draw actions; else take the most likely ones.
        """
        if (num_steps is None) == (num_episodes is None):
            raise EtudeError("collect takes num_steps or num_episodes: one of them.")
        wanted = num_steps if num_episodes is None else num_episodes
        if wanted is None or wanted < 1:
            raise EtudeError(f"collect needs at least one step or episode, not {wanted}.")
        if self._must_reset or num_episodes is not None:
            self._reset()
        self._must_reset = True  # should this be broken off: the steps made until then are lost
        exp = (self._collect_steps if num_episodes is None else self._collect_episodes)(wanted, explore)
        self._must_reset = num_episodes is not None
        return exp

    def _reset(self) -> None:
        self.arena.reset(self._env_seed)
        self._env_seed = None  # seeded once: later resets go on in the envs' own streams
        self._book.abandon()
        self._carried = self._prev = None
        self._lookback.clear()

    def _collect_steps(self, num_steps: int, explore: bool) -> Experience:
        slots = self.arena.num_slots
        rollout, self._carried = self._carried, None
        if rollout is None:
            rollout = self._new_rollout(max(-(-num_steps // slots), self._turns))
        have = int((~rollout.buffers.columns[_SKIPPED][:, : rollout.t]).sum())
        if have < num_steps:
            actor = self._actor(explore)
            while have < num_steps:
                have += self._step(actor, rollout)
            self._finish(actor, rollout)
            self._turns = rollout.t
        valid = ~rollout.buffers.columns[_SKIPPED][:, : rollout.t]
        surplus = np.flatnonzero(valid[:, -1])[valid[:, -1].sum() - (have - num_steps) :]
        valid[surplus, -1] = False
        exp = self._cut(rollout, valid)
        if len(surplus):
            self._carried = self._carry(rollout, surplus)
        return exp

    def _collect_episodes(self, num_episodes: int, explore: bool) -> Experience:
        slots = self.arena.num_slots
        quota = Quota.of(num_episodes, slots)
        rollout = self._new_rollout(256)
        actor = self._actor(explore)
        owed = quota.owed.copy()
        while (owed > 0).any():
            self._step(actor, rollout)
            owed -= self._done(rollout, rollout.t - 1)
        self._finish(actor, rollout)
        valid = ~rollout.buffers.columns[_SKIPPED][:, : rollout.t]
        exp = self._cut(rollout, valid & quota.delivered(valid & self._done(rollout, slice(0, rollout.t))))
        return exp

    def _new_rollout(self, turns: int) -> _Rollout:
        buffers = Buffers(self.arena.num_slots, turns)
        buffers.add(_SKIPPED, np.bool_)
        buffers.add(col.REWARD, np.float64)
        return _Rollout(buffers, 0, 0, [])

    def _actor(self, explore: bool) -> Actor:
        if explore not in self._actors:
            self._actors[explore] = self.module.actor(explore=explore)
        self.module.eval()  # nothing is dropped out while acting; the learner goes back to training mode
        actor = self._actors[explore]
        actor.start(self._rng, self.arena.num_slots)
        return actor

    def _step(self, actor: Actor, rollout: _Rollout) -> int:
        """One turn: act on what the slots show and note what it brought. Gives how many steps that made."""
        turn, t, buffers = self.arena.recv(), rollout.t, rollout.buffers
        buffers.write(t, turn.obs)
        seen = turn.obs
        if self.connectors.observes:
            seen = self._seen(turn)
            buffers.write(t, {_SEEN + name: column for name, column in seen.items()})
        action, extras = actor.step(seen)
        self.arena.send(self.connectors.act(action))
        after = self.arena.recv()
        buffers.write(
            t,
            {
                **action,
                **extras,
                col.REWARD: after.reward,
                col.TERMINATED: after.terminated,
                col.TRUNCATED: after.truncated,
            },
        )
        if after.final_rows is not None and after.final_obs is not None:
            rollout.finals.append((t, after.final_rows, after.final_obs))
        if self.connectors.observes:
            self._prev = (action, after.reward)
        rollout.t += 1
        if turn.live is None:
            return buffers.num_slots
        buffers.write(t, {_SKIPPED: ~turn.live})
        return int(np.count_nonzero(turn.live))

    def _seen(self, turn: Turn) -> Columns:
        slots = np.arange(self.arena.num_slots)
        if self._prev is None:
            action, reward = self._nothing, np.zeros(len(slots))
        else:
            action, reward = self._prev
            if turn.first.any():
                action = {name: _blanked(column, turn.first) for name, column in action.items()}
                reward = _blanked(reward, turn.first)
        return self.connectors.online(Inputs(slots, turn.obs, turn.first, action, reward)).obs

    def _finish(self, actor: Actor, rollout: _Rollout) -> None:
        """Add the columns that are cheaper to compute for all new rows at once than turn by turn."""
        buffers, old, t = rollout.buffers, rollout.old, rollout.t
        seen = [name for name in buffers.columns if name.startswith(_SEEN)] or col.under(buffers.columns, col.OBS)
        rows = (buffers.num_slots, t - old)
        added = actor.finish(
            {name.removeprefix(_SEEN): buffers.flat(name, old, t) for name in seen},
            {n: buffers.flat(n, old, t) for n in (col.DIST_INPUTS, col.VALUE) if n in buffers.columns},
            {name: buffers.flat(name, old, t) for name in col.under(buffers.columns, col.ACTION)},
        )
        for name, values in added.items():
            shape = (buffers.num_slots, buffers.capacity, *values.shape[1:])
            if old == 0 and t == buffers.capacity:
                buffers.columns[name] = values.reshape(shape)
                continue
            if name not in buffers.columns:
                buffers.columns[name] = np.zeros(shape, values.dtype)
            buffers.columns[name][:, old:t] = values.reshape(*rows, *values.shape[1:])

    # -- cutting ------------------------------------------------------------------------------------------------

    def _done(self, rollout: _Rollout, t: int | slice) -> NDArray[np.bool_]:
        columns = rollout.buffers.columns
        return np.asarray(columns[col.TERMINATED][:, t] | columns[col.TRUNCATED][:, t])

    def _cut(self, rollout: _Rollout, deliver: NDArray[np.bool_]) -> Experience:
        """The rows ``deliver`` (bool ``[slots, T]``) as Experience: views of the buffers where they are all of them."""
        buffers, t = rollout.buffers, rollout.t
        hidden = (_SKIPPED, col.TERMINATED, col.TRUNCATED)
        names = [name for name in buffers.columns if name not in hidden and not name.startswith(_SEEN)]
        names.sort(key=lambda name: _ORDER.get(name.partition(col.SEPARATOR)[0], len(_ORDER)))
        slot, time = np.divmod(np.flatnonzero(deliver), t)
        rows = slot * buffers.capacity + time
        steps: Columns = {name: buffers.rows(name, rows) for name in names}
        terminated, truncated = (buffers.rows(name, rows) for name in (col.TERMINATED, col.TRUNCATED))
        last = np.flatnonzero(np.append(slot[1:] != slot[:-1], True) | terminated | truncated)
        offsets = np.append(0, last + 1)
        returns = np.add.reduceat(steps[col.REWARD], offsets[:-1])
        segments = self._book.enter(slot[last], np.diff(offsets), returns, terminated[last], truncated[last])
        final_obs = self._final_obs(rollout, slot[last], time[last])
        exp = Experience(steps, offsets, segments, final_obs)
        _check_numbers(exp)
        return self._lookback.lead(exp, slot[last]) if self._lookback.context else exp

    def _final_obs(self, rollout: _Rollout, slot: NDArray[np.int64], time: NDArray[np.int64]) -> Columns:
        """What each slot saw after its step at ``time``: the next column, the pending turn, or what came apart."""
        pending = self.arena.recv().obs
        following = np.minimum(time + 1, rollout.t - 1)
        is_pending = time + 1 == rollout.t
        final: Columns = {}
        for name, now in pending.items():
            values = rollout.buffers.columns[name][slot, following]
            values[is_pending] = now[slot[is_pending]]
            final[name] = values
        key = slot * (rollout.t + 1) + time
        for t, rows, columns in rollout.finals:
            where = np.searchsorted(key, rows * (rollout.t + 1) + t)
            where = np.minimum(where, len(key) - 1)
            hit = key[where] == rows * (rollout.t + 1) + t
            for name, values in columns.items():
                final[name][where[hit]] = values[hit]
        return final

    def _carry(self, rollout: _Rollout, slots: NDArray[np.int64]) -> _Rollout:
        """The last column again, with only ``slots`` not yet delivered."""
        last = rollout.t - 1
        carried = _Rollout(Buffers(self.arena.num_slots, rollout.buffers.capacity), 1, 1, [])
        carried.buffers.write(0, rollout.column(last))
        delivered = np.ones(self.arena.num_slots, bool)
        delivered[slots] = False
        carried.buffers.write(0, {_SKIPPED: delivered})
        carried.finals = [(0, rows, columns) for t, rows, columns in rollout.finals if t == last]
        return carried

    # -- the rest -----------------------------------------------------------------------------------------------

    def take_finished(self) -> Finished:
        """Returns and lengths of the episodes whose ends were collected since this was last asked."""
        return self._book.take_finished()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next collection depends on, the module's weights left out; plain data and arrays."""
        carried = self._carried
        return {
            "rng": self._rng.bit_generator.state,
            "env_seed": self._env_seed,
            "must_reset": self._must_reset,
            "book": self._book.state_dict(),
            "lookback": self._lookback.state_dict(),
            "connectors": self.connectors.state_dict(),
            "prev": None if self._prev is None else [self._prev[0], np.array(self._prev[1])],
            "carried": None if carried is None else [carried.column(0), carried.finals],
            "arena": None if self._must_reset else self.arena.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Go on from `state_dict`; says how the running episodes went on (see `Arena.load_state_dict`).

        Where there are other slots than before, new episodes begin.
        """
        self._rng.bit_generator.state = state["rng"]
        self._env_seed = state["env_seed"]
        self._carried, self._prev = None, None
        self.connectors.load_state_dict(state["connectors"])
        before, now = len(state["book"]["t"]), self.arena.num_slots
        if before != now:
            self.connectors.start(now)
            self._book.load_counter(state["book"])
            self._renew()
            return f"new episodes: there were {before} slots, and now there are {now}"
        self._book.load_state_dict(state["book"])
        self._lookback.load_state_dict(state["lookback"])
        self._must_reset = state["must_reset"]
        if state["prev"] is not None:
            self._prev = (state["prev"][0], state["prev"][1])
        if state["carried"] is not None:
            columns, finals = state["carried"]
            self._carried = _Rollout(Buffers(self.arena.num_slots, 1), 1, 1, [tuple(final) for final in finals])
            self._carried.buffers.write(0, columns)
        if state["arena"] is None:
            return "no episode was running"
        how = self.arena.load_state_dict(state["arena"])
        if how.startswith("new episodes"):
            self._renew()
        return how

    def _renew(self) -> None:
        """Let new episodes begin in envs that know nothing of the earlier ones' random streams."""
        self._must_reset, self._env_seed = True, int(self._rng.integers(2**31))

    def close(self) -> None:
        """Close the arena."""
        self.arena.close()


def _blanked(column: NDArray[Any], where: NDArray[np.bool_]) -> NDArray[Any]:
    column = column.copy()
    column[where] = 0
    return column


def _check_numbers(exp: Experience) -> None:
    """Raise an error that names the culprit, env or module, where what was collected is not finite."""
    try:
        check_finite(exp, (col.OBS, col.REWARD, col.DIST_INPUTS, col.VALUE))
    except DataError as error:
        seen = np.ones(exp.num_steps, bool)
        for column in col.subtree(exp.steps, col.OBS).values():
            if column.dtype.kind == "f":
                seen &= np.isfinite(column).reshape(len(column), -1).all(axis=1)
        for name in (col.DIST_INPUTS, col.VALUE):
            given = exp.steps.get(name, np.zeros(exp.num_steps))
            if (seen & ~np.isfinite(given).reshape(len(given), -1).all(axis=1)).any():
                raise ModuleError(
                    f"the module gave `{name}` that is not finite for observations that are: its weights may have "
                    f"grown beyond bounds ({error})"
                ) from error
        raise EnvError(f"the env gave numbers that nothing can be learned from: {error}") from error

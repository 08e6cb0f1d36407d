# SPDX-License-Identifier: Apache-2.0
"""Runner: collects Experience from an arena with policies."""

import logging
import operator
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from etude.columns import Columns
from etude.display import short
from etude.envs import Arena
from etude.errors import EtudeError, SettingsError
from etude.experience import Experience, arrays
from etude.experience.arrays import describe
from etude.interruption import interruptible
from etude.modules.module import load_weights
from etude.policies import Policy, PolicyLike
from etude.runners.callbacks import CallbackLike, CallbackRunner, callback_from
from etude.runners.episodes import EpisodeTracker, Finished
from etude.runners.limits import CountBy, EpisodeLimit, Lengths, Limit, StepLimit, WholeEpisodeLimit
from etude.runners.mapping import ModuleOf, PolicyMapping, Share
from etude.runners.rollout import Rollout, TensorRollout

PHASES = ("env", "observe", "infer", "act", "note")
"""The parts of a turn that are timed: waiting for envs; connectors before the module; the module; connectors after it;
storing rows."""

_log = logging.getLogger("etude.runners")

LONG_EPISODE: Final = 50_000
"""The steps of an episode after which a run that waits for its end logs a warning. Atari has at most 27,000."""


class Runner:
    """Collects Experience by letting policies act in an arena.

    Args:
        arena: The arena. It is reset before the first collection, with a seed derived from ``seed``.
        policies: The policies that act: one for all slots, or several by module id. They are not copied, so that
            updates of their weights apply to the next collection.
        module_of: Chooses the module for an agent whenever the agent begins an episode; see `ModuleOf`.
        seed: The seed of the arena, the actions and the episode ids. None: a random one.
        count_steps_by: Whether to count env steps or agent steps if several agents share an env.
        callbacks: Called while episodes run, in this order; see `Callback`.
        lengths: Limits on the length of segments; None: no limits.

    The same seed gives the same Experience, bit for bit, if the arena returns its turns in the same order. In an arena
    of tensors, the columns of Experience are tensors on the same device (see `Arena.device`).
    """

    def __init__(
        self,
        arena: Arena,
        policies: PolicyLike | Mapping[str, PolicyLike],
        *,
        module_of: ModuleOf | None = None,
        seed: int | None = None,
        count_steps_by: CountBy = "env_steps",
        callbacks: Sequence[CallbackLike] = (),
        lengths: Lengths | None = None,
    ) -> None:
        if not callable(getattr(arena, "recv", None)):
            raise SettingsError(
                f"Runner takes an arena, not {arena!r}: write Runner(etude.make_arena(env, num_envs), policy)."
            )
        self.arena = arena
        self._env_seed: int | None
        self._rng: np.random.Generator
        self._tracker = EpisodeTracker("", arena)
        self._seconds = 0.0  # seconds of collecting, without the running collection, which may be interrupted
        self._epoch: float | None = None  # while collecting: when it began, as if there had been no pauses
        self._by: CountBy = count_steps_by
        self._limit: Limit  # of the running or latest collection
        self._late = 0  # results of the current turns that are left for the next collection
        self._lengths = lengths
        self._seq_nos: dict[str | None, int] = {}  # by module: version of the weights taken by `take_weights`
        self._shares: list[Share] = []  # stored rows of the current turns, not yet acted on
        self._is_whole = self._is_stopped = self._has_warned = False
        self._must_reset = True
        self._at = 0.0  # time of the current turns, in seconds of collecting
        self.warn_of_lost_episodes = False
        """Whether to log a warning, at the next reset, if the envs' running episodes can't be saved in checkpoints."""
        self.checks_offline = False
        """Whether to refuse connectors that change observations for acting but not for learning; set by algorithms."""
        self.agent_steps = 0
        """The agent steps returned since the runner was made."""
        self.env_steps = 0
        """The env steps returned since the runner was made; the same number if agents have no names."""
        self.times = dict.fromkeys(PHASES, 0.0)
        """Seconds since the runner was made, by phase; with callbacks, also in ``callbacks``, and in ``render`` if one
        of them renders."""
        self.turns = 0
        """The number of turns since the runner was made."""
        self.policies: dict[str | None, Policy] = {}
        """The policies by module id; None is the id of a single, unnamed module."""
        self.rollouts: dict[str | None, Rollout] = {}
        """The rollouts by module id."""
        self._set_policies(policies, module_of)
        self.restart_episodes(seed)
        called = [callback_from(callback) for callback in callbacks]
        self._callbacks = CallbackRunner(called, arena, self._tracker, self._clock, self.rollouts) if called else None

    def __repr__(self) -> str:
        return short(self, repr(self.arena), policies=len(self.policies), env_steps=self.env_steps)

    def _set_policies(self, policies: PolicyLike | Mapping[str, PolicyLike], module_of: ModuleOf | None) -> None:
        by_id: Mapping[Any, PolicyLike] = policies if isinstance(policies, Mapping) else {None: policies}
        self.policies = {name: own if isinstance(own, Policy) else Policy(own) for name, own in by_id.items()}
        self.rollouts = {name: self._rollout(own, name) for name, own in self.policies.items()}
        self._mapping = PolicyMapping(self.rollouts, module_of, self.arena, self._tracker)

    def _rollout(self, policy: Policy, module_id: str | None) -> Rollout:
        slots, device = self.arena.num_slots, self.arena.device
        if device is None:
            return Rollout(policy, module_id, slots)
        return TensorRollout(policy, module_id, slots, device)

    def set_policies(
        self, policies: PolicyLike | Mapping[str, PolicyLike], *, module_of: ModuleOf | None = None
    ) -> None:
        """Replace the policies, as in the constructor. The running episodes are abandoned."""
        self._set_policies(policies, module_of)
        if self._callbacks is not None:
            self._callbacks.rollouts = self.rollouts
        self.abandon_episodes()

    # -- collecting ---------------------------------------------------------------------------------------------

    def collect(
        self,
        *,
        num_steps: int | None = None,
        num_episodes: int | None = None,
        whole_episodes: bool = False,
        explore: bool = True,
    ) -> Experience:
        """Act, and return the steps as raw Experience: the env's observations and rewards and the module's outputs.

        Args:
            num_steps: Collect exactly this many steps. Episodes continue in the next collection; a segment that is cut
                has its last observation in ``final_obs`` like any other, and connectors that need context get
                ``lookback`` rows, which are not counted. Extra steps, because slots act together, and steps whose
                results are not known yet are kept for the next collection, with the ``logp`` of the weights that made
                them. If agents take turns, a few env steps may have no result for any agent.
            num_episodes: Collect this many whole episodes, assigned to the envs in advance so that short ones are not
                favoured. Running episodes are abandoned: every env begins a new one, now and in the next collection. An
                episode that is cut because its env failed is played again, up to ten times; then it is left out.
            whole_episodes: With ``num_steps``, return only finished episodes, as soon as they have that many steps
                together. The others continue in the next collection and stay in memory until they end; a warning is
                logged once if these exceed ten times ``num_steps``, and 1,000 steps.
            explore: Sample actions; otherwise take the most likely ones.

        Raises:
            EtudeError: not exactly one of the two numbers is given, or modules have different columns: see
                `collect_each`.
        """
        parts = self.collect_each(
            num_steps=num_steps, num_episodes=num_episodes, whole_episodes=whole_episodes, explore=explore
        )
        if not parts:
            return next(rollout for rollout in self.rollouts.values() if rollout.rows.names).nothing()
        if len(parts) == 1:
            return next(iter(parts.values()))
        shapes = {tuple((n, describe(c)) for n, c in sorted(exp.steps.items())) for exp in parts.values()}
        if len(shapes) > 1:
            raise EtudeError(
                f"the modules {sorted(map(str, parts))} have columns that don't fit into one Experience: use "
                "collect_each, which returns one for each module."
            )
        return Experience.concat(list(parts.values()))

    def collect_each(
        self,
        *,
        num_steps: int | None = None,
        num_episodes: int | None = None,
        whole_episodes: bool = False,
        explore: bool = True,
    ) -> dict[str | None, Experience]:
        """Like `collect`, but return an Experience for each module that has steps, by module id."""
        if (num_steps is None) == (num_episodes is None):
            raise EtudeError("collect takes either num_steps or num_episodes: give one of them.")
        wanted = num_steps if num_steps is not None else num_episodes
        if not isinstance(wanted, int | np.integer) or wanted < 1:
            raise EtudeError(f"collect needs at least one step or episode, not {wanted!r}.")
        is_whole = whole_episodes and num_episodes is None
        goes_on = num_episodes is None and is_whole == self._is_whole and not self._must_reset
        self._is_whole = is_whole
        self._must_reset = True  # if this is interrupted, its steps are lost
        epoch = self._epoch = perf_counter() - self._seconds
        self._run(wanted, num_episodes is not None, explore, goes_on=goes_on)
        given = self._cut(num_steps)
        self._must_reset = num_episodes is not None
        self._seconds, self._epoch = perf_counter() - epoch, None
        return given

    @interruptible
    def _run(self, wanted: int, by_episode: bool, explore: bool, *, goes_on: bool) -> None:
        """Act until the collection has ``wanted`` steps, or as many episodes."""
        for rollout in self.rollouts.values():
            rollout.start(self._rng, explore)
        if not goes_on:
            self._reset()
        elif self._callbacks is not None:
            self._callbacks.find_rows()
        if by_episode:
            self._limit = EpisodeLimit(wanted, self.arena.num_envs)
        elif self._is_whole:
            self._limit = WholeEpisodeLimit(self._tracker, self._by, wanted)
        else:
            self._limit = StepLimit(self._tracker, self._by, wanted, self._late)
        if not goes_on:
            self._receive()
        while self._limit.is_open:
            self._act()
            self._receive()
            if self._limit.by_episode and not self._has_warned:
                self._warn_of_long_episodes(wanted)

    def _clock(self) -> float:
        """Seconds of collecting until now. The time between collections does not count."""
        return self._seconds if self._epoch is None else perf_counter() - self._epoch

    def _reset(self) -> None:
        self.arena.reset(self._env_seed)
        if self.warn_of_lost_episodes:
            self.warn_of_lost_episodes = False
            lost = self.arena.state_dict()
            if lost["how"] == "new episodes":
                _log.warning(
                    "The state of this env can't be saved: a resumed run will begin new episodes (%s).", lost["why"]
                )
        self._env_seed = None  # seeded once: later resets continue the envs' random streams
        self._late = 0
        self._tracker.abandon()
        for rollout in self.rollouts.values():
            rollout.clear()
        if self._callbacks is not None:
            self._callbacks.abandon()

    def _receive(self) -> None:
        """Store the arena's next turns."""
        if self._is_stopped:
            raise EtudeError("the collection was stopped.")
        begin = perf_counter()
        try:
            turns = self.arena.recv()
        except EtudeError as error:
            for rollout in self.rollouts.values():
                rollout.check_chosen(error)
            raise
        received = perf_counter()
        tracker, limit, callbacks = self._tracker, self._limit, self._callbacks
        assert self._epoch is not None
        self._at, self._shares = received - self._epoch, []
        tracker.next_turns()
        for rollout in self.rollouts.values():
            rollout.pending = rollout.rows.size
        for i, turn in enumerate(turns):
            if turn.lost is not None:
                self._fail(turn.lost)
            ended = tracker.note(turn, self._at)
            limit.count(turn, *ended)
            if callbacks is not None:
                callbacks.begin(turn, self._at, limit)
            shares = self._mapping.split(turn, i)
            for share in shares:
                share.start = share.rollout.note(share.turn)
            self._shares += shares
            if callbacks is not None:
                callbacks.note(turn, shares, ended[0])
        self.turns += 1
        self.times["env"] += received - begin
        self.times["note"] += perf_counter() - received
        if callbacks is not None:
            callbacks.call()
            self.times["note"] -= callbacks.spend(self.times)

    def _fail(self, slots: Any) -> None:
        """End the episodes of these slots, whose envs failed, with their last known results."""
        envs, numbers = self._tracker.running(slots)
        if self._callbacks is not None:
            self._callbacks.cut(envs)
        self._limit.cut(envs, numbers)
        self._tracker.cut(envs)
        for rollout in self.rollouts.values():
            rollout.fail(slots)

    def _act(self) -> None:
        """Act on the current turns."""
        action: Columns = {}
        for i, share in enumerate(self._shares):
            whole = share.whole
            if not whole.waits:
                continue
            chosen = share.rollout.act(share.turn, share.start, self.times)
            if share.rows is not None:
                action = _put(action, chosen, share.rows, len(whole.slots))
                if i + 1 < len(self._shares) and self._shares[i + 1].whole is whole:
                    continue
                chosen, action = action, {}
            begin = perf_counter()
            self.arena.send(whole, chosen)
            self.times["env"] += perf_counter() - begin

    def _warn_of_long_episodes(self, wanted: int) -> None:
        if self._tracker.t.max() > LONG_EPISODE:
            self._has_warned = True
            _log.warning(
                "an episode has more than %s steps, and the run waits for its end. Without a time limit, a policy that "
                "takes the most likely actions may repeat one forever. Set a limit, such as "
                "gymnasium.wrappers.TimeLimit, Workers(max_steps=...) in the config or max_steps of an evaluation, or "
                "let the policy sample its actions (explore).",
                f"{LONG_EPISODE:,}",
            )
        held = sum(rollout.rows.size for rollout in self.rollouts.values())
        if self._is_whole and held > max(10 * wanted, 1000):
            self._has_warned = True
            warnings.warn(
                f"{held} steps of episodes that have not ended are held in memory, where {wanted} were asked for. If "
                "episodes may be that long, ask for more steps, or for fragments: whole_episodes=False.",
                stacklevel=5,
            )

    def _cut(self, num_steps: int | None) -> dict[str | None, Experience]:
        """The collected steps by module id, after counting them and applying the limits on lengths."""
        limit, self._late = self._limit, 0
        late = defaultdict[str | None, list[NDArray[np.int64]]](list)  # rows, by module
        for share in reversed(self._shares):
            rows = share.new_results()
            share.results = rows[limit.late(share.turn.slots[rows])]
            if len(share.results):
                self._late += len(share.results)
                late[share.rollout.module_id].append(share.start + share.results)
        given = {}
        for name, rollout in self.rollouts.items():
            if self.checks_offline and rollout.connectors.observes:
                rollout.connectors.check_offline()
            exp = rollout.cut(limit, late[name], self._tracker)
            if exp is not None:
                steps = int(exp.offsets[-1] - exp.segments.lookback.sum())
                self.agent_steps += steps
                self.env_steps += 0 if self._tracker.named else steps
                given[name] = exp if self._lengths is None else self._lengths.keep(exp, rollout.connectors.context)
        if self._tracker.named:
            by_clock = self._by == "env_steps" and not limit.by_episode
            made, self._tracker.moves = self._tracker.moves, 0
            self.env_steps += num_steps if by_clock and num_steps is not None else made
        if isinstance(limit, StepLimit):
            self._tracker.finish_except(limit.late_envs)
        else:
            self._tracker.finish(limit.delivers)
        if self._callbacks is not None:
            self._callbacks.segments(given.values())
            self._callbacks.spend(self.times)
        return given

    # -- the rest -----------------------------------------------------------------------------------------------

    def take_finished(self) -> Finished:
        """The episodes whose ends were collected since the last call."""
        finished = self._tracker.take_finished()
        return finished if self._callbacks is None else self._callbacks.logged(finished)

    def stats(self) -> dict[str, float]:
        """The arena's counts since the last call, such as ``faulty_episodes``."""
        return self.arena.stats() | ({} if self._lengths is None else self._lengths.stats())

    def take_weights(
        self, weights: Mapping[str, torch.Tensor], seq_no: int, module_id: str | None = None, *, shared: bool = False
    ) -> bool:
        """Load a module's weights from elsewhere, unless they are older than the weights loaded before.

        Weights may arrive from a learner in another order than they were sent; a runner never goes back.

        Args:
            weights: The module's ``state_dict()``, on any device; copied.
            seq_no: The number of gradient steps that made them.
            module_id: The module's id; None for a single, unnamed module.
            shared: Use the given memory for acting if possible, without a copy; it must not be written to.

        Returns:
            Whether they were loaded.

        Raises:
            EtudeError: there is no such module.
            CheckpointError: the weights do not fit the module, which is then unchanged.
        """
        if module_id not in self.rollouts:
            raise EtudeError(f"there is no module {module_id!r}; the modules are {list(self.rollouts)}.")
        if seq_no < self._seq_nos.get(module_id, 0):
            return False
        load_weights(self.rollouts[module_id].module, weights, shared=shared)
        self._seq_nos[module_id] = seq_no
        return True

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next collection depends on, except the modules' weights; plain data and arrays."""
        return {
            "rng": self._rng.bit_generator.state,
            "env_seed": self._env_seed,
            "must_reset": self._must_reset,
            "is_whole": self._is_whole,
            "tracker": self._tracker.state_dict(),
            "steps": [self.env_steps, self.agent_steps],
            "seconds": [self._seconds, self._at],
            "rollouts": [rollout.state_dict() for rollout in self.rollouts.values()],
            "mapping": self._mapping.state_of(self._shares),
            "callbacks": None if self._callbacks is None else self._callbacks.state_dict(),
            "arena": None if self._must_reset else self.arena.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Restore a `state_dict`; return how the running episodes continue (see `Arena.load_state_dict`).

        If the number of slots has changed, new episodes begin.
        """
        self.warn_of_lost_episodes = False  # the return value says that
        self._rng.bit_generator.state = state["rng"]
        self._env_seed = state["env_seed"]
        self.env_steps, self.agent_steps = map(operator.index, state["steps"])
        self._is_whole = state["is_whole"]
        self._seconds, self._at = map(float, state["seconds"])
        self._epoch = None
        called = state["callbacks"] if self._callbacks is not None else None
        if self._callbacks is not None and called is not None:
            self._callbacks.load_own_states(called)
        before, now = len(state["tracker"]["t"]), self.arena.num_slots
        rollouts = list(zip(self.rollouts.values(), state["rollouts"], strict=True))
        if before != now:
            for rollout, stored in rollouts:
                rollout.connectors.load_state_dict(stored["connectors"])
            self.abandon_episodes()
            return f"new episodes: there were {before} slots, and now there are {now}"
        for rollout, stored in rollouts:
            rollout.load_state_dict(stored)
        self._tracker.load_state_dict(state["tracker"])
        if self._callbacks is not None and called is not None:
            self._callbacks.load_state_dict(called)
        self._must_reset = state["must_reset"]
        if state["arena"] is None:
            if self._env_seed is None:
                self._renew()
            return "no episode was running"
        how = self.arena.load_state_dict(state["arena"])
        if how.startswith("new episodes"):
            self._renew()
        else:
            self._shares = self._mapping.load_state(state["mapping"], self.arena.recv())
            self._late = sum(len(share.new_results()) for share in self._shares)
        return how

    def restart_episodes(self, seed: int | None) -> None:
        """Abandon the running episodes: the next ones are those of a new runner with this seed."""
        env_seed, draws, ids = np.random.SeedSequence(seed).spawn(3)
        self._rng = np.random.default_rng(draws)
        for rollout in self.rollouts.values():
            rollout.connectors.start(self.arena.num_slots)
        self._begin(f"{ids.generate_state(1, np.uint64)[0]:016x}", int(env_seed.generate_state(1)[0] >> 1))

    def abandon_episodes(self) -> None:
        """Abandon the running episodes: the next collection begins new ones. Connectors keep their statistics."""
        self.warn_of_lost_episodes = False
        for rollout in self.rollouts.values():
            rollout.connectors.start(self.arena.num_slots)
        self._renew()

    def _renew(self) -> None:
        """Begin new episodes, with new ids and a new seed for the envs."""
        self._begin(f"{self._rng.integers(1 << 63):016x}", int(self._rng.integers(2**31)))

    def _begin(self, ids: str, env_seed: int) -> None:
        self._shares = []
        self._tracker.renew(ids)
        self._must_reset, self._env_seed = True, env_seed

    def stop(self) -> None:
        """Make a collection in another thread end with an EtudeError at its next turn."""
        self._is_stopped = True

    def close(self) -> None:
        """Close the arena."""
        self.arena.close()


def _put(whole: Columns, part: Columns, rows: Any, count: int) -> Columns:
    """``whole`` with the rows of ``part`` written into it; if ``whole`` is empty, it is created with ``count`` rows."""
    for name, column in part.items():
        if name not in whole:
            whole[name] = arrays.zeros(count, column)
        whole[name][rows] = column
    return whole

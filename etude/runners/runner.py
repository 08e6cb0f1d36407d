# SPDX-License-Identifier: Apache-2.0
"""Runner: Arena + Modules + Connectors → Experience."""

import warnings
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.connectors import Pipeline
from etude.envs import Arena
from etude.errors import EtudeError
from etude.experience import Experience
from etude.experience.experience import offsets_of
from etude.modules import Module
from etude.modules.weights import load_weights
from etude.runners.callbacks import CallbackLike, callback_from
from etude.runners.counting import CountBy, Counter
from etude.runners.episodes import EpisodeBook, Finished, Key
from etude.runners.faults import check_chosen, check_numbers
from etude.runners.lengths import Lengths
from etude.runners.lookback import Lookback
from etude.runners.quota import Dealt, Quota, Whole
from etude.runners.routes import ModuleOf, Part, Routes
from etude.runners.track import EPISODE, SLOT, Steps, Track
from etude.runners.watch import Watch

PHASES = ("env", "observe", "infer", "act", "note")
"""Where the time of turns goes: waiting for envs; connectors towards the module; the module; connectors back; keeping
what was lived through."""


class Runner:
    """Lets modules act in an arena and gives what was lived through as Experience.

    Args:
        arena: Where to act. It is reset, with a seed derived from ``seed``, when first collected from.
        modules: What acts: one module for all slots, or several by id. They are used as they are: an update of their
            weights is seen by the next collection.
        connectors: What stands between the two; by module id where there are several.
        module_of: Which module acts for an agent, asked when the agent begins an episode; see `ModuleOf`.
        seed: Of the arena, the actions drawn and the episodes' ids. None draws one from the operating system.
        count_steps_by: What a step is where several agents share an env: one of the env's, or one of an agent's.
        callbacks: Called while episodes run, in this order; see `Callback`.
        lengths: How long segments may be; None is as they come.

    The same seed gives the same Experience, bit for bit, where the arena gives its turns in the same order.
    """

    def __init__(
        self,
        arena: Arena,
        modules: Module | Mapping[str, Module],
        connectors: Pipeline | Mapping[str, Pipeline] | None = None,
        *,
        module_of: ModuleOf | None = None,
        seed: int | None = None,
        count_steps_by: CountBy = "env_steps",
        callbacks: Sequence[CallbackLike] = (),
        lengths: Lengths | None = None,
    ) -> None:
        self.arena = arena
        env_seed, draws, ids = np.random.SeedSequence(seed).spawn(3)
        self._env_seed: int | None = int(env_seed.generate_state(1)[0] >> 1)
        self._rng = np.random.default_rng(draws)
        prefix = f"{ids.generate_state(1, np.uint64)[0]:016x}"
        self._book = EpisodeBook(prefix, arena.env_of, arena.agents)
        self._cast(modules, connectors, module_of)
        self._counter = Counter(arena, count_steps_by)
        self._parts: list[Part] = []
        """What the arena shows: in the logs, and not yet acted on."""
        self._overs: list[Key] = []
        """Episodes that have ended for all agents, but were not told of yet."""
        self._quota: Quota | None = None
        self._whole = Whole(arena, count_steps_by)
        self._is_whole = False  # unfinished episodes are kept as a whole
        self._lengths = Lengths() if lengths is None else lengths
        self._warned = False
        self._must_reset = True
        self.times = dict.fromkeys(PHASES, 0.0)
        """Seconds since the runner was made, by phase; with callbacks, also those in ``callbacks``, and where one of
        them draws, those in ``render``."""
        self._seconds = 0.0  # of collecting, until now or until the running collection began
        self._at = 0.0  # when the arena showed what it does
        self._epoch: float | None = None  # when a collection runs: when all had begun, were there no pauses
        self.turns = 0
        """Turns since the runner was made."""
        self.agent_steps = 0
        """Steps of agents given out since the runner was made."""
        self.env_steps = 0
        """Steps of envs likewise; as many, where agents have no names."""
        called = [callback_from(callback) for callback in callbacks]
        self._watch = Watch(called, arena, self._book, self.tracks, self._clock) if called else None

    def _cast(
        self,
        modules: Module | Mapping[str, Module],
        connectors: Pipeline | Mapping[str, Pipeline] | None,
        module_of: ModuleOf | None,
    ) -> None:
        by_id: Mapping[Any, Module] = {None: modules} if isinstance(modules, Module) else modules
        slots = self.arena.num_slots
        self._seq_nos: dict[str | None, int] = {}
        """Of the weights that were taken from elsewhere."""
        self.tracks: dict[str | None, Track] = {}
        for module_id, module in by_id.items():
            pipeline = connectors.get(module_id) if isinstance(connectors, Mapping) else connectors
            pipeline = Pipeline([]) if pipeline is None else pipeline
            self.tracks[module_id] = Track(module, pipeline, module_id, slots)
        self._lookbacks = {name: Lookback(track.connectors.context, slots) for name, track in self.tracks.items()}
        self._routes = Routes(self.tracks, module_of, self.arena, self._book)

    def set_modules(
        self,
        modules: Module | Mapping[str, Module],
        connectors: Pipeline | Mapping[str, Pipeline] | None = None,
        *,
        module_of: ModuleOf | None = None,
    ) -> None:
        """Let these modules act from now on, as when the runner was made. The running episodes are abandoned."""
        self._cast(modules, connectors, module_of)
        if self._watch is not None:
            self._watch.cast(self.tracks)
        self.begin_anew()

    def _clock(self) -> float:
        """Seconds of collecting until now."""
        return self._seconds if self._epoch is None else perf_counter() - self._epoch

    @property
    def connectors(self) -> Pipeline:
        """Those of the only module, or of the first."""
        return next(iter(self.tracks.values())).connectors

    @property
    def module(self) -> Module:
        """The only module, or the first."""
        return next(iter(self.tracks.values())).module

    # -- collecting ---------------------------------------------------------------------------------------------

    def collect(
        self,
        *,
        num_steps: int | None = None,
        num_episodes: int | None = None,
        whole_episodes: bool = False,
        explore: bool = True,
    ) -> Experience:
        """Act, and give the steps as raw Experience: what the env said and what the module chose.

        Args:
            num_steps: Exactly this many steps. Episodes go on from one collection to the next; one that is cut has its
                last observation in ``final_obs`` like any other, and connectors that need it get ``lookback`` rows,
                which count apart. Steps that are too many, because slots act together, and steps whose result has not
                come yet are kept for the next collection, with the ``logp`` and ``value`` of the weights that made
                them. Where agents take turns, a few steps of their env may bring none of them a result.
            num_episodes: This many whole episodes, dealt out to the envs beforehand so that short ones are not
                favoured. Running episodes are abandoned: every env begins a new one, now and after.
            whole_episodes: With ``num_steps``: give out only episodes that have ended, as soon as they have that many
                steps together. The others go on in the next collection, and are held in memory until they end; a
                warning says so, once, where that are over ten times ``num_steps``, and 1,000 steps at least.
            explore: Draw actions; else take the most likely ones.

        Raises:
            EtudeError: neither or both are asked for, or modules have different columns: see `collect_each`.
        """
        parts = self.collect_each(
            num_steps=num_steps, num_episodes=num_episodes, whole_episodes=whole_episodes, explore=explore
        )
        if not parts:
            return next(track for track in self.tracks.values() if track.log.columns).nothing()
        if len(parts) == 1:
            return next(iter(parts.values()))
        columns = {name: set(exp.steps) for name, exp in parts.items()}
        shapes = {tuple((n, c.dtype.str, c.shape[1:]) for n, c in sorted(exp.steps.items())) for exp in parts.values()}
        if len(shapes) > 1:
            raise EtudeError(
                f"the modules {sorted(map(str, columns))} have columns that don't go into one Experience: use "
                "collect_each, which gives one for each module."
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
        """As `collect`, but an Experience for each module with steps whose results have come, by its id."""
        if (num_steps is None) == (num_episodes is None):
            raise EtudeError("collect takes num_steps or num_episodes: one of them.")
        wanted = num_steps if num_steps is not None else num_episodes
        if wanted is None or wanted < 1:
            raise EtudeError(f"collect needs at least one step or episode, not {wanted}.")
        is_whole = whole_episodes and num_episodes is None
        goes_on = num_episodes is None and is_whole == self._is_whole and not self._must_reset
        self._is_whole = is_whole
        self._quota = self._whole if is_whole else None
        if num_episodes is not None:
            self._quota = Dealt(num_episodes, self.arena.num_envs)
        self._must_reset = True  # should this be broken off: the steps made until then are lost
        self._begin(explore, goes_on)
        if self._quota is None:
            self._run_steps(wanted)
        else:
            self._run_episodes(self._quota, wanted)
        parts = self._cut()
        steps = sum(exp.num_steps - int(exp.segments.lookback.sum()) for exp in parts.values())
        self.agent_steps += steps
        self.env_steps += self._counter.env_steps(steps, None if is_whole else num_steps)
        given = {name: self._lengths.keep(exp, self._lookbacks[name].context) for name, exp in parts.items()}
        if self._watch is not None:
            self._watch.segments(given.values())
            self._watch.spend(self.times)
        self._must_reset = num_episodes is not None
        self._seconds, self._epoch = self._clock(), None
        return given

    def _begin(self, explore: bool, goes_on: bool) -> None:
        for track in self.tracks.values():
            track.start(self._rng, explore)
        self._epoch = perf_counter() - self._seconds
        if goes_on:
            self._note_again()
            return
        self.arena.reset(self._env_seed)
        self._env_seed = None  # seeded once: later resets go on in the envs' own streams
        self._book.abandon()
        self._counter.clear()
        self._overs.clear()
        self._whole.running[:] = 0
        for module_id, track in self.tracks.items():
            track.clear()
            self._lookbacks[module_id].clear()
        if self._watch is not None:
            self._watch.abandon()
        self._receive()

    def _run_steps(self, num_steps: int) -> None:
        while self._counter.steps < num_steps:
            self._act()
            self._receive()
        rows = [part.counted_rows() for part in self._parts]
        late = self._counter.late([part.turn.slots[r] for part, r in zip(self._parts, rows, strict=True)], num_steps)
        for part, some, is_late in zip(self._parts, rows, late, strict=True):
            self._postpone(part, some[is_late])

    def _run_episodes(self, quota: Quota, wanted: int) -> None:
        if isinstance(quota, Whole):
            quota.start(wanted)
        while quota.is_owed:
            self._act()
            self._receive()
            if isinstance(quota, Whole) and not self._warned:
                self._warn_of_long_episodes(wanted)
        if isinstance(quota, Whole):
            for part in self._parts:
                self._postpone(part, self._unfinished(part, quota))

    def _unfinished(self, part: Part, quota: Quota) -> NDArray[np.int64]:
        """The rows of a part with results in episodes that have not ended."""
        turn, rows = part.turn, part.counted_rows()
        if turn.episode is not None:
            return rows[~quota.delivered(self.arena.env_of[turn.slots[rows]], turn.episode[rows])]
        ended = np.zeros(len(turn.slots), bool)
        for flag in (turn.terminated, turn.truncated):
            if flag is not None:
                ended |= flag
        return rows[~ended[rows]]

    def _warn_of_long_episodes(self, wanted: int) -> None:
        held = sum(track.log.size for track in self.tracks.values())
        if held > max(10 * wanted, 1000):
            self._warned = True
            warnings.warn(
                f"{held} steps of episodes that have not ended are held in memory, where {wanted} were asked for. If "
                "episodes may be that long, ask for more steps, or for fragments: whole_episodes=False.",
                stacklevel=4,
            )

    # -- a turn -------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Take what the arena shows into the logs."""
        begin = perf_counter()
        try:
            turns = self.arena.recv()
        except EtudeError as error:
            for part in self._parts:
                check_chosen(part.track.log, error)
            raise
        received = perf_counter()
        self._at, watch = self._clock(), self._watch
        self._parts = []
        for i, turn in enumerate(turns):
            if turn.lost is not None:
                self._lose(turn.lost)
            if turn.over is not None:
                self._overs += [(env, self._book.number_of(env)) for env in turn.over.tolist()]
            if self._quota is not None:
                self._quota.count(turn, *self._book.ends(turn))
            if turn.first is not None:
                self._book.begin(turn)
            if watch is not None:
                watch.begins(turn, self._at, self._quota)
            parts = self._routes.parts(turn, i)
            for part in parts:
                part.start = part.track.note(part.turn, self._at)
            self._parts += parts
            if watch is not None:
                watch.shown(turn, parts)
        self._counter.count(turns)
        self.turns += 1
        times = self.times
        times["env"] += received - begin
        times["note"] += perf_counter() - received
        if watch is not None:
            watch.after()
            times["note"] -= watch.spend(times)

    def _act(self) -> None:
        """Answer what the arena shows."""
        times = self.times
        action: Columns = {}
        for i, part in enumerate(self._parts):
            track, whole = part.track, part.whole
            if not whole.waits:
                continue
            begin = perf_counter()
            if track.connectors.observes:
                seen = track.seen(part.turn)
                times["observe"] += perf_counter() - begin
                begin = perf_counter()
            else:
                seen = part.turn.obs
            chosen = track.act(part.turn, part.start, seen)
            chose = perf_counter()
            times["infer"] += chose - begin
            if track.connectors.acts:
                chosen = track.connectors.act(chosen)
                times["act"] += perf_counter() - chose
                chose = perf_counter()
            if part.rows is None:
                self.arena.send(whole, chosen)
            else:
                action = _put(action, chosen, part.rows, len(whole.slots))
                if i + 1 < len(self._parts) and self._parts[i + 1].whole is whole:
                    continue
                self.arena.send(whole, action)
                action = {}
            times["env"] += perf_counter() - chose

    def _postpone(self, part: Part, late: NDArray[np.int64]) -> None:
        """Keep the results of ``late`` rows for the next collection."""
        part.counted = np.zeros(len(part.turn.slots), bool)
        if len(late):
            part.counted[late] = True
            part.track.silence(part.start + late)

    def _note_again(self) -> None:
        """Take what was not acted on into the logs once more, with the results that were kept for now."""
        count = 0
        for part in self._parts:
            assert part.counted is not None
            count += int(np.count_nonzero(part.counted))
            part.start = part.track.note(part.turn, self._at, ~part.counted)
        self._counter.carry(count)
        if self._watch is not None:
            self._watch.seats.find()

    def _lose(self, slots: NDArray[np.int64]) -> None:
        if self._watch is not None:
            self._watch.lose(slots)
        results = sum(track.lose(slots) for track in self.tracks.values())
        self._counter.take_back(np.unique(self.arena.env_of[slots]), results)

    # -- cutting ------------------------------------------------------------------------------------------------

    def _cut(self) -> dict[str | None, Experience]:
        """What was collected; the logs keep what is not yet answered, and the noted turns come again."""
        parts = {}
        cut = [(track, *self._delivered(track)) for track in self.tracks.values() if track.log.size]
        for track, steps, numbers in cut:
            if len(steps.rows):
                parts[track.module_id] = self._experience(track, steps, numbers)
        for track, steps, _ in cut:
            held = [part.start + np.arange(len(part.turn.slots)) for part in self._parts if part.track is track]
            track.forget(steps, np.concatenate([np.zeros(0, np.int64), *held]), keep_results=self._is_whole)
        if self._watch is not None:
            self._watch.seats.forget()
        later = self._episodes_held()
        self._book.finish([over for over in self._overs if over not in later], later)
        self._overs = [over for over in self._overs if over in later]
        return parts

    def _episodes_held(self) -> set[Key]:
        """The episodes of which results are kept for the next collection."""
        held: set[Key] = set()
        for part in self._parts:
            if part.counted is not None and part.turn.episode is not None:
                envs, numbers = self.arena.env_of[part.turn.slots[part.counted]], part.turn.episode[part.counted]
                held.update(zip(envs.tolist(), numbers.tolist(), strict=True))
        return held

    def _delivered(self, track: Track) -> tuple[Steps, NDArray[np.int64]]:
        """The steps to give out, and of each segment which of its env's episodes it is of."""
        steps = track.steps()
        rows = steps.rows[steps.begins]
        slots = track.log.take(SLOT, rows)
        if EPISODE in track.log.columns:
            numbers = track.log.take(EPISODE, rows)
        else:
            numbers = self._book.begun[slots] - steps.later - 1
        if self._quota is None:
            return steps, numbers
        which = self._quota.delivered(self.arena.env_of[slots], numbers)
        return steps.select(which), numbers[which]

    def _experience(self, track: Track, steps: Steps, numbers: NDArray[np.int64]) -> Experience:
        columns, final_obs = track.columns_of(steps)
        lengths = np.diff(steps.last, prepend=-1)
        slots = track.log.take(SLOT, steps.rows[steps.last])
        returns = np.add.reduceat(columns[col.REWARD], steps.begins)
        clock = None
        if col.ENV_T in track.log.columns:
            clock = track.log.take(col.ENV_T, steps.answers[steps.last])
        flags, spans = track.flags_of(steps), track.spans_of(steps)
        segments = self._book.enter(slots, numbers, lengths, returns, flags, track.module_id, spans, clock)
        exp = Experience(columns, offsets_of(lengths), segments, final_obs)
        check_numbers(exp)
        lookback = self._lookbacks[track.module_id]
        return lookback.lead(exp, slots) if lookback.context else exp

    # -- the rest -----------------------------------------------------------------------------------------------

    def take_finished(self) -> Finished:
        """What the episodes brought whose ends were collected since this was last asked."""
        finished = self._book.take_finished()
        return finished if self._watch is None else self._watch.logged(finished)

    def stats(self) -> dict[str, float]:
        """What the arena counted since this was last asked, such as ``faulty_episodes``."""
        return self.arena.stats() | self._lengths.stats()

    def take_weights(self, weights: Mapping[str, torch.Tensor], seq_no: int, module_id: str | None = None) -> bool:
        """Take a module's weights from elsewhere, unless they are older than those that were taken before.

        Weights may overtake one another on their way from a learner; a runner never goes back.

        Args:
            weights: As in the module's ``state_dict()``, on any device; copied.
            seq_no: The gradient steps that made them.
            module_id: Of which module; None is the only one.

        Returns:
            Whether they were taken.

        Raises:
            EtudeError: there is no such module.
            CheckpointError: they are weights of another module; those that are here stay.
        """
        if module_id not in self.tracks:
            raise EtudeError(f"there is no module {module_id!r} here, but {list(self.tracks)}.")
        if seq_no < self._seq_nos.get(module_id, 0):
            return False
        load_weights(self.tracks[module_id].module, weights)
        self._seq_nos[module_id] = seq_no
        return True

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next collection depends on, the modules' weights left out; plain data and arrays."""
        return {
            "rng": self._rng.bit_generator.state,
            "env_seed": self._env_seed,
            "must_reset": self._must_reset,
            "book": self._book.state_dict(),
            "tracks": [track.state_dict() for track in self.tracks.values()],
            "lookbacks": [lookback.state_dict() for lookback in self._lookbacks.values()],
            "routes": self._routes.state_dict(),
            "counter": self._counter.state_dict(),
            "steps": [self.env_steps, self.agent_steps],
            "whole": [self._is_whole, self._whole.running.copy()],
            "seconds": [self._seconds, self._at],
            "watch": None if self._watch is None else self._watch.state_dict(),
            "parts": self._routes.state_of(self._parts),
            "overs": [list(over) for over in self._overs],
            "arena": None if self._must_reset else self.arena.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Go on from `state_dict`; says how the running episodes went on (see `Arena.load_state_dict`).

        Where there are other slots than before, new episodes begin.
        """
        self._rng.bit_generator.state = state["rng"]
        self._env_seed = state["env_seed"]
        self.env_steps, self.agent_steps = state["steps"]
        self._is_whole = state["whole"][0]
        (self._seconds, self._at), self._epoch = state["seconds"], None
        watched = state["watch"] if self._watch is not None else None
        if self._watch is not None and watched is not None:
            self._watch.load_callbacks(watched)
        before, now = len(state["book"]["t"]), self.arena.num_slots
        if before != now:
            for track, stored in zip(self.tracks.values(), state["tracks"], strict=True):
                track.connectors.load_state_dict(stored["connectors"])
            self.begin_anew()
            return f"new episodes: there were {before} slots, and now there are {now}"
        for track, stored in zip(self.tracks.values(), state["tracks"], strict=True):
            track.load_state_dict(stored)
        for lookback, stored in zip(self._lookbacks.values(), state["lookbacks"], strict=True):
            lookback.load_state_dict(stored)
        self._book.load_state_dict(state["book"])
        if self._watch is not None and watched is not None:
            self._watch.load_episodes(watched)
        self._routes.load_state_dict(state["routes"])
        self._counter.load_state_dict(state["counter"])
        self._whole.running[:] = state["whole"][1]
        self._overs = [(env, number) for env, number in state["overs"]]
        self._must_reset = state["must_reset"]
        if state["arena"] is None:
            if self._env_seed is None:
                self._renew()
            return "no episode was running"
        how = self.arena.load_state_dict(state["arena"])
        if how.startswith("new episodes"):
            self._renew()
        else:
            self._parts = self._routes.load_parts(state["parts"], self.arena.recv())
        return how

    def begin_anew(self) -> None:
        """Abandon the running episodes: the next collection begins new ones, with what the connectors have learned."""
        for track in self.tracks.values():
            track.connectors.start(self.arena.num_slots)
        self._renew()

    def _renew(self) -> None:
        """Let new episodes begin in envs that know nothing of the earlier ones' numbers and random streams."""
        self._book.renew(f"{self._rng.integers(1 << 63):016x}")
        self._must_reset, self._env_seed = True, int(self._rng.integers(2**31))

    def close(self) -> None:
        """Close the arena."""
        self.arena.close()


def _put(whole: Columns, part: Columns, rows: NDArray[np.int64], count: int) -> Columns:
    """``whole`` with the rows of ``part`` put into it; made for ``count`` rows where it is empty."""
    for name, column in part.items():
        if name not in whole:
            whole[name] = np.zeros((count, *column.shape[1:]), column.dtype)
        whole[name][rows] = column
    return whole

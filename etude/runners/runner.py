# SPDX-License-Identifier: Apache-2.0
"""Runner: Arena + Modules + Connectors → Experience."""

import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from etude.connectors import Pipeline
from etude.envs import Arena
from etude.errors import EtudeError
from etude.experience import Experience
from etude.interruption import interruptible
from etude.modules import Module
from etude.runners.callbacks import CallbackLike, callback_from
from etude.runners.cast import Cast
from etude.runners.clock import Clock
from etude.runners.counting import CountBy, Counter
from etude.runners.cutting import as_one, cut
from etude.runners.episodes import EpisodeBook, Finished
from etude.runners.lengths import Lengths
from etude.runners.quota import Dealt, Quota, Whole
from etude.runners.routes import ModuleOf
from etude.runners.track import Track
from etude.runners.turn_loop import TurnLoop
from etude.runners.watch import Watch

_log = logging.getLogger("etude.runners")


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
        self._book = EpisodeBook(f"{ids.generate_state(1, np.uint64)[0]:016x}", arena.env_of, arena.agents)
        cast = Cast(modules, connectors, module_of, arena, self._book)
        self._counter = Counter(arena, count_steps_by)
        self._whole = Whole(arena, count_steps_by)
        self._is_whole = False  # unfinished episodes are kept as a whole
        self._lengths = Lengths() if lengths is None else lengths
        self._must_reset = True
        self.warn_of_lost_episodes = False
        """Whether to warn, once the envs are reset, if their running episodes can't be part of a checkpoint."""
        self.agent_steps = 0
        """Steps of agents given out since the runner was made."""
        self.env_steps = 0
        """Steps of envs likewise; as many, where agents have no names."""
        clock, called = Clock(), [callback_from(callback) for callback in callbacks]
        self._watch = Watch(called, arena, self._book, cast.tracks, clock.now) if called else None
        self._loop = TurnLoop(arena, cast, self._book, self._counter, clock, self._watch)

    def set_modules(
        self,
        modules: Module | Mapping[str, Module],
        connectors: Pipeline | Mapping[str, Pipeline] | None = None,
        *,
        module_of: ModuleOf | None = None,
    ) -> None:
        """Let these modules act from now on, as when the runner was made. The running episodes are abandoned."""
        self._loop.cast = Cast(modules, connectors, module_of, self.arena, self._book)
        if self._watch is not None:
            self._watch.cast(self.tracks)
        self.begin_anew()

    @property
    def tracks(self) -> dict[str | None, Track]:
        """What each module acts with, by module id; None is that of the only one."""
        return self._loop.cast.tracks

    @property
    def connectors(self) -> Pipeline:
        """Those of the only module, or of the first."""
        return self._loop.cast.first.connectors

    @property
    def module(self) -> Module:
        """The only module, or the first."""
        return self._loop.cast.first.module

    @property
    def times(self) -> dict[str, float]:
        """Seconds since the runner was made, by phase; see `TurnLoop.times`."""
        return self._loop.times

    @property
    def turns(self) -> int:
        """Turns since the runner was made."""
        return self._loop.turns

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
                favoured. Running episodes are abandoned: every env begins a new one, now and after. One that is cut,
                as its env failed, is played again, up to ten times: then there is one less.
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
        return as_one(parts)

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
        quota: Quota | None = self._whole if is_whole else None
        if num_episodes is not None:
            quota = Dealt(num_episodes, self.arena.num_envs)
        self._must_reset = True  # should this be broken off: the steps made until then are lost
        self._begin(explore, quota, goes_on=goes_on)
        if quota is None:
            self._loop.run_steps(wanted)
        else:
            self._loop.run_episodes(quota, wanted)
        given = self._given(num_steps, is_whole=is_whole)
        self._must_reset = num_episodes is not None
        self._loop.clock.stop()
        return given

    @interruptible
    def _begin(self, explore: bool, quota: Quota | None, *, goes_on: bool) -> None:
        self._loop.cast.start(self._rng, explore)
        self._loop.clock.start()
        if goes_on:
            self._loop.resume(quota)
            return
        self.arena.reset(self._env_seed)
        if self.warn_of_lost_episodes:
            self.warn_of_lost_episodes = False
            lost = self.arena.state_dict()
            if lost["how"] == "new episodes":
                _log.warning(
                    "The state of this env can't be saved: a resumed run will begin new episodes (%s).", lost["why"]
                )
        self._env_seed = None  # seeded once: later resets go on in the envs' own streams
        self._whole.running[:] = 0
        self._loop.begin(quota)

    def _given(self, num_steps: int | None, *, is_whole: bool) -> dict[str | None, Experience]:
        """What was collected, counted and of the right lengths."""
        parts = cut(self._loop, keep_results=is_whole)
        steps = sum(exp.num_steps - int(exp.segments.lookback.sum()) for exp in parts.values())
        self.agent_steps += steps
        self.env_steps += self._counter.env_steps(steps, None if is_whole else num_steps)
        lookbacks = self._loop.cast.lookbacks
        given = {name: self._lengths.keep(exp, lookbacks[name].context) for name, exp in parts.items()}
        if self._watch is not None:
            self._watch.segments(given.values())
            self._watch.spend(self.times)
        return given

    # -- the rest -----------------------------------------------------------------------------------------------

    def take_finished(self) -> Finished:
        """What the episodes brought whose ends were collected since this was last asked."""
        finished = self._book.take_finished()
        return finished if self._watch is None else self._watch.logged(finished)

    def stats(self) -> dict[str, float]:
        """What the arena counted since this was last asked, such as ``faulty_episodes``."""
        return self.arena.stats() | self._lengths.stats()

    def take_weights(
        self, weights: Mapping[str, torch.Tensor], seq_no: int, module_id: str | None = None, *, shared: bool = False
    ) -> bool:
        """Take a module's weights from elsewhere, unless they are older than those that were taken before.

        Weights may overtake one another on their way from a learner; a runner never goes back.

        Args:
            weights: As in the module's ``state_dict()``, on any device; copied.
            seq_no: The gradient steps that made them.
            module_id: Of which module; None is the only one.
            shared: Act with the memory that is given, where it can be, rather than with a copy; nobody may write to it.

        Returns:
            Whether they were taken.

        Raises:
            EtudeError: there is no such module.
            CheckpointError: they are weights of another module; those that are here stay.
        """
        return self._loop.cast.take_weights(weights, seq_no, module_id, shared=shared)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next collection depends on, the modules' weights left out; plain data and arrays."""
        return {
            "rng": self._rng.bit_generator.state,
            "env_seed": self._env_seed,
            "must_reset": self._must_reset,
            "book": self._book.state_dict(),
            "steps": [self.env_steps, self.agent_steps],
            "whole": [self._is_whole, self._whole.running.copy()],
            "watch": None if self._watch is None else self._watch.state_dict(),
            "arena": None if self._must_reset else self.arena.state_dict(),
            **self._loop.cast.state_dict(),
            **self._loop.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Go on from `state_dict`; says how the running episodes went on (see `Arena.load_state_dict`).

        Where there are other slots than before, new episodes begin.
        """
        self._rng.bit_generator.state = state["rng"]
        self._env_seed = state["env_seed"]
        self.env_steps, self.agent_steps = map(operator.index, state["steps"])
        self._is_whole = state["whole"][0]
        self._loop.load_clock(state)
        watched = state["watch"] if self._watch is not None else None
        if self._watch is not None and watched is not None:
            self._watch.load_callbacks(watched)
        before, now = len(state["book"]["t"]), self.arena.num_slots
        if before != now:
            self._loop.cast.load_connectors(state)
            self.begin_anew()
            return f"new episodes: there were {before} slots, and now there are {now}"
        self._loop.cast.load_state_dict(state)
        self._book.load_state_dict(state["book"])
        if self._watch is not None and watched is not None:
            self._watch.load_episodes(watched)
        self._loop.load_state_dict(state)
        self._whole.running[:] = state["whole"][1]
        self._must_reset = state["must_reset"]
        if state["arena"] is None:
            if self._env_seed is None:
                self._renew()
            return "no episode was running"
        how = self.arena.load_state_dict(state["arena"])
        if how.startswith("new episodes"):
            self._renew()
        else:
            self._loop.load_parts(state)
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

    def stop(self) -> None:
        """Let a collection that runs in another thread end with an EtudeError at its next turn."""
        self._loop.is_stopped = True

    def close(self) -> None:
        """Close the arena."""
        self.arena.close()

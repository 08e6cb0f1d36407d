# SPDX-License-Identifier: Apache-2.0
"""A small world that records what connectors saw online, beside the raw Experience of the same steps."""

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.connectors import Inputs, Pipeline
from etude.experience import Experience, Segments
from etude.spaces import Flattener, Space, leaf_dtype, leaf_shape, leaves

OBS_SPACES: dict[str, Space] = {
    "vector": spaces.Box(-5, 5, (3,), np.float32),
    "vector64": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "number": spaces.Box(-1, 1, (), np.float32),
    "image": spaces.Box(0, 255, (4, 5, 3), np.uint8),
    "image_channels_first": spaces.Box(0, 255, (2, 4, 4), np.uint8),
    "grey": spaces.Box(0, 255, (4, 5), np.uint8),
    "discrete": spaces.Discrete(4, start=-1),
    "multi_discrete": spaces.MultiDiscrete([3, 2]),
    "multi_binary": spaces.MultiBinary(3),
    "dict": spaces.Dict(
        {
            "joints": spaces.Box(-1, 1, (2,), np.float32),
            "camera": spaces.Box(0, 255, (3, 3, 1), np.uint8),
            "mode": spaces.Dict({"gear": spaces.Discrete(3)}),
        }
    ),
    "masked": spaces.Dict({"action_mask": spaces.MultiBinary(3), "view": spaces.Box(0, 255, (4, 5, 3), np.uint8)}),
    "tuple": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)]),
}

ACTION_SPACES: dict[str, Space] = {
    "discrete": spaces.Discrete(3, start=1),
    "box": spaces.Box(-2, 2, (2,), np.float32),
    "multi_discrete": spaces.MultiDiscrete([3, 2], start=[0, 5]),
    "multi_binary": spaces.MultiBinary(2),
    "dict": spaces.Dict({"move": spaces.Box(-1, 1, (2,), np.float32), "jump": spaces.Discrete(2)}),
}


class World:
    """Slots that live through random episodes, and keep what they were shown raw and through connectors.

    Args:
        pipeline: Its `spaces` and `start` have been called.
        shy: Only some of the slots are ready at each turn, in any order.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        obs_space: Space,
        action_space: Space,
        num_slots: int,
        seed: int,
        *,
        shy: bool,
        done: float = 0.25,
    ) -> None:
        self.pipeline, self.num_slots, self.shy, self.done = pipeline, num_slots, shy, done
        self.rng = np.random.default_rng(seed)
        self.obs_space, self.action_space = obs_space, action_space
        self.obs_space.seed(seed)
        self.action_space.seed(seed + 1)
        self.flat_obs, self.flat_action = Flattener(obs_space, col.OBS), Flattener(action_space, col.ACTION)
        self.waiting = [self._observe() for _ in range(num_slots)]
        self.first = np.ones(num_slots, bool)
        self.prev_action = [self._nothing() for _ in range(num_slots)]
        self.prev_reward = np.zeros(num_slots)
        self.episode = list(range(num_slots))
        self.rows: dict[int, list[dict[str, Any]]] = {i: [] for i in range(num_slots)}
        self.ends: dict[int, dict[str, Any]] = {}
        self.num_episodes = num_slots

    def _observe(self) -> dict[str, NDArray[Any]]:
        sample = self.flat_obs(self.obs_space.sample())
        return {n: np.asarray(sample[n], leaf_dtype(leaf)) for n, leaf in self.flat_obs.leaves.items()}

    def _nothing(self) -> dict[str, NDArray[Any]]:
        return {n: np.zeros(leaf_shape(a), leaf_dtype(a)) for n, a in self.flat_action.leaves.items()}

    def shown(self, slots: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """What the connectors make of the observations that wait in ``slots``."""
        inputs = Inputs(
            slots=slots,
            obs={name: np.stack([self.waiting[i][name] for i in slots]) for name in self.flat_obs.leaves},
            first=self.first[slots],
            prev_action={n: np.stack([self.prev_action[i][n] for i in slots]) for n in self.flat_action.leaves},
            prev_reward=self.prev_reward[slots],
        )
        return self.pipeline.online(inputs).obs

    def turn(self) -> dict[str, NDArray[Any]]:
        """One turn of some slots; gives what was shown."""
        slots = np.arange(self.num_slots)
        if self.shy:
            slots = self.rng.permutation(slots)[: self.rng.integers(1, self.num_slots + 1)]
        seen = {name: values.copy() for name, values in self.shown(slots).items()}
        ended = [self._step(int(slot), {n: v[row] for n, v in seen.items()}) for row, slot in enumerate(slots)]
        over = slots[np.array(ended)]
        if len(over):
            final = self.shown(over)
            for row, slot in enumerate(over):
                self._end(int(slot), {name: values[row] for name, values in final.items()}, reset=True)
        return seen

    def _step(self, slot: int, seen: dict[str, Any]) -> bool:
        sample = self.flat_action(self.action_space.sample())
        action = {n: np.asarray(sample[n], leaf_dtype(a)) for n, a in self.flat_action.leaves.items()}
        reward = float(self.rng.normal() * 2)
        row = {**self.waiting[slot], **action, "reward": reward}
        self.rows[self.episode[slot]].append({"raw": row, "seen": seen})
        self.waiting[slot] = self._observe()
        self.first[slot], self.prev_action[slot], self.prev_reward[slot] = False, action, reward
        return bool(self.rng.random() < self.done)

    def _end(self, slot: int, seen: dict[str, Any], *, reset: bool) -> None:
        flags = ("terminated" if self.rng.random() < 0.5 else "truncated") if reset else "cut"
        self.ends[self.episode[slot]] = {"raw": self.waiting[slot], "seen": seen, "flags": flags}
        if reset:
            self.episode[slot] = self.num_episodes
            self.rows[self.num_episodes] = []
            self.num_episodes += 1
            self.waiting[slot], self.prev_action[slot] = self._observe(), self._nothing()
            self.first[slot], self.prev_reward[slot] = True, 0.0

    def finish(self) -> tuple[Experience, Experience]:
        """The Experience of all steps: raw, and with the observations as shown online."""
        for slot in range(self.num_slots):
            if self.rows[self.episode[slot]]:
                final = self.shown(np.array([slot]))
                self._end(slot, {name: values[0] for name, values in final.items()}, reset=False)
        return self._experience("raw"), self._experience("seen")

    def _experience(self, which: str) -> Experience:
        episodes = [e for e in self.rows if self.rows[e]]
        steps = [row for e in episodes for row in self.rows[e]]
        names = [n for n in steps[0][which] if col.is_under(n, col.OBS)]
        others = [n for n in steps[0]["raw"] if not col.is_under(n, col.OBS)]
        flags = [self.ends[e]["flags"] for e in episodes]
        return Experience(
            {
                **{n: np.stack([row[which][n] for row in steps]) for n in names},
                **{n: np.stack([row["raw"][n] for row in steps]) for n in others},
            },
            np.cumsum([0, *(len(self.rows[e]) for e in episodes)]),
            Segments.of(
                len(episodes),
                episode_id=[f"e{e}" for e in episodes],
                terminated=[f == "terminated" for f in flags],
                truncated=[f == "truncated" for f in flags],
            ),
            {n: np.stack([self.ends[e][which][n] for e in episodes]) for n in names},
        )


def assert_same_obs(made: Experience, expected: Experience) -> None:
    """The observations of all trained steps and all ``final_obs`` are equal, bit for bit, and of one dtype."""
    assert set(made.final_obs) == set(expected.final_obs) == set(col.under(made.steps, col.OBS))
    trained = expected.trained()
    np.testing.assert_array_equal(made.offsets, expected.offsets)
    for name, final in expected.final_obs.items():
        assert made.steps[name].dtype == made.final_obs[name].dtype == final.dtype, name
        np.testing.assert_array_equal(made.steps[name][trained], expected.steps[name][trained], err_msg=name)
        np.testing.assert_array_equal(made.final_obs[name], final, err_msg=f"final {name}")


def assert_fits(columns: dict[str, Any], space: Space) -> None:
    """The columns are those of ``space``, in shape and dtype."""
    found = leaves(space, col.OBS)
    assert set(col.under(columns, col.OBS)) == set(found)
    for name, leaf in found.items():
        assert columns[name].shape[1:] == leaf_shape(leaf), name
        assert columns[name].dtype == leaf_dtype(leaf), name


def episodes(lengths: list[int], **segments: Any) -> Experience:
    """Segments: observation ``[segment, t]``, action t, reward ``10 * segment + t``; final ``t`` is the length."""
    which = np.repeat(np.arange(len(lengths)), lengths)
    t = np.concatenate([np.arange(n) for n in lengths]) if lengths else np.zeros(0, int)
    obs = np.stack([which, t], axis=1).astype(np.float32)
    final = np.stack([np.arange(len(lengths)), lengths], axis=1).astype(np.float32)
    return Experience(
        {"obs": obs, "action": t.astype(np.int64), "reward": (10.0 * which + t)},
        np.cumsum([0, *lengths]),
        Segments.of(len(lengths), episode_id=[f"e{i}" for i in range(len(lengths))], **segments),
        {"obs": final},
    )

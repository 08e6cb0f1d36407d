# SPDX-License-Identifier: Apache-2.0
"""A replay in plain Python, step by step, and random lives of many episodes to put into both."""

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from etude.experience import Experience, Segments


@dataclasses.dataclass
class Chain:
    """An agent's steps in an episode, without a gap."""

    key: tuple[str, str | None, str | None]
    steps: list[dict[str, Any]]
    final_obs: Any = None
    terminated: bool = False
    truncated: bool = False
    known: bool = False


class NaiveReplay:
    """Every step that was ever added, in order, as (chain, place in it)."""

    def __init__(self, capacity: int, n_step: int, gamma: float) -> None:
        self.capacity, self.n_step, self.gamma = capacity, n_step, gamma
        self.steps: list[tuple[Chain, int]] = []
        self.chains: list[Chain] = []

    def add(self, exp: Experience) -> None:
        for segment in exp:
            own = segment.segments
            key = (own.episode_id[0], own.agent_id[0], own.module_id[0])
            skipped, num = int(own.lookback[0]), segment.num_steps
            known, terminated, truncated = (bool(x[0]) for x in (own.has_final_obs, own.terminated, own.truncated))
            final_obs = segment.final_obs["obs"][0]
            if not known and not terminated:  # nothing to bootstrap the last step from
                num, known, truncated = num - 1, True, False
                final_obs = segment.steps["obs"][num]
            if num <= skipped:
                continue
            t = int(own.t_start[0]) + skipped
            chain = next((c for c in reversed(self.chains) if c.key == key), None)
            ended = chain is None or chain.terminated or chain.truncated
            if ended or chain.steps[-1]["t"] + 1 != t:
                chain = Chain(key, [])
                self.chains.append(chain)
            for row in range(skipped, num):
                step = {name: column[row] for name, column in segment.steps.items()}
                chain.steps.append({**step, "t": t + row - skipped})
                self.steps.append((chain, len(chain.steps) - 1))
            chain.final_obs, chain.known = final_obs, known
            chain.terminated, chain.truncated = terminated, truncated

    @property
    def stored(self) -> range:
        return range(max(0, len(self.steps) - self.capacity), len(self.steps))

    def with_n_step_returns(self, index: int) -> dict[str, Any]:
        """What a sample of this step is."""
        chain, place = self.steps[index]
        first, total, k = chain.steps[place], 0.0, 0
        while k < self.n_step and place < len(chain.steps):
            total += self.gamma**k * float(chain.steps[place]["reward"])
            k += 1
            place += 1
        terminated = place == len(chain.steps) and chain.terminated
        return {
            **{name: first[name] for name in ("obs", "action", "state_in/h")},
            "reward": np.float32(total),
            "next_obs": chain.steps[place]["obs"] if place < len(chain.steps) else chain.final_obs,
            "terminated": terminated,
            "discount": np.float32(0.0 if terminated else self.gamma**k),
        }

    def find(self, obs: Any) -> tuple[Chain, int]:
        """The stored step with this observation."""
        return next(self.steps[i] for i in self.stored if self.steps[i][0].steps[self.steps[i][1]]["obs"] == obs)


@st.composite
def lives(draw: Any) -> list[Experience]:
    """Random episodes, cut into random pieces that come in a random order, several in each Experience."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num = draw(st.integers(1, 8))
    one_step = draw(st.booleans())
    queues = [_pieces(rng, f"e{i // 2}", (None, "red", "blue")[i % 2 + int(num > 5)], i, one_step) for i in range(num)]
    out: list[Experience] = []
    while any(queues):
        parts = []
        for _ in range(int(rng.integers(1, 5))):
            some = [queue for queue in queues if queue]
            if some:
                parts.append(some[int(rng.integers(len(some)))].pop(0))
        out.append(Experience.concat(parts))
    return out


def _pieces(rng: np.random.Generator, episode: str, agent: str | None, number: int, one_step: bool) -> list[Experience]:
    length, out, t = int(rng.integers(1, 12)), [], 0
    end = rng.choice(["terminated", "truncated", "open"])
    while t < length:
        num = 1 if one_step else min(length - t, int(rng.integers(1, 6)))
        lookback = min(t, int(rng.integers(0, 3))) if rng.random() < 0.3 else 0
        is_last = t + num == length
        known = bool(rng.random() < 0.7)
        out.append(_piece(number, episode, agent, t, num, lookback, str(end) if is_last else "open", known))
        t += num
    if len(out) > 2 and rng.random() < 0.2:
        del out[int(rng.integers(1, len(out) - 1))]  # a gap: steps that were lost
    return out


def _piece(
    number: int, episode: str, agent: str | None, t: int, num: int, lookback: int, end: str, known: bool
) -> Experience:
    times = np.arange(t - lookback, t + num)
    obs = (1000 * (number + 1) + times).astype(np.float32)
    final = np.array([1000 * (number + 1) + t + num if known else 0], np.float32)
    segments = Segments.of(
        1,
        episode_id=[episode],
        agent_id=agent,
        t_start=t - lookback,
        lookback=lookback,
        terminated=end == "terminated",
        truncated=end == "truncated",
        has_final_obs=known,
    )
    steps = {
        "obs": obs,
        "action": (2 * obs).astype(np.int64),
        "reward": (7 * obs % 11 - 5).astype(np.float64),
        "state_in/h": np.stack([obs, -obs], axis=1),
    }
    return Experience(steps, np.array([0, len(times)]), segments, {"obs": final})

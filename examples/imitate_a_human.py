# SPDX-License-Identifier: Apache-2.0
"""Imitation of a human's recording: MountainCar, played at the keyboard and cloned from a few episodes.

With a screen, you play: hold A to push left and D to push right, and close the window after five episodes or so.
Without a screen, or with the argument ``script``, a script plays in your place. It is no human, but has two of our
habits: it reacts late, and it rests at times. The recording says who played. Needs ``pip install pygame``.
"""

import os
import sys
import tempfile
from typing import Any

import gymnasium as gym
import numpy as np

import etude

LEFT, REST, RIGHT = 0, 1, 2


def make_env(render_mode: str | None = None) -> gym.Env[Any, Any]:
    """MountainCar with more time than usual, which beginners need."""
    return gym.make("MountainCar-v0", render_mode=render_mode, max_episode_steps=500)


def played_by_hand() -> list[tuple[Any, ...]]:
    """Open a window, and return the steps that were played in it."""
    from gymnasium.utils.play import play

    steps: list[tuple[Any, ...]] = []
    keys = {"a": LEFT, "d": RIGHT}
    play(make_env("rgb_array"), lambda *step: steps.append(step), keys_to_action=keys, noop=REST, fps=30, seed=1)
    return steps


def played_by_script(num_episodes: int = 6, delay: int = 6) -> list[tuple[Any, ...]]:
    """Push the way that the car rolled some steps ago, and rest in every tenth step."""
    env, rng, steps = make_env(), np.random.default_rng(1), list[tuple[Any, ...]]()
    for episode in range(num_episodes):
        obs, _ = env.reset(seed=episode)
        velocities, is_over = [obs[1]] * delay, False
        while not is_over:
            action = REST if rng.random() < 0.1 else RIGHT if velocities[-delay] >= 0 else LEFT
            next_obs, *outcome = env.step(action)
            steps.append((obs, next_obs, action, *outcome))
            is_over = outcome[1] or outcome[2]
            obs = next_obs
            velocities.append(obs[1])
    return steps


def write(steps: list[tuple[Any, ...]], path: str, player: str) -> None:
    """Write the episodes that have ended as a recording."""
    obs, next_obs, action, reward, terminated, truncated = map(np.array, list(zip(*steps, strict=True))[:6])
    last = np.flatnonzero(terminated | truncated)  # the last step of each episode
    num_steps = last[-1] + 1
    names = [f"{player}-{i}" for i in range(len(last))]
    ends = {"terminated": terminated[last], "truncated": truncated[last]}
    exp = etude.Experience(
        steps={"obs": obs[:num_steps], "action": action[:num_steps], "reward": reward[:num_steps].astype(np.float64)},
        offsets=np.append(0, last + 1),
        segments=etude.Segments.of(len(last), episode_id=names, **ends),
        final_obs={"obs": next_obs[last]},
    )
    env = make_env()
    spaces = {"obs_space": env.observation_space, "action_space": env.action_space}
    with etude.RecordingWriter(path, **spaces, env="MountainCar-v0", meta={"player": player}) as writer:
        writer.write(exp)


has_screen = sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
player = "human" if has_screen and "script" not in sys.argv else "script"
data = tempfile.mkdtemp()
write(played_by_hand() if player == "human" else played_by_script(), data, player)
played = etude.Recording.open(data).read()
print(f"{player}: {played.num_segments} episodes, {played.num_steps} steps, mean return {played.returns().mean():.0f}")

clone = etude.BC(etude.BCConfig(data=data, env="MountainCar-v0", connectors=("normalize_obs",), seed=1))
clone.fit(etude.Stop(updates=1_000))
print(f"clone: mean return {clone.evaluate(50, seed=2).return_mean:.0f}; an env without a push ends at -200")
etude.clip(clone, "imitate_a_human.gif", size="300x200", seed=0)

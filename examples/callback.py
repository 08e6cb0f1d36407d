# SPDX-License-Identifier: Apache-2.0
"""A callback of one's own: how close CartPole's falls are, in figures, a histogram and a drawing."""

import numpy as np
from matplotlib.figure import Figure

import etude


class Falls(etude.Callback):
    """Logs where the pole was when an episode ended, and the way there."""

    def on_episode_start(self, episode: etude.RunningEpisode) -> None:
        """Begin the way."""
        episode.data["angles"] = [float(episode.obs[2])]

    def on_episode_step(self, episode: etude.RunningEpisode) -> None:
        """Go on."""
        episode.data["angles"].append(float(episode.obs[2]))

    def on_episode_end(self, episode: etude.RunningEpisode) -> None:
        """Log what it came to."""
        angles = np.degrees(episode.data["angles"])
        episode.log("fell", episode.terminated)
        episode.log("largest angle", np.abs(angles).max())
        episode.log_histogram("angles", angles)
        if episode.env_index == 0:
            figure = Figure((4, 2), layout="constrained")
            axes = figure.subplots()
            axes.plot(angles)
            axes.set_ylabel("degrees")
            episode.log_media("the way", figure)


ppo = etude.PPO(etude.PPOConfig(env="CartPole-v1", num_steps=4096, seed=1, callbacks=(Falls,)))
for result in ppo.iterate(etude.Stop(env_steps=20_000)):
    custom = result.custom
    print(
        f"return {result.return_mean:.0f}, fell in {custom['fell']['mean']:.0%}, largest angle "
        f"{custom['largest angle']['mean']:.1f}; a turn {sum(result.turn_ms.values()):.2f} ms; drawn: {list(ppo.media)}"
    )

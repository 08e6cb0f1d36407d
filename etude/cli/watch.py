# SPDX-License-Identifier: Apache-2.0
"""``etude watch``: see a trained run play, as a clip or in the env's own window; and clips of a run that trains."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli import files, flags, folders
from etude.cli.play import PlayOptions, loaded
from etude.cli.streams import say
from etude.cli.streams import show as show_text
from etude.errors import EtudeError, SettingsError
from etude.interruption import interruptible
from etude.settings import settings
from etude.urls import redacted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from etude.algorithms import Algorithm, Result
    from etude.cli.logs import Logs

SIZE = "320x240"
"""Of the clips of a run that trains: TensorBoard loads them whole."""


@settings
class WatchOptions(PlayOptions):
    """What the command takes."""

    to: str | None = None
    """The clip to write: .gif; or .mp4 or .webm, which need etude[video]."""

    live: bool = False
    """Open the env's own window instead."""

    random: bool = False
    """Let actions be drawn at random, rather than by the run."""

    episodes: int = 1
    """How many whole episodes, at least 1."""

    fps: float | None = None
    """Frames a second; the env's natural speed if none."""

    size: str | None = None
    """Width and height in pixels, such as 480x320, that frames are fitted into; as drawn if none."""

    quiet: bool = False
    """Print nothing but errors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.to is None) != self.live:
            raise SettingsError(
                "watch needs to know how: --to clip.mp4 writes a clip (.mp4, .webm or .gif), --live opens the env's "
                f"own window; {'both were' if self.live else 'neither was'} given."
            )
        if self.live and (self.fps is not None or self.size is not None):
            raise SettingsError("`fps` and `size` are for clips: the env's own window has its own.")


def main(args: list[str]) -> int:
    """Run ``etude watch RUN ...``."""
    about = "See a trained run play: as a clip, or in the env's own window."
    options = flags.options(WatchOptions, args, prog="etude watch", about=about, positional="run")
    from etude.algorithms.clips import clip, show

    algorithm = loaded(options)
    try:
        policy = None if options.random else algorithm
        env = algorithm.config.env if options.env is None and options.random else options.env
        told: dict[str, Any] = {}
        if options.live:
            returns = show(policy, env, episodes=options.episodes, explore=options.explore, seed=options.seed)
        else:
            made = clip(
                policy,
                env,
                options.to,
                episodes=options.episodes,
                explore=options.explore,
                seed=options.seed,
                fps=options.fps,
                size=options.size,
            )
            returns, told = made.returns, {"to": options.to, "frames": made.num_frames, "fps": made.fps}
    finally:
        algorithm.close()
    if options.json:
        files.print_json({"run": redacted(options.run), "episodes": len(returns), "returns": returns.tolist(), **told})
    elif not options.quiet:
        show_text(_summary(returns, told))
    return 0


def _summary(returns: "NDArray[Any]", told: dict[str, Any]) -> str:
    shown = ", ".join(f"{value:,.5g}" for value in returns[:10]) + (", …" if len(returns) > 10 else "")
    text = f"{len(returns)} episode{'s' * (len(returns) != 1)}, returned {shown}"
    if not told:
        return text
    seconds = told["frames"] / told["fps"]
    return f"{text}\n{told['frames']:,} frames, {seconds:,.1f} s at {told['fps']:g} a second, in {told['to']}"


@dataclasses.dataclass(frozen=True)
class TrainingClips:
    """A clip every ``interval`` iterations of a run: a file in ``out``/clips, and in TensorBoard."""

    interval: int
    """0 is never."""
    out: Path

    def check(self, algorithm: "Algorithm[Any]") -> None:
        """Raise an EtudeError now where no clip can be made later: the env can't be drawn, or there is none."""
        if self.interval:
            from etude.algorithms.clips import check_clips

            check_clips(algorithm)

    @interruptible
    def after(self, result: "Result", algorithm: "Algorithm[Any]", log: "Logs") -> None:
        """Make the clip of an iteration, if it is to have one. That it fails is said, and ends no training."""
        if not self.interval or result.iteration % self.interval:
            return
        from etude.algorithms.clips import clip

        path = self.out / folders.CLIPS / f"iteration_{result.iteration:06}.gif"
        try:
            clip(algorithm, to=path, size=SIZE, seed=result.iteration)
        except EtudeError as error:
            say(f"no clip of iteration {result.iteration}: {error}")
        else:
            log.video(path, result)

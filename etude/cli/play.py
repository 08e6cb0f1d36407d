# SPDX-License-Identifier: Apache-2.0
"""``etude evaluate``, ``record``, ``watch``, ``export``, ``serve``, ``plot``, ``compare`` and ``demo``."""

import dataclasses
import shlex
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from etude.cli import flags
from etude.cli.streams import say, show, table, tell
from etude.display import counted, rounded
from etude.errors import CheckpointError, SettingsError
from etude.settings import IntFrom1, defaults, settings
from etude.urls import redacted

if TYPE_CHECKING:
    from etude.algorithms import Algorithm, Evaluation

GOAL, EPISODES = 450.0, 60
"""The demo's training goal, and the number of episodes that it records."""


@settings
class Play:
    """Options of commands that play episodes with a trained run."""

    run: str
    """The folder of the run, with its checkpoint."""

    env: str | None = None
    """Env to play in, a registered id or `module:factory`. None: the env it was trained in."""

    seed: int | None = None
    """Seed of envs and action sampling. None: a random one."""

    explore: bool = False
    """Sample actions from the policy instead of taking the most likely ones."""

    json: bool = False
    """Print one JSON object on standard output."""

    episodes: IntFrom1 = 20
    """Number of whole episodes, at least 1."""

    max_steps: IntFrom1 | None = None
    """Steps after which an episode is truncated, at least 1. None: as in training."""

    set: Mapping[str, str] | None = None
    """Settings to change from the saved ones, such as `target_return=400`."""

    trust: bool = False
    """Import and call whatever the checkpoint names: this runs code from the file."""

    def loaded(self, held_out: Any = None) -> "Algorithm[Any]":
        """Load the run, without what only training needs, to play or to be evaluated on ``held_out`` data."""
        from etude.algorithms import load
        from etude.cli.options import import_from_here, saved_in

        if self.trust or ":" in (self.env or ""):
            import_from_here()
        saved = saved_in(self.run, "config")
        # One process is enough to play, whichever engine trained the run.
        given: dict[str, Any] = {**(self.set or {}), "engine": "local", "callbacks": (), "modules_to_train": None}
        if "prelearner" in saved:
            given["prelearner"] = None
        if held_out is not None and (saved.get("data") is not None or "data" not in saved):
            given["env"] = None
        elif self.env is not None:
            given["env"] = self.env
        if saved and held_out is None and given.get("env", saved.get("env")) is None:
            raise SettingsError(f"{redacted(self.run)} was trained without an env: say where to play with --env.")
        if saved.get("data") is not None:
            given = {"data": held_out} | given
        return load(self.run, trust=self.trust, **given)

    def tell(self, found: dict[str, Any], words: str) -> int:
        """Print the results, and return the exit code."""
        if self.json or not getattr(self, "quiet", False):
            tell(found | {"run": redacted(self.run)}, words, as_json=self.json)
        return 0


@settings
class Evaluate(Play, flags.TableOptions):
    """Play whole episodes with a trained run, and report their returns. With --on, estimate the return from recorded
    episodes of another policy instead."""

    on: str | None = None
    """Recording of held-out episodes from which to estimate the policy's return, without playing. The options below
    apply only with it."""

    methods: str | None = None
    """Estimators, separated by commas: is, wis, pdis, wpdis, dm, dr, wdr and fqe. None: all. The last four fit action
    values, which takes most of the time."""

    gamma: float = 0.99
    """Discount factor, 0 to 1."""

    confidence: float = 0.95
    """Confidence level of the intervals, between 0 and 1."""

    greedy: bool = False
    """Estimate the return of the most likely actions instead of that of sampled actions."""

    behaviour: Literal["recorded", "fit"] = "recorded"
    """Source of the behaviour policy's probabilities: the recorded ones, or a model fitted to the recorded actions."""

    on_bad: Literal["strict", "repair", "skip"] = "strict"
    """What to do with bad data, such as NaN or duplicate steps. strict: raise an error; repair: fix it if no values
    need to be invented; skip: leave it out. What was changed or left out is reported."""

    def __post_init__(self) -> None:
        super().__post_init__()
        others: tuple[str, ...] = ("methods", "gamma", "confidence", "greedy", "behaviour", "on_bad", "columns")
        if self.on is None:
            why = "is for estimates from a recording, but without `on` the policy plays: give --on, or leave it out."
        else:
            others = ("env", "explore", "episodes", "max_steps")
            why = "is for playing, but with `on` nothing is played: leave one out. Actions are drawn, unless `greedy`."
        for name in others:
            if getattr(self, name) != defaults(Evaluate)[name]:
                raise SettingsError(f"`{name}` {why}")

    def execute(self) -> int:
        """Play, or with --on estimate, and print the results."""
        from etude.algorithms.play import check_played

        if self.on is not None:
            return self._estimate(self.on)
        with closing(self.loaded()) as algorithm:
            how: dict[str, Any] = {"seed": self.seed, "explore": self.explore, "max_steps": self.max_steps}
            found = algorithm.evaluate(self.episodes, env=self.env, **how)
        check_played(found)
        return self.tell(found.to_dict(), summary(found))

    def _estimate(self, data: str) -> int:
        from etude.evaluation import METHODS, evaluate_each_on

        methods = METHODS if self.methods is None else self.methods.split(",")
        held_out = self.described(data)
        how: dict[str, Any] = {name: getattr(self, name) for name in ("gamma", "confidence", "behaviour", "on_bad")}
        how |= {"methods": methods, "seed": self.seed or 0, "explore": not self.greedy, "progress": True}
        with closing(self.loaded(held_out)) as algorithm:
            found = evaluate_each_on(algorithm, held_out, **how)
        modules = {name: result.to_dict() for name, result in found.items()}
        return self.tell({"on": redacted(data), "modules": modules}, "\n\n".join(map(str, found.values())))


@settings
class Record(Play):
    """Play whole episodes with a trained run, and record them as Parquet."""

    to: str
    """The folder of the recording."""

    append: bool = False
    """Add to an existing recording; otherwise an existing one is an error."""

    compression: str | None = None
    """A codec for all columns, such as `zstd:3`, or codecs by column: `obs/camera=zstd:3,obs=lz4`. None: LZ4 for
    numbers, Zstandard for images."""

    max_rows_per_file: int = 1_048_576
    """Maximum number of steps in a file, at least 1."""

    max_file_size: int = 268_435_456
    """Size in bytes at which a file is closed, at least 1."""

    quiet: bool = False
    """Print only errors."""

    def execute(self) -> int:
        """Play and write."""
        names = ("env", "seed", "explore", "max_steps", "append", "compression", "max_rows_per_file", "max_file_size")
        how: dict[str, Any] = {name: getattr(self, name) for name in names}
        with closing(self.loaded()) as algorithm:
            found = algorithm.record(self.to, self.episodes, **how)
        to = redacted(self.to)
        return self.tell(found.to_dict() | {"to": to}, f"{summary(found)}\nrecorded to {to}")


@settings
class Watch(Play):
    """Watch a trained run play: as a clip, or in the env's own window."""

    to: str | None = None
    """Clip to write: .gif, or .mp4 or .webm, which need etude[video]."""

    live: bool = False
    """Open the env's own window instead."""

    random: bool = False
    """Take random actions instead of the run's."""

    episodes: int = 1
    """Number of whole episodes, at least 1."""

    fps: float | None = None
    """Frames per second. None: the env's natural speed."""

    size: str | None = None
    """Width and height in pixels, such as 480x320; frames are scaled without distortion. None: as rendered."""

    quiet: bool = False
    """Print only errors."""

    def __post_init__(self) -> None:
        if (self.to is None) != self.live:
            raise SettingsError(
                "watch needs either --to clip.mp4, which writes a clip (.mp4, .webm or .gif), or --live, which opens "
                f"the env's own window; {'both were' if self.live else 'neither was'} given."
            )
        if self.live and (self.fps is not None or self.size is not None):
            raise SettingsError("`fps` and `size` are for clips: the env's own window has its own.")

    def execute(self) -> int:
        """Play, and write a clip or show the env's window."""
        from etude.algorithms import clips

        with closing(self.loaded()) as algorithm:
            policy = None if self.random else algorithm
            env = algorithm.config.env if self.env is None and self.random else self.env
            how: dict[str, Any] = {name: getattr(self, name) for name in ("episodes", "explore", "seed", "max_steps")}
            made = None if self.live else clips.clip(policy, env, self.to, fps=self.fps, size=self.size, **how)
            returns = clips.show(policy, env, **how) if made is None else made.returns
        shown = ", ".join(f"{value:,.5g}" for value in returns[:10]) + (", …" if len(returns) > 10 else "")
        words = f"{counted(len(returns), 'episode')}, returned {shown}"
        found: dict[str, Any] = {"episodes": len(returns), "returns": returns.tolist()}
        if made is not None:
            found |= {"to": self.to, "frames": made.num_frames, "fps": made.fps}
            seconds = made.num_frames / made.fps
            words += f"\n{made.num_frames:,} frames, {seconds:,.1f} s at {made.fps:g} a second, in {self.to}"
        return self.tell(found, words)


@settings
class Plot:
    """Plot the learning curves of runs: one for each run or, with --by, the mean and interval of groups of runs."""

    run: tuple[str, ...] = ()
    """The folders of the runs; with --by, also folders that contain such folders."""

    to: str = "curves.png"
    """Image to write: .png, .svg or .pdf."""

    by: str | None = None
    """What to group runs by: `algorithm`, `folder`, or a setting such as `lr`."""

    y: str = "return_mean"
    """With --by: field of results to plot; `losses/policy` is an entry of a field."""

    x: str = "env_steps"
    """With --by: field on the x axis: env_steps, updates, seconds or iteration."""

    def __post_init__(self) -> None:
        if self.by is None and (self.y, self.x) != (Plot.y, Plot.x):
            raise SettingsError("--y and --x go with --by, such as --by algorithm or --by folder: add it.")

    def execute(self) -> int:
        """Plot them."""
        from etude.algorithms.comparison import plot_groups
        from etude.metrics.plot import plot_runs

        how: dict[str, Any] = {"by": self.by, "y": self.y, "x": self.x}
        show(str(plot_runs(self.run, self.to) if self.by is None else plot_groups(self.run, self.to, **how)))
        return 0


@settings
class Compare:
    """Compare the final results of groups of runs: the interquartile mean of their last values, with its 95 %
    interval."""

    run: tuple[str, ...] = ()
    """The folders of the runs, or folders that contain such folders."""

    by: str = "algorithm"
    """What to group runs by: `algorithm`, `folder`, or a setting such as `lr`."""

    y: str = "return_mean"
    """Field of results to compare; `losses/policy` is an entry of a field."""

    x: str = "env_steps"
    """Field of results that measures how long runs were trained. Groups without env steps are measured in updates."""

    json: bool = False
    """Print one JSON object on standard output."""

    def execute(self) -> int:
        """Print a table, and the groups whose runs were not trained equally long."""
        from etude.algorithms.comparison import compare

        groups = [(group, self.x) for group in compare(self.run, by=self.by, y=self.y, x=self.x)]
        if self.x == "env_steps" and not all(group.last for group, _ in groups):  # some learn from recordings
            by_update = {group[:2]: group for group in compare(self.run, by=self.by, y=self.y, x="updates")}
            groups = [(group, x) if group.last else (by_update[group[:2]], "updates") for group, x in groups]
        rows, uneven = [("env", self.by, "runs", "trained for", self.y, "95 % interval")], []
        for group, x in groups:
            interval = f"{group.low:,.5g} … {group.high:,.5g}" if group.num_runs > 1 else "-"
            both = dict.fromkeys((group.first, group.last))
            ends = " … ".join(f"{end:,.0f}" if end.is_integer() else f"{end:,.5g}" for end in both)
            x = "iterations" if x == "iteration" else x
            rows.append((group.env, group.name, str(group.num_runs), f"{ends} {x}", f"{group.value:,.5g}", interval))
            if group.is_uneven:
                between = f"{group.name}: its runs ended between {ends.replace('…', 'and')} {x}"
                uneven.append(f"{between}, so not with equal training. `etude plot --by` compares them where all were.")
        found = {"groups": [{**group._asdict(), "x": x} for group, x in groups], "uneven": uneven}
        tell(found, "\n".join([table(rows), *uneven]), as_json=self.json)
        return 0


@settings
class Demo:
    """A one-minute demo: train PPO, record it, clone it from the recording alone, and plot both learning curves."""

    out: str = "runs/demo"
    """The folder of all results; an earlier demo in it is replaced."""

    def execute(self) -> int:
        """Run the demo's commands, one after the other."""
        from etude.cli.main import main

        ppo, recording, bc, curves = (str(Path(self.out) / name) for name in ("ppo", "recording", "bc", "curves.png"))
        shutil.rmtree(recording, ignore_errors=True)
        how = ["--env", "CartPole-v1", "--seed", "1", "--stop.return-mean", f"{GOAL:g}", "--overwrite"]
        for words in (
            ["train", "ppo", *how, "--preset", "--stop.env-steps", "400000", "--out", ppo],
            ["record", ppo, "--episodes", str(EPISODES), "--seed", "5", "--to", recording],
            ["train", "bc", *how, "--data", recording, "--stop.updates", "5000", "--out", bc],
            ["plot", ppo, bc, "--to", curves],
        ):
            say(f"$ etude {shlex.join(words)}")
            if code := main(words):
                return code
        return 0


@settings
class Export:
    """Export a trained policy, connectors included, as a file that runs without Etude."""

    run: str
    """The folder of the run, with its checkpoint."""

    to: str
    """File to write: .onnx, which needs etude[export]; or .pt2, for torch.export.load."""

    policy: str | None = None
    """Module id of the policy, if there are several."""

    json: bool = False
    """Print one JSON object on standard output."""

    trust: bool = False
    """Import and call whatever the checkpoint names: this runs code from the file."""

    def __post_init__(self) -> None:
        if not self.to.endswith((".onnx", ".pt2")):
            raise SettingsError(f"`to` is {self.to!r}, but must end in .onnx or .pt2.")

    def execute(self) -> int:
        """Load and write."""
        from etude.algorithms import load_policy
        from etude.algorithms.progress import gauge
        from etude.cli.options import import_from_here

        if self.trust:
            import_from_here()
        with gauge(f"exporting {redacted(self.run)}"):
            load_policy(self.run, self.policy, trust=self.trust).export(self.to)
        tell({"run": redacted(self.run), "to": self.to}, f"exported to {self.to}", as_json=self.json)
        return 0


def serve_command() -> type[flags.Command]:
    """Define the command ``etude serve``, whose options are those of `etude.serving`, which takes a while to import."""
    from etude.serving import ServingConfig, serve

    @settings
    class Serve(ServingConfig):
        """Serve the newest checkpoint of a run over HTTP (needs etude[serve]): POST an observation to /act."""

        run: str
        """The folder of the run, with its checkpoint."""

        def execute(self) -> int:
            """Serve until Ctrl-C or SIGTERM."""
            config = {field.name: getattr(self, field.name) for field in dataclasses.fields(ServingConfig)}
            try:
                serve(self.run, ready=lambda url: show(f"{url} serves {redacted(self.run)}; Ctrl-C ends it."), **config)
            except KeyboardInterrupt:
                say("ended.")
            except CheckpointError as error:
                if "--trust" not in str(error):
                    raise
                raise CheckpointError(
                    f"{error} `etude serve` has no such option: load the policy in Python, for `etude.serving.serve`."
                ) from None
            return 0

    return Serve


COMMANDS: dict[str, type[flags.Command]] = {
    cls.__name__.lower(): cls for cls in (Evaluate, Record, Watch, Export, Plot, Compare, Demo)
}


def main(command: str, args: list[str]) -> int:
    """Run ``etude evaluate|record|watch|export|serve|plot|compare RUN ...``, or ``etude demo``."""
    cls = serve_command() if command == "serve" else COMMANDS[command]
    return flags.run(cls, args, prog=f"etude {command}", positional=None if command == "demo" else "run")


def summary(found: "Evaluation") -> str:
    """Describe an evaluation in words."""
    from etude.algorithms.progress import parts

    whole = (
        f"{found.episodes} episodes, {found.env_steps:,} steps: mean return {rounded(found.return_mean)} "
        f"(std {rounded(found.return_std)}, {found.return_min:,.5g} … {found.return_max:,.5g}), "
        f"mean length {found.length_mean:,.1f}"
    )
    lines = [whole, *(f"mean returns of {kind}: {returns}" for kind, returns in parts(found).items())]
    if found.faulty_episodes:
        lines.append(f"{found.faulty_episodes:,} more episodes were cut by an error of the env")
    return "\n".join(lines)

# SPDX-License-Identifier: Apache-2.0
"""``etude train``: train an algorithm from flags and files, with metrics and checkpoints.

Also ``etude presets``, which lists settings that are known to work.
"""

import dataclasses
import shlex
import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from etude.algorithms import ALGORITHMS, Algorithm, Checkpoints, Result, Stop, load, run
from etude.algorithms.algorithm import needs_evaluation
from etude.algorithms.checkpoint import check_metric
from etude.algorithms.clips import check_clips, clip
from etude.algorithms.comparison import interval_of
from etude.algorithms.loading import load_settings
from etude.algorithms.parallel import failures, seed_jobs, seeds_of, title_of, train_all
from etude.algorithms.saving import name_of, names_code
from etude.checkpoints import MANIFEST
from etude.cli import flags, streams
from etude.cli.options import FolderOptions, algorithm_class, ask, config_of, import_from_here
from etude.display import rounded
from etude.envs import kill_workers
from etude.errors import EtudeError, SettingsError, described
from etude.interruption import INTERRUPTED, Signals, interruptible
from etude.presets import Preset, find_preset, find_presets
from etude.settings import IntFrom0, settings, typed

FAILED, GOAL_MISSED = 1, 3
CLIP_SIZE = "320x240"
"""Size of clips in pixels; small, as TensorBoard loads clips whole."""
CLIP_STEPS = 2_000
"""Maximum number of steps of a clip made during training: an episode may never end."""

USAGE = """usage: etude train ALGORITHM [OPTIONS]

ALGORITHM is one of {names}, or `module:Class` of your own.
Its settings: etude train ALGORITHM --help, all of them: --help-all
"""


@settings
class KeepOptions:
    """Checkpoints kept in OUT/checkpoints, besides the newest one in OUT itself."""

    everyday: ClassVar[tuple[str, ...]] = ()

    keep_last: IntFrom0 = 0
    """Number of newest checkpoints to keep, at least 0; at least the newest is kept if there is a `keep_best`."""

    keep_best: IntFrom0 = 0
    """Number of checkpoints with the best `metric` to keep, at least 0. A new best is also saved between two
    `save_interval`s, if this takes only a small part of the time."""

    metric: str = "return_mean"
    """Field of results that decides which is best; `losses/policy` is an entry of a field."""

    best_is: Literal["max", "min"] = "max"
    """Whether larger or smaller values of `metric` are better."""

    def __post_init__(self) -> None:
        check_metric(self.metric)

    def kept_in(self, out: Path) -> Checkpoints | None:
        """Make the `Checkpoints` that keeps them in ``out``; None if none are kept."""
        if not self.keep_last and not self.keep_best:
            return None
        last, where = max(1, self.keep_last), out / run.CHECKPOINTS
        return Checkpoints(where, keep_last=last, keep_best=self.keep_best, metric=self.metric, best_is=self.best_is)


@settings
class TrainOptions(FolderOptions):
    """Options of `etude train`, besides the settings of the algorithm."""

    everyday: ClassVar[tuple[str, ...]] = ("out", "resume")

    out: str | None = None
    """Folder of the run: checkpoint, metrics and TensorBoard events. None: runs/ALGORITHM-ENV-TIME, or the resumed
    run."""

    resume: str | None = None
    """Resume from the checkpoint in this folder with its settings; those given here take precedence. Give the engine
    again, and your own code, such as an env `module:factory`."""

    trust: bool = False
    """Import and call whatever the resumed checkpoint names: this runs code from the file."""

    checkpoints: KeepOptions = KeepOptions()
    """Checkpoints to keep besides the newest one."""

    seeds: IntFrom0 = 0
    """Number of seeds to train with, counted from `seed` (or 0), each in its own process and folder, such as
    OUT/seed-0. 0: one run, in OUT itself."""

    max_concurrent: int | None = None
    """With `seeds`: maximum number of runs at a time. None: as many as the cores allow."""

    clip_interval: IntFrom0 = 0
    """Iterations between clips of an episode, in OUT/clips and in TensorBoard; 0 makes none. The env must support
    rendering (render_mode)."""

    def __post_init__(self) -> None:
        if self.seeds and self.clip_interval:
            raise SettingsError("`clip_interval` is for one run: leave it out with `seeds`, and see etude watch.")
        if not self.seeds and self.max_concurrent is not None:
            raise SettingsError("`max_concurrent` limits how many seeds are trained at a time: give --seeds, too.")


def main(command: str, args: list[str]) -> int:
    """Run ``etude train ALGORITHM ...``, or ``etude presets``."""
    if command == "presets":
        return flags.run(PresetsOptions, args, prog="etude presets", positional="which")
    cls = algorithm_class(args, "train", USAGE)
    if cls is None:
        return 0
    owner, given, options = ask(cls, TrainOptions, args, "train", flags.summary(cls))
    if options.seeds:
        return _train_seeds(cls, owner, given, options)
    if options.resume is not None:
        run.check_run_of(options.resume, name_of(cls), owner)
    out = options.folder(owner, given.get("env"))
    folder = out.absolute()  # an env may change the current folder
    run.check_logs(options.log)
    # Claimed before a checkpoint is read: the folder's owner may save a newer one meanwhile.
    with Signals(quiet=options.quiet, kill=kill_workers) as signals, run.claimed(folder):
        goes_on = options.resume is not None and out.resolve() == Path(options.resume).resolve()
        run.check_free(folder, goes_on, overwrite=options.overwrite)
        with closing(_made(cls, owner, given, options)) as algorithm:
            algorithm.check_stop(options.stop)  # before anything is replaced
            algorithm.prepare()
            if options.clip_interval:
                check_clips(algorithm)
            if options.overwrite:
                run.clear(folder)
            try:
                return train(algorithm, folder, options, signals, shown=out)
            except SystemExit as error:  # it would end the command without a word
                raise EtudeError(
                    f"the run was ended by {described(error)}. A callback, a connector or a network must raise an "
                    f"Exception instead, and may not call sys.exit. {out} keeps the last checkpoint, if any."
                ) from error


def _made(cls: type[Algorithm[Any]], owner: str, given: dict[str, Any], options: TrainOptions) -> Algorithm[Any]:
    """Create or load the algorithm."""
    if options.resume is not None:
        if options.trust:
            import_from_here()
        return load(options.resume, trust=options.trust, **{"engine": "local"} | typed(cls.Config, given, owner=owner))
    return cls(config_of(cls, given, owner))


def train(algorithm: Algorithm[Any], out: Path, options: TrainOptions, signals: Signals, *, shown: Path) -> int:
    """Train until ``options.stop`` is met or a signal comes. Metrics and checkpoints are written to ``out``, which
    messages call ``shown``.

    Returns:
        0 if the goal was met or none was set, 3 if a budget ran out before, 130 if it was interrupted.
    """
    stop = options.stop

    def report(result: Result) -> int:
        met = stop.goals_met(result)
        cut = signals.is_set() and (not stop.now(result) or needs_evaluation(algorithm.config, result, stop))
        if not options.quiet:
            streams.say(_ending(algorithm, shown, result, stop, cut=cut))
        if options.json:
            about = {"algorithm": algorithm.name, "out": str(shown), "goal_met": met, "interrupted": cut}
            streams.print_json(result.to_dict() | about)
        return INTERRUPTED if cut else 0 if met else GOAL_MISSED

    def film(result: Result, log: run.Logs) -> None:
        if options.clip_interval and result.iteration % options.clip_interval == 0:
            _make_clip(algorithm, result, out, log)

    if stop == Stop() and not options.quiet:
        streams.say("nothing says when to stop (--stop....): Ctrl-C saves and ends it")
    view, kept = algorithm.view(stop, quiet=options.quiet, say=streams.say), options.checkpoints.kept_in(out)
    settings = (options.log, kept, options.save_interval)
    return report(algorithm.fit_in(out, stop, signals, view, *settings, each=film, concluded=report))


def _train_seeds(cls: type[Algorithm[Any]], owner: str, given: dict[str, Any], options: TrainOptions) -> int:
    """Train with several seeds, each in its own process; return the exit code."""
    out = options.folder(owner, given.get("env"), in_place="a run of several seeds")
    if options.trust:
        import_from_here()
    changes = {"engine": "local"} | typed(cls.Config, given, owner=owner)
    begun = sorted(run.numbered(out, "seed-").items()) if options.resume is not None else []
    saved = next((path for _, path in begun if (path / MANIFEST).exists()), None)
    if saved is not None:  # resumes like a single run, with its checkpoint's settings
        run.check_run_of(saved, name_of(cls), owner)
        first = changes.get("seed", begun[0][0])
        config = load_settings(saved, trust=options.trust, **changes)
    else:
        config = config_of(cls, given, owner)
        first = config.seed
    seeds = seeds_of(first, options.seeds)
    more = options.of_jobs() | {"trust": options.trust, "kept_in": options.checkpoints.kept_in}
    jobs = seed_jobs(seeds, out, config, changes, algorithm=cls, **more)
    how: dict[str, Any] = {"max_concurrent": options.max_concurrent, "quiet": options.quiet, "say": streams.say}
    outcomes = train_all(jobs, out, title_of(cls, config, len(jobs)), **how)
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    cut, failed = any(outcome.is_interrupted for outcome in outcomes), failures(jobs, outcomes)
    met = [options.stop.goals_met(result) for result in results]
    for line in failed:
        streams.say(f"error: {line}")
    if not options.quiet:
        trust = " --trust" if names_code(config) else ""
        to_go_on = f"etude train {owner} --seeds {options.seeds} --resume {shlex.quote(str(out))}{trust}"
        if cut or failed:
            streams.say(f"the runs are in {out}. Go on with: {to_go_on}{_stop_flags(options.stop)}")
        else:
            streams.say(f"{_over_seeds(results)}. The runs are in {out}: etude compare {shlex.quote(str(out))}")
    if options.json:
        runs = [
            {"seed": seed, "out": str(job.out), "error": end.error, **(end.result.to_dict() if end.result else {})}
            for seed, job, end in zip(seeds, jobs, outcomes, strict=True)
        ]
        about = {"algorithm": cls.name, "out": str(out), "goals_met": sum(met), "interrupted": cut}
        streams.print_json({**about, "seeds": runs})
    return INTERRUPTED if cut else FAILED if failed else 0 if all(met) else GOAL_MISSED


def _over_seeds(results: Sequence[Result]) -> str:
    """The final results of several seeds as text."""
    returns = np.array([result.return_mean for result in results if result.returns_counted])
    if not returns.size:
        return f"{len(results)} seeds are done"
    middle, low, high = interval_of(returns)
    return f"{len(results)} seeds are done, with a return of {rounded(middle)} ({rounded(low)} to {rounded(high)})"


@interruptible
def _make_clip(algorithm: Algorithm[Any], result: Result, out: Path, log: run.Logs) -> None:
    """Make a clip of an iteration. A failure is reported, but does not end training."""
    path = out / run.CLIPS / f"iteration_{result.iteration:06}.gif"
    try:
        clip(algorithm, to=path, size=CLIP_SIZE, seed=result.iteration, max_steps=CLIP_STEPS)
    except EtudeError as error:
        streams.say(f"no clip of iteration {result.iteration}: {error}")
    else:
        log.video(path, result)


def _stop_flags(stop: Stop) -> str:
    """The flags that set ``stop``, which a checkpoint does not store, each with a space in front."""
    given = {name: value for name, value in dataclasses.asdict(stop).items() if value is not None}
    return "".join(f" --stop.{name.replace('_', '-')} {value}" for name, value in given.items())


def _ending(algorithm: Algorithm[Any], out: Path, result: Result, stop: Stop, *, cut: bool) -> str:
    # The command includes the engine, and trust in the user's own code, as checkpoints do not store them.
    kind = type(algorithm)
    name = next((name for name, cls in ALGORITHMS.items() if cls is kind), name_of(kind))
    engine = "" if algorithm.config.engine == "local" else " --engine ray"
    trust = " --trust" if names_code(algorithm.config) else ""
    to_go_on = f"etude train {name} --resume {shlex.quote(str(out))}{engine}{trust}"
    if cut:
        return f"interrupted: the checkpoint is in {out}. Go on with: {to_go_on}{_stop_flags(stop)}"
    if not stop.goals_met(result):
        return (
            f"a budget ran out with a mean return of {rounded(result.return_mean)}, short of {stop.return_mean:,.6g}. "
            f"The checkpoint is in {out}; go on with: {to_go_on}{_stop_flags(Stop(return_mean=stop.return_mean))} and "
            "a larger budget."
        )
    reached = "goal met" if stop.return_mean is not None else "done"
    return f"{reached} after {result.seconds:.1f} s of training. The run is in {out}"


# -- etude presets ----------------------------------------------------------------------------------------------------


@settings
class PresetsOptions:
    """List the presets. With an algorithm and an env, print its settings file: etude presets ppo HalfCheetah-v5."""

    which: tuple[str, ...] = ()
    """An algorithm, or an algorithm and an env."""

    json: bool = False
    """Print them as one JSON object on standard output."""

    def __post_init__(self) -> None:
        if len(self.which) > 2:
            raise SettingsError(f"give an algorithm and an env, not {len(self.which)} names: {' '.join(self.which)}.")

    def execute(self) -> int:
        """Print the presets."""
        if len(self.which) > 1:
            preset = find_preset(self.which[0], self.which[1])
            if self.json:
                streams.print_json(dataclasses.asdict(preset))
            else:
                streams.write(preset.to_yaml())
            return 0
        found = find_presets(*self.which)
        words = streams.table([PRESETS_HEAD, *map(_preset_row, found)])
        streams.tell({"presets": [dataclasses.asdict(preset) for preset in found]}, words, as_json=self.json)
        return 0


PRESETS_HEAD = ("algorithm", "env", "for", "return", "seeds", "minutes")


def _preset_row(preset: Preset) -> tuple[str, ...]:
    """A row of the table: what the preset is for, and its return, the mean over seeds and their standard deviation."""
    (unit, size), reached = next(iter(preset.stop.items())), preset.reached
    what = (preset.algorithm, preset.env, f"{size:,} {unit.replace('_', ' ')}")
    if reached is None:
        return (*what, "not run", "", "")
    returns = reached["returns"]
    mean, spread = statistics.fmean(returns), statistics.pstdev(returns)
    short = "" if reached[unit] >= size else f" after {reached[unit]:,}"
    minutes = "" if reached["seconds"] is None else f"{reached['seconds'] / 60:.0f}"
    return (*what, f"{mean:,.0f} ± {spread:,.0f}{short}", str(len(returns)), minutes)

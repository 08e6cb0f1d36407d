# SPDX-License-Identifier: Apache-2.0
"""``etude presets``: settings that are known to work for a task, with what they reached."""

import dataclasses
import statistics
import sys

from etude.cli import flags, streams
from etude.errors import SettingsError
from etude.presets import Preset, find_preset, find_presets
from etude.settings import settings


@settings
class PresetsOptions:
    """List the presets. With an algorithm and an env, write its settings file: etude presets ppo HalfCheetah-v5."""

    which: tuple[str, ...] = ()
    """An algorithm; or an algorithm and an env."""

    json: bool = False
    """Print them as one JSON object on standard output."""

    def __post_init__(self) -> None:
        if len(self.which) > 2:
            raise SettingsError(f"give an algorithm and an env, not {len(self.which)} names: {' '.join(self.which)}.")

    def execute(self) -> int:
        """Do it."""
        if len(self.which) > 1:
            sys.stdout.write(find_preset(self.which[0], self.which[1]).to_yaml())
            return 0
        found = find_presets(*self.which)
        if self.json:
            streams.print_json({"presets": [dataclasses.asdict(preset) for preset in found]})
        else:
            streams.show(streams.table([HEAD, *map(_row, found)]))
        return 0


HEAD = ("algorithm", "env", "for", "return", "seeds", "minutes")


def _row(preset: Preset) -> tuple[str, ...]:
    """A line of the table: what it is for, and what it reached, the mean over seeds and their standard deviation."""
    (unit, size), reached = next(iter(preset.stop.items())), preset.reached
    what = (preset.algorithm, preset.env, f"{size:,} {unit.replace('_', ' ')}")
    if reached is None:
        return (*what, "not run", "", "")
    returns = reached["returns"]
    mean, spread = statistics.fmean(returns), statistics.pstdev(returns)
    short = "" if reached[unit] >= size else f" after {reached[unit]:,}"
    return (*what, f"{mean:,.0f} ± {spread:,.0f}{short}", str(len(returns)), f"{reached['seconds'] / 60:.0f}")


def main(command: str, args: list[str]) -> int:
    """Run ``etude presets``."""
    return flags.run(PresetsOptions, args, prog=f"etude {command}", positional="which")

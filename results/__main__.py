# SPDX-License-Identifier: Apache-2.0
"""``python -m results [NAME ...] [--minutes M]``: make the runs that are missing, and write what was reached."""

import argparse
import subprocess
import sys

from results import page, runs
from results.plan import PLAN


def main() -> int:
    """Make what is missing, one run after the other, and write the page after each."""
    parser = argparse.ArgumentParser(prog="python -m results", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="presets, such as ppo-Hopper-v5; all if none")
    parser.add_argument("--minutes", type=float, default=40, help="that a run may last (default: 40)")
    parser.add_argument("--page", action="store_true", help="make no runs, write the page only")
    options = parser.parse_args()
    wanted = [planned for planned in PLAN if not options.names or planned.preset in options.names]
    for planned in [] if options.page else wanted:
        for seed in range(1, planned.seeds + 1):
            if runs.is_made(planned, seed, runs.told()):
                continue
            print(f"{planned.preset} by {planned.by}, seed {seed}", flush=True)
            try:
                runs.make(planned, seed, options.minutes)
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                print(f"  not made: {error}", flush=True)
                continue
            page.write(runs.told())
    page.write(runs.told())
    return 0


if __name__ == "__main__":
    sys.exit(main())

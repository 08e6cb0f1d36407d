# SPDX-License-Identifier: Apache-2.0
"""``etude plot``: learning curves as a picture."""

from etude.cli import flags
from etude.cli.streams import show
from etude.settings import settings


@settings
class PlotOptions:
    """What the command takes."""

    run: tuple[str, ...] = ()
    """The folders of the runs."""

    to: str = "curves.png"
    """The picture to write; .png, .svg or .pdf."""


def main(args: list[str]) -> int:
    """Run ``etude plot RUN ...``."""
    about = "Draw the learning curves of one or more runs."
    options = flags.options(PlotOptions, args, prog="etude plot", about=about, positional="run")
    from etude.metrics.plot import plot_runs

    show(str(plot_runs(options.run, options.to)))
    return 0

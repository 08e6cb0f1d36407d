# SPDX-License-Identifier: Apache-2.0
"""``etude serve``: a trained run behind HTTP."""

import dataclasses

from etude.cli import flags
from etude.cli.streams import say, show
from etude.serving import ServingConfig, serve
from etude.settings import settings
from etude.urls import redacted


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
        return 0


def main(command: str, args: list[str]) -> int:
    """Run ``etude serve RUN ...``."""
    return flags.run(Serve, args, prog="etude serve", positional="run")

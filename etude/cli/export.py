# SPDX-License-Identifier: Apache-2.0
"""``etude export``: a trained policy as a file that runs without Etude."""

from etude.cli import flags
from etude.cli.streams import print_json, show
from etude.errors import SettingsError
from etude.settings import settings
from etude.urls import redacted


@settings
class Export:
    """Write a trained policy, connectors included, as a file that runs without Etude."""

    run: str
    """The folder of the run, with its checkpoint."""

    to: str
    """The file: .onnx, which needs etude[export]; or .pt2, for torch.export.load."""

    policy: str | None = None
    """Which policy, by its module id, where there are several."""

    json: bool = False
    """Print one JSON object on standard output."""

    trust: bool = False
    """Import and call whatever the checkpoint names: this runs code from the file."""

    def __post_init__(self) -> None:
        if not self.to.endswith((".onnx", ".pt2")):
            raise SettingsError(f"`to` is {self.to!r}, but must end in .onnx or .pt2.")

    def execute(self) -> int:
        """Load, and write."""
        from etude.algorithms import load_policy
        from etude.cli.asked import import_from_here

        if self.trust:
            import_from_here()
        load_policy(self.run, self.policy, trust=self.trust).export(self.to)
        if self.json:
            print_json({"run": redacted(self.run), "to": self.to})
        else:
            show(f"exported to {self.to}")
        return 0


def main(command: str, args: list[str]) -> int:
    """Run ``etude export RUN --to FILE``."""
    return flags.run(Export, args, prog=f"etude {command}", positional="run")

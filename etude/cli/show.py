# SPDX-License-Identifier: Apache-2.0
"""``etude show``: a page in the browser that shows recordings. Imports no torch."""

import webbrowser

from etude.cli import flags
from etude.cli.data import DataCommand
from etude.cli.streams import say, show
from etude.errors import SettingsError
from etude.settings import settings


@settings
class Show(DataCommand):
    """Look at one recording, or at several side by side, in the browser: figures, episodes, and each step."""

    path: tuple[str, ...]
    """The recordings: folders or files."""

    to: str | None = None
    """Write the page to this file, which needs nothing else, instead of serving it."""

    where: str = ""
    """With --to: only episodes for which an expression holds, such as `return > 100`, as for `etude data filter`."""

    episodes: int = 20
    """With --to: how many episodes of each recording can be stepped through, at least 0."""

    port: int = 0
    """Where the page is served, on this machine alone; 0 is any port that is free."""

    browser: bool = True
    """Whether to open the page in the browser."""

    def execute(self) -> int:
        """Serve the page until Ctrl-C, or write it."""
        from etude.files import located
        from etude.viewer import RecordingView, Server, save_page

        if self.episodes < 0:
            raise SettingsError(f"--episodes is {self.episodes}, but must be at least 0.")
        if self.to is None and self.where:
            raise SettingsError("--where is for a page that --to writes; a served page has a filter of its own.")
        views = [RecordingView(self.opened(path)) for path in self.path]
        if self.to is not None:
            notes = save_page(views, located(self.to), where=self.where, max_episodes=self.episodes)
            found = {"path": self.to, "recordings": list(self.path), "notes": notes}
            return self.tell([view.recording for view in views], found, "\n".join([f"{self.to}: written.", *notes]))
        server = Server(views, self.port)
        show(f"{server.url} shows {', '.join(self.path)}; Ctrl-C ends it.")
        if self.browser:
            webbrowser.open(server.url)
        try:
            server.serve()
        except KeyboardInterrupt:
            say("ended.")
        finally:
            server.close()
        return 0


def main(command: str, args: list[str]) -> int:
    """Run ``etude show``."""
    return flags.run(Show, args, prog="etude show", positional="path")

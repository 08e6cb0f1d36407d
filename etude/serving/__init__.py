# SPDX-License-Identifier: Apache-2.0
"""Policies behind HTTP, and envs that are clients of a run by the same protocol. Needs ``etude[serve]``."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from etude.serving.external import ExternalEnv
from etude.serving.service import Policies, PolicyService, ServingConfig
from etude.serving.web import WebServer, make_app

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["ExternalEnv", "PolicyService", "ServingConfig", "WebServer", "app", "serve"]


def app(policies: Policies, **config: Any) -> "Starlette":
    """An ASGI app that serves policies, for a server of yours: ``uvicorn.run(app(policy))``.

    Args:
        policies: A policy, several by name, or the path or URL of a run, whose newest checkpoint is served.
        config: The fields of `ServingConfig`. The address is that of your server; with a ``host`` other than one of
            this machine, requests may name any host.

    Raises:
        SettingsError: a setting is wrong, or a package is missing.
        CheckpointError: the run can't be loaded.
        DataError: it can't be recorded to ``record``.
    """
    return make_app(PolicyService(policies, ServingConfig(**config)))


def serve(policies: Policies, *, ready: Callable[[str], None] | None = None, **config: Any) -> None:
    """Serve policies until SIGINT or SIGTERM; then what runs is answered, and the recording finished.

    Args:
        policies: See `app`, as for the errors.
        ready: Called with the URL as soon as requests are accepted.
        config: The fields of `ServingConfig`.

    Raises:
        KeyboardInterrupt: it was interrupted, and all is closed.
    """
    settings = ServingConfig(**config)
    service = PolicyService(policies, settings)
    try:
        server = WebServer(service, settings.host, settings.port)
        if ready is not None:
            ready(server.url)
        server.serve()
    finally:
        service.finish_recording()  # also where the port is taken

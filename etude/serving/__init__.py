# SPDX-License-Identifier: Apache-2.0
"""Serve policies over HTTP, and train on envs that are HTTP clients. Needs ``etude[serve]``."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from etude.serving.external import ExternalEnv
from etude.serving.service import Policies, PolicyService, ServingConfig
from etude.serving.web import WebServer, make_app

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["ExternalEnv", "PolicyService", "ServingConfig", "WebServer", "app", "serve"]


def app(policies: Policies, **config: Any) -> "Starlette":
    """Make an ASGI app that serves policies, to run on your own server: ``uvicorn.run(app(policy))``.

    Args:
        policies: A policy; a mapping of names to policies; or the path or URL of a run, whose newest checkpoint is
            served.
        config: Fields of `ServingConfig`. Your server sets the address. If ``host`` names this machine, as by default,
            requests whose Host header names another one are refused.

    Raises:
        SettingsError: a setting is wrong, or a package is missing.
        CheckpointError: the run can't be loaded.
        DataError: ``record`` can't be written.
    """
    return make_app(PolicyService(policies, ServingConfig(**config)))


def serve(policies: Policies, *, ready: Callable[[str], None] | None = None, **config: Any) -> None:
    """Serve policies until SIGINT or SIGTERM. Then finish the running requests and the recording.

    Args:
        policies: See `app`, which also lists the errors.
        ready: Called with the server's URL as soon as it accepts requests.
        config: Fields of `ServingConfig`.

    Raises:
        KeyboardInterrupt: SIGINT was received; everything is closed.
    """
    settings = ServingConfig(**config)
    service = PolicyService(policies, settings)
    try:
        server = WebServer(service, settings.host, settings.port)
        if ready is not None:
            ready(server.url)
        server.serve()
    finally:
        service.finish_recording()  # also if the port is taken

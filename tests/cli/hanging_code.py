# SPDX-License-Identifier: Apache-2.0
"""Code of a user that hangs outside of envs, and says so on standard error as `hanging_envs` do."""

import itertools
import threading
import time
from typing import Any

from hanging_envs import tell

import etude

_calls = itertools.count()


def hang_at(call: int) -> None:
    if next(_calls) == call:
        tell()
        threading.Event().wait()


class Segments(etude.Callback):
    def on_segment(self, segment: Any, episode: Any) -> None:
        hang_at(20)


class Connects(etude.Connector):
    def offline(self, exp: Any, module: Any = None) -> Any:
        hang_at(3)
        return exp


def prelearner(exp: Any, connect: Any) -> Any:
    hang_at(1)
    return connect(exp)


class HangsInLoss(etude.PPO):
    def loss(self, module: Any, batch: Any) -> Any:
        hang_at(5)
        return super().loss(module, batch)


class IsSlow(etude.PPO):
    """Its update takes hours, each gradient step of it a moment."""

    def loss(self, module: Any, batch: Any) -> Any:
        if next(_calls) == 5:
            tell()
        time.sleep(0.02)
        return super().loss(module, batch)

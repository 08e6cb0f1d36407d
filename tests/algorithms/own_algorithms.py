# SPDX-License-Identifier: Apache-2.0
"""Algorithms that inherit from each of Etude's, with a setting of their own; importable, as a user's module is."""

from typing import Any

import etude


@etude.settings
class MyConfig(etude.PPOConfig):
    """PPO's settings and one more."""

    my_weight: float = 0.1
    """Weight of mine."""


class MyPPO(etude.PPO):
    """PPO that logs its own setting from the loss."""

    Config = MyConfig

    def loss(self, module: Any, batch: Any) -> etude.Loss:
        return super().loss(module, batch).log(mine=self.config.my_weight)  # type: ignore[attr-defined]


class Heir(MyPPO):
    """Inherits the settings of `MyPPO`."""


class Plain(etude.PPO):
    """Has no settings of its own."""


class PlainIQL(etude.IQL):
    """Has no settings of its own."""


class Mine:
    """What several algorithms share, with the settings that it needs."""

    Config = MyConfig


class Mixed(Mine, etude.PPO):
    """Has its settings from a mixin."""


def _own(base: Any) -> Any:
    """As `MyConfig` and `MyPPO`, of another algorithm."""
    space = {"__module__": __name__, "__annotations__": {"my_weight": float}, "my_weight": 0.1}
    config = etude.settings(type(f"My{base.Config.__name__}", (base.Config,), space))

    def loss(self: Any, module: Any, batch: Any) -> etude.Loss:
        made: etude.Loss = base.loss(self, module, batch)
        return made.log(mine=self.config.my_weight)

    return type(f"My{base.__name__}", (base,), {"__module__": __name__, "Config": config, "loss": loss})


MyA2C, MyIMPALA, MyAPPO = map(_own, (etude.A2C, etude.IMPALA, etude.APPO))
MyDQN, MyQRDQN, MySAC, MyTD3 = map(_own, (etude.DQN, etude.QRDQN, etude.SAC, etude.TD3))
MyBC, MyMARWIL, MyIQL = map(_own, (etude.BC, etude.MARWIL, etude.IQL))
MyAWAC, MyCQL, MyTD3BC = map(_own, (etude.AWAC, etude.CQL, etude.TD3BC))
MyDecisionTransformer = _own(etude.DecisionTransformer)

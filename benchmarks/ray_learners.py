# SPDX-License-Identifier: Apache-2.0
"""Two learners of a cluster beside one, and beside torch's DistributedDataParallel that does the same."""

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import ray.util
import torch
import torch.distributed as dist
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import ENV, ETUDE, STEPS_A_SECOND, Figure, Options, Reach, Row, Work, race
from etude import PPO, Experience, NetworkConfig, PPOConfig
from etude.algorithms import Ray
from etude.experience import Segments
from etude.ray.learners import Learners

ROWS, EPOCHS, WIDTH = 8192, 8, 256
DDP, ONE, ONE_AWAY = (
    "bare DDP, two processes",
    "Etude, one learner in this process",
    "Etude, one learner of the cluster",
)
SPACES = (spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2))


def rows(options: Options) -> Iterator[Row]:
    """Steps learned from a second, in gradient steps of 8,192, all that belongs to an update."""
    with on_cluster(), updates(WIDTH, (2, 1)) as works:
        yield _row(works, options)


@contextmanager
def on_cluster() -> Iterator[None]:
    """A cluster of this machine alone, on whose cores its processes stand in each other's way."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=2**30)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def updates(width: int, nums: Sequence[int]) -> Iterator[dict[int, Work]]:
    """Whole updates, by so many learners of the cluster, and by none: in this process."""
    exp = _experience()
    made = {num: Learners(_algorithm(width), Ray(num_learners=num)) for num in nums}
    alone = _algorithm(width)

    def away(learners: Learners) -> Work:
        def work() -> int:
            learners.update({"main": exp}, 0)
            return ROWS * EPOCHS

        return work

    def here() -> int:
        alone.learn("main", exp)
        return ROWS * EPOCHS

    yield {num: away(learners) for num, learners in made.items()} | {0: here}
    for learners in made.values():
        learners.close()


def _row(works: dict[int, Work], options: Options) -> Row:
    actors = [_Bare.remote(rank) for rank in range(2)]  # type: ignore[attr-defined]
    address = ray.get(actors[0].address.remote())
    ray.get([actor.join.remote(address) for actor in actors])

    def bare() -> int:
        ray.get([actor.update.remote() for actor in actors])
        return ROWS * EPOCHS

    rates = race({ETUDE: works[2], DDP: bare, ONE_AWAY: works[1], ONE: works[0]}, options)
    for actor in actors:
        ray.kill(actor)
    figures = [Figure(ETUDE, rates[ETUDE], "etude"), *(Figure(name, rates[name]) for name in (DDP, ONE_AWAY, ONE))]
    work = f"PPO with two learners (gloo), 2x{WIDTH}, minibatch {ROWS:,}, {EPOCHS} epochs"
    return Row(work, STEPS_A_SECOND, figures, Reach(0.9, DDP))


def _algorithm(width: int) -> PPO:
    network = NetworkConfig(hidden=(width, width))
    config = PPOConfig(env=ENV, seed=0, network=network, minibatch_size=ROWS, epochs=EPOCHS, lr=3e-4)
    return PPO(config, saved_spaces={"main": SPACES})


def _experience() -> Experience:
    """Made up, as prepared for PPO: in segments as long as 16 envs give them."""
    obs, action, logp, advantage, target = (column.numpy() for column in _columns(ROWS))
    num = 16
    steps = {"obs": obs, "action": action, "logp": logp, "advantage": advantage, "value_target": target}
    segments = Segments.of(num, episode_id=[str(i) for i in range(num)])
    return Experience(steps, np.arange(0, ROWS + 1, ROWS // num), segments, {"obs": obs[:num]})


def _columns(size: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(size, 4, generator=generator)
    action = torch.randint(2, (size,), generator=generator)
    logp, advantage, target = torch.randn(3, size, generator=generator)
    return obs, action, -logp.abs(), advantage, target


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.policy, self.value = (
            nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))
            for outputs in (2, 1)
        )

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(obs), self.value(obs).squeeze(-1)


@ray.remote(num_cpus=1)
class _Bare:
    """Half of the rows, which it has already, and the loop as it is written beside DDP."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._data = _columns(ROWS // 2)

    def address(self) -> Any:
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as free:
            free.bind((host, 0))
            return host, free.getsockname()[1]

    def join(self, address: Any) -> None:
        host, port = address
        dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=self._rank, world_size=2)
        self._net = nn.parallel.DistributedDataParallel(_Net())
        self._optimizer = torch.optim.Adam(self._net.parameters(), 3e-4, fused=True)

    def update(self) -> None:
        for _ in range(EPOCHS):
            order = torch.randperm(ROWS // 2)
            obs, action, old, advantage, target = (column.index_select(0, order) for column in self._data)
            logits, value = self._net(obs)
            logp = logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
            ratio = (logp - old).exp()
            policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = policy + 0.5 * F.mse_loss(value, target)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._net.parameters(), 0.5)
            self._optimizer.step()

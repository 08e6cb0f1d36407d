# SPDX-License-Identifier: Apache-2.0
"""Gradient steps of PPO and BC beside the same steps written out in torch."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn import functional as F

from benchmarks import nets, sb3
from benchmarks.harness import ENV, ETUDE, Figure, Options, Reach, Row, Work, expert, milliseconds, race
from etude import BC, PPO, BCConfig, Experience, PPOConfig

STEPS, MINIBATCH, EPOCHS = 4096, 128, 2
ONE = "Etude, one module"
EAGER, FLAT, SB3 = "bare eager", "bare, flat + fused Adam", "SB3 train"
REACH, COMPILED_REACH = 0.75 / 1.06, 0.35 / 1.06
BC_BATCH, BC_UPDATES = 1024, 50
BARE_BC, BC_REACH, STREAMING_REACH = "bare step, one batch", 1.3 / 0.9, 1.5 / 0.9


def ppo(options: Options) -> Iterator[Row]:
    """A gradient step at minibatch 128, all that belongs to it: shuffling, gathering, loss, gradient, clip, Adam."""
    compiled = "Etude, compile=True"
    begin = time.perf_counter()
    compiled_work = _etude_ppo(compile=True)
    compiled_work()
    seconds = time.perf_counter() - begin
    works = {
        ETUDE: _etude_ppo(compile=False),
        EAGER: _bare_ppo(flat=False),
        SB3: sb3.stepping(STEPS, MINIBATCH, EPOCHS),
        compiled: compiled_work,
        FLAT: _bare_ppo(flat=True),
    }
    times = milliseconds(race(works, options))
    others = [Figure(EAGER, times[EAGER]), Figure(FLAT, times[FLAT]), Figure(SB3, times[SB3], "peer")]
    work = f"PPO gradient step, minibatch {MINIBATCH}, 2x64"
    yield Row(work, "ms", [Figure(ETUDE, times[ETUDE], "etude"), *others], Reach(REACH, EAGER))
    yield Row(
        f"{work}, compile=True",
        "ms",
        [Figure(ETUDE, times[compiled], "etude"), *others],
        Reach(COMPILED_REACH, EAGER),
        f"the first update, which compiles, took {seconds:.1f} s",
    )


def modules(options: Options) -> Iterator[Row]:
    """The same for two modules of one learner, beside one."""
    one, exp = _prepared(compile=False)
    other, _ = _prepared(compile=False)

    def both() -> int:
        for algorithm in (one, other):
            algorithm.learner.only.update(exp, minibatch_size=MINIBATCH, epochs=EPOCHS)
        return EPOCHS * STEPS // MINIBATCH

    def alone() -> int:
        one.learner.only.update(exp, minibatch_size=MINIBATCH, epochs=EPOCHS)
        return EPOCHS * STEPS // MINIBATCH

    times = milliseconds(race({ETUDE: both, ONE: alone}, options))
    yield Row(
        f"PPO gradient step of two modules, minibatch {MINIBATCH} each",
        "ms",
        [Figure(ETUDE, times[ETUDE], "etude"), Figure(ONE, times[ONE])],
        Reach(2.1, ONE),
    )


def _prepared(*, compile: bool) -> tuple[PPO, Experience]:
    """PPO after sampling and GAE, and what it has to learn from."""
    config = PPOConfig(env=ENV, seed=0, num_steps=STEPS, minibatch_size=MINIBATCH, epochs=EPOCHS, compile=compile)
    algorithm = PPO(config)
    exp = algorithm.connectors.offline(algorithm.runner.collect(num_steps=STEPS))
    return algorithm, algorithm.learner.only.connectors.offline(exp, algorithm.module)


def _etude_ppo(*, compile: bool) -> Work:
    """What PPO does in an iteration after sampling and GAE."""
    algorithm, exp = _prepared(compile=compile)

    def work() -> int:
        algorithm.update(algorithm.learner.only, exp)
        return EPOCHS * STEPS // MINIBATCH

    return work


def _bare_ppo(*, flat: bool) -> Work:
    """The step as it is written in single-file implementations; or as lean as torch allows without compiling."""
    net = nets.seeded_net()
    parameters = list(net.parameters())
    if flat:
        parameters = [_flattened(parameters)]
    optimizer = torch.optim.Adam(parameters, 3e-4, fused=flat)
    data = _random_data()
    loss_of = _lean_ppo_loss if flat else _ppo_loss

    def work() -> int:
        for _ in range(EPOCHS):
            order = torch.randperm(STEPS)
            for i in range(0, STEPS, MINIBATCH):
                rows = order[i : i + MINIBATCH]
                loss = loss_of(net, *(column.index_select(0, rows) for column in data))
                optimizer.zero_grad(set_to_none=not flat)
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        return EPOCHS * STEPS // MINIBATCH

    return work


def _random_data() -> tuple[Tensor, ...]:
    """Columns obs, action, logp, advantage, value target."""
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(STEPS, 4, generator=generator)
    action = torch.randint(2, (STEPS,), generator=generator)
    logp, advantage, target = torch.randn(3, STEPS, generator=generator)
    return obs, action, -logp.abs(), advantage, target


def _ppo_loss(net: Any, obs: Tensor, action: Tensor, old: Tensor, advantage: Tensor, target: Tensor) -> Tensor:
    logits, value = net(obs)
    dist: Any = Categorical(logits=logits, validate_args=False)
    ratio = (dist.log_prob(action) - old).exp()
    policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    loss: Tensor = policy + 0.5 * F.mse_loss(value, target) - 0.0 * dist.entropy().mean()
    return loss


def _lean_ppo_loss(net: Any, obs: Tensor, action: Tensor, old: Tensor, advantage: Tensor, target: Tensor) -> Tensor:
    """The same without a distribution object and without the entropy, which has no weight."""
    logits, value = net(obs)
    logp = logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
    ratio = (logp - old).exp()
    policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    loss: Tensor = policy + 0.5 * F.mse_loss(value, target)
    return loss


def _flattened(parameters: list[torch.nn.Parameter]) -> torch.nn.Parameter:
    """One parameter that shares its memory, and its gradient's, with all of these."""
    flat = torch.nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters]))
    flat.grad = torch.zeros_like(flat)
    at = 0
    for p in parameters:
        p.data = flat.data[at : at + p.numel()].view_as(p)
        p.grad = flat.grad[at : at + p.numel()].view_as(p)
        at += p.numel()
    return flat


def bc(options: Options) -> Iterator[Row]:
    """A gradient step on 1,024 recorded steps with getting them."""
    memory, streaming = "Etude, in memory", "Etude, streaming"
    data = str(expert(options))
    works = {memory: _etude_bc(data, "auto"), BARE_BC: _bare_bc(), streaming: _etude_bc(data, "stream")}
    times = milliseconds(race(works, options))
    bare = Figure(BARE_BC, times[BARE_BC])
    for name, about, reach in ((memory, "in memory", BC_REACH), (streaming, "streaming", STREAMING_REACH)):
        yield Row(
            f"BC, iteration of 1,024 steps with its data, {about}",
            "ms",
            [Figure(ETUDE, times[name], "etude"), bare],
            Reach(reach, BARE_BC),
        )


def _etude_bc(data: str, mode: Any) -> Work:
    algorithm = BC(BCConfig(data=data, mode=mode, batch_size=BC_BATCH, updates_per_iteration=BC_UPDATES, seed=0))

    def work() -> int:
        algorithm.train()
        return BC_UPDATES

    return work


def _bare_bc() -> Work:
    policy = nets.seeded_net().policy
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(BC_BATCH, 4, generator=generator)
    action = torch.randint(2, (BC_BATCH,), generator=generator)

    def work() -> int:
        for _ in range(BC_UPDATES):
            optimizer.zero_grad()
            F.cross_entropy(policy(obs), action).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return BC_UPDATES

    return work

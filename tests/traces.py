# SPDX-License-Identifier: Apache-2.0
"""Compare the numbers of this checkout with those of another commit: `make traces BASE=<commit>`.

Short runs with fixed seeds (every algorithm, one and many agents, memory, workers, resuming) are made twice: with the
package as it is in BASE, in a worktree of its own, and as it is here. Their losses, weights and experience must be
equal bit for bit, but for the cases in `TOLERANCES`, each of which says why.

Both sides run this file, so that it uses public names only. Where a name has changed since BASE, `first` finds either.
A weight or a column whose name has changed is compared with the one of equal content.

    python tests/traces.py run FOLDER [--data FOLDER] [--cases ppo,sac]     one side: a file for each case
    python tests/traces.py compare BASE_FOLDER HEAD_FOLDER
    python tests/traces.py BASE_COMMIT [--cases ppo,sac]                    both
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch

import etude

TOLERANCES: dict[str, tuple[float, str]] = {
    "ppo_gru": (1e-4, "values are computed for all steps at once, no more while acting"),
    "ppo_lstm": (1e-4, "values are computed for all steps at once, no more while acting"),
}
"""Case: the largest relative difference that is meant, and the change of arithmetic that it comes from."""

Trace = dict[str, np.ndarray]
CASES: dict[str, Callable[[Path], Trace]] = {}
"""What each case runs, by name; it gets the folder with the recordings that BASE made."""

HERE = Path(__file__).resolve().parent.parent


def case(make: Callable[[Path], Trace]) -> Callable[[Path], Trace]:
    """Add a case."""
    CASES[make.__name__] = make
    return make


# -- what a trace holds ------------------------------------------------------------------------------------------


def first(thing: Any, *names: str) -> Any:
    """The attribute of ``thing`` by the first of these names that it has."""
    return next(getattr(thing, name) for name in names if hasattr(thing, name))


def weights(algorithm: Any) -> Trace:
    """All tensors of all modules."""
    policies = first(algorithm, "policies", "students")
    return {
        f"weights/{name}/{key}": value.detach().cpu().numpy().copy()
        for name, policy in policies.items()
        for key, value in policy.module.state_dict().items()
    }


def experience(exp: Any, prefix: str = "experience") -> Trace:
    """All columns, and where each segment begins and ends. Ids are numbered in the order in which they come."""
    parts = exp if isinstance(exp, dict) else {"": exp}
    trace: Trace = {}
    for name, part in parts.items():
        begin = f"{prefix}/{name or ''}"
        trace |= {f"{begin}/{column}": np.asarray(values) for column, values in part.steps.items()}
        trace |= {f"{begin}/final/{column}": np.asarray(values) for column, values in part.final_obs.items()}
        trace[f"{begin}/offsets"] = np.asarray(part.offsets)
        for field in ("t_start", "lookback", "terminated", "truncated", "has_final_obs"):
            trace[f"{begin}/{field}"] = np.asarray(getattr(part.segments, field))
        _, numbers = np.unique(np.asarray(part.segments.episode_id).astype(str), return_inverse=True)
        _, order = np.unique(numbers, return_index=True)
        trace[f"{begin}/episode"] = np.argsort(np.argsort(order))[numbers]
    return trace


def trained(algorithm: Any, iterations: int = 2, *, close: bool = True) -> Trace:
    """The losses of some iterations, and the weights after them."""
    trace: Trace = {}
    for i in range(iterations):
        result = algorithm.train()
        trace |= {f"losses/{i}/{name}": np.asarray(value) for name, value in result.losses.items()}
        trace[f"returns/{i}"] = np.asarray([result.env_steps, result.episodes, result.return_mean], np.float64)
    trace |= weights(algorithm)
    if close:
        algorithm.close()
    return trace


def acting(algorithm: Any, iterations: int = 2, num_steps: int = 256) -> Trace:
    """As `trained`, and what is collected after it."""
    trace = trained(algorithm, iterations, close=False)
    runner = first(algorithm, "runner")
    collect = first(runner, "collect_each", "collect")
    trace |= experience(collect(num_steps=num_steps))
    algorithm.close()
    return trace


# -- envs --------------------------------------------------------------------------------------------------------


class NoVelocity(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole without velocities."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: Any) -> Any:
        """Where the cart and the pole are."""
        return observation[[0, 2]]


class Pair:
    """Two agents with different spaces; the second leaves early."""

    possible_agents = ("left", "right")
    observation_spaces: ClassVar = {
        name: gym.spaces.Box(-5, 5, (size,), np.float32) for name, size in (("left", 2), ("right", 3))
    }
    action_spaces: ClassVar = {"left": gym.spaces.Discrete(3), "right": gym.spaces.Box(-1, 1, (1,), np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Both begin."""
        if seed is not None or not hasattr(self, "random"):
            self.random = np.random.default_rng(seed)
        self.t, self.length = 0, int(self.random.integers(5, 15))
        return self._obs(), {}

    def _obs(self) -> dict[str, Any]:
        both = {"left": self.random.normal(size=2), "right": self.random.normal(size=3)}
        return {name: value.clip(-5, 5).astype(np.float32) for name, value in both.items()}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """The left one is paid for 1, the right one for what is near 0."""
        self.t += 1
        rewards = {"left": float(action["left"] == 1)} if "left" in action else {}
        if "right" in action:
            rewards["right"] = -float(np.abs(action["right"]).sum())
        over = self.t >= self.length
        obs = {name: value for name, value in self._obs().items() if name in action}
        leaves = {"right": True} if self.t == 5 and not over else {}
        return obs, rewards, {"__all__": over, **leaves}, {"__all__": False}, {}


# -- acting ------------------------------------------------------------------------------------------------------

ON_POLICY = {"env": "CartPole-v1", "seed": 3, "num_envs": 8, "num_steps": 512, "minibatch_size": 128, "epochs": 2}
OFF_POLICY = {"seed": 3, "num_steps": 16, "iteration_steps": 400, "learning_starts": 200, "batch_size": 64}


@case
def ppo(_: Path) -> Trace:
    """PPO on CartPole."""
    return acting(etude.PPO(etude.PPOConfig(**ON_POLICY)))


@case
def ppo_one_env(_: Path) -> Trace:
    """PPO with one env."""
    return acting(etude.PPO(etude.PPOConfig(**{**ON_POLICY, "num_envs": 1})))


@case
def ppo_box(_: Path) -> Trace:
    """PPO on Pendulum, with connectors of both sides, a target of the KL, and a clipped value."""
    settings = {**ON_POLICY, "env": "Pendulum-v1", "connectors": ("normalize_obs", "frame_stack:3", "clip_reward")}
    return acting(etude.PPO(etude.PPOConfig(**settings, kl_target=0.02, value_clip=1.0, entropy_weight=0.01)))


@case
def ppo_squashed_copies(_: Path) -> Trace:
    """PPO with a squashed Gaussian, on copies of an env that has no vectorised version."""
    settings = {**ON_POLICY, "env": "MountainCarContinuous-v0", "squash": True, "connectors": ("rescale_action",)}
    return acting(etude.PPO(etude.PPOConfig(**settings)))


@case
def ppo_whole_episodes(_: Path) -> Trace:
    """PPO from whole episodes of limited length."""
    settings = {**ON_POLICY, "whole_episodes": True, "max_trajectory_length": 20}
    return acting(etude.PPO(etude.PPOConfig(**settings)))


@case
def ppo_lstm(_: Path) -> Trace:
    """PPO with an LSTM."""
    network = etude.NetworkConfig(recurrent="lstm")
    return acting(etude.PPO(etude.PPOConfig(**{**ON_POLICY, "env": NoVelocity}, network=network, burn_in=4)))


@case
def ppo_gru(_: Path) -> Trace:
    """PPO with a GRU that starts its sequences from zeros."""
    network = etude.NetworkConfig(recurrent="gru")
    settings = {**ON_POLICY, "env": NoVelocity, "sequence_start": "zeros", "max_seq_len": 8}
    return acting(etude.PPO(etude.PPOConfig(**settings, network=network)))


@case
def ppo_agents(_: Path) -> Trace:
    """PPO with a module for each of two agents."""
    return acting(etude.PPO(etude.PPOConfig(**{**ON_POLICY, "env": Pair}, modules=("left", "right"))))


@case
def ppo_workers(_: Path) -> Trace:
    """PPO with four envs in two processes, in lock-step."""
    workers = etude.Workers(num_workers=2, envs_per_worker=2, min_batch=4)
    return acting(etude.PPO(etude.PPOConfig(**{**ON_POLICY, "env": "Acrobot-v1"}, workers=workers)))


@case
def impala(_: Path) -> Trace:
    """IMPALA."""
    settings = {name: value for name, value in ON_POLICY.items() if name != "minibatch_size"}
    return acting(etude.IMPALA(etude.IMPALAConfig(**settings)))


@case
def a2c(_: Path) -> Trace:
    """A2C."""
    return acting(etude.A2C(etude.A2CConfig(env="CartPole-v1", seed=3)))


@case
def appo(_: Path) -> Trace:
    """APPO."""
    return acting(etude.APPO(etude.APPOConfig(**ON_POLICY)))


@case
def dqn(_: Path) -> Trace:
    """DQN."""
    return acting(etude.DQN(etude.DQNConfig(env="CartPole-v1", **OFF_POLICY)), num_steps=64)


@case
def dqn_parts(_: Path) -> Trace:
    """DQN with priorities, several steps, a dueling network and several envs."""
    config = etude.DQNConfig(env="CartPole-v1", **OFF_POLICY, num_envs=4, prioritized=True, n_step=3, dueling=True)
    return acting(etude.DQN(config), num_steps=64)


@case
def qr_dqn(_: Path) -> Trace:
    """QR-DQN with a noisy network."""
    config = etude.QRDQNConfig(env="CartPole-v1", **OFF_POLICY, num_quantiles=10, noisy=True)
    return acting(etude.QRDQN(config), num_steps=64)


@case
def sac(_: Path) -> Trace:
    """SAC."""
    config = etude.SACConfig(env="Pendulum-v1", **{**OFF_POLICY, "iteration_steps": 300})
    return acting(etude.SAC(config), num_steps=64)


@case
def td3(_: Path) -> Trace:
    """TD3."""
    config = etude.TD3Config(env="Pendulum-v1", **{**OFF_POLICY, "iteration_steps": 300})
    return acting(etude.TD3(config), num_steps=64)


# -- resuming ----------------------------------------------------------------------------------------------------


def resumed(make: Callable[[], Any], iterations: int = 2) -> Trace:
    """Train, save, load, and train on."""
    with tempfile.TemporaryDirectory() as folder:
        algorithm = make()
        trained(algorithm, iterations, close=False)
        algorithm.save(folder)
        algorithm.close()
        return acting(etude.load(folder), iterations, 64)


@case
def ppo_resumed(_: Path) -> Trace:
    """PPO, resumed."""
    return resumed(lambda: etude.PPO(etude.PPOConfig(**ON_POLICY, connectors=("normalize_obs",))))


@case
def sac_resumed(_: Path) -> Trace:
    """SAC, resumed."""
    config = etude.SACConfig(env="Pendulum-v1", **{**OFF_POLICY, "iteration_steps": 250})
    return resumed(lambda: etude.SAC(config))


# -- recordings --------------------------------------------------------------------------------------------------


def make_data(data: Path) -> None:
    """The recordings that both sides read: of one agent with each kind of action, and of two agents."""
    for name, env in (("discrete", "CartPole-v1"), ("box", "Pendulum-v1")):
        with_values = etude.PPO(etude.PPOConfig(env=env, seed=5, num_envs=4))
        with_values.record(data / name, 20, seed=6, explore=True)
        with_values.close()
    pair = etude.PPO(etude.PPOConfig(env=Pair, seed=5, num_envs=4, modules=("left", "right")))
    pair.record(data / "pair", 40, seed=6, explore=True)
    pair.close()


@case
def recordings(data: Path) -> Trace:
    """What is read of the recordings."""
    return {
        name: values
        for folder in ("discrete", "box", "pair/left", "pair/right")
        for name, values in experience(etude.Recording.open(data / folder).read(), folder).items()
    }


def offline(algorithm: str, data: Path, **settings: Any) -> Trace:
    """Losses and weights of an offline algorithm."""
    config = getattr(etude, f"{algorithm}Config")
    given = {"batch_size": 128, "updates_per_iteration": 20, "evaluation_interval": 0, "seed": 3} | settings
    return trained(getattr(etude, algorithm)(config(data=str(data), **given)))


@case
def bc_memory(data: Path) -> Trace:
    """BC, from memory."""
    return offline("BC", data / "discrete", mode="materialize_data", connectors=("normalize_obs",))


@case
def bc_stream(data: Path) -> Trace:
    """BC, streaming, with workers and a filter."""
    return offline("BC", data / "discrete", mode="stream", num_workers=2, buffer_size=512, filter="t > 2")


@case
def bc_lstm(data: Path) -> Trace:
    """BC with an LSTM."""
    return offline("BC", data / "discrete", network=etude.NetworkConfig(recurrent="lstm"), burn_in=4)


@case
def bc_agents(data: Path) -> Trace:
    """BC of one of two agents."""
    return offline("BC", data / "pair/right")


@case
def marwil(data: Path) -> Trace:
    """MARWIL."""
    return offline("MARWIL", data / "box")


@case
def iql(data: Path) -> Trace:
    """IQL."""
    return offline("IQL", data / "box")


@case
def awac(data: Path) -> Trace:
    """AWAC."""
    return offline("AWAC", data / "box")


@case
def cql_box(data: Path) -> Trace:
    """CQL with a Box."""
    return offline("CQL", data / "box")


@case
def cql_discrete(data: Path) -> Trace:
    """CQL with discrete actions."""
    return offline("CQL", data / "discrete")


@case
def td3_bc(data: Path) -> Trace:
    """TD3+BC."""
    return offline("TD3BC", data / "box")


@case
def decision_transformer(data: Path) -> Trace:
    """Decision Transformer."""
    small: dict[str, Any] = {"embedding_size": 16, "num_layers": 1, "context_length": 4}
    return offline("DecisionTransformer", data / "box", **small)


# -- both sides --------------------------------------------------------------------------------------------------


def run(folder: Path, data: Path, names: list[str]) -> None:
    """Run the cases with the package that is imported here; a case that fails leaves its error."""
    folder.mkdir(parents=True, exist_ok=True)
    if not data.exists():
        make_data(data)
    for name in names:
        try:
            trace = CASES[name](data)
        except Exception as error:  # noqa: BLE001  one broken case must not hide the others
            trace = {"error": np.asarray(f"{type(error).__name__}: {error}")}
        np.savez(folder / f"{name}.npz", **{key.replace("/", "|"): value for key, value in trace.items()})
        print(f"{name}: {len(trace)} arrays", flush=True)


def differences(base: Trace, head: Trace, tolerance: float) -> Iterator[str]:
    """What differs, in words."""
    for side, trace in (("base", base), ("here", head)):
        if "error" in trace:
            yield f"{side}: {trace['error']}"
            return
    gone, new = sorted(base.keys() - head.keys()), sorted(head.keys() - base.keys())
    for name in gone:  # the name may have changed
        same = next((other for other in new if _distance(base[name], head[other]) == 0), None)
        if same is None:
            yield f"{name} is gone"
        else:
            new.remove(same)
    for name in new:
        yield f"{name} is new"
    for name in sorted(base.keys() & head.keys()):
        far = _distance(base[name], head[name])
        if far > tolerance:
            yield f"{name} differs by {far:.3g}"


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, relative to the largest number; infinite where they can't be compared."""
    if a.shape != b.shape or a.dtype.kind != b.dtype.kind:
        return np.inf
    if a.dtype.kind not in "fiub" or a.size == 0:
        return 0.0 if np.array_equal(a, b) else np.inf
    if np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.nanmax(np.abs(a - b)) / max(np.nanmax(np.abs(a)), 1e-12))


def compare(base: Path, head: Path) -> bool:
    """Print a line for each case; True where all are as they should be."""
    fine = True
    for path in sorted(head.glob("*.npz")):
        name = path.stem
        tolerance, reason = TOLERANCES.get(name, (0.0, ""))
        traces = []
        for folder in (base, head):
            with np.load(folder / path.name, allow_pickle=False) as file:
                traces.append({key.replace("|", "/"): file[key] for key in file.files})
        found = list(differences(*traces, tolerance))
        fine &= not found
        equal = f"within {tolerance:g} ({reason})" if tolerance else "equal"
        print(f"{name:24} {equal if not found else 'DIFFERENT'}")
        for line in found[:8]:
            print(f"    {line}")
        if len(found) > 8:
            print(f"    and {len(found) - 8} more")
    return fine


def both(commit: str, names: list[str]) -> bool:
    """Run BASE in a worktree, then this checkout, and compare."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tree = folder / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=HERE, check=True)
        try:
            for side, root in (("base", tree), ("head", HERE)):
                print(f"-- {side}", flush=True)
                arguments = ["run", str(folder / side), "--data", str(folder / "data"), "--cases", ",".join(names)]
                env = {**os.environ, "PYTHONPATH": str(root)}
                subprocess.run([sys.executable, __file__, *arguments], cwd=root, env=env, check=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=HERE, check=True)
        return compare(folder / "base", folder / "head")


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="run, compare, or the commit to compare with")
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cases", default=",".join(CASES))
    given = parser.parse_args()
    names = given.cases.split(",")
    torch.use_deterministic_algorithms(True)
    if given.what == "run" and len(given.folders) == 1:
        with tempfile.TemporaryDirectory() as folder:
            run(given.folders[0], given.data or Path(folder) / "data", names)
    elif given.what == "compare" and len(given.folders) == 2:
        sys.exit(not compare(*given.folders))
    elif not given.folders:
        sys.exit(not both(given.what, names))
    else:
        parser.error("see --help")


if __name__ == "__main__":
    main()

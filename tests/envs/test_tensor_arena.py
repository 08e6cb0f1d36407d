# SPDX-License-Identifier: Apache-2.0
"""Vector envs of torch tensors: the same steps as in NumPy, without a word to the host but rewards and flags."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from some_envs import LendingVectorEnv, Numbered
from tensor_envs import AsTensors, Follow, HostCount

from etude.envs import VectorArena, Workers, make_arena
from etude.envs.tensors import TensorArena
from etude.errors import EnvError, SpaceError
from etude.experience.arrays import host_columns
from etude.spaces import Flattener

MODES = list(AutoresetMode)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


def cartpole(mode: AutoresetMode) -> VectorEnv[Any, Any, Any]:
    return gym.make_vec("CartPole-v1", 3, "sync", vector_kwargs={"autoreset_mode": mode}, max_episode_steps=20)


def nested(mode: AutoresetMode) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([lambda i=i: Numbered(i, "dict") for i in range(3)], autoreset_mode=mode)


def lending(mode: AutoresetMode) -> VectorEnv[Any, Any, Any]:
    return LendingVectorEnv(3, mode)


def turns_of(arena: VectorArena, num: int = 60) -> list[dict[str, Any]]:
    """All that an arena shows, in NumPy and copied; actions depend on what slots are shown."""
    shown = []
    arena.reset(seed=3)
    for step in range(num):
        for turn in arena.recv():
            obs = {name: column.copy() for name, column in host_columns(turn.obs).items()}
            reward = np.where(turn.first, 0, turn.reward) if turn.first is not None else turn.reward.copy()
            flags = [None if flag is None else flag.copy() for flag in (turn.terminated, turn.truncated, turn.first)]
            shown.append({"slots": turn.slots, "obs": obs, "reward": reward, "flags": flags, "waits": turn.waits})
            if turn.waits:
                waiting = turn
        rng = np.random.default_rng(step)
        space = arena.action_space
        space.seed(int(rng.integers(1000)))
        flatten = Flattener(space, "action")
        drawn = [flatten(space.sample()) for _ in range(arena.num_slots)]
        action: Any = {name: np.stack([one[name] for one in drawn]) for name in drawn[0]}
        if arena.device is not None:
            action = {name: torch.from_numpy(column).to(arena.device) for name, column in action.items()}
        arena.send(waiting, action)
    return shown


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [cartpole, nested, lending])
def test_turns_are_those_of_the_same_env_in_numpy(make: Any, mode: AutoresetMode, device: str) -> None:
    arena = TensorArena(AsTensors(make(mode), device), 3)
    found, wanted = turns_of(arena), turns_of(VectorArena(make(mode), 3))
    assert sum(not turn["waits"] for turn in found) or mode is AutoresetMode.NEXT_STEP
    assert any(turn["flags"][0] is not None for turn in found)
    for own, other in zip(found, wanted, strict=True):
        assert own["obs"].keys() == other["obs"].keys()
        for name, column in own["obs"].items():
            np.testing.assert_array_equal(column, other["obs"][name])
            assert column.dtype == other["obs"][name].dtype
        np.testing.assert_array_equal(own["slots"], other["slots"])
        np.testing.assert_allclose(own["reward"], other["reward"])
        for flag, its in zip(own["flags"], other["flags"], strict=True):
            np.testing.assert_array_equal(flag, its)
        assert own["waits"] == other["waits"]


# in the mode SAME_STEP, Gymnasium's wrapper can't turn the final_obs of its own SyncVectorEnv into tensors
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_gymnasiums_own_wrapper_gives_the_same_turns(mode: AutoresetMode) -> None:
    pytest.importorskip("array_api_compat", reason="gymnasium.wrappers.vector.NumpyToTorch needs array_api_compat")
    from gymnasium.wrappers.vector import NumpyToTorch

    def make() -> Any:
        return gym.make_vec("CartPole-v1", 3, "sync", vector_kwargs={"autoreset_mode": mode}, max_episode_steps=20)

    arena = make_arena(NumpyToTorch(make(), device="cpu"), 3)
    assert type(arena) is TensorArena
    for own, other in zip(turns_of(arena), turns_of(VectorArena(make(), 3)), strict=True):
        np.testing.assert_array_equal(own["obs"]["obs"], other["obs"]["obs"])
        np.testing.assert_array_equal(own["flags"][2], other["flags"][2])


@pytest.mark.parametrize("device", DEVICES)
def test_max_steps_truncate(device: str) -> None:
    arena = make_arena(Follow(4, AutoresetMode.DISABLED, device), 4, Workers(max_steps=3))
    ends = [turn for turn in turns_of(arena, 12) if turn["flags"][1] is not None]
    assert len(ends) == 3
    assert all(turn["flags"][1].all() and len(turn["slots"]) == 4 for turn in ends)
    with pytest.raises(EnvError, match=r"Follow resets its copies itself.*after 3 steps \(workers.max_st"):
        make_arena(Follow(4, device=device), 4, Workers(max_steps=3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_one_transfer_a_step(mode: AutoresetMode, device: str) -> None:
    arena = make_arena(Follow(6, mode, device), 6, Workers(check=2))
    arena.reset(seed=1)
    action: Any = {"action": torch.zeros(6, dtype=torch.int64, device=arena.device)}

    def step() -> None:
        arena.send(arena.recv()[-1], action)

    with HostCount() as counted:
        step()
        assert counted.counts.pop(("torch.float32", (6, 3))), "the first observations are checked"
        step()
        counted.counts.clear()
        for _ in range(20):
            step()
    assert counted.counts == {("torch.float32", (3, 6)): 20, ("numpy", (3, 6)): 20}
    (turn,) = arena.recv()[-1:]
    assert turn.obs["obs"].device == arena.device
    assert all(isinstance(part, np.ndarray) for part in (turn.reward, turn.slots))


@pytest.mark.parametrize("given", [lambda obs: obs.tolist(), lambda obs: obs[:, :2], lambda obs: obs.double()])
def test_observations_get_the_form_of_their_space_or_are_refused(given: Any) -> None:
    class Changing(Follow):
        def step(self, actions: Any) -> Any:
            obs, *rest = super().step(actions)
            return given(obs), *rest

    arena = make_arena(Changing(6), 6, Workers(check=0))
    arena.reset(seed=1)
    action: Any = {"action": torch.zeros(6, dtype=torch.int64)}
    if isinstance(given(torch.zeros(6, 3)), torch.Tensor) and given(torch.zeros(6, 3)).shape == (6, 3):
        arena.send(arena.recv()[-1], action)
        assert arena.recv()[-1].obs["obs"].dtype == torch.float32
        return
    with pytest.raises(
        SpaceError, match=r"`obs` is a (list|Tensor) of .* needs a tensor of torch.float32 and shape \(6, 3\)"
    ):
        arena.send(arena.recv()[-1], action)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("space", "given", "match"),
    [
        (gym.spaces.Box(0, 255, (2,), np.uint8), [300, 1], "`obs` has dtype int64, but its space .* dtype uint8"),
        (gym.spaces.Box(-9, 9, (2,), np.int32), [2**31, 1], "`obs` holds 2147483648, outside the range of int32"),
        (gym.spaces.MultiDiscrete([3, 4]), [3, 0], r"copy 1: `obs` is \[3 0\], outside its space MultiDiscrete"),
        (gym.spaces.MultiBinary(2), [0, 7], r"copy 1: `obs` is \[0 7\], outside its space MultiBinary"),
    ],
)
def test_whole_numbers_are_checked_at_every_step_or_first_on_a_gpu(
    space: Any, given: list[int], match: str, device: str
) -> None:
    class Whole(Follow):
        count = 0

        def _show(self) -> torch.Tensor:
            super()._show()
            self.count += 1
            return torch.tensor([[0, 0], given if self.count > at else [0, 0]], device=self.device)

    at = 20 if device == "cpu" else 3
    env = Whole(2, device=device)
    env.single_observation_space = space
    with pytest.raises(SpaceError, match=match):
        turns_of(make_arena(env, 2), 40)


def test_the_count_counts() -> None:
    tensor = torch.zeros(2, 3)
    with HostCount() as counted:
        tensor.cpu(), np.asarray(tensor), tensor.tolist(), bool(tensor[0, 0]), float(tensor[0, 0])
    assert counted.counts["torch.float32", (2, 3)] >= 3
    assert counted.counts["torch.float32", ()] >= 2


def test_rewards_keep_their_precision_and_copies_their_own() -> None:
    class Precise(Follow):
        def step(self, actions: Any) -> Any:
            obs, _, *others = super().step(actions)
            return obs, 1e-12 + torch.arange(self.num_envs).double(), *others

    arena = make_arena(Precise(3), 3)
    arena.reset(seed=1)
    arena.send(arena.recv()[0], {"action": torch.zeros(3, dtype=torch.int64)})  # type: ignore[dict-item]
    assert arena.recv()[0].reward.tolist() == [1e-12, 1 + 1e-12, 2 + 1e-12]


@pytest.mark.parametrize(("dtype", "reward"), [(torch.uint8, 200), (torch.int64, 2**24 + 1), (torch.bool, 1)])
def test_rewards_in_whole_numbers_are_exact(dtype: torch.dtype, reward: int) -> None:
    class Whole(Follow):
        def step(self, actions: Any) -> Any:
            obs, _, *others = super().step(actions)
            return obs, torch.full((self.num_envs,), reward, dtype=dtype), *others

    arena = make_arena(Whole(3), 3)
    arena.reset(seed=1)
    arena.send(arena.recv()[0], {"action": torch.zeros(3, dtype=torch.int64)})  # type: ignore[dict-item]
    assert arena.recv()[0].reward.tolist() == [reward] * 3


def test_the_older_name_of_the_last_observation() -> None:
    class Older(Follow):
        def step(self, actions: Any) -> Any:
            *given, info = super().step(actions)
            return *given, {"final_observation": info["final_obs"]}

    args = (3, AutoresetMode.SAME_STEP)
    for own, other in zip(turns_of(make_arena(Older(*args), 3)), turns_of(make_arena(Follow(*args), 3)), strict=True):
        np.testing.assert_array_equal(own["obs"]["obs"], other["obs"]["obs"])


@pytest.mark.parametrize(
    ("which", "wrong", "match"),
    [
        (1, torch.zeros(3, 1), r"`reward` of Wrong is a tensor float32\[3, 1\].*3 numbers"),
        (1, torch.zeros(3, dtype=torch.complex64), r"`reward` of Wrong is a tensor complex64"),
        (1, np.zeros(3), "`reward` of Wrong is .*must be a tensor"),
        (2, torch.zeros(3), r"`terminated` of Wrong is a tensor float32\[3\].*3 bools"),
        (3, torch.zeros(2, dtype=torch.bool), r"`truncated` of Wrong is a tensor bool\[2\].*3 bools"),
    ],
)
def test_what_a_step_gives_is_checked(which: int, wrong: Any, match: str) -> None:
    class Wrong(Follow):
        def step(self, actions: Any) -> Any:
            given = list(super().step(actions))
            given[which] = wrong
            return tuple(given)

    with pytest.raises(EnvError, match=match):
        turns_of(make_arena(Wrong(3), 3), 3)


def test_tensors_elsewhere_than_the_env_says() -> None:
    class Elsewhere(Follow):
        def reset(self, **asked: Any) -> Any:
            obs, info = super().reset(**asked)
            return obs.to("meta"), info

    arena = make_arena(Elsewhere(3), 3)
    with pytest.raises(EnvError, match="Elsewhere says that its tensors are on cpu, but `obs` is on meta"):
        arena.reset()


def test_running_episodes_are_not_captured() -> None:
    arena = make_arena(Follow(3), 3)
    arena.reset()
    state = arena.state_dict()
    assert state["how"] == "new episodes"
    assert "tensors" in arena.load_state_dict(state)

# SPDX-License-Identifier: Apache-2.0
"""The state of an algorithm in named parts: some of them are saved, and some taken."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from many_agent_envs import TwoJobs
from toy_envs import Echo, Toil

import etude
from etude.algorithms import BC, PPO, BCConfig, PPOConfig
from etude.algorithms.checkpoint import chosen
from etude.checkpoints import load_meta, load_tree
from etude.errors import CheckpointError
from etude.runners import Episode

SMALL: dict[str, Any] = {"num_envs": 3, "num_steps": 60, "minibatch_size": 30, "epochs": 1}
MAIN = ["modules/main", "optimizers/main", "learners/main", "connectors/main"]
ALL = [*MAIN, "counters", "figures", "seed", "runner"]


def ppo(seed: int = 1, **given: Any) -> PPO:
    return PPO(PPOConfig(**{"env": Echo, "seed": seed, **SMALL, **given}))


def by_job(agent: Any, episode: Episode) -> str:
    return "red" if agent == "echo" else "blue"


def two(seed: int = 1) -> PPO:
    return ppo(seed, env=TwoJobs, modules=("red", "blue"), module_of=by_job)


def facts(state: Any) -> Any:
    """A state as something that can be compared: numbers bit for bit, without clocks and the run's count."""
    if isinstance(state, dict):
        return {name: facts(value) for name, value in state.items() if name not in ("seconds", "seq_no")}
    if isinstance(state, list | tuple):
        return [facts(value) for value in state]
    if isinstance(state, torch.Tensor):
        return facts(state.cpu().numpy())
    return state.tobytes() if isinstance(state, np.ndarray) else repr(state)


def differing(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before if facts(before[name]) != facts(after[name])}


NAMES = ["modules/p1", "modules/p10", "optimizers/p1", "optimizers/p10", "counters"]


@pytest.mark.parametrize(
    ("components", "not_components", "expected"),
    [
        (None, None, NAMES),
        ("modules/p1", None, ["modules/p1"]),
        ("modules", None, ["modules/p1", "modules/p10"]),
        ("modules/", None, ["modules/p1", "modules/p10"]),
        (["counters", "modules/p10"], None, ["modules/p10", "counters"]),
        (None, "optimizers", ["modules/p1", "modules/p10", "counters"]),
        (None, ("optimizers", "modules/p1"), ["modules/p10", "counters"]),
        ("modules", "modules/p10", ["modules/p1"]),
        ((), None, []),
    ],
)
def test_components_are_chosen_by_name(components: Any, not_components: Any, expected: list[str]) -> None:
    assert chosen(NAMES, components, not_components) == expected


@pytest.mark.parametrize("unknown", ["module", "modules/p2", "", "counters/x"])
def test_components_that_are_not_there_are_an_error_that_lists_those_that_are(unknown: str) -> None:
    message = rf"there is no component `{unknown}`: there are modules/p1, modules/p10, .*, counters\."
    with pytest.raises(CheckpointError, match=message):
        chosen(NAMES, [unknown])
    with pytest.raises(CheckpointError, match=message):
        chosen(NAMES, not_components=unknown)


def test_the_state_is_a_dict_by_component() -> None:
    algorithm = ppo()
    assert list(algorithm.get_state()) == ALL
    assert set(two().get_state()) == {
        *(f"{kind}/{name}" for kind in ("modules", "optimizers", "learners", "connectors") for name in ("red", "blue")),
        *ALL[4:],
    }
    with pytest.raises(CheckpointError, match="there is no component `replay`: there are modules/main"):
        algorithm.get_state("replay")


def test_weights_have_the_number_of_steps_that_made_them() -> None:
    algorithm = ppo()
    assert algorithm.get_state("modules")["modules/main"]["seq_no"] == 0
    algorithm.train()
    state = algorithm.get_state("modules")["modules/main"]
    assert state["seq_no"] == algorithm.updates == 2
    before = facts(state)
    algorithm.train()
    assert facts(state) == before, "a state must not change with what it was taken from"
    other = ppo(2)
    other.set_state({"modules/main": state})
    assert other.get_state("modules")["modules/main"]["seq_no"] == other.updates == 0, "it counts the run's own steps"
    other.set_state(algorithm.get_state("learners"))
    assert other.get_state("modules")["modules/main"]["seq_no"] == 4


@pytest.mark.parametrize("taken", ["modules/red", "optimizers/blue", "learners", "counters", "figures", "seed"])
def test_what_is_not_taken_is_left_untouched(taken: str) -> None:
    algorithm, other = two(1), two(2)
    for each in (algorithm, other):
        each.train()
    for _ in range(2):
        algorithm.train()
    before, given = other.get_state(), algorithm.get_state(taken)
    other.set_state(given)
    after = other.get_state()
    assert facts({name: after[name] for name in given}) == facts(given)
    assert differing(before, after) == set(given)
    assert facts(algorithm.get_state(taken)) == facts(given)
    other.train()


def test_a_whole_state_goes_on_as_if_nothing_had_happened() -> None:
    algorithm, other = ppo(1, env=Toil, connectors=("frame_stack:2", "normalize_obs")), None
    algorithm.train()
    state = algorithm.get_state()
    expected = algorithm.train()
    other = ppo(2, env=Toil, connectors=("frame_stack:2", "normalize_obs"))
    other.train()
    other.set_state(state)
    result = other.train()
    assert result.resumed == "snapshot"
    assert repr([result.losses, result.return_mean]) == repr([expected.losses, expected.return_mean])
    assert not differing(algorithm.get_state(["modules", "optimizers"]), other.get_state(["modules", "optimizers"]))


CONNECTORS = ("frame_stack:2", "normalize_obs")


@pytest.mark.parametrize("taken", ["connectors", "runner"])
@pytest.mark.parametrize("num_envs", [3, 5])
def test_connectors_and_running_episodes_that_are_taken_apart_begin_new_episodes(taken: str, num_envs: int) -> None:
    algorithm, other = ppo(env=Toil, connectors=CONNECTORS), ppo(2, env=Toil, connectors=CONNECTORS, num_envs=num_envs)
    for each in (algorithm, other):
        each.train()
    learned = [each.connectors.metrics() for each in (algorithm, other)]
    algorithm.train()
    counts = [each.connectors.metrics() for each in (algorithm, other)]
    other.set_state(algorithm.get_state(taken))
    assert other.connectors.metrics() == counts[0 if taken == "connectors" else 1]
    assert learned[0] != counts[0]
    result = other.train()
    assert result.resumed is not None
    assert result.resumed.startswith("new episodes: ")
    assert other.train().resumed is None
    begun = other.runner.collect(num_steps=30).segments
    assert len(begun.episode_id)


def test_connectors_may_be_taken_before_a_loaded_run_has_its_envs(tmp_path: Path) -> None:
    algorithm, other = ppo(env=Toil, connectors=CONNECTORS), ppo(2, env=Toil, connectors=CONNECTORS, num_envs=5)
    for each in (algorithm, other, other):
        each.train()
    algorithm.save(tmp_path / "a")
    other.save(tmp_path / "b", components="connectors")
    loaded = etude.load(tmp_path / "a", env=Toil)
    loaded.load(tmp_path / "b")
    assert loaded.connectors.metrics() == other.connectors.metrics() == {"normalize_obs/count": 120.0}
    assert loaded.train().resumed == (
        "new episodes: of the runner and the connectors, not all were taken from the checkpoint"
    )
    assert loaded.connectors.metrics() == {"normalize_obs/count": 180.0}


class OtherToil(Toil):
    """An env of equal spaces, which knows nothing of the episodes of the first."""


def test_running_episodes_of_another_env_are_not_taken(tmp_path: Path) -> None:
    algorithm = ppo(env=Toil)
    algorithm.train()
    algorithm.save(tmp_path)
    same, other = ppo(2, env=Toil), ppo(2, env=OtherToil)
    for each in (same, other):
        each.load(tmp_path)
    assert same.train().resumed == "snapshot"
    assert other.train().resumed == "new episodes: another env was given"
    with pytest.raises(
        CheckpointError, match="acted with 1 modules, but here are 2: leave it out, with not_components="
    ):
        two().set_state(algorithm.get_state("runner"))


def test_results_in_another_env_do_not_count_episodes_of_the_first(tmp_path: Path) -> None:
    algorithm = ppo(env=Toil, evaluation_interval=1, evaluation_episodes=1)
    before = algorithm.train()
    algorithm.save(tmp_path)
    loaded, other = etude.load(tmp_path, env=OtherToil), ppo(2, env=OtherToil)
    other.load(tmp_path)
    for each in (loaded, other):
        now = each.current_result()
        assert (now.returns_counted, now.episodes, now.env_steps) == (0, before.episodes, before.env_steps)
        assert now.evaluation == {}
        assert each.train().metrics["env_steps_trained_lifetime"] == 2 * before.env_steps
    same = etude.load(tmp_path, env=Toil).current_result()
    assert (same.returns_counted, same.return_mean) == (before.returns_counted, before.return_mean)
    assert same.evaluation == before.evaluation


def test_states_of_other_algorithms_are_refused_before_anything_changes() -> None:
    algorithm, other = two(), ppo(2)
    before = other.get_state()
    with pytest.raises(CheckpointError, match="components modules/red, .*, which are not here; here are modules/main"):
        other.set_state(algorithm.get_state())
    assert not differing(before, other.get_state())
    with pytest.raises(CheckpointError, match="component `optimizers/main` of the state holds no 'all': it is"):
        other.set_state({"optimizers/main": {}})
    wide = ppo(network=etude.NetworkConfig(hidden=(3,)))
    with pytest.raises(CheckpointError, match="the checkpoint is of another module"):
        other.set_state(wide.get_state("modules"))


# -- on disk --------------------------------------------------------------------------------------------------------


def test_a_part_is_saved_and_taken(tmp_path: Path) -> None:
    algorithm, other = two(1), two(2)
    algorithm.train()
    algorithm.save(tmp_path, components="modules/red")
    assert list(load_tree(tmp_path)[0]) == ["modules/red"]
    before = other.get_state()
    other.load(tmp_path)
    assert differing(before, other.get_state()) == {"modules/red"}
    assert facts(algorithm.get_state("modules/red")["modules/red"]["weights"]) == facts(
        other.get_state("modules/red")["modules/red"]["weights"]
    )


def test_a_part_is_taken_from_a_whole_checkpoint_and_nothing_else_is_read(tmp_path: Path) -> None:
    algorithm, other = ppo(1), ppo(2)
    algorithm.train()
    algorithm.save(tmp_path)
    (path,) = tmp_path.glob("state-*.safetensors")
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:header] + bytes(len(data) - header))  # all arrays are broken ...
    other.load(tmp_path, "counters")  # ... of which the counters have none
    assert (other.iteration, other.env_steps) == (1, 60)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        other.load(tmp_path, "modules")


def test_a_part_is_not_loaded_as_a_whole(tmp_path: Path) -> None:
    algorithm = ppo()
    algorithm.save(tmp_path, not_components=["optimizers", "runner"])
    with pytest.raises(CheckpointError) as error:
        etude.load(tmp_path, env=Echo)
    assert "is a part of a checkpoint: it has modules/main, learners/main, connectors/main, c" in str(error.value)
    assert "but lacks optimizers/main, runner. Make the algorithm, as PPO(config), and let it take" in str(error.value)
    other = ppo(3)
    other.load(tmp_path)
    assert not differing(algorithm.get_state("modules"), other.get_state("modules"))
    with pytest.raises(CheckpointError, match="there is no component `optimizers`: there are modules/main, l"):
        other.load(tmp_path, "optimizers")


def test_weights_may_come_from_another_algorithm(tmp_path: Path) -> None:
    expert = ppo()
    expert.train()
    expert.record(tmp_path / "data", 5, seed=1)
    bc = BC(BCConfig(data=str(tmp_path / "data"), seed=3, updates_per_iteration=2, network=expert.config.network))
    bc.train()
    bc.save(tmp_path / "bc")
    assert list(bc.get_state()) == [*MAIN, "counters", "figures", "seed", "data"]
    assert facts(etude.load(tmp_path / "bc").get_state()) == facts(bc.get_state())
    with pytest.raises(CheckpointError, match="components data, which are not here"):
        expert.load(tmp_path / "bc")


def test_a_result_is_kept_with_a_checkpoint(tmp_path: Path) -> None:
    algorithm = ppo()
    result = algorithm.train()
    algorithm.save(tmp_path, result=result)
    meta = load_meta(tmp_path)
    assert repr(meta["result"]) == repr(result.to_dict())
    assert (meta["iteration"], meta["env_steps"], meta["updates"]) == (1, 60, 2)
    algorithm.save(tmp_path)
    assert load_meta(tmp_path)["result"] is None


class WithTwoOptimizers(PPO):
    def setup(self) -> None:
        super().setup()
        register_two(self)


def register_two(algorithm: PPO) -> None:
    learner, parameters = algorithm.learner.only, list(algorithm.module.parameters())
    learner.optimizers.clear()
    decaying = functools.partial(torch.optim.AdamW, weight_decay=0.5)
    learner.register_optimizer("first", decaying, parameters[:2], lr=1e-2)
    learner.register_optimizer("others", None, parameters[2:], lr=1e-2)


@pytest.mark.parametrize("in_setup", [True, False])
def test_own_optimizers_of_a_saved_run(in_setup: bool, tmp_path: Path) -> None:
    def made(seed: int) -> PPO:
        if in_setup:
            return WithTwoOptimizers(ppo(seed).config)
        algorithm = ppo(seed)
        register_two(algorithm)
        return algorithm

    algorithm, other = made(1), made(2)
    algorithm.train()
    algorithm.save(tmp_path / "run")
    with pytest.raises(CheckpointError, match="were first, others when it was saved, and are all now.* in `setup`"):
        ppo(1).load(tmp_path / "run")
    other.load(tmp_path / "run")
    assert other.train().losses == algorithm.train().losses
    assert not differing(other.get_state(["modules", "optimizers"]), algorithm.get_state(["modules", "optimizers"]))


def test_what_is_no_checkpoint_of_an_algorithm(tmp_path: Path) -> None:
    etude.checkpoints.save_tree(tmp_path, {"a": 1})
    with pytest.raises(CheckpointError, match="is a checkpoint, but not of an algorithm"):
        ppo().load(tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_states_move_to_where_the_module_is(tmp_path: Path) -> None:
    near, far = ppo(1), ppo(2, device="cuda")
    near.train()
    near.save(tmp_path / "near")
    far.load(tmp_path / "near", not_components="runner")
    assert next(far.module.parameters()).device.type == "cuda"
    assert not differing(near.get_state(["modules", "optimizers"]), far.get_state(["modules", "optimizers"]))
    far.train()
    back = ppo(3)
    back.set_state(far.get_state(["modules", "optimizers"]))
    assert facts(far.get_state("modules")["modules/main"]["weights"]) == facts(
        back.get_state("modules")["modules/main"]["weights"]
    )
    back.train()
    loaded = etude.load(tmp_path / "near", device="cuda")
    assert next(loaded.module.parameters()).device.type == "cuda"
    loaded.train()


def test_a_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    other = ppo(2)
    params = list(other.module.parameters())
    other.learner.only.optimizers.clear()
    other.learner.modules["main"].register_optimizer("own", torch.optim.SGD, params, 0.1)
    other.train()
    other.save(tmp_path)
    algorithm = ppo()
    algorithm.train()
    before = facts(algorithm.get_state(not_components="runner"))
    with pytest.raises(CheckpointError, match="were own when it was saved, and are all now"):
        algorithm.load(tmp_path)
    assert facts(algorithm.get_state(not_components="runner")) == before
    algorithm.train()


def test_the_state_of_another_optimizer_is_named(tmp_path: Path) -> None:
    wide = ppo(network=etude.NetworkConfig(hidden=(8,)))
    wide.train()
    wide.save(tmp_path)
    with pytest.raises(CheckpointError, match="component `optimizers/main` of the state does not fit"):
        ppo().load(tmp_path, "optimizers")

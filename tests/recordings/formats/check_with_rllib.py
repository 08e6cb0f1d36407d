# SPDX-License-Identifier: Apache-2.0
"""Does RLlib read what Etude writes for it? Run by hand, with RLlib 2.60 installed: in this Python, or in another one.

    python tests/recordings/formats/check_with_rllib.py write FOLDER                  with Etude
    pip install "ray[rllib]==2.60.0" msgpack-numpy                                    (any environment)
    python tests/recordings/formats/check_with_rllib.py read FOLDER                   with RLlib

The first writes recordings with `etude.recordings.convert`, and beside each the numbers that are in it. The second
opens them with RLlib's `OfflineData`, makes episodes of them with its `SingleAgentEpisode` and `OfflinePreLearner`,
compares every value with those numbers, and trains RLlib's BC on them.
"""

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

VECTOR = gym.spaces.Box(-10, 10, (4,), np.float32)
IMAGE = gym.spaces.Box(0, 255, (12, 10, 3), np.uint8)
GRID = gym.spaces.Box(-1, 1, (2, 3), np.float32)
NESTED = gym.spaces.Dict({"mode": gym.spaces.Discrete(4), "pos": VECTOR})
SPACES: dict[str, tuple[gym.Space, gym.Space]] = {
    "vector": (VECTOR, gym.spaces.Discrete(2)),
    "continuous": (VECTOR, gym.spaces.Box(-1, 1, (2,), np.float32)),
    "image": (IMAGE, gym.spaces.Discrete(3)),
    "discrete": (gym.spaces.Discrete(6), gym.spaces.MultiDiscrete([3, 2])),
    "nested": (NESTED, gym.spaces.MultiDiscrete([3, 2])),
    "grid": (gym.spaces.Dict({"grid": GRID, "more": NESTED}), gym.spaces.Discrete(3)),
    "pair": (VECTOR, gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (1,), np.float32)])),
}
EPISODES_ONLY = ("grid", "pair")
LENGTHS = (30, 1, 17, 50, 8)


# -- with Etude ------------------------------------------------------------------------------------------------


def write(folder: Path) -> None:
    """Recordings in both of RLlib's formats, and for each its numbers in ``<name>.npz``."""
    import etude
    from etude.recordings import convert

    for name, (obs, action) in SPACES.items():
        exp = experience(obs, action)
        own = folder / name / "etude"
        with etude.RecordingWriter(own, obs_space=obs, action_space=action) as writer:
            for piece in pieces(exp):
                writer.write(piece)
        for format in ("rllib-episodes", "rllib-table")[: 1 if name in EPISODES_ONLY else 2]:
            written = convert(etude.Recording.open(own), folder / name / format, format=format)
            print(name, format, *written.notes)
        segments = exp.segments
        np.savez(
            folder / f"{name}.npz",
            **{f"steps/{key}": column for key, column in exp.steps.items()},
            **{f"final/{key}": column for key, column in exp.final_obs.items()},
            offsets=exp.offsets,
            t_start=segments.t_start,
            terminated=segments.terminated,
            truncated=segments.truncated,
            episode_id=segments.episode_id.astype(str),
        )


def experience(obs: gym.Space, action: gym.Space) -> Any:
    """Random episodes: terminated, truncated, one that is unfinished, one that lacks its first steps."""
    from etude.experience import Experience, Segments
    from etude.spaces import Flattener

    rng = np.random.default_rng(0)
    obs.seed(0), action.seed(0)
    num, count = sum(LENGTHS), len(LENGTHS)

    def columns(space: gym.Space, root: str, rows: int) -> dict[str, np.ndarray]:
        flat = Flattener(space, root)
        samples = [flat(space.sample()) for _ in range(rows)]
        return {key: np.array([s[key] for s in samples], leaf.dtype) for key, leaf in flat.leaves.items()}

    steps = {
        **columns(obs, "obs", num),
        **columns(action, "action", num),
        "reward": rng.normal(size=num),
        "logp": rng.normal(size=num).astype(np.float32),
        "dist_inputs": rng.normal(size=(num, 2)).astype(np.float32),
        "value": rng.normal(size=num).astype(np.float32),
        "info/fuel": rng.normal(size=num),
    }
    segments = Segments.of(
        count,
        episode_id=[f"episode-{i}" for i in range(count)],
        t_start=np.array([0, 0, 0, 0, 5]),
        terminated=np.array([True, False, False, True, False]),
        truncated=np.array([False, True, False, False, True]),
    )
    return Experience(steps, np.cumsum([0, *LENGTHS]), segments, columns(obs, "obs", count))


def pieces(exp: Any) -> list[Any]:
    """The segments in pieces, those of different episodes mixed, as several envs give them."""
    cut = exp.cut(20)
    order = np.lexsort((cut.segments.episode_id.astype(str), cut.segments.t_start))
    return [cut.select(np.array([i])) for i in order]


# -- with RLlib ------------------------------------------------------------------------------------------------


def read(folder: Path) -> None:
    """Read all of it with RLlib, and compare."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    for name, (obs, action) in SPACES.items():
        wanted = dict(np.load(folder / f"{name}.npz"))
        for format, check in (("rllib-episodes", check_episodes), ("rllib-table", check_table)):
            if (folder / name / format).exists():
                config = config_for(folder / name / format, obs, action)
                values = check(config, obs, action, wanted)
                print(f"{name:<11}{format:<15}{values:>6,} values are equal")
    for name in ("vector", "continuous"):
        for format in ("rllib-episodes", "rllib-table"):
            print(
                f"{name:<11}{format:<15}{train(config_for(folder / name / format, *SPACES[name])):>6,} steps trained on"
            )


def config_for(path: Path, obs: gym.Space, action: gym.Space) -> Any:
    from ray.rllib.algorithms.bc import BCConfig

    config = BCConfig().environment(observation_space=obs, action_space=action)
    config.offline_data(
        input_=[str(path)],
        input_read_episodes=path.name == "rllib-episodes",
        input_compress_columns=[],  # by default, RLlib takes observations for compressed text
        map_batches_kwargs={"concurrency": 1, "num_cpus": 1},
        dataset_num_iters_per_learner=1,
    )
    return config.training(train_batch_size_per_learner=64).learners(num_learners=0)


def check_episodes(config: Any, obs: gym.Space, action: gym.Space, wanted: dict[str, np.ndarray]) -> int:
    import msgpack
    import msgpack_numpy
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from ray.rllib.offline.offline_data import OfflineData

    rows = OfflineData(config).data.take_all()
    episodes = {}
    for row in rows:
        episode = SingleAgentEpisode.from_state(msgpack.unpackb(row["item"], object_hook=msgpack_numpy.decode))
        episodes[episode.id_] = episode
    assert sorted(episodes) == sorted(wanted["episode_id"])
    assert len(rows) == len(episodes)
    count = 0
    for i, episode_id in enumerate(wanted["episode_id"].tolist()):
        episode, start, stop = episodes[episode_id], *wanted["offsets"][i : i + 2].tolist()
        unfinished = not wanted["terminated"][i] and not wanted["truncated"][i]
        assert len(episode) == stop - start
        assert episode.t_started == wanted["t_start"][i]
        assert episode.is_terminated == wanted["terminated"][i]
        assert episode.is_truncated == (wanted["truncated"][i] or unfinished)
        assert (episode.observation_space, episode.action_space) == (obs, action)
        for t in range(stop - start + 1):
            last = t == stop - start
            expected = nested(wanted, "final/obs" if last else "steps/obs", i if last else start + t, obs)
            count += same(episode.get_observations(t), expected)
        for t in range(stop - start):
            row = start + t
            count += same(episode.get_actions(t), nested(wanted, "steps/action", row, action))
            count += same(episode.get_rewards(t), wanted["steps/reward"][row])
            count += same(episode.get_infos(t + 1), {"fuel": wanted["steps/info/fuel"][row]})
            for theirs, ours in EXTRAS.items():
                count += same(episode.get_extra_model_outputs(theirs, t), wanted[f"steps/{ours}"][row])
    return count


def check_table(config: Any, obs: gym.Space, action: gym.Space, wanted: dict[str, np.ndarray]) -> int:
    from ray.rllib.offline.offline_data import OfflineData
    from ray.rllib.offline.offline_prelearner import OfflinePreLearner

    prelearner = OfflinePreLearner.__new__(OfflinePreLearner)  # what makes episodes of rows needs its settings alone
    prelearner.config = config
    num = len(wanted["steps/reward"])
    place = {}
    for i, episode in enumerate(wanted["episode_id"].tolist()):
        for row in range(*wanted["offsets"][i : i + 2].tolist()):
            place[episode, row - wanted["offsets"][i] + wanted["t_start"][i]] = (i, row)
    count, seen = 0, set()
    for batch in OfflineData(config).data.iter_batches(batch_size=64, batch_format="numpy"):
        for j, episode in enumerate(prelearner._map_to_episodes(batch)["episodes"]):
            i, row = place[episode.id_, int(batch["t"][j])]
            seen.add(row)
            last = row == wanted["offsets"][i + 1] - 1
            following = nested(wanted, "final/obs" if last else "steps/obs", i if last else row + 1, obs)
            count += same(episode.get_observations(0), nested(wanted, "steps/obs", row, obs))
            count += same(episode.get_observations(1), following)
            count += same(episode.get_actions(0), nested(wanted, "steps/action", row, action))
            count += same(episode.get_rewards(0), wanted["steps/reward"][row])
            count += same(episode.get_infos(1), {"fuel": wanted["steps/info/fuel"][row]})
            for theirs, ours in EXTRAS.items():
                count += same(episode.get_extra_model_outputs(theirs, 0), wanted[f"steps/{ours}"][row])
            assert episode.is_terminated == (last and wanted["terminated"][i])
            assert episode.is_truncated == (last and wanted["truncated"][i])
    assert seen == set(range(num))
    return count


EXTRAS = {"action_logp": "logp", "action_dist_inputs": "dist_inputs", "vf_preds": "value"}


def nested(wanted: dict[str, np.ndarray], name: str, row: int, space: gym.Space) -> Any:
    """One value of a space."""
    if isinstance(space, gym.spaces.Dict):
        return {key: nested(wanted, f"{name}/{key}", row, part) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return [nested(wanted, f"{name}/{i}", row, part) for i, part in enumerate(space.spaces)]
    return wanted[name][row]


def same(found: Any, expected: Any) -> int:
    """Compare; gives how many numbers were."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), (found, expected)
        return sum(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        assert len(found) == len(expected), (found, expected)
        return sum(same(a, b) for a, b in zip(found, expected, strict=True))
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, (found, expected)
    assert (found == expected).all(), (found, expected)
    return expected.size


def train(config: Any) -> int:
    """An iteration of RLlib's BC through its whole pipeline."""
    algo = config.build_algo()
    result = algo.train()
    algo.stop()
    trained = int(result["learners"]["default_policy"]["num_module_steps_trained"])
    assert np.isfinite(result["learners"]["default_policy"]["policy_loss"])
    assert trained
    return trained


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]).absolute())

# SPDX-License-Identifier: Apache-2.0
"""Write Minari datasets in the HDF5 layout (https://minari.farama.org/content/dataset_standards)."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.recordings.formats.hdf5_files import h5py_module
from etude.recordings.formats.minari import METADATA, json_of
from etude.recordings.formats.minari_episodes import FILE
from etude.recordings.formats.rllib_writers import extras, infos_of
from etude.recordings.layout import Header
from etude.spaces import Nester

VERSION: Final = "0.5.4"
"""The version of Minari that has this layout."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+-v\d+")
_KEPT: Final = ("code_permalink", "author", "author_email", "algorithm_name", "description", "env_spec")


class MinariWriter:
    """Writes whole, finished episodes, one per segment. Images are stored without loss, not as JPEG.

    Args:
        folder: An existing folder.
        header: The header of the recording; its metadata from an original Minari dataset is kept.
        columns: The step columns, all numeric. The layout has no place for those of a module, such as ``logp``.
        path: The final path of the folder, named ``<name>-v<number>``.

    Raises:
        DataError: the folder's name is not valid for a dataset, or HDF5 can't store the name of a column.
    """

    whole_episodes = True
    keeps_time = False
    needs_final_obs = True

    def __init__(self, folder: Path, header: Header, columns: list[str], path: Path) -> None:
        if not _NAME.fullmatch(path.name):
            such = path.with_name(path.name + "-v0")
            raise DataError(f"Minari's datasets have a version, but the folder is {path}. Call it {such}, say.")
        left_out = extras(columns, header)
        for name in columns:
            if name not in left_out and {"", "."} & set(name.split(col.SEPARATOR)):
                raise DataError(f"HDF5 can't store a part called '' or '.', as in the column `{name}`: rename it.")
        others = [f"`{name}`" if name else "the column without a name" for name in left_out]
        self.notes: list[str] = []
        if others:
            self.notes.append(
                f"{', '.join(others)}: not an observation, action, reward or info, and Minari has no place for "
                "anything else: left out"
            )
        if any(col.is_under(name, col.INFO) for name in columns):
            self.notes.append("infos at an env's reset are unknown: NaN or 0 in their place")
        self._nesters = {root: Nester(space, root) for root, space in header.spaces.items()}
        seeds = header.meta.get("seeds")
        self._seeds: Mapping[str, Any] = seeds if isinstance(seeds, dict) else {}
        self._name, self._header = path.name, header
        self._folder = folder / "data"
        self._folder.mkdir()
        self._h5py = h5py_module()
        self._file = self._h5py.File(self._folder / FILE, "w", track_order=True)
        self._scalar = self._h5py.h5s.create(self._h5py.h5s.SCALAR)
        self._episodes = self._steps = 0

    def write(self, exp: Experience) -> None:
        """Write these episodes."""
        for i in range(exp.num_segments):
            self._write_one(exp[i])

    def close(self) -> None:
        """Finish the file, and write the dataset's metadata."""
        self._file.close()
        (self._folder / METADATA).write_text(json.dumps(self._metadata()))

    def _write_one(self, exp: Experience) -> None:
        rewards, episode = exp.steps[col.REWARD], str(exp.segments.episode_id[0])
        if "\0" in episode:
            raise DataError(f"episode {episode!r}: HDF5 can't store an id with a NUL character: give it another.")
        group = self._file.create_group(f"episode_{self._episodes}")
        group.attrs["episode_id"] = episode
        numbers: dict[str, float] = {"id": self._episodes, "total_steps": exp.num_steps}
        if isinstance(self._seeds.get(episode), int):
            numbers["seed"] = self._seeds[episode]
        for name in ("sum", "mean", "std", "min", "max"):
            numbers[f"rewards_{name}"] = float(getattr(rewards.astype(np.float64), name)())
        for name, number in numbers.items():
            self._put_number(group.id, name, number)
        observed = {name: np.concatenate([exp.steps[name], final]) for name, final in exp.final_obs.items()}
        members = {
            "observations": self._nesters[col.OBS](observed),
            "actions": self._nesters[col.ACTION](exp.steps),
            "rewards": rewards,
            "terminations": exp.at_ends(exp.segments.terminated),
            "truncations": exp.at_ends(exp.segments.truncated),
            "infos": _from_reset(infos_of(exp.steps)),
        }
        self._put(group.id, members)
        self._episodes += 1
        self._steps += exp.num_steps

    def _put_number(self, group: Any, name: str, number: float) -> None:
        """Write an attribute through h5py's low-level API, which takes a tenth of the time."""
        value = np.asarray(number)
        kind = self._h5py.h5t.py_create(value.dtype)
        self._h5py.h5a.create(group, name.encode(), kind, self._scalar).write(value)

    def _put(self, group: Any, members: Mapping[str, Any]) -> None:
        """Write arrays as datasets in a group, and nested ones as groups."""
        for name, value in members.items():
            key = str(name).encode()
            if isinstance(value, tuple):
                value = {f"_index_{i}": part for i, part in enumerate(value)}
            if isinstance(value, Mapping):
                self._put(self._h5py.h5g.create(group, key), value)
                continue
            kind, space = self._h5py.h5t.py_create(value.dtype, logical=True), self._h5py.h5s.create_simple(value.shape)
            dataset = self._h5py.h5d.create(group, key, kind, space, dcpl=self._layout_of(value))
            dataset.write(self._h5py.h5s.ALL, self._h5py.h5s.ALL, np.ascontiguousarray(value))

    def _layout_of(self, value: NDArray[Any]) -> Any:
        """Compress images one by one, without loss; store other arrays as they are."""
        if value.dtype != np.uint8 or value.ndim < 3:
            return None
        layout = self._h5py.h5p.create(self._h5py.h5p.DATASET_CREATE)
        layout.set_chunk((1, *value.shape[1:]))
        layout.set_deflate(1)
        return layout

    def _metadata(self) -> dict[str, Any]:
        came_from = self._header.meta.get("minari")
        kept = {k: v for k, v in came_from.items() if k in _KEPT} if isinstance(came_from, dict) else {}
        spec = kept.pop("env_spec", None) or _spec_of(self._header.env)
        return {
            "total_episodes": self._episodes,
            "total_steps": self._steps,
            "data_format": "hdf5",
            "jpeg_encoding": False,
            "observation_space": json.dumps(json_of(self._header.obs_space)),
            "action_space": json.dumps(json_of(self._header.action_space)),
            **({} if spec is None else {"env_spec": spec}),
            "dataset_size": round((self._folder / FILE).stat().st_size / 1e6, 1),
            "dataset_id": self._name,
            **kept,
            "minari_version": VERSION,
        }


def _from_reset(infos: Mapping[str, Any]) -> dict[str, Any]:
    """Insert a first row for the infos of the env's reset, which Etude does not store."""
    return {name: _from_reset(v) if isinstance(v, Mapping) else _later(v) for name, v in infos.items()}


def _later(column: NDArray[Any]) -> NDArray[Any]:
    first = np.full((1, *column.shape[1:]), np.nan if column.dtype.kind == "f" else 0, column.dtype)
    return np.concatenate([first, column])


def _spec_of(env: str | None) -> str | None:
    """Gymnasium's description of an env, if it is known here; None if Minari could not read it."""
    try:
        return None if env is None else (gym.registry.get(env) or EnvSpec(env)).to_json()
    except (TypeError, ValueError, gym.error.Error):
        return None

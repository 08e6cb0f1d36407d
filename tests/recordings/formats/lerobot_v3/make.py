# SPDX-License-Identifier: Apache-2.0
"""Makes the datasets in this folder with LeRobot's own writer, and ``wanted.npz``: what its own reader reads of them.

    pip install lerobot==0.4.4
    python make.py FOLDER

``arms`` has numbers alone: two tasks, five files in three chunks, rewards and flags. ``cameras`` has images of two
sizes in Parquet, whole numbers, truth and text, and no reward. ``films`` has a video of two episodes, in AV1; four of
its frames are in ``wanted.npz``. To be small, they are without the statistics of single episodes, which LeRobot's
reader does not look at.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from lerobot.datasets.lerobot_dataset import LeRobotDataset

CHANNELS = ["height", "width", "channels"]


def arms(root: Path) -> None:
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["shoulder", "elbow", "wrist"]},
        "observation.environment_state": {"dtype": "float64", "shape": (2,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": ["left", "right"]},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        "next.success": {"dtype": "bool", "shape": (1,), "names": None},
    }
    dataset = LeRobotDataset.create("me/arms", 10, features, root=root, robot_type="so100", use_videos=False)
    dataset.meta.update_chunk_settings(chunks_size=2, data_files_size_in_mb=0.0001)
    rng = np.random.default_rng(0)
    for episode, length in enumerate([7, 12, 1, 9, 20]):
        for t in range(length):
            last = t == length - 1
            dataset.add_frame(
                {
                    "observation.state": rng.normal(size=3).astype(np.float32),
                    "observation.environment_state": rng.normal(size=2),
                    "action": rng.normal(size=2).astype(np.float32),
                    "next.reward": np.array([t + episode / 8], np.float32),
                    "next.done": np.array([last]),
                    "next.success": np.array([last and episode % 2 == 0]),
                    "task": "stack the cups" if episode % 3 else "open the drawer",
                }
            )
        dataset.save_episode()
    dataset.finalize()


def drawn(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A picture with a few soft spots, which neither PNG nor video find hard."""
    y, x = np.mgrid[:height, :width]
    at = rng.uniform(0, 1, (3, 2)) * [height, width]
    spots = [255 * np.exp(-((y - a) ** 2 + (x - b) ** 2) / (height * width / 16)) for a, b in at]
    return np.stack(spots, -1).astype(np.uint8)


def cameras(root: Path) -> None:
    features = {
        "observation.state": {"dtype": "float64", "shape": (1,), "names": None},
        "observation.images.top": {"dtype": "image", "shape": (12, 16, 3), "names": CHANNELS},
        "observation.images.wrist": {"dtype": "image", "shape": (8, 8, 3), "names": CHANNELS},
        "observation.mode": {"dtype": "int64", "shape": (1,), "names": None},
        "observation.grid": {"dtype": "int16", "shape": (2, 3), "names": None},
        "action": {"dtype": "int64", "shape": (1,), "names": None},
        "is_pressed": {"dtype": "bool", "shape": (2,), "names": None},
        "said": {"dtype": "string", "shape": (1,), "names": None},
    }
    dataset = LeRobotDataset.create("me/cameras", 30, features, root=root, use_videos=False)
    rng = np.random.default_rng(1)
    for episode, length in enumerate([4, 6]):
        for t in range(length):
            dataset.add_frame(
                {
                    "observation.state": rng.normal(size=1),
                    "observation.images.top": drawn(rng, 12, 16),
                    "observation.images.wrist": drawn(rng, 8, 8),
                    "observation.mode": rng.integers(0, 3, 1),
                    "observation.grid": rng.integers(-9, 9, (2, 3)).astype(np.int16),
                    "action": np.array([(t + episode) % 4]),
                    "is_pressed": rng.integers(0, 2, 2) > 0,
                    "said": f"step {t}",
                    "task": "press",
                }
            )
        dataset.save_episode()
    dataset.finalize()


def films(root: Path) -> None:
    features = {
        "observation.state": {"dtype": "float32", "shape": (2,), "names": None},
        "observation.images.front": {"dtype": "video", "shape": (48, 64, 3), "names": CHANNELS},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
    }
    dataset = LeRobotDataset.create("me/films", 15, features, root=root, robot_type="toy", use_videos=True)
    rng = np.random.default_rng(2)
    for length in (9, 14):
        for t in range(length):
            image = drawn(rng, 48, 64)
            image[:8, : 4 * t + 4] = 255  # the number of the frame, to be seen
            dataset.add_frame(
                {
                    "observation.state": rng.normal(size=2).astype(np.float32),
                    "observation.images.front": image,
                    "action": rng.normal(size=2).astype(np.float32),
                    "task": "watch",
                }
            )
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()


def without_stats(root: Path) -> None:
    for path in root.glob("meta/episodes/*/*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.select([n for n in table.column_names if not n.startswith("stats/")]), path)


def read(root: Path) -> dict[str, np.ndarray]:
    """Every column as LeRobot's own reader gives it; images as bytes, [height, width, channels]."""
    dataset = LeRobotDataset(f"me/{root.name}", root=root)
    rows: list[dict[str, Any]] = [dataset[i] for i in range(len(dataset))]
    out = {}
    for name in rows[0]:
        values = [row[name] if isinstance(row[name], str) else row[name].numpy() for row in rows]
        out[name] = np.array(values)
        if name in dataset.meta.camera_keys:
            out[name] = np.round(out[name] * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return out


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    wanted: dict[str, np.ndarray] = {}
    for make in (arms, cameras, films):
        shutil.rmtree(folder / make.__name__, ignore_errors=True)
        make(folder / make.__name__)
        shutil.rmtree(folder / make.__name__ / "images", ignore_errors=True)
        without_stats(folder / make.__name__)
        found = read(folder / make.__name__)
        if make is films:
            found["observation.images.front"] = found["observation.images.front"][[0, 8, 9, 22]]
        wanted |= {f"{make.__name__}/{name}": values for name, values in found.items()}
    np.savez_compressed(folder / "wanted.npz", **wanted)

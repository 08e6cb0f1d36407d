# SPDX-License-Identifier: Apache-2.0
"""A source of one's own: folders of PNG images to episodes, and a policy that learns to steer by what it sees."""

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from matplotlib.figure import Figure
from PIL import Image

import etude

STEER = ("left", "ahead", "right")


def drive(folder: Path, rng: np.random.Generator) -> None:
    """What a logger leaves: an image a step, named by its time and by what the driver did; the road is bright."""
    folder.mkdir(parents=True)
    road = int(rng.integers(4, 28))
    for t in range(21):
        image = rng.integers(0, 60, (32, 32, 3), np.uint8)
        image[:, max(road - 2, 0) : road + 3] = 220
        steer = 0 if road < 13 else 2 if road > 18 else 1
        Image.fromarray(image).save(folder / f"{t:03}-{STEER[steer]}.png")
        road += int(np.sign(15 - road)) if steer != 1 else int(rng.integers(-4, 5))


def episode(images: "list[etude.RawRow[bytes]]") -> dict[str, Any]:
    """The images of one folder: what was seen, ``[T + 1, 32, 32, 3]``, and what was done, ``[T]``."""
    frames = [np.asarray(Image.open(io.BytesIO(image.data))) for image in images]
    steer = [STEER.index(Path(image.path).stem.split("-")[1]) for image in images]
    return {"obs": np.stack(frames), "action": steer[:-1], "truncated": True}


data = Path(tempfile.mkdtemp())
for i in range(40):
    drive(data / f"drive-{i:03}", np.random.default_rng(i))

source = etude.read_binary(
    data, episode, obs_space=Box(0, 255, (32, 32, 3), np.uint8), action_space=Discrete(3), together="folder"
)
print(etude.Recording.open(source))
network = etude.NetworkConfig(conv=((8, 4, 2), (16, 3, 2)), conv_width=64)
bc = etude.BC(etude.BCConfig(data=source, network=network, batch_size=128, lr=1e-3, seed=1))
for result in bc.iterate(etude.Stop(updates=100)):
    print(f"{result.updates:>4} updates  imitation {result.losses['imitation']:.3f}")

drive(data / "new" / "drive", np.random.default_rng(99))
new = episode([etude.RawRow(str(path), path.read_bytes(), 0) for path in sorted((data / "new" / "drive").iterdir())])
with torch.no_grad():
    steer = bc.module(torch.from_numpy(new["obs"][:-1])).dist_inputs.argmax(-1).numpy()

figure = Figure((9, 1.6), layout="constrained")
for axes, frame, chosen, driven in zip(figure.subplots(1, 10), new["obs"], steer, new["action"], strict=False):
    axes.imshow(frame)
    axes.set_title(STEER[chosen], fontsize=10, color="black" if chosen == driven else "red")
    axes.axis("off")
figure.savefig("images.png")
print(f"steers as the driver did in {(steer == new['action']).mean():.0%} of a new drive")

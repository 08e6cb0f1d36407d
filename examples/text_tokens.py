# SPDX-License-Identifier: Apache-2.0
"""A source of one's own: text to steps. Each letter is an action, the letters before it are what was observed."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete

import etude

LETTERS = "\n abcdefghijklmnopqrstuvwxyz"
VERSE = """tyger tyger burning bright
in the forests of the night
what immortal hand or eye
could frame thy fearful symmetry
in what distant deeps or skies
burnt the fire of thine eyes
on what wings dare he aspire
what the hand dare seize the fire"""


def steps_of(line: "etude.RawRow[str]") -> dict[str, Any]:
    """One line is one episode: the letter seen, ``[T]``, and the one that follows it; first and last comes the end."""
    tokens = np.array([LETTERS.index(letter) for letter in f"\n{line.data}\n"])
    return {"obs": tokens[:-1], "action": tokens[1:], "terminated": True}


path = Path(tempfile.mkdtemp()) / "verse.txt"
path.write_text(VERSE)
letter = Discrete(len(LETTERS))
source = etude.read_text(path, steps_of, obs_space=letter, action_space=letter)
recording = etude.Recording.open(source)
print(f"{recording.num_episodes} lines, {recording.num_steps} letters")

connectors = (etude.FrameStack(6),)  # the last six letters
bc = etude.BC(etude.BCConfig(data=source, connectors=connectors, batch_size=128, lr=3e-3, seed=1))
for result in bc.iterate(etude.Stop(updates=600)):
    print(f"{result.updates:>4} updates  imitation {result.losses['imitation']:.3f}")

written, seen = "", [0] * 6
while not written.endswith("\n") and len(written) < 60:
    with torch.no_grad():
        logits = bc.module(torch.tensor([seen[-6:]])).dist_inputs
    seen.append(int(logits.argmax()))
    written += LETTERS[seen[-1]]
print(f"written from nothing: {written.strip()!r}")

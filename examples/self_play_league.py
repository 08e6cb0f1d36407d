# SPDX-License-Identifier: Apache-2.0
"""Tic-tac-toe by self-play against a league: the learner plays older versions of itself, and never trains them."""

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from matplotlib.figure import Figure

import etude

LINES = np.array([(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)])
PAST = ("past_0", "past_1", "past_2", "past_3")
SPACE = Dict({"board": Box(0, 1, (18,), np.float32), "action_mask": MultiBinary(9)})


class TicTacToe:
    """Two players in turn: each is shown its own stones, the other's, and which squares are free."""

    possible_agents = ("crosses", "noughts")
    observation_spaces = dict.fromkeys(possible_agents, SPACE)
    action_spaces = dict.fromkeys(possible_agents, Discrete(9))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """An empty board; crosses begin."""
        self.stones = np.zeros((2, 9), np.float32)
        return {"crosses": self.seen_by(0)}, {}

    def seen_by(self, player: int) -> dict[str, Any]:
        """The board from a player's side."""
        return {
            "board": np.concatenate([self.stones[player], self.stones[1 - player]]),
            "action_mask": (self.stones.sum(axis=0) == 0).astype(np.int8),
        }

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """A stone is put; three in a line win."""
        ((name, square),) = action.items()
        player = self.possible_agents.index(name)
        other = self.possible_agents[1 - player]
        self.stones[player, int(square)] = 1
        won = bool(self.stones[player][LINES].all(axis=1).any())
        over = won or bool(self.stones.any(axis=0).all())
        seen = self.seen_by(1 - player)
        if over:
            seen["action_mask"][:] = 1  # nobody acts on it, but no mask may forbid everything
        return {other: seen}, {name: 1.0, other: -1.0} if won else {}, {"__all__": over}, {}, {}


def module_of(agent: str, episode: etude.Episode) -> str:
    """The learner plays each side in half of the episodes; the other side is one of the league."""
    mine = TicTacToe.possible_agents[episode.number % 2]
    return "learner" if agent == mine else PAST[(episode.number // 2 + episode.env) % len(PAST)]


def against_chance(policy: etude.Policy, games: int = 200) -> dict[str, int]:
    """How many games the policy wins, draws and loses against random moves, as crosses and noughts in turn."""
    rng, results = np.random.default_rng(0), {"won": 0, "drawn": 0, "lost": 0}
    for game in range(games):
        env, mine = TicTacToe(), TicTacToe.possible_agents[game % 2]
        obs, over, reward = env.reset()[0], False, dict[str, float]()
        while not over:
            ((name, seen),) = obs.items()
            move = policy.act(seen) if name == mine else rng.choice(np.flatnonzero(seen["action_mask"]))
            obs, reward, ended, _, _ = env.step({name: move})
            over = ended["__all__"]
        results["won" if reward.get(mine) == 1 else "lost" if reward else "drawn"] += 1
    return results


ppo = etude.PPO(
    etude.PPOConfig(
        env=TicTacToe,
        modules=("learner", *PAST),
        module_of=module_of,
        modules_to_train=("learner",),
        num_envs=64,
        num_steps=8192,
        minibatch_size=256,
        lr=1e-3,
        entropy_weight=0.02,
        seed=1,
    )
)
played = [against_chance(ppo.policies["learner"])]
print("before:", played[0])
for result in ppo.iterate(etude.Stop(env_steps=160_000)):
    if result.iteration % 2 == 0:  # the oldest of the league makes room
        oldest = ppo.policies[PAST[result.iteration // 2 % len(PAST)]].module
        oldest.load_state_dict(ppo.policies["learner"].module.state_dict())
    played.append(against_chance(ppo.policies["learner"]))
print("after: ", played[-1])

figure = Figure((6, 3), layout="constrained")
axes = figure.subplots()
axes.stackplot(range(len(played)), *([games[how] / 2 for games in played] for how in played[0]), labels=played[0])
axes.set(xlabel="iterations of 8,192 steps", ylabel="% of games against chance", xmargin=0, ylim=(0, 100))
axes.legend(loc="lower right")
figure.savefig("self_play_league.png")

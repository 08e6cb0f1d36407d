# SPDX-License-Identifier: Apache-2.0
"""Envs that hang in their 300th step, in several ways, and say so on standard error: "hangs", and where."""

import collections
import contextlib
import ctypes
import itertools
import os
import signal
import threading
import time

from gymnasium.envs.classic_control import CartPoleEnv


def tell() -> None:
    os.write(2, f"hangs in {os.getpid()}\n".encode())


class Hangs(CartPoleEnv):
    steps = itertools.count(1)  # threads may count at once
    at = 300

    def step(self, action):
        if next(Hangs.steps) == self.at:
            tell()
            self.hang()
        return super().step(action)

    def hang(self):
        time.sleep(1e9)


class Waits(Hangs):
    def hang(self):
        threading.Event().wait()


class Loops(Hangs):
    def hang(self):
        while True:
            pass


class IsDeaf(Hangs):
    """Takes no exception for an answer."""

    def hang(self):
        while True:
            with contextlib.suppress(BaseException):
                threading.Event().wait()


class IsLocked(Hangs):
    """In C code that waits for a lock, whatever signals come."""

    def hang(self):
        libc = ctypes.CDLL(None)
        mutex = ctypes.create_string_buffer(256)
        libc.pthread_mutex_init(mutex, None)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)


class HoldsPython(Hangs):
    """In C code that holds Python's lock."""

    def hang(self):
        collections.deque(itertools.repeat(0), maxlen=0)


class NeverCloses(Hangs):
    def close(self):
        threading.Event().wait()


class AtOnce(Hangs):
    at = 3


class InEvaluation(Hangs):
    """The envs of training don't get so far."""

    at = 128 + 20


class WhenMade(CartPoleEnv):
    def __init__(self):
        tell()
        threading.Event().wait()


class IsDeafWhenMade(IsDeaf):
    def __init__(self):
        tell()
        self.hang()


class Walks(CartPoleEnv):
    """Never hangs; says when it has made some steps."""

    steps = itertools.count(1)

    def step(self, action):
        if next(Walks.steps) in (300, 3000):
            tell()
        return super().step(action)


class Quiet(CartPoleEnv):
    """Says nothing: something else hangs."""


def fit() -> None:
    """A program that trains until Ctrl-C."""
    import etude

    signal.signal(signal.SIGINT, signal.default_int_handler)
    small = {"num_steps": 64, "minibatch_size": 32, "epochs": 1, "seed": 1}
    workers = etude.Workers(num_workers=2, cleanup_time=0.5)
    algorithm = etude.PPO(etude.PPOConfig(env=Hangs, workers=workers, **small))
    try:
        algorithm.fit(etude.Stop(env_steps=10**9))
    except KeyboardInterrupt:
        algorithm.close()
        print("interrupted", flush=True)
        raise

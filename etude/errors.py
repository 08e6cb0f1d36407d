# SPDX-License-Identifier: Apache-2.0
"""The errors that Etude raises. Each message says what was wrong, where, and what to do next."""


class EtudeError(Exception):
    """Base of every error that Etude raises on purpose."""


class SettingsError(EtudeError):
    """A setting is unknown, ill-typed or out of range; the message names it and the nearest right name."""


class SpaceError(EtudeError):
    """A value does not fit its space, or a space is of a kind that Etude can't handle."""


class ModuleError(EtudeError):
    """A module (a user's network) can't be made, or breaks its contract."""


class EnvError(EtudeError):
    """An environment can't be made, or breaks its contract."""


class DataError(EtudeError):
    """Experience or a recording is broken; the message names the file, row and column where there are any."""


class CheckpointError(EtudeError):
    """A folder is not a checkpoint, or can't be loaded."""


class EngineError(EtudeError):
    """What runs elsewhere can't be reached, can't be started, or was lost more often than it may be."""

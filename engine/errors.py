"""Our exception hierarchy:

ServeError                  anything that we raise on purpose; the message is for the user
  OptionError        (2)    an option, or a combination of them, that cannot work
  ModelError         (3)    the checkpoint cannot be found, read, or served
    UnsupportedModel
  CapacityError      (4)    it does not fit: memory, devices
  EngineError        (5)    the engine failed while starting or running
    RankFailed              a rank failed, died or fell silent; the message names it
    PeerLost                a rank heard no more of another one: a consequence, never the first cause
    EngineDead              the engine process is gone; open requests end with this

Numbers are the exit codes of the process. `server.errors` maps what a request can cause to HTTP statuses.
"""

from __future__ import annotations


class ServeError(Exception):
    """Raised on purpose; `str(error)` is one clear line for the user."""

    exit_code = 1


class OptionError(ServeError):
    exit_code = 2


class ModelError(ServeError):
    exit_code = 3


class UnsupportedModel(ModelError):
    pass


class CapacityError(ServeError):
    exit_code = 4


class EngineError(ServeError):
    exit_code = 5


class RankFailed(EngineError):
    pass


class PeerLost(EngineError):
    pass


class EngineDead(EngineError):
    pass


# What to do about a process that ended in this way, and about one that ended in another.
HINTS = {
    "signal SIGKILL": "the system may be out of memory: if so, lower --kv-cache-memory or use fewer ranks per host"
}
ASK_LOG = "the server's log may say more"

BY_NAME: dict[str, type[ServeError]] = {
    kind.__name__: kind
    for kind in (
        *(ServeError, OptionError, ModelError, UnsupportedModel, CapacityError),
        *(EngineError, RankFailed, PeerLost, EngineDead),
    )
}

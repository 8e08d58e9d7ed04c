"""The exception hierarchy:

ServeError                  every error that serve-llm raises on purpose; the message is for the user
  OptionError        (2)    an option, or a combination of options, that cannot work
  ModelError         (3)    the checkpoint cannot be found, read, or served
    UnsupportedModel
    AdapterError             a LoRA adapter cannot be read or does not fit the model
  CapacityError      (4)    the model does not fit the memory or the devices
  EngineError        (5)    the engine failed while starting or running
    RankFailed              a rank failed, died or stopped responding; the message names it
      HostLost              its host is lost, with all processes there
    PeerLost                a rank lost the connection to a peer: a consequence, never the first cause
    EngineDead              the engine process ended; open requests fail with this error

The numbers are the exit codes of the process. `server.http.errors` maps the errors of a request to HTTP statuses.
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


class AdapterError(ModelError):
    pass


class CapacityError(ServeError):
    exit_code = 4


class EngineError(ServeError):
    exit_code = 5


class RankFailed(EngineError):
    pass


class HostLost(RankFailed):
    pass


class PeerLost(EngineError):
    pass


class EngineDead(EngineError):
    pass


# Advice for the user by how a process ended; `ASK_LOG` in all other cases.
HINTS = {
    "signal SIGKILL": "the system may be out of memory: if so, lower --kv-cache-memory or use fewer ranks per host"
}
ASK_LOG = "the server's log may say more"

_CLASSES = (
    ServeError,
    OptionError,
    ModelError,
    UnsupportedModel,
    AdapterError,
    CapacityError,
    EngineError,
    RankFailed,
    HostLost,
    PeerLost,
    EngineDead,
)
BY_NAME: dict[str, type[ServeError]] = {error_class.__name__: error_class for error_class in _CLASSES}

"""The exception tree. A rejection of a request is a value, not an exception (`core.actions.Reject`).

MoonpoolError
├── ConfigError        a mistake in an option, a YAML key, a path: one line, exit code 2
├── ModelError         a model is missing, damaged or of an unsupported kind: one line, exit code 2
├── TraceError         a trace file cannot be read or is malformed: one line, exit code 2
├── JournalError       a journal cannot be read, or does not hold what is asked for: one line, exit code 2
├── PeerUnavailableError    a message could not be handed to a peer in time
├── TransferError      Messenger could not move bytes
├── StageLostError     a stage of this worker's pipeline group is gone: the group forms again
├── PoolError          a node refused a call
│   ├── PoolBusyError      for a reason that is over in a moment
│   ├── RoomTooLargeError  it takes more of the arena than pinned blocks leave
│   └── NodeUnreachableError    there is no node at the address, or it cannot be connected to
├── ApiError           a client's request is answered by an error (gateway/problem.py)
└── ClientGoneError    nobody waits for the answer any more (gateway/problem.py)
"""


class MoonpoolError(Exception):
    """Base of all errors that Moonpool raises on purpose; the message is fit for a user."""


class ConfigError(MoonpoolError):
    pass


class ModelError(MoonpoolError):
    pass


class TraceError(MoonpoolError):
    pass


class JournalError(MoonpoolError):
    pass


class PeerUnavailableError(MoonpoolError):
    pass


class TransferError(MoonpoolError):
    pass


class StageLostError(MoonpoolError):
    pass


class PoolError(MoonpoolError):
    pass


class PoolBusyError(PoolError):
    pass


class RoomTooLargeError(PoolError):
    pass


class NodeUnreachableError(PoolError):
    def __init__(self, message: str, *, is_starting: bool = False) -> None:
        """`is_starting`: nothing listens there, which is so until a node has started."""
        super().__init__(message)
        self.is_starting = is_starting

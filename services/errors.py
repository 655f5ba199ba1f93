"""Errors that a person sees, each one line that says what to do. Internal errors stand beside the code that raises
them."""


class UserError(Exception):
    """Something that the person at the keyboard can mend: printed as one line, exit code 2."""


class BrokerRefusesError(UserError):
    """The broker asks for a key, and does not know ours."""


class BrokerUnreachableError(UserError):
    """No NATS server answered, or it refused us."""


class MeshNotRunningError(UserError):
    """A command that needs a running mesh found none."""


class CheckpointError(UserError):
    """This checkpoint cannot be served. The message is folded into one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))

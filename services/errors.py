"""Errors that a person sees. Each is one line that says what to do; internal ones live beside what raises them."""


class UserError(Exception):
    """Something the person at the keyboard can mend: printed as one line, exit code 2."""


class BrokerUnreachableError(UserError):
    """No NATS server answered, or it refused us."""


class MeshNotRunningError(UserError):
    """A command that needs a running mesh found none."""


class CheckpointError(UserError):
    """This checkpoint cannot be served."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))

"""What can go wrong with a checkpoint, said in one line for the person who chose it."""

from services.errors import UserError


class CheckpointError(UserError):
    """This checkpoint cannot be served. The message is one line and says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))

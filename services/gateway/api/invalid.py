"""What a client asked for wrongly."""

from services.gateway import limits


class InvalidRequestError(Exception):
    """The client asked for something it cannot have. `param` names the field, where there is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        cut = limits.MAX_ERROR_CHARACTERS
        self.message = message if len(message) <= cut else f"{message[: cut - 2]} …"
        super().__init__(self.message)
        self.param = param
        self.code = code
        self.status = status

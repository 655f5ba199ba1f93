"""What the scripts ask. Names and numbers are bounded, so that a model that understands nothing ends, too."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FACTS = "The code of Ada Brook is 7412. The code of Max Reed is 3055."
QUESTION = f"{FACTS} What is the code of Ada Brook?"
QUESTION_JSON = f'{QUESTION} Answer in JSON, like {{"name": "Max Reed", "code": 3055}}.'

Name = Literal["Ada Brook", "Max Reed"]


class Entry(BaseModel):
    """A person and the person's code."""

    model_config = ConfigDict(extra="forbid")  # where more is allowed, such a model goes on to write more
    name: Name
    code: int = Field(ge=1000, le=9999)


CODES: dict[str, int] = {"Ada Brook": 7412, "Max Reed": 3055}

FIND_CODE = {
    "name": "find_code",
    "description": "Find a person's code.",
    "parameters": {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": list(CODES), "description": "Whose code."}},
        "required": ["name"],
        "additionalProperties": False,
    },
}
"""A tool, as OpenAI's API has it."""

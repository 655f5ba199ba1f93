"""instructor."""

import instructor
from instructor import Mode
from openai import AsyncOpenAI, OpenAI
from question import QUESTION, Entry
from tried import MODEL, run, tries


def create(mode: Mode) -> None:
    client = instructor.from_openai(OpenAI(), mode=mode)
    entry = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=Entry,
        max_tokens=256,
        max_retries=0,
        temperature=0,
    )
    assert isinstance(entry, Entry)


@tries("TOOLS")
def _() -> None:
    create(Mode.TOOLS)


@tries("TOOLS_STRICT")
def _() -> None:
    create(Mode.TOOLS_STRICT)


@tries("JSON_SCHEMA")
def _() -> None:
    create(Mode.JSON_SCHEMA)


@tries("TOOLS, in parts as they come")
def _() -> None:
    client = instructor.from_openai(OpenAI(), mode=Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], response_model=Entry, max_tokens=256
    )
    assert isinstance(Entry.model_validate(last.model_dump()), Entry)


@tries("JSON_SCHEMA, asynchronous")
async def _() -> None:
    async with AsyncOpenAI() as openai:
        client = instructor.from_openai(openai, mode=Mode.JSON_SCHEMA)
        entry = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            response_model=Entry,
            max_tokens=256,
            max_retries=0,
        )
    assert isinstance(entry, Entry)


@tries("RESPONSES_TOOLS")
def _() -> None:
    client = instructor.from_openai(OpenAI(), mode=Mode.RESPONSES_TOOLS)
    entry = client.responses.create(
        model=MODEL, input=QUESTION, response_model=Entry, max_output_tokens=256, max_retries=0
    )
    assert isinstance(entry, Entry)


run()

"""pydantic-ai."""

from collections.abc import Callable
from typing import Any

from pydantic_ai import Agent, ModelRequest, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition
from question import CODES, FIND_CODE, QUESTION, Entry, Name
from tried import MODEL, run, tries

settings = ModelSettings(max_tokens=256, temperature=0)
models: dict[str, Callable[[], Model[Any]]] = {
    "chat": lambda: OpenAIChatModel(MODEL),
    "responses": lambda: OpenAIResponsesModel(MODEL),
}


def agent(model: Model[Any], output: Any = str) -> Agent[None, Any]:
    return Agent(model, output_type=output, instructions="You know codes.", model_settings=settings, retries=0)


def try_all(route: str, make: Callable[[], Model[Any]]) -> None:
    @tries(f"{route}: text")
    async def _() -> None:
        assert (await agent(make()).run(QUESTION)).output

    @tries(f"{route}: text, streamed")
    async def _() -> None:
        async with agent(make()).run_stream(QUESTION) as stream:
            assert "".join([part async for part in stream.stream_text(delta=True)])

    @tries(f"{route}: output by a tool")
    async def _() -> None:
        assert isinstance((await agent(make(), ToolOutput(Entry)).run(QUESTION)).output, Entry)

    @tries(f"{route}: output by a tool, streamed")
    async def _() -> None:
        async with agent(make(), ToolOutput(Entry)).run_stream(QUESTION) as stream:
            assert isinstance(await stream.get_output(), Entry)

    @tries(f"{route}: output by a schema")
    async def _() -> None:
        assert isinstance((await agent(make(), NativeOutput(Entry)).run(QUESTION)).output, Entry)

    @tries(f"{route}: an agent with a tool")
    async def _() -> None:
        with_tool = agent(make())

        @with_tool.tool_plain
        def find_code(name: Name) -> int:
            """Find a person's code."""
            return CODES[name]

        assert (await with_tool.run(QUESTION)).output

    @tries(f"{route}: tools, required")
    async def _() -> None:
        definition = ToolDefinition(
            name="find_code",
            description="Find a person's code.",
            parameters_json_schema=FIND_CODE["parameters"],  # type: ignore
        )
        answer = await model_request(
            make(),
            [ModelRequest.user_text_prompt(QUESTION)],
            model_settings={**settings, "tool_choice": "required", "parallel_tool_calls": False},
            model_request_parameters=ModelRequestParameters(function_tools=[definition]),
        )
        [call] = answer.parts
        assert isinstance(call, ToolCallPart) and call.args_as_dict()["name"] in CODES


for route, make in models.items():
    try_all(route, make)


run()

"""openai-agents."""

from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.items import ToolCallOutputItem
from openai import AsyncOpenAI
from question import CODES, QUESTION, Entry, Name
from tried import MODEL, run, tries

set_tracing_disabled(True)


@function_tool
def find_code(name: Name) -> int:
    """Find a person's code."""
    return CODES[name]


def agent(route: str, **fields: Any) -> Agent[Any]:
    """`route`: "responses", which is the library's default, or "chat"."""
    settings = ModelSettings(**{"max_tokens": 256, "temperature": 0, "store": False, **fields.pop("settings", {})})
    model = MODEL if route == "responses" else OpenAIChatCompletionsModel(MODEL, AsyncOpenAI())
    return Agent(name="codes", instructions="You know codes.", model=model, model_settings=settings, **fields)


def try_all(route: str) -> None:
    @tries(f"{route}: text")
    async def _() -> None:
        assert (await Runner.run(agent(route), QUESTION)).final_output

    @tries(f"{route}: text, streamed")
    async def _() -> None:
        result = Runner.run_streamed(agent(route), QUESTION)
        kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
        assert "response.output_text.delta" in kinds and kinds[-1] == "response.completed" and result.final_output

    @tries(f"{route}: a tool, and the answer after its result")
    async def _() -> None:
        result = await Runner.run(agent(route, tools=[find_code], settings={"tool_choice": "required"}), QUESTION)
        outputs = [item.output for item in result.new_items if isinstance(item, ToolCallOutputItem)]
        assert outputs and all(output in CODES.values() for output in outputs)

    @tries(f"{route}: a tool, streamed")
    async def _() -> None:
        with_tool = agent(
            route,
            tools=[find_code],
            tool_use_behavior="stop_on_first_tool",
            settings={"tool_choice": "find_code", "parallel_tool_calls": False},
        )
        result = Runner.run_streamed(with_tool, QUESTION)
        kinds = {event.data.type async for event in result.stream_events() if event.type == "raw_response_event"}
        assert "response.function_call_arguments.delta" in kinds and int(result.final_output) in CODES.values()

    @tries(f"{route}: output_type")
    async def _() -> None:
        assert isinstance((await Runner.run(agent(route, output_type=Entry), QUESTION)).final_output, Entry)

    @tries(f"{route}: a handoff")
    async def _() -> None:
        front = agent(
            route, handoffs=[agent(route, handoff_description="Knows codes.")], settings={"tool_choice": "required"}
        )
        result = await Runner.run(front, QUESTION)
        assert result.final_output


for each in ("responses", "chat"):
    try_all(each)


run()

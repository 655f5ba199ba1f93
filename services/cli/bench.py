"""The subcommands of `kvmesh bench`. Each imports its measurement when it runs."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from services.config import MeshConfig, ModelConfig, SchedulerConfig, WorkerConfig
from services.errors import UserError

bench = typer.Typer(no_args_is_help=True)

Model = Annotated[str, typer.Option(help="Checkpoint folder or hub id; random weights if left out.")]
Prefill = Annotated[int, typer.Option(min=1, max=64, help="Prefill workers.")]
Decode = Annotated[int, typer.Option(min=1, max=64, help="Decode workers.")]
Url = Annotated[str, typer.Option(help="Measure this running gateway instead (one mode).")]
Concurrency = Annotated[int, typer.Option(min=1, help="How many at once.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


@bench.callback()
def check_installed() -> None:
    """Measure a mesh. Each starts its own unless --url names one."""
    parts = ("services.bench", "services.sim", "greenlet", "httpx", "matplotlib")
    if missing := [name for name in parts if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"measurements and simulations are not installed here ({', '.join(missing)}): "
            "`pip install 'kvmesh[sim]'`, or, of a checkout, `make setup`; the container's image never has them"
        )


@bench.command()
def ttft(
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens; if empty 100,1000,10000, with --large-kv 100,500,2000.")
    ] = "",
    requests: Annotated[int, typer.Option(min=1, help="Requests a length, with and without the split each.")] = 15,
    large_kv: Annotated[
        bool, typer.Option("--large-kv", help="A model with KV of 128 KiB a token, as an 8B's.")
    ] = False,
    url: Annotated[str, typer.Option(help="Measure this running gateway instead (one mode).")] = "",
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Time to the first and the second token, with and without the split, interleaved in one run."""
    from services.bench.ttft import run_ttft

    run_ttft(lengths, requests, large_kv=large_kv, url=url, as_json=json)


@bench.command()
def multiturn(
    history: Annotated[str, typer.Option(help="Tokens that a conversation begins with.")] = "1000,2000,4000,8000",
    turns: Annotated[int, typer.Option(min=1, help="Turns of a conversation.")] = 5,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations a history length, in each mode.")] = 4,
    concurrency: Concurrency = 2,
    think_ms: Annotated[int, typer.Option(min=0, help="What a user thinks between an answer and a message.")] = 200,
    restart: Annotated[bool, typer.Option("--restart", help="Half way, kill a worker that holds KV.")] = False,
    output: Annotated[str, typer.Option(help="Tokens of an answer: a number or a range.")] = "32..64",
    prefill: Prefill = 2,
    decode: Decode = 2,
    plot: Annotated[Path | None, typer.Option(help="Where to plot; multiturn.png here, unless --json.")] = None,
    model: Model = "",
    url: Url = "",
    json: Json = False,
) -> None:
    """Conversations: recompute, prefix cache only, session affinity, and reads in both directions, interleaved."""
    from services.bench.multiturn import MultiturnPlan, run_multiturn
    from services.launch.options import Launch

    plan = MultiturnPlan(
        history=history,
        output=output,
        num_turns=turns,
        num_conversations=conversations,
        concurrency=concurrency,
        think_ms=think_ms,
        restart=restart,
    )
    if plot is None and not json:
        plot = Path("multiturn.png")
    options = Launch(num_prefill=prefill, num_decode=decode, config=MeshConfig(model=ModelConfig(path=model)))
    run_multiturn(plan, options, url=url, plot=plot, as_json=json)


@bench.command()
def burst(
    clients: Annotated[str, typer.Option(help="How many ask at once; several with commas between.")] = "8",
    n: Annotated[str, typer.Option(help="Choices of each request; several with commas between.")] = "1,8",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 4_000,
    output: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Bursts of each kind, each with a fresh prompt.")] = 3,
    prefill: Prefill = 2,
    decode: Decode = 2,
    model: Model = "",
    json: Json = False,
) -> None:
    """Many clients with one prompt at once: how often it is computed and sent, with and without waiting."""
    from services.bench.burst import BurstPlan, run_burst
    from services.launch.options import Launch

    plan = BurstPlan(clients=clients, choices=n, num_prompt_tokens=tokens, num_tokens=output, num_rounds=rounds)
    run_burst(
        plan,
        Launch(num_prefill=prefill, num_decode=decode, config=MeshConfig(model=ModelConfig(path=model))),
        as_json=json,
    )


@bench.command()
def replay(
    trace: Annotated[Path | None, typer.Argument(help="A trace, one JSON object a line; made up if left out.")] = None,
    scale: Annotated[float, typer.Option(help="Divides all lengths; 16 makes a block of 512 tokens one of 32.")] = 16.0,
    speed: Annotated[float, typer.Option(help="Divides the time between arrivals.")] = 1.0,
    groups: Annotated[
        int, typer.Option(min=0, help="Only the first groups of prompts that share a prefix; 0: all.")
    ] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Only the first requests; 0: all.")] = 300,
    slo_ttft_ms: Annotated[float, typer.Option(help="Goodput: the longest time to the first token.")] = 1_000.0,
    slo_itl_ms: Annotated[float, typer.Option(help="Goodput: the longest mean time between tokens.")] = 100.0,
    policy: Annotated[
        str, typer.Option(help="Placement: cost, least_loaded, round_robin, affinity, or package.module:name.")
    ] = "cost",
    prefix_cache: Annotated[bool, typer.Option(help="Keep the KV of earlier requests and serve from it.")] = True,
    store: Annotated[str, typer.Option(help="A KV store: memory, disk, redis://… or valkey://…; none if empty.")] = "",
    prefill: Prefill = 2,
    decode: Decode = 2,
    model: Model = "",
    url: Url = "",
    json: Json = False,
) -> None:
    """Replay a trace's arrivals, lengths and shared prefixes; what was reused, and how quick it was."""
    from services.bench.replay import ReplayPlan, run_replay
    from services.launch.options import Launch

    plan = ReplayPlan(
        path=trace,
        scale=scale,
        speed=speed,
        groups=groups,
        limit=limit,
        slo_ttft_ms=slo_ttft_ms,
        slo_itl_ms=slo_itl_ms,
    )
    options = Launch(
        num_prefill=prefill,
        num_decode=decode,
        store=store,
        config=MeshConfig(
            model=ModelConfig(path=model),
            scheduler=SchedulerConfig(policy=policy),
            worker=WorkerConfig(prefix_cache=prefix_cache),
        ),
    )
    run_replay(plan, options, url=url, as_json=json)

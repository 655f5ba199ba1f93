"""Makes vLLM's engine in this process, and proves before it serves that blocks cross between it and the arena."""

# pyright: basic, reportMissingImports=false
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from dataplane.blocks.cache import max_sequence_tokens
from dataplane.blocks.layout import ArenaShape
from services.config import set_environment
from services.engine.checkpoint import Checkpoint, engine_folder
from services.engine.interface import EngineLostError, Sequence, StepFailedError
from services.engine.rules import stop_token_ids
from services.engine.vllm_engine import self_check
from services.engine.vllm_engine.formats import MAX_SEQUENCES, check_args, cpu_format, installed_version, pool_bytes
from services.engine.vllm_engine.link import EngineLink
from services.engine.vllm_engine.steps import Output, VllmSteps
from services.errors import CheckpointError, UserError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, on the thread that steps
    "VLLM_CONFIGURE_LOGGING": "0",  # it would write to stdout
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # the checkpoint is a folder by now
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""What vLLM reads when it is imported."""
DEFAULTS = {"enforce_eager": True, "use_tqdm_on_load": False}
"""Engine arguments that `engine.args` may change."""


class LoadedVllm(NamedTuple):
    """`device`: what is reported of where it runs."""

    steps: VllmSteps
    device: str


def load_vllm(
    checkpoint: Checkpoint,
    arena: memoryview,
    shape: ArenaShape,
    *,
    token_budget: int,
    num_threads: int,
    kv_format: str,
    kv_bytes: int,
    args: Mapping[str, Any],
) -> LoadedVllm:
    """Return an engine that has proven itself. `kv_format`: what others take its KV for. `kv_bytes`: of vLLM's own
    pool; 0: enough for all that the arena holds. `args`: further arguments of vLLM's engine.

    Raises UserError where vLLM is not installed or its KV is of another format, CheckpointError where it does not take
    the checkpoint or the arguments, or fails its check.
    """
    # Refuse what can be refused before the import, which takes seconds. OpenMP reads its variable as it is loaded.
    check_args(args)
    version = installed_version()
    set_environment({"OMP_NUM_THREADS": str(num_threads)})
    import_vllm()
    from vllm import EngineArgs, LLMEngine  # noqa: PLC0415

    # Compare the formats before the model is loaded: other services identify this KV by `kv_format`.
    _check_format(cpu_format(version, _packing(shape.layout), shape.layout.dtype, args), kv_format)
    ours = _engine_args(checkpoint, shape, token_budget, kv_bytes)
    # Not in the arena: of an engine that is started again, others may be reading what it has left there.
    scratch = msgspec.structs.replace(shape, num_blocks=(self_check.NUM_BLOCKS,) * len(shape.num_blocks))
    link = EngineLink(scratch, memoryview(bytearray(scratch.arena_bytes)))
    # The link exists before the engine: vLLM creates the connector itself, which looks up the link by its name.
    try:
        with engine_folder(checkpoint) as folder:
            ours["model"] = str(folder)
            engine = LLMEngine.from_engine_args(EngineArgs(**ours, **_link_args(link), **{**DEFAULTS, **args}))
    except Exception as error:
        link.close()
        raise CheckpointError(f"vLLM does not take {checkpoint.name}: {_first_line(error)}") from error
    local = InProcess(engine, link)
    steps = VllmSteps(
        local,
        link,
        vocab_size=checkpoint.vocab_size,
        context_length=checkpoint.context_length,
        token_budget=token_budget,
    )
    # The link gets the worker's arena only after the check: an engine that fails it has not touched this arena.
    try:
        self_check.check_steps(steps, local, link)
    except (EngineLostError, StepFailedError) as error:
        steps.close()
        raise CheckpointError(
            f"vLLM {version} does not do with {checkpoint.name} what the mesh relies on: {error}"
        ) from error
    link.use(shape, arena)
    return LoadedVllm(steps, f"cpu, vLLM {version}")


def import_vllm() -> None:
    """Import vLLM as it is to run here, which takes seconds. Raises ImportError."""
    set_environment(ENVIRONMENT)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    import vllm.v1.worker.cpu_worker  # noqa: F401, PLC0415


class InProcess:
    """vLLM's engine as `LocalEngine`, with what the self-check needs besides."""

    def __init__(self, engine: Any, link: EngineLink) -> None:
        self._engine: Any = engine
        self._link = link

    def add_request(self, name: str, sequence: Sequence, num_tokens: int) -> str:
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        from services.engine.vllm_engine.sampling import EXTRA_KEY  # noqa: PLC0415

        params = SamplingParams(
            max_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=True,  # it has no tokenizer, and knows of none
            stop_token_ids=sorted(stop_token_ids(sequence)),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            prompt_logprobs=sequence.sampling.prompt_logprobs if sequence.wants_prompt_logprobs else None,
            extra_args={EXTRA_KEY: name},
        )
        prompt: dict[str, object] = {"prompt_token_ids": list(sequence.token_ids)}
        if sequence.tenant:
            prompt["cache_salt"] = sequence.tenant
        return self._engine.add_request(name, prompt, params)

    def abort(self, name: str) -> None:
        self._engine.abort_request([name], internal=True)

    def engine_step(self) -> list[Output]:
        from torch.compiler import set_stance  # noqa: PLC0415

        if not any(sequence.wants_prompt_logprobs and not sequence.index for sequence in self._link.sequences.values()):
            return self._engine.step()
        # It compiles how it counts a prompt's ranks, which nobody asks for: a minute, and only with a C++ compiler.
        with set_stance("force_eager"):
            return self._engine.step()

    def forget_blocks(self) -> None:
        """Let vLLM forget what it has cached itself. Nothing may be running."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def close(self) -> None:
        """End vLLM. Else this process's next engine would be given this one's connector. Idempotent."""
        self._engine.engine_core.shutdown()


def _check_format(own_format: str, kv_format: str) -> None:
    """Raise UserError where vLLM's KV is of another format than others think."""
    if own_format != kv_format:
        raise UserError(
            f"KV of vLLM is {own_format} on this machine, and mesh.toml has engine.kv_format = {kv_format!r}: workers "
            "that share KV run one version of it, on processors of one kind"
        )


def _engine_args(checkpoint: Checkpoint, shape: ArenaShape, token_budget: int, kv_bytes: int) -> dict[str, Any]:
    """Return what follows from the checkpoint and `mesh.toml` (`formats.OURS`)."""
    layout = shape.layout
    # A sequence fits into the arena or is refused by the worker, and vLLM wants room for the longest before it starts.
    # The last token's KV is never computed.
    most = max_sequence_tokens(shape, token_budget)
    return {
        "model": checkpoint.path,
        "served_model_name": checkpoint.name,
        "skip_tokenizer_init": True,
        "dtype": layout.dtype,
        "block_size": layout.block_size,
        "max_model_len": min(checkpoint.context_length, most + 1) if most else checkpoint.context_length,
        "max_num_batched_tokens": token_budget,
        "max_logprobs": -1,  # gateways bound it
        "max_num_seqs": min(MAX_SEQUENCES, token_budget),
        "kv_cache_memory_bytes": kv_bytes or pool_bytes(shape, token_budget),
        # Of layers with windows it would have what the arena has not, with gaps.
        "enable_prefix_caching": not layout.is_windowed,
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
    }


def _link_args(link: EngineLink) -> dict[str, Any]:
    """Return what makes vLLM load the connector and the sampler, with the link that they find."""
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    transfer = KVTransferConfig(
        kv_connector="MeshConnector",
        kv_connector_module_path="services.engine.vllm_engine.connector",
        kv_connector_extra_config={"link": link.name},
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    processors = ["services.engine.vllm_engine.sampling:MeshSampling"]
    return {"kv_transfer_config": transfer, "logits_processors": processors}


def _packing(layout: Any) -> str:
    import torch  # noqa: PLC0415
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

    return _get_attn_isa(getattr(torch, layout.dtype), layout.block_size, layout.head_dim, "auto")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]

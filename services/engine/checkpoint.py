"""What a checkpoint is, read from its files without torch: the gateway and the CLI need no more.

A checkpoint is a Hugging Face folder (config.json, safetensors, tokenizer) or a hub id `org/name`.
"""

import functools
import importlib.util
import json
import os.path
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from dataplane.blocks.cache import ring_blocks
from dataplane.blocks.layout import ITEM_BYTES, ArenaShape, KVLayout, num_blocks_for, uniform_shape
from services.config import EngineName, MeshConfig, dtype_of
from services.engine.weights import DTYPE_NAMES, folder_of, read_weights
from services.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Their frequencies depend on the longest sequence of a batch: a request's KV would depend on its neighbours.
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope", "su"})
ROPE_FIELDS = ("rope_parameters", "rope_scaling")
ROPE_NUMBERS = (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct"))
"""What a rope has beside its type, by the name inside of it and the names outside."""
EVERY_LAYER_SLIDES = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
SLIDING_FROM_A_LAYER_ON = frozenset({"qwen2", "qwen3"})
PATTERN_OF = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""Every n-th layer sees all tokens."""
_EXCHANGEABLE_ATTENTION, _ATTENTION_SINKS = "_supports_attention_backend = True", "s_aux="
"""What the source of a model of transformers says where others may compute its attention, and where this would have to
know of sinks."""
VLLM_QUANTIZATION = ("compressed-tensors", "gptq", "awq")
"""`quant_method` of checkpoints that were tried with vLLM on the CPU (`tests/engine/vllm_engine/test_models.py`)."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose files are whole and whose architecture an engine can serve, as far as its config shows."""

    path: str
    name: str
    model_type: str
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    windows: tuple[int, ...]
    """Per layer how many tokens a query sees, itself included; 0: all. Empty: all layers see all tokens."""
    eos_token_ids: frozenset[int]
    """The ids that generation_config.json names, else config.json."""
    weights: str
    """Identity of configuration and weights (`services.engine.weights`)."""
    dtype: str
    """The dtype of most parameters in the files; of quantized ones, that in which is computed."""
    num_bytes: int
    """Size of the weight files."""
    weight_files: tuple[str, ...]
    """Those that `weights` is the identity of, relative to `path`: what an engine is given (`engine_folder`)."""
    is_plain: bool
    """Whether whoever loads the folder finds these and no others."""


class _Shape(NamedTuple):
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int


def read_checkpoint(model: str, engine: EngineName = "transformers") -> Checkpoint:
    """Return what `model`, a folder or a hub id, is. Raises CheckpointError, one line that says what to do, for what
    this engine does not serve."""
    # Check config.json first: a model that is not served is refused before any weight file is read.
    folder = find_checkpoint(model)
    config_bytes, config = _read_json(folder / "config.json")
    architecture = _check_architecture(config, folder)
    _check_kv(config, folder)
    if engine == "vllm":
        _check_vllm(architecture, config, folder)
    else:
        _check_own_engine(architecture, config, folder)
    shape = _shape(config, folder)
    # Then the other files: the tokenizer must be there, the weight files must be whole.
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(f"{folder} has no tokenizer.json: copy the tokenizer's files beside config.json")
    weights = read_weights(folder, config_bytes)
    # Quantized weights have a storage type such as I32: take the dtype that config.json names for computing.
    dtype = weights.dtype if weights.dtype in DTYPE_NAMES.values() else _computed_in(config)
    return Checkpoint(
        path=str(folder),
        # The folder of a downloaded model is named by a commit hash: such a model keeps its hub id as its name.
        name=model.rstrip("/") if HUB_ID.fullmatch(model) and not Path(model).is_dir() else folder.name,
        model_type=str(config.get("model_type", "")),
        architecture=architecture,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        context_length=shape.context_length,
        windows=_windows(config, shape),
        eos_token_ids=_eos_token_ids(config, folder),
        weights=weights.identity,
        dtype=dtype,
        num_bytes=weights.num_bytes,
        weight_files=weights.files,
        is_plain=weights.is_plain,
    )


def engine_folder(checkpoint: Checkpoint) -> AbstractContextManager[Path]:
    """Lend the folder that an engine is to load: its weights are those that were read, whatever else lies there."""
    return folder_of(Path(checkpoint.path), checkpoint.weight_files, is_plain=checkpoint.is_plain)


def layout_for(config: MeshConfig, checkpoint: Checkpoint) -> KVLayout:
    """Return the shape of this mesh's KV: the same for every service that reads the same mesh.toml. Raises
    CheckpointError."""
    return layout_of(
        checkpoint,
        dtype=dtype_of(config, checkpoint.dtype),
        block_size=config.block_size,
        wire_dtype=config.worker.wire_dtype,
        kv_format=config.engine.kv_format,
    )


def layout_of(
    checkpoint: Checkpoint,
    *,
    dtype: str = "float32",
    block_size: int = 16,
    wire_dtype: str = "same",
    kv_format: str = "",
) -> KVLayout:
    """Return the shape of the KV that an engine of this checkpoint writes. Raises CheckpointError for another dtype.

    Where KV may be compressed on its way, it is other KV: it has a name of its own, so that what has lost something
    never meets what has not, in a store neither. So is KV whose bytes only its engine understands, and this in whole
    blocks: `kv_format` names what they mean.
    """
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"dtype {dtype} is not served: choose one of {', '.join(ITEM_BYTES)}")
    # Compression and format become part of `weights`: the layout's fingerprint, which identifies KV, covers it.
    weights = checkpoint.weights if wire_dtype == "same" else f"{checkpoint.weights}+{wire_dtype}"
    return KVLayout(
        weights=f"{weights}@{kv_format}" if kv_format else weights,
        dtype=dtype,
        num_layers=checkpoint.num_layers,
        num_kv_heads=checkpoint.num_kv_heads,
        head_dim=checkpoint.head_dim,
        block_size=block_size,
        windows=checkpoint.windows,
        whole_blocks=bool(kv_format),
    )


def default_shape(layout: KVLayout, kv_bytes: int, *, context_length: int, token_budget: int) -> ArenaShape:
    """Return how many blocks each cache group gets out of `kv_bytes`.

    With several groups they should run out at about the same time: for sequences of half the context length, as many
    blocks as one of them fills in each group, times as many sequences as fit. Each group can hold at least one sequence
    of full length. Raises CheckpointError where even that does not fit.
    """
    if len(layout.groups) == 1:
        return uniform_shape(layout, kv_bytes // layout.block_bytes)
    # A windowed group keeps a sequence in a ring of blocks; other groups keep all of it, up to the context length.
    block_size = layout.block_size
    longest = num_blocks_for(context_length, block_size)
    group_bytes = [len(group.layers) * layout.layer_block_bytes for group in layout.groups]
    rings = [
        ring_blocks(group.window, token_budget, block_size) if group.window else longest for group in layout.groups
    ]
    # Reserve `least`, one sequence of full length, and divide the spare bytes in proportion to `usual`, half a length.
    least = [min(longest, ring) for ring in rings]
    usual = [min(max(1, longest // 2), ring) for ring in rings]
    spare = kv_bytes - sum(count * size for count, size in zip(least, group_bytes, strict=True))
    if spare < 0:
        raise CheckpointError(
            f"{kv_bytes >> 20} MiB of KV do not hold one sequence of {context_length} tokens, which needs "
            f"{(kv_bytes - spare) / (1 << 20):.0f} MiB: raise --kv-mib"
        )
    # Keep the number of further sequences a fraction, and round per group: so the fraction is used too.
    one_more = sum(count * size for count, size in zip(usual, group_bytes, strict=True))
    num_more = spare / one_more
    return ArenaShape(
        layout=layout,
        num_blocks=tuple(count + int(num_more * more) for count, more in zip(least, usual, strict=True)),
    )


def find_checkpoint(model: str) -> Path:
    """Return the local folder of `model`, downloading a hub id if need be. Raises CheckpointError."""
    try:
        folder = Path(model).expanduser()
        is_folder, is_file = bool(model) and folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError):  # a name too long for the file system, an unknown ~user
        folder, is_folder, is_file = Path(), False, False
    if is_folder:
        return Path(os.path.abspath(folder))  # noqa: PTH100 - a symlinked folder keeps the name that was asked for
    if is_file:
        raise CheckpointError(f"{model} is a file: name the folder that holds config.json")
    if not HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"there is no folder {model[:200]!r}: name a checkpoint folder, or a hub id such as Qwen/Qwen3-0.6B"
        )
    return _download(model)


def _download(hub_id: str) -> Path:
    import huggingface_hub  # noqa: PLC0415 - slow to import, and most checkpoints are local
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError  # noqa: PLC0415

    try:
        download = cast(Callable[..., str], huggingface_hub.snapshot_download)  # pyright: ignore[reportUnknownMemberType]
        return Path(download(hub_id, allow_patterns=HUB_PATTERNS))
    except GatedRepoError as error:
        raise CheckpointError(f"{hub_id} is gated: accept its licence on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{hub_id} is neither a folder here nor a model on the hub: check the name") from error
    except Exception as error:
        raise CheckpointError(
            f"{hub_id} is no folder here, and the hub could not be reached ({type(error).__name__}): "
            "check the network, or download the checkpoint and name its folder"
        ) from error


def _read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}: name a Hugging Face checkpoint folder") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    try:
        parsed = json.loads(content)
    except ValueError as error:
        is_cut = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip())
        hint = "it is cut off, download it again" if is_cut else f"mend it ({error})"
        raise CheckpointError(f"{path} is not valid JSON: {hint}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} is no JSON object: put a checkpoint's there")
    return content, cast(dict[str, Any], parsed)


def _check_architecture(config: dict[str, Any], folder: Path) -> str:
    """Return the name of the model class. Raises CheckpointError for what is not a plain causal language model."""
    architectures: Any = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not config.get("model_type"):
        raise CheckpointError(f"{folder}/config.json names no architecture and model_type: choose another checkpoint")
    architecture = str(cast(list[object], architectures)[0])
    if config.get("is_encoder_decoder"):
        raise CheckpointError(f"{architecture} is an encoder-decoder: choose a decoder-only (causal) language model")
    if "text_config" in config or "vision_config" in config:
        raise CheckpointError(f"{architecture} is multi-modal: choose a text-only checkpoint of the family")
    if not architecture.endswith(CAUSAL_SUFFIXES):
        raise CheckpointError(f"{architecture} is no causal language model: choose a ...ForCausalLM checkpoint")
    if config.get("auto_map"):
        raise CheckpointError(f"{architecture} needs code of its own, which is never run: choose another")
    return architecture


def _check_kv(config: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError where a token's KV is not one block of each layer's, or depends on its neighbours."""
    name = folder.name
    if config.get("kv_lora_rank") or config.get("num_kv_shared_layers"):
        raise CheckpointError(
            f"{name} compresses or shares KV between layers, which is not served: choose another model"
        )
    layer_types = {str(kind) for kind in cast(list[object], config.get("layer_types") or [])}
    if unknown := sorted(layer_types - LAYER_TYPES):
        raise CheckpointError(f"{name} has {unknown[0]} layers, which are not served: choose another model")
    if config.get("use_bidirectional_attention"):
        raise CheckpointError(f"{name} attends in both directions: choose a causal language model")
    _check_rope(config, name)


def _check_own_engine(architecture: str, config: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError for what our own engine would compute wrongly."""
    if config.get("quantization_config"):
        raise CheckpointError(
            f"{folder.name} is quantized: choose the checkpoint with plain float weights, or try --engine vllm"
        )
    if config.get("attn_logit_softcapping") is not None:
        raise CheckpointError(
            f"{folder.name} caps its attention logits: choose another model, or --engine vllm, which can do that"
        )
    _check_library(architecture, str(config["model_type"]))


def _check_vllm(architecture: str, config: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError for what vLLM's CPU build is not known to serve here."""
    quantization: Any = config.get("quantization_config")
    method = cast(dict[str, Any], quantization).get("quant_method") if isinstance(quantization, dict) else None
    if quantization and method not in VLLM_QUANTIZATION:
        raise CheckpointError(
            f"{folder.name} is quantized by {method}: vLLM on the CPU is served with {', '.join(VLLM_QUANTIZATION)}"
        )
    spec = importlib.util.find_spec("vllm")  # a gateway or a store may run where it is not
    if spec is not None and spec.origin is not None:
        registry = Path(spec.origin).parent / "model_executor/models/registry.py"
        if f'"{architecture}"' not in registry.read_text("utf-8"):
            raise CheckpointError(f"vLLM does not know the architecture {architecture}: choose another checkpoint")


@functools.cache
def _check_library(architecture: str, model_type: str) -> None:
    """Raise CheckpointError unless transformers has this architecture and lets others compute its attention. Reads the
    library's sources: importing it takes seconds, and loading the weights to find out takes longer."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise CheckpointError("transformers is not installed: pip install kvmesh brings it")
    family = model_type.partition("_")[0].rstrip("0123456789")
    sources = sorted(Path(spec.origin).parent.glob("models/*/modeling_*.py"), key=lambda path: family not in path.name)
    source = next((text for path in sources if f"class {architecture}(" in (text := path.read_text("utf-8"))), None)
    if source is None:
        raise CheckpointError(
            f"transformers does not know the architecture {architecture}: choose another, or upgrade it"
        )
    if _ATTENTION_SINKS in source:
        raise CheckpointError(f"{architecture} has attention sinks, which are not served: choose another model")
    if _EXCHANGEABLE_ATTENTION not in source:
        raise CheckpointError(
            f"{architecture} has no attention that can run on paged KV (in transformers it is code of its own): "
            "choose another architecture"
        )


def _computed_in(config: dict[str, Any]) -> str:
    """Return the dtype that a quantized checkpoint is computed in."""
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def _check_rope(config: dict[str, Any], name: str) -> None:
    """Raise CheckpointError for a rope that is not served, and where libraries would read different ones: there are an
    older and a newer spelling, for all layers or per layer type, and a checkpoint may hold both."""
    # Collect all ropes that the config has: a field holds one rope for all layers, or one rope per layer type.
    given = [cast(dict[str, Any], config[key]) for key in ROPE_FIELDS if isinstance(config.get(key), dict)]
    per_type = [[cast(dict[str, Any], part) for part in rope.values() if isinstance(part, dict)] for rope in given]
    ropes = [rope for whole, parts in zip(given, per_type, strict=True) for rope in parts or [whole]]
    # Refuse a rope that depends on the batch, whether the newer or the older key names its type.
    for rope in ropes:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in BATCH_DEPENDENT_ROPE:
            raise CheckpointError(f"{name} uses {kind} rope scaling, which is not served: choose another model")
    # Collect conflicts as (name, one value, other value). First: both keys of one rope name a type.
    conflicts = [("type", rope["rope_type"], rope["type"]) for rope in ropes if {"rope_type", "type"} <= rope.keys()]
    conflicts = [pair for pair in conflicts if pair[1] != pair[2]]
    # Second: numbers outside of the ropes. Each must be in one of the ropes; where none has it, all names outside
    # must have the same value.
    outside: dict[str, Any] = {}
    for names in ROPE_NUMBERS:
        known = [rope[names[0]] for rope in ropes if rope.get(names[0]) is not None]
        for value in (config[key] for key in names if config.get(key) is not None):
            known = known or [value]
            outside.setdefault(names[0], value)
            conflicts += [(names[0], value, known[0])] if value not in known else []
    # Third: where both fields hold a rope for all layers, compare them key by key. Numbers from outside and the
    # default type fill the gaps: what one field leaves out is no contradiction then.
    if len(given) == len(ROPE_FIELDS) and not any(per_type):
        new, old = ({**outside, "rope_type": rope.get("type", "default"), **rope} for rope in given)
        pairs = ((key, new.get(key), old.get(key)) for key in sorted((new.keys() | old.keys()) - {"type"}))
        conflicts += [pair for pair in pairs if pair[1] != pair[2]]
    if conflicts:
        what, one, other = conflicts[0]
        raise CheckpointError(
            f"{name}/config.json contradicts itself: its rope's {what} is {one!r:.80} and {other!r:.80}; "
            "keep the one that the model was trained with"
        )


def _shape(config: dict[str, Any], folder: Path) -> _Shape:
    def number(*names: str, default: int | None = None) -> int:
        for key in names:
            value: Any = config.get(key)
            if isinstance(value, int) and value > 0:
                return value
        if default is None:
            raise CheckpointError(
                f"{folder}/config.json lacks a valid {names[0]}: add it, or choose another checkpoint"
            )
        return default

    num_heads = number("num_attention_heads", "n_head", "num_heads")
    num_kv_heads = number("num_key_value_heads", "num_kv_heads", default=num_heads)
    hidden_size = number("hidden_size", "n_embd", "d_model")
    return _Shape(
        num_layers=number("num_hidden_layers", "n_layer", "num_layers"),
        num_kv_heads=num_kv_heads,
        head_dim=number("head_dim", default=hidden_size // num_heads),
        vocab_size=number("vocab_size"),
        context_length=number("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"),
    )


def _windows(config: dict[str, Any], shape: _Shape) -> tuple[int, ...]:
    """Return each layer's window as transformers resolves it; a layer of which we do not know is taken to see all.

    The engine's self-check refuses a model whose layers see more than is kept.
    """
    # No window, one that is as long as the context, or one that is switched off: all layers see all tokens.
    window: Any = config.get("sliding_window")
    if not isinstance(window, int) or not 0 < window < shape.context_length:
        return ()
    if config.get("use_sliding_window") is False:
        return ()
    # Find the layers that slide: `layer_types` decides; without it, the rule of the model's family.
    layer_types: Any = config.get("layer_types")
    model_type = str(config.get("model_type", ""))
    layers = range(shape.num_layers)
    if isinstance(layer_types, list):
        types = cast(list[object], layer_types)
        sliding = [layer < len(types) and types[layer] == "sliding_attention" for layer in layers]
    elif model_type in EVERY_LAYER_SLIDES:
        sliding = [True] * shape.num_layers
    elif model_type in PATTERN_OF:
        pattern: Any = config.get("sliding_window_pattern") or PATTERN_OF[model_type]
        sliding = [(layer + 1) % int(pattern) != 0 for layer in layers]
    elif model_type in SLIDING_FROM_A_LAYER_ON and config.get("use_sliding_window"):
        first: Any = config.get("max_window_layers", 28)
        sliding = [layer >= int(first) for layer in layers]
    else:
        sliding = []
    # Empty rather than all zeros: the layout's fingerprint covers the windows, and both mean the same KV.
    return tuple(window if slides else 0 for slides in sliding) if any(sliding) else ()


def _eos_token_ids(config: dict[str, Any], folder: Path) -> frozenset[int]:
    """Return the ids that end an answer: those of generation_config.json, else of config.json."""
    generation = folder / "generation_config.json"
    for source in [_read_json(generation)[1], config] if generation.is_file() else [config]:
        value: Any = source.get("eos_token_id")
        values = cast(list[object], value) if isinstance(value, list) else [value]
        if ids := frozenset(entry for entry in values if isinstance(entry, int)):
            return ids
    return frozenset()

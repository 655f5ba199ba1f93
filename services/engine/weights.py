"""The safetensors files of a checkpoint: are they whole, and who are they? No torch.

Format: https://huggingface.co/docs/safetensors (u64 header length, JSON header, then the tensors' bytes).
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, cast

import xxhash

from services.engine import limits
from services.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


class Weights(NamedTuple):
    """`identity` is a hex digest, `dtype` the one most of the parameters have in the files."""

    identity: str
    dtype: str
    num_bytes: int


class Tensor(NamedTuple):
    dtype: str
    num_bytes: int


def read_weights(folder: Path, config: bytes) -> Weights:
    """Check every weight file of `folder` against its own header and the index, and return who they are.

    The identity covers `config` (the bytes of config.json), each file's name, size and header, and its content: whole
    up to 64 MiB a file, above that 256 evenly spaced samples of 64 KiB, so that a large model is named in well under a
    second. Two files of equal size and header that differ only between the samples would get one name; trained weights
    do not. Raises CheckpointError.
    """
    digest = xxhash.xxh3_128(config)
    num_bytes = 0
    dtypes: Counter[str] = Counter()
    for path, expected in _weight_files(folder):
        tensors = _check_file(path, expected)
        for tensor in tensors.values():
            dtypes[tensor.dtype] += tensor.num_bytes
        digest.update(path.name.encode())
        _digest_file(path, digest)
        num_bytes += path.stat().st_size
    if not dtypes:
        raise CheckpointError(f"{folder} holds no weights: its safetensors files are empty; download it again")
    name = dtypes.most_common(1)[0][0]
    return Weights(digest.hexdigest(), DTYPE_NAMES.get(name, name), num_bytes)


def _weight_files(folder: Path) -> list[tuple[Path, frozenset[str]]]:
    """Return each file with the tensors that the index promises there (none promised without an index)."""
    index = folder / INDEX_FILE
    if not index.is_file():
        single = folder / SINGLE_FILE
        if single.is_file():
            return [(single, frozenset())]
        other = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
        hint = "convert its pickled weights to safetensors" if other else "download the whole checkpoint"
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: {hint}")
    files: dict[str, set[str]] = {}
    try:
        content = cast(dict[str, Any], json.loads(index.read_bytes()))
        _, weight_map = content["metadata"], cast(dict[str, str], content["weight_map"])  # the library needs both
        for tensor, file in weight_map.items():
            files.setdefault(Path(file).name, set()).add(tensor)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no valid index of weight files; download it again") from error
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} weight file(s), first {missing[0]}: download it again")
    return [(folder / name, frozenset(tensors)) for name, tensors in sorted(files.items())]


def _check_file(path: Path, expected: frozenset[str]) -> dict[str, Tensor]:
    """Return the tensors of one file. Raises CheckpointError unless its length is what its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, limits.MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is truncated or no safetensors file ({size} bytes); download it again")
        header = file.read(header_bytes)
    tensors: dict[str, Tensor] = {}
    data_bytes = 0
    try:
        entries = cast(dict[str, dict[str, Any]], json.loads(header))
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            start, end = cast(tuple[int, int], entry["data_offsets"])
            if not 0 <= start <= end:
                raise ValueError(f"offsets {start}, {end} of {name}")
            tensors[name] = Tensor(str(entry["dtype"]), end - start)
            data_bytes = max(data_bytes, end)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a broken safetensors header; download it again") from error
    if 8 + header_bytes + data_bytes != size:
        raise CheckpointError(
            f"{path} has {size} bytes where its header promises {8 + header_bytes + data_bytes}; download it again"
        )
    missing = sorted(expected - tensors.keys())
    if missing:
        raise CheckpointError(f"{path} lacks tensor {missing[0]} that the index promises; download it again")
    return tensors


def _digest_file(path: Path, digest: xxhash.xxh3_128) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= limits.FULL_DIGEST_BYTES:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            return
        header_bytes = int.from_bytes(file.read(8), "little")
        digest.update(file.read(header_bytes))
        first = 8 + header_bytes
        for sample in range(limits.NUM_SAMPLES):
            file.seek(first + (size - first - limits.SAMPLE_BYTES) * sample // (limits.NUM_SAMPLES - 1))
            digest.update(file.read(limits.SAMPLE_BYTES))

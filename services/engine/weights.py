"""The safetensors files of a checkpoint: are they whole, and who are they? No torch.

Which files these are is what transformers would load: the one that config.json names as `transformers_weights`, else
`model.safetensors`, else the shards of its index. What is digested here is what engines are given (`folder_of`).

Format: https://huggingface.co/docs/safetensors (u64 header length, JSON header, then the tensors' bytes).
"""

import json
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import xxhash

from services.engine import limits
from services.errors import CheckpointError
from services.files import write_private

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_config.json"
NAMED_BY = "transformers_weights"
"""The field of config.json that names the file, or its index."""
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


class Weights(NamedTuple):
    """`identity` is a hex digest, `dtype` the one that most bytes of the parameters have in the files, which are named
    relative to the folder. `is_plain`: whoever loads the folder itself finds these files and no others."""

    identity: str
    dtype: str
    num_bytes: int
    files: tuple[str, ...]
    is_plain: bool


class Tensor(NamedTuple):
    dtype: str
    num_bytes: int


def read_weights(folder: Path, config: bytes) -> Weights:
    """Check every weight file of `folder` against its own header, and return who they are.

    The identity covers `config` (the bytes of config.json), each file's name, size and header, and its content: whole
    up to 64 MiB a file, above that 256 evenly spaced samples of 64 KiB, so that a large model is named in well under a
    second. Two files of equal size and header that differ only between the samples would get one name; trained weights
    do not. Raises CheckpointError.
    """
    # An adapter would change what is computed, and the identity below does not cover its weights.
    if (folder / ADAPTER_FILE).is_file():
        raise CheckpointError(
            f"{folder} holds an adapter ({ADAPTER_FILE}), which is not served: merge it into the weights and save them "
            "in a folder of their own, or take its files away"
        )
    named: Any = json.loads(config).get(NAMED_BY)
    files, has_metadata = _weight_files(folder, named)
    # Check each file before it is digested: a file that is cut off gets no identity.
    digest = xxhash.xxh3_128(config)
    num_bytes = 0
    dtypes: Counter[str] = Counter()
    for name in files:
        path = folder / name
        for tensor in _check_file(path):
            dtypes[tensor.dtype] += tensor.num_bytes
        digest.update(name.encode())
        _digest_file(path, digest)
        num_bytes += path.stat().st_size
    if not dtypes:
        raise CheckpointError(f"{folder} holds no weights: its safetensors files are empty; choose another checkpoint")
    # The dtype is that of most bytes. A folder is plain where a loader that does not know which files are meant finds
    # the same ones.
    name = dtypes.most_common(1)[0][0]
    others = {path.name for path in folder.glob("*.safetensors")} != set(files)
    return Weights(
        digest.hexdigest(), DTYPE_NAMES.get(name, name), num_bytes, files, not (named or others) and has_metadata
    )


@contextmanager
def folder_of(checkpoint: Path, files: tuple[str, ...], *, is_plain: bool) -> Generator[Path]:
    """Lend a folder whose weights are these files of a checkpoint's, under the names that every loader knows.

    It is the checkpoint's own where that `is_plain`; else one of links, for as long as it is lent.
    """
    if is_plain:
        yield checkpoint
        return
    with TemporaryDirectory(prefix="kvmesh-") as name:
        folder = Path(name)
        for path in checkpoint.iterdir():
            if path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.endswith(".index.json"):
                (folder / path.name).symlink_to(path)
        config = json.loads((checkpoint / "config.json").read_bytes())
        (folder / "config.json").unlink()
        write_private(folder / "config.json", json.dumps({key: config[key] for key in config if key != NAMED_BY}))
        (folder / "params.json").unlink(missing_ok=True)  # Mistral's own format, which vLLM would prefer
        weight_map: dict[str, str] = {}
        for number, file in enumerate(files, start=1):
            link = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else SINGLE_FILE
            (folder / link).symlink_to(checkpoint / file)
            weight_map |= dict.fromkeys(_header(checkpoint / file)[0], link)
        if len(files) > 1:
            write_private(folder / INDEX_FILE, json.dumps({"metadata": {}, "weight_map": weight_map}))
        yield folder


def _weight_files(folder: Path, named: object) -> tuple[tuple[str, ...], bool]:
    """Return the names of the files, and whether an index among them is as transformers needs it: with metadata."""
    if named is not None and not (isinstance(named, str) and named.endswith((".safetensors", ".index.json"))):
        raise CheckpointError(
            f"{NAMED_BY} of {folder}/config.json is no safetensors file, and no index of such: {named!r:.80}"
        )
    # The name in config.json decides alone, even where the usual files are there as well.
    found = next(
        (name for name in ([named] if named else [SINGLE_FILE, INDEX_FILE]) if (folder / name).is_file()), None
    )
    # No name may lead out of the folder: a checkpoint could make the engine load any file of this machine.
    if named and (found is None or not _is_inside(named)):
        raise CheckpointError(
            f"{folder} has no {named:.80}, which its config.json names as its {NAMED_BY}: mend one of them"
        )
    if found is None:
        other = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
        hint = "convert its pickled weights to safetensors" if other else "download the whole checkpoint"
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: {hint}")
    if not found.endswith(".index.json"):
        return (found,), True
    # An index names a file for each tensor. Sort the files: the identity depends on their order.
    try:
        content = cast(dict[str, Any], json.loads((folder / found).read_bytes()))
        files = tuple(sorted(set(cast(dict[str, str], content["weight_map"]).values())))
        has_metadata = "metadata" in content
        outside = [name for name in files if not _is_inside(name)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / found} is no valid index of weight files: write it anew") from error
    if outside:
        raise CheckpointError(f"{folder / found} names {outside[0]:.80}, which is not in its folder: mend it")
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} weight file(s), first {missing[0]}: fetch what is missing"
        )
    return files, has_metadata


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _check_file(path: Path) -> list[Tensor]:
    """Return the tensors of one file. Raises CheckpointError unless its length is what its header says."""
    size = path.stat().st_size
    header, header_bytes = _header(path)
    tensors: list[Tensor] = []
    data_bytes = 0
    try:
        for name, entry in header.items():
            start, end = cast(tuple[int, int], entry["data_offsets"])
            if not 0 <= start <= end:
                raise ValueError(f"offsets {start}, {end} of {name}")
            tensors.append(Tensor(str(entry["dtype"]), end - start))
            data_bytes = max(data_bytes, end)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a broken safetensors header: save it anew") from error
    if 8 + header_bytes + data_bytes > size:
        raise CheckpointError(
            f"{path} is cut off: it has {size} bytes where its header promises {8 + header_bytes + data_bytes}; "
            "download it again"
        )
    if 8 + header_bytes + data_bytes < size:
        raise CheckpointError(
            f"{path} has {size} bytes where its header promises {8 + header_bytes + data_bytes}: save it anew"
        )
    return tensors


def _header(path: Path) -> tuple[Mapping[str, Mapping[str, Any]], int]:
    """Return what a file says of each of its tensors, and the length of that text. Raises CheckpointError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, limits.MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is truncated or no safetensors file ({size} bytes); download it again")
        header = file.read(header_bytes)
    try:
        entries = cast(dict[str, dict[str, Any]], json.loads(header))
        return {name: entry for name, entry in entries.items() if name != "__metadata__"}, header_bytes
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} has a broken safetensors header: save it anew") from error


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

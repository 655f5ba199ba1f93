"""Checkpoint folders as people save them: of each aspect of a folder one choice."""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import torch as safetensors_torch

from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.weights import INDEX_FILE, SINGLE_FILE

Change = Callable[[Path], None]
Choices = Mapping[str, str]
"""By aspect; of aspects that are not named, the first choice."""
TEMPLATE = (
    "{{ bos_token }}{{ image_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = "{{ tools | tojson }}" + TEMPLATE


def merge(path: Path, **fields: Any) -> None:
    """Write fields into a JSON file, which may not be there yet; None: leave the field out."""
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    kept = {name: value for name, value in (found | fields).items() if value is not None}
    path.write_text(json.dumps(kept, ensure_ascii=False), "utf-8")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return cast(Any, safetensors_torch).load_file(folder / SINGLE_FILE)


def save(tensors: dict[str, torch.Tensor], path: Path, **metadata: str) -> None:
    path.parent.mkdir(exist_ok=True)
    cast(Any, safetensors_torch).save_file(tensors, path, metadata=metadata or None)


def others(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return other weights of the same shapes."""
    return {name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}


def shard(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    *,
    index: str = INDEX_FILE,
    below: str = "",
    metadata: dict[str, Any] | None = None,
    **file_metadata: str,
) -> dict[str, str]:
    """Write tensors as two shards and their index, and return its map."""
    names = sorted(tensors)
    files = {f"{below}part-1.safetensors": names[::2], f"{below}part-2.safetensors": names[1::2]}
    for file, held in files.items():
        save({name: tensors[name] for name in held}, folder / file, **file_metadata)
    weight_map = {name: file for file, held in files.items() for name in held}
    fields = {} if metadata is None else {"metadata": metadata}
    (folder / index).write_text(json.dumps({**fields, "weight_map": weight_map}))
    return weight_map


def shards(folder: Path, *, instead: bool = True, **how: Any) -> dict[str, str]:
    tensors = tensors_of(folder)
    if instead:
        (folder / SINGLE_FILE).unlink()
    return shard(folder, tensors, **{"metadata": {}, "format": "pt", **how})


def index_lists_the_head(folder: Path) -> None:
    weight_map = shards(folder)
    weight_map.setdefault("lm_head.weight", "part-1.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def index_of_other_weights(folder: Path) -> None:
    shard(folder, others(tensors_of(folder)), metadata={}, format="pt")


def named(folder: Path) -> None:
    tensors = tensors_of(folder)
    save(tensors, folder / "the.safetensors", format="pt")
    save(others(tensors), folder / SINGLE_FILE, format="pt")
    merge(folder / "config.json", transformers_weights="the.safetensors")


def named_index(folder: Path) -> None:
    shards(folder, instead=False, index="the.safetensors.index.json")
    save(others(tensors_of(folder)), folder / SINGLE_FILE, format="pt")
    merge(folder / "config.json", transformers_weights="the.safetensors.index.json")


def stray(folder: Path) -> None:
    save(others(tensors_of(folder)), folder / "older.safetensors", format="pt")


def untied(folder: Path) -> None:
    tensors = tensors_of(folder)
    head = tensors["model.embed_tokens.weight"].flip(1).contiguous()
    save(tensors | {"lm_head.weight": head}, folder / SINGLE_FILE, format="pt")
    merge(folder / "config.json", tie_word_embeddings=False)


def tied_with_a_head(folder: Path) -> None:
    tensors = tensors_of(folder)
    head = tensors["model.embed_tokens.weight"].clone()
    save(tensors | {"lm_head.weight": head}, folder / SINGLE_FILE, format="pt")


def rope(**fields: Any) -> Change:
    names = ("rope_parameters", "rope_scaling", "rope_theta")
    return lambda folder: merge(folder / "config.json", **(dict.fromkeys(names) | fields))


LINEAR, THETA = {"rope_type": "linear", "factor": 2.0}, 5_000.0
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}


def ends(config: int | None, generation: Any = None, tokenizer: str | None = None) -> Change:
    def change(folder: Path) -> None:
        merge(folder / "config.json", eos_token_id=config)
        merge(folder / "tokenizer_config.json", eos_token=tokenizer)
        if generation is None:
            (folder / "generation_config.json").unlink(missing_ok=True)
        else:
            merge(folder / "generation_config.json", eos_token_id=generation)

    return change


def special(file: str, **fields: Any) -> Change:
    return lambda folder: merge(folder / file, **fields)


def template(text: str, file: str = "chat_template.jinja") -> Change:
    def change(folder: Path) -> None:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text, "utf-8")

    return change


def in_tokenizer_config(value: Any) -> Change:
    return lambda folder: merge(folder / "tokenizer_config.json", chat_template=value)


def named_files(folder: Path) -> None:
    template(TEMPLATE)(folder)
    template(WITH_TOOLS, "additional_chat_templates/tool_use.jinja")(folder)


def in_both(folder: Path) -> None:
    in_tokenizer_config("other" + TEMPLATE)(folder)
    template(TEMPLATE)(folder)


def beyond(folder: Path) -> None:
    """A token that the tokenizer knows and the model does not."""
    found = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    size = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    token = {**found["added_tokens"][0], "id": size + 3, "content": BEYOND, "special": False}
    found["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(found, ensure_ascii=False), "utf-8")


def begins(folder: Path) -> None:
    """The tokenizer writes a token before each text, as Llama's does."""
    found = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    token = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    names = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    found["post_processor"] = {
        "type": "TemplateProcessing", "single": [token, text[0]], "pair": [token, *text], "special_tokens": names
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(found, ensure_ascii=False), "utf-8")


def nothing(_: Path) -> None:
    pass


BEYOND = "<beyond>"
ASPECTS: dict[str, dict[str, Change]] = {
    "head": {"tied": nothing, "untied": untied, "tied with a head": tied_with_a_head},
    "files": {
        "one file": nothing,
        "shards": lambda folder: (shards(folder), None)[1],
        "shards without a format": lambda folder: (shards(folder, format=""), None)[1],
        "an index without metadata": lambda folder: (shards(folder, metadata=None), None)[1],
        "an index that lists the head": index_lists_the_head,
        "shards in a folder below": lambda folder: (shards(folder, below="weights/"), None)[1],
        "a file beside an index": index_of_other_weights,
        "a file by name": named,
        "an index by name": named_index,
        "a stray file": stray,
    },
    "rope": {
        "inside": rope(rope_parameters={"rope_type": "default", "rope_theta": THETA}),
        "outside": rope(rope_theta=THETA),
        "on both sides": rope(rope_parameters={"rope_type": "default", "rope_theta": THETA}, rope_theta=THETA),
        "linear inside": rope(rope_parameters=LINEAR | {"rope_theta": THETA}),
        "linear, older": rope(rope_scaling=LINEAR, rope_theta=THETA),
        "linear, oldest": rope(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=THETA),
        "linear, twice": rope(rope_scaling=LINEAR, rope_parameters=LINEAR, rope_theta=THETA),
        "yarn": rope(rope_scaling={"type": "yarn", **YARN}, rope_theta=THETA),
        "llama3": rope(rope_parameters={"rope_type": "llama3", "rope_theta": THETA, **LLAMA3}),
    },
    "ends": {
        "in config": ends(0, tokenizer="<|endoftext|>"),
        "in tokenizer_config": ends(77, tokenizer="<|im_end|>"),
        "in generation_config": ends(77, [0, 2], "<|im_end|>"),
        "one in generation_config": ends(0, 2),
        "in no other": ends(None, tokenizer="<|im_end|>"),
    },
    "special": {
        "none": nothing,
        "BOS in tokenizer_config": special("tokenizer_config.json", bos_token="<|im_start|>"),
        "BOS in special_tokens_map": special("special_tokens_map.json", bos_token="<|im_start|>"),
        "BOS as an object": special(
            "special_tokens_map.json",
            bos_token={
                "content": "<|im_start|>",
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
            },
        ),
        "others": special("tokenizer_config.json", extra_special_tokens={"image_token": "<|im_end|>"}),
    },
    "template": {
        "a file": template(TEMPLATE),
        "in tokenizer_config": in_tokenizer_config(TEMPLATE),
        "a list": in_tokenizer_config(
            [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": WITH_TOOLS}]
        ),
        "named files": named_files,
        "in both": in_both,
        "a generation tag": template(
            TEMPLATE.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
        ),
        "tojson's arguments": template(
            TEMPLATE.replace("arguments | tojson", "arguments | tojson(separators=(',', ':'), sort_keys=true)")
        ),
        "letters beyond ASCII": template("é｜" + TEMPLATE),
        "the day": template("{{ strftime_now('%Y') }}" + TEMPLATE),
        "none": nothing,
    },
    "tokens": {"as they are": nothing, "one beyond the model's": beyond, "one before a text": begins},
}
ORDER = tuple(ASPECTS)
"""In which the choices are made: a head before the files that hold it."""


def make_folder(folder: Path, base: Path, choices: Choices) -> Path:
    """Make a folder of `base`, a checkpoint with the demo model's tokens."""
    shutil.copytree(base, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL_DIR / name, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    for aspect in ORDER:
        ASPECTS[aspect][choices.get(aspect, next(iter(ASPECTS[aspect])))](folder)
    return folder


def alone() -> Iterator[dict[str, str]]:
    """Yield each choice by itself."""
    yield from ({aspect: choice} for aspect, found in ASPECTS.items() for choice in found)


def pairs(aspects: Mapping[str, Mapping[str, Change]] = ASPECTS, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield whole folders, as few as it takes that each two choices of different aspects meet in one."""
    rng = random.Random(seed)
    missing = {
        frozenset([(one, first), (other, second)])
        for one, other in combinations(aspects, 2)
        for first in aspects[one]
        for second in aspects[other]
    }
    while missing:
        wanted = dict(min(missing, key=sorted))
        wholes = [{name: rng.choice(list(aspects[name])) for name in aspects} | wanted for _ in range(20)]
        best = max(wholes, key=lambda whole: sum(pair <= whole.items() for pair in missing))
        missing = {pair for pair in missing if not pair <= best.items()}
        yield best

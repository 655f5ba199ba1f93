"""Checkpoints as quantizers leave them, of random weights: the projections as small integers and their scales.

The formats are those that vLLM reads: 8-bit weights and activations of compressed-tensors, 4-bit weights of AutoGPTQ
and of AutoAWQ.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
"""Rows that share a scale, of the 4-bit formats."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _INT8 | {"strategy": "channel", "dynamic": False},
                "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
            }
        },
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def quantize(folder: Path, method: str) -> Path:
    """Quantize a checkpoint of one file where it lies, by one of CONFIGS."""
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(file).items():
        if name.endswith("_proj.weight"):
            tensors |= {f"{name.removesuffix('weight')}{part}": made for part, made in _parts(weight, method).items()}
        else:
            tensors[name] = weight
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": CONFIGS[method]}))
    return folder


def _parts(weight: Tensor, method: str) -> dict[str, Tensor]:
    """Return what stands for a weight [out, in]."""
    if method == "compressed-tensors":
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}
    groups = weight.T.float().unflatten(0, (-1, GROUP))
    scales = groups.abs().amax(1) / 7
    values = ((groups / scales[:, None]).round() + 8).clamp(0, 15).flatten(0, 1)
    zeros = torch.full_like(scales, 8)
    if method == "gptq":
        index = torch.arange(values.shape[0]) // GROUP
        made = {"qweight": _pack(values.T).T, "qzeros": _pack(zeros - 1), "g_idx": index.to(torch.int32)}
    else:
        made = {"qweight": _pack(values, AWQ_ORDER), "qzeros": _pack(zeros, AWQ_ORDER)}
    return made | {"scales": scales.to(weight.dtype)}


def _pack(values: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Return each eight 4-bit numbers of a row as one 32-bit number: the `order[n]`-th lies in bits 4·n and up."""
    eights = values.to(torch.int64).unflatten(1, (-1, 8))
    packed = sum(eights[..., place] << 4 * number for number, place in enumerate(order))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)

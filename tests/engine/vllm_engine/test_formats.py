import ast
import importlib.util
import inspect

import pytest

from dataplane.blocks.layout import ArenaShape, KVLayout
from services.engine.vllm_engine import formats, loading
from services.errors import UserError


@pytest.mark.parametrize(
    ("dtype", "block_size", "head_dim", "machine", "flags", "expected"),
    [
        ("float32", 32, 64, "x86_64", {"avx512f", "amx_tile"}, "vec"),
        ("bfloat16", 32, 64, "x86_64", {"avx512f", "amx_tile"}, "amx"),
        ("bfloat16", 32, 64, "x86_64", {"avx512f"}, "vec"),
        ("float32", 16, 64, "x86_64", set(), "vec16"),
        ("float32", 32, 80, "x86_64", set(), "vec16"),
        ("float32", 32, 64, "aarch64", set(), "neon"),
    ],
)
def test_the_packing_of_a_machine(
    dtype: str, block_size: int, head_dim: int, machine: str, flags: set[str], expected: str
) -> None:
    assert formats.packing(dtype, block_size, head_dim, machine, frozenset(flags)) == expected


def test_the_pool_has_room_for_all_that_the_arena_holds() -> None:
    """vLLM gives each kind of layers groups of equally many: five layers with windows beside two without are three."""
    layout = KVLayout(
        weights="w", dtype="float32", num_layers=7, num_kv_heads=1, head_dim=4, block_size=32, whole_blocks=True,
        windows=(64, 64, 0, 64, 64, 0, 64),
    )  # fmt: skip
    shape = ArenaShape(layout=layout, num_blocks=(100, 30))
    block_bytes = 2 * 32 * 4 * 4
    assert formats.pool_bytes(shape, 9) == (2 * (100 + 10) + 6 * (30 + 10)) * block_bytes
    assert formats.pool_bytes(shape, 1000) == (2 * (100 + 257) + 6 * (30 + 257)) * block_bytes


def test_what_follows_from_the_rest_of_mesh_toml_is_not_a_user_s_to_set() -> None:
    """All that `loading.py` gives the engine, and nothing else, is refused in `engine.args`."""
    given = [
        ast.literal_eval(key)
        for function in ("_engine_args", "_link_args")
        for node in ast.walk(ast.parse(inspect.getsource(getattr(loading, function))))
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if key is not None
    ]
    assert sorted(given) == sorted(formats.OURS)
    assert not loading.DEFAULTS.keys() & (formats.OURS | formats.NOT_SERVED.keys())


def test_without_vllm_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="make vllm"):
        formats.installed_version()


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_it_is_vllm_s_own_word(dtype: str, head_dim: int) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    import torch
    from vllm import __version__
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    own = _get_attn_isa(getattr(torch, dtype), 32, head_dim, "auto")
    version = formats.installed_version()
    assert formats.format_here(dtype, 32, head_dim, {}) == formats.cpu_format(version, own, dtype, {})
    assert version in __version__ or __version__ in version

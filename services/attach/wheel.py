"""Builds the wheel `kvmesh_vllm`: the connector and those modules of this installation that it imports, under one name.

A user's vLLM environment pins its own versions of much that kvmesh uses: what goes there needs only what vLLM has
anyway, and xxhash. The modules are copied as they are here, so the two are always of one version.

Format: https://packaging.python.org/specifications/binary-distribution-format
"""

import ast
import base64
import hashlib
import importlib.metadata
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from services.files import private_folder

ROOT = Path(__file__).parents[2]
PACKAGE = "kvmesh_vllm"
FIRST = "services.attach.connector.connector"
OURS = ("dataplane", "schemas", "services")
NEEDS = ("msgspec", "numpy", "xxhash")
"""And torch, of which whoever has vLLM has the right one."""
_IMPORT = re.compile(rf"^(\s*)(from|import) ({'|'.join(OURS)})\b", re.MULTILINE)
_DATE = (1980, 1, 1, 0, 0, 0)


def write_wheel(folder: Path) -> Path:
    """Write the wheel into a folder, and return its path. The same modules make the same bytes. Raises OSError."""
    version = importlib.metadata.version("kvmesh")
    info = f"{PACKAGE}-{version}.dist-info"
    files = {f"{PACKAGE}/__init__.py": _first_module().encode()}
    for module, path in sorted(modules().items()):
        is_package = path.name == "__init__.py"
        name = f"{PACKAGE}/{module.replace('.', '/')}" + ("/__init__.py" if is_package else ".py")
        files[name] = _IMPORT.sub(rf"\1\2 {PACKAGE}.\3", path.read_text("utf-8")).encode()
    requires = "".join(f"Requires-Dist: {name}\n" for name in NEEDS)
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: kvmesh-vllm\nVersion: {version}\n"
        f"Summary: The connector by which vllm serve attaches to kvmesh\nRequires-Python: >=3.11\n{requires}"
    ).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: kvmesh\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = f"{info}/RECORD"
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    private_folder(folder)
    target = folder / f"{PACKAGE}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            wheel.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    return target


def modules() -> dict[str, Path]:
    """Return the modules of ours that the connector imports, and those these import, with their files."""
    found: dict[str, Path] = {}
    waiting = [FIRST]
    while waiting:
        module = waiting.pop()
        path = _file_of(module)
        if module in found or path is None:
            continue
        found[module] = path
        waiting += [module.rpartition(".")[0], *_imports(path)]
    return found


def _imports(path: Path) -> Iterator[str]:
    """Yield what a file imports of ours; of `from a import b` both may be modules."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split(".")) if module else None
    if path is None:
        return None
    return next((each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file()), None)


def _first_module() -> str:
    return (
        '"""The connector by which `vllm serve` attaches to kvmesh: this is its kv_connector_module_path."""\n\n'
        f"from {PACKAGE}.{FIRST} import KvmeshConnector\n\n"
        '__all__ = ["KvmeshConnector"]\n'
    )


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()

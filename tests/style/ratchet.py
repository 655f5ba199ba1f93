"""`python -m tests.style.ratchet`: what the house has only ever less of. Part of `make check`.

A change that lowers a figure lowers its bound here; one that raises a bound says why in its commit.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("schemas", "dataplane", "services")
MANY_CLASSES = 5

BOUNDS = {
    "Protocols": 45,
    f"names of public methods on more than {MANY_CLASSES} classes": 4,
}


def measured() -> dict[str, int]:
    """Return each figure of `BOUNDS`."""
    texts = [path.read_text("utf-8") for root in PRODUCT for path in Path(root).rglob("*.py")]
    classes = [each for text in texts for each in _classes(ast.parse(text))]
    owners: defaultdict[str, int] = defaultdict(int)
    for each in classes:
        for name in _public_methods(each):
            owners[name] += 1
    num_protocols = sum(any(ast.unparse(base).startswith("Protocol") for base in each.bases) for each in classes)
    num_shared = sum(count > MANY_CLASSES for count in owners.values())
    return dict(zip(BOUNDS, (num_protocols, num_shared), strict=True))


def _classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _public_methods(each: ast.ClassDef) -> set[str]:
    functions = (node for node in each.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name for node in functions if not node.name.startswith("_")}


def main() -> int:
    """Print the figures that have moved. Exit code 1 where one has grown."""
    grown = 0
    for what, figure in measured().items():
        if figure > (bound := BOUNDS[what]):
            grown += 1
            print(f"{what}: {figure:,}, and were {bound:,}: make it less, or raise the bound and say why in the commit")
        elif figure < bound:
            print(f"{what}: {figure:,}, and were {bound:,}: lower the bound in {Path(__file__).name}")
    return min(1, grown)


if __name__ == "__main__":
    sys.exit(main())

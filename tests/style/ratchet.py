"""`python -m tests.style.ratchet`: what the house has only ever less of. Part of `make check`.

A change that lowers a figure lowers its bound here; one that raises a bound says why in its commit.
"""

import ast
import re
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

NAMES = {"an attempt": 9, "a token": 8, "a read": 12, "a placement": 8, "a setting": 2, "sampling parameters": 2}
"""The most records that each thing of ARCHITECTURE's table "Names for one thing" may pass through."""


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


def known_names() -> set[str]:
    """Return the names of all classes of the product."""
    texts = (path.read_text("utf-8") for root in PRODUCT for path in Path(root).rglob("*.py"))
    return {each.name for text in texts for each in _classes(ast.parse(text))}


def wrong_rows(page: str, known: set[str]) -> list[str]:
    """Return what is wrong with the table "Names for one thing": a row that has grown, that has become shorter than its
    bound, or that names a class that there is not."""
    _, _, section = page.partition("\n## Names for one thing\n")
    rows = dict(re.findall(r"^\| (an? [a-z]+|[a-z ]+) \| (.*`.*) \|$", section.partition("\n## ")[0], re.MULTILINE))
    wrong = [
        f"ARCHITECTURE.md, names for one thing: a row {thing!r} is missing" for thing in NAMES if thing not in rows
    ]
    for thing, row in rows.items():
        names, most = re.findall(r"`(\w+)`", row), NAMES.get(thing, 0)
        wrong += [f"{thing}: there is no class {name}" for name in names if name not in known]
        if len(names) != most:
            hint = "make it less" if len(names) > most else f"lower the bound in {Path(__file__).name}"
            wrong.append(f"{thing} passes through {len(names)} records, and did through {most}: {hint}")
    return wrong


def main() -> int:
    """Print the figures that have moved, and what is wrong with the table of names. Exit code 1 where one has grown."""
    grown = 0
    for what, figure in measured().items():
        if figure > (bound := BOUNDS[what]):
            grown += 1
            print(f"{what}: {figure:,}, and were {bound:,}: make it less, or raise the bound and say why in the commit")
        elif figure < bound:
            print(f"{what}: {figure:,}, and were {bound:,}: lower the bound in {Path(__file__).name}")
    wrong = wrong_rows(Path("ARCHITECTURE.md").read_text("utf-8"), known_names())
    print("".join(f"{each}\n" for each in wrong), end="")
    return min(1, grown + len(wrong))


if __name__ == "__main__":
    sys.exit(main())

"""Writes the golden files: `python -m tests.wire.make_golden`. A changed file is a changed wire: see that old services
can live with it before you commit it."""

from pathlib import Path

from schemas.message import encode
from tests.wire.examples import EXAMPLES

GOLDEN = Path(__file__).with_name("golden")


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for example in EXAMPLES:
        (GOLDEN / f"{type(example).__name__}.json").write_bytes(encode(example))


if __name__ == "__main__":
    main()

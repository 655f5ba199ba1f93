"""The table of ARCHITECTURE that says which records a thing passes through: it may become shorter, and is true."""

from pathlib import Path

import pytest

from tests.style import ratchet

PAGE = Path("ARCHITECTURE.md").read_text("utf-8")
ROW = next(line for line in PAGE.splitlines() if line.startswith("| a placement |"))


def test_the_table_is_true() -> None:
    assert ratchet.wrong_rows(PAGE, ratchet.known_names()) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            ROW.replace("`Choice`", "`Choice`, `Placer`"),
            "a placement passes through 9 records, and did through 8",
        ),
        (ROW.replace(", `Choice`", ""), "a placement passes through 7 records, and did through 8: lower the bound"),
        (ROW.replace("`Choice`", "`Chosen2`"), "a placement: there is no class Chosen2"),
        ("", "a row 'a placement' is missing"),
        (f"{ROW}\n| a thing | `Choice` |", "a thing passes through 1 records, and did through 0: make it less"),
    ],
)
def test_what_is_wrong_with_it_is_said(row: str, said: str) -> None:
    (wrong,) = ratchet.wrong_rows(PAGE.replace(ROW, row), ratchet.known_names())
    assert said in wrong

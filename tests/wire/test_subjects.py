"""The one table of subjects, and what is generated from it."""

from pathlib import Path
from typing import Any

import pytest

from schemas import subjects
from schemas.handoff import HANDOFF_TRANSITIONS, HandoffState, advance
from schemas.ids import is_subject_token, new_id
from schemas.subjects import SUBJECTS, Subject
from services.bus.memory import matches
from services.errors import UserError
from tests.pages import tables
from tests.pages.message_tables import message_tables
from tests.pages.tables import PAGES, handoff_diagram, regenerate, subject_table
from tests.wire.examples import EXAMPLES, MESSAGE_TYPES

ROOT = Path(__file__).parents[2]
SECTIONS = {"one": lambda: "1", "two": lambda: "2", "three": lambda: "3"}

each_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.pattern)


@each_subject
def test_a_subject_is_made_of_valid_tokens(subject: Subject[Any, Any]) -> None:
    assert subject.pattern.startswith("mesh.v1.")
    assert all(token == "{}" or is_subject_token(token) for token in subject.pattern.split("."))
    assert subject.published_by and subject.received_by
    assert not subject.queue or subject.reply, "only requests have queue groups"


@each_subject
def test_a_subject_takes_exactly_its_ids(subject: Subject[Any, Any]) -> None:
    num_ids = len(subject.ids)
    concrete = subject.of(*(new_id("w") for _ in range(num_ids)))
    assert matches(tuple(subject.of(*["*"] * num_ids).split(".")), tuple(concrete.split(".")))
    for wrong in {num_ids - 1, num_ids + 1} - {-1}:
        with pytest.raises(ValueError):
            subject.of(*["x"] * wrong)


def test_every_subject_is_in_the_table_and_no_two_overlap() -> None:
    assert {value for value in vars(subjects).values() if isinstance(value, Subject)} == set(SUBJECTS)
    for one in SUBJECTS:
        pattern = tuple(one.pattern.replace("{}", "*").split("."))
        heard = [s for s in SUBJECTS if matches(pattern, tuple(s.pattern.replace("{}", "x").split(".")))]
        assert heard == [one]


def test_every_message_has_an_example() -> None:
    assert sorted(type(e).__name__ for e in EXAMPLES) == [kind.__name__ for kind in MESSAGE_TYPES]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_is_generated(page: str) -> None:
    document = (ROOT / page).read_text()
    assert document == regenerate(document, PAGES[page]), "run: make docs"


def test_the_table_and_the_diagram_name_everything() -> None:
    table, diagram = subject_table(), handoff_diagram()
    assert all(f"`{kind.__name__}`" in table for kind in MESSAGE_TYPES)
    rows = {row.split("`")[1]: row for row in message_tables().splitlines() if row.startswith("| `")}
    for kind in MESSAGE_TYPES:
        named = rows[kind.__name__] + "".join(rows.get(base.__name__, "") for base in kind.__mro__)
        assert all(f"`{field}`: " in named for field in kind.__struct_encode_fields__), kind
    assert all(
        f"{source} --> {target}" in diagram for source, targets in HANDOFF_TRANSITIONS.items() for target in targets
    )


def section(name: str, text: str = "") -> str:
    return f"<!-- generated: {name} -->\n{text}<!-- end -->\n"


def test_a_document_is_rewritten_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n" + "\nb\n".join(section(name, "stale\n") for name in SECTIONS) + "c\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables, "PAGES", {"page.md": SECTIONS})
    tables.main()
    written = page.read_text()
    assert written == "a\n" + "\nb\n".join(section(name, f"{make()}\n") for name, make in SECTIONS.items()) + "c\n"
    assert regenerate(written, SECTIONS) == written


WHOLE = [section(name) for name in SECTIONS]


@pytest.mark.parametrize(
    "page",
    [
        "",
        "".join(WHOLE[1:]),
        "".join(WHOLE[:-1]) + WHOLE[-1].replace("<!-- end -->", ""),
        WHOLE[0].replace("<!-- end -->", "") + "".join(WHOLE[1:]),
        "".join(WHOLE) + WHOLE[0],
        "".join(WHOLE) + section("x"),
    ],
)
def test_a_document_with_wrong_markers_is_refused(page: str) -> None:
    with pytest.raises(UserError):
        regenerate(page, SECTIONS)


def test_the_hand_over_ends_and_never_leaves_its_end() -> None:
    for state, targets in HANDOFF_TRANSITIONS.items():
        ended = state in (HandoffState.RELEASED, HandoffState.ABORTED)
        assert (not targets) == ended
        assert ended or HandoffState.ABORTED in targets
        for target in HandoffState:
            if target in targets:
                assert advance(state, target) is target
            else:
                with pytest.raises(AssertionError, match="cannot go"):
                    advance(state, target)

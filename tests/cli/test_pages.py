"""What is made of a real mesh for README and ARCHITECTURE: the pages name what the bus has, the pictures are there."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from schemas.subjects import SUBJECTS
from services.bus.memory import matches
from services.errors import UserError
from services.pages.listening import END, LISTENING, MAX_TEXT, QUERIES, START, Heard, rewrite, section
from services.pages.shots import picture

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
PATTERNS = [tuple(subject.pattern.replace("{}", "x").split(".")) for subject in SUBJECTS]


def heard_part() -> str:
    return PAGE.partition(START)[2].partition(END)[0]


def test_ten_subscriptions_stand_in_the_page_and_each_was_heard() -> None:
    listed = re.findall(r"^\| `(mesh[^`]*)` \|", heard_part(), re.MULTILINE)
    assert listed == [listening.subscription for listening in LISTENING]
    assert len(listed) == 10
    for subscription in listed:
        _, _, after = heard_part().partition(f"$ nats sub '{subscription}'\n")
        first = after.splitlines()[0]
        assert matches(tuple(subscription.split(".")), tuple(first.split("."))), subscription


@pytest.mark.parametrize("listening", LISTENING, ids=lambda listening: listening.subscription)
def test_a_subscription_fits_the_table_of_subjects(listening: object) -> None:
    subscription = tuple(str(listening.subscription).split("."))  # type: ignore[attr-defined]
    assert any(matches(subscription, pattern) for pattern in PATTERNS)


@pytest.mark.parametrize("query", QUERIES)
def test_what_is_asked_takes_an_empty_message(query: str) -> None:
    asked = tuple(query.format(worker="x", request="x").split("."))
    [subject] = [s for s, pattern in zip(SUBJECTS, PATTERNS, strict=True) if pattern == asked]
    assert subject.may_be_empty and f"$ nats req {query.split('{', maxsplit=1)[0]}" in heard_part()


def test_every_subject_that_may_be_empty_is_shown() -> None:
    assert len([subject for subject in SUBJECTS if subject.may_be_empty]) == len(QUERIES)


def test_long_texts_are_cut_and_what_the_subject_says_is_left_out() -> None:
    heard = Heard("req-1", {listening.subscription: [] for listening in LISTENING})
    payload = b'{"type":"X","request_id":"req-1","deep":[{"lease_id":"l","text":"%s"}]}' % (b"a" * 99)
    heard.messages["mesh.v1.kv.*.lease"] = [("mesh.v1.kv.w.lease", payload)]
    text = section(heard)
    assert "mesh.v1.kv.w.lease\n  {deep: [{text: " + "a" * MAX_TEXT + "…}]}\n" in text


def test_the_page_is_rewritten_between_its_marks() -> None:
    assert rewrite(f"a\n{START}old\n{END}\nb\n", "new") == f"a\n{START}new\n{END}\nb\n"
    with pytest.raises(UserError):
        rewrite("a page without marks", "new")


def test_a_picture_is_whole_and_loads_nothing_from_elsewhere() -> None:
    svg = picture("a title", 40, lambda console: console.print(Text("hello <there>", style="green")))
    shown = svg.replace("&#160;", " ")
    assert "hello &lt;there&gt;" in shown and "a title" in shown
    _check_picture(svg)


@pytest.mark.parametrize("name", ["top", "trace"])
def test_the_readme_shows_the_pictures(name: str) -> None:
    path = f"docs/pictures/{name}.svg"
    assert path in (ROOT / "README.md").read_text()
    _check_picture((ROOT / path).read_text())


def _check_picture(svg: str) -> None:
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert "url(http" not in svg and "href" not in svg


def test_pictures_are_as_wide_as_they_are_told() -> None:
    widths: list[int] = []

    def draw(console: Console) -> None:
        widths.append(console.width)

    picture("", 61, draw)
    assert widths == [61]


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "dataplane/SCALING.md", "compose/README.md"])
def test_a_file_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:tests|services|dataplane|schemas|compose)/[\w./*{}-]+)`", text)
    named += re.findall(r"\]\(((?!http)[\w./-]+?)(?:#[\w-]+)?\)", text)
    missing = [name for name in named if not found(name, ROOT / page)]
    assert not missing


def found(name: str, page: Path) -> bool:
    return any(any(folder.glob(name.rstrip("/"))) for folder in (ROOT, page.parent))


def test_the_list_of_what_never_met_a_device_names_files_that_touch_one() -> None:
    _, _, rest = PAGE.partition("<!-- never met a device -->")
    listed, end, _ = rest.partition("<!-- end of what never met a device -->")
    assert end
    named = set(re.findall(r"`([\w/]+\.py)`", "\n".join(line.split("|")[1] for line in listed.splitlines()[3:])))
    touching = {
        "dataplane/cards/cuda/cuda_driver.py",
        "dataplane/cards/nccl/library.py",
        "services/engine/cuda/cuda_runtime.py",
        "services/engine/cuda/on_card.py",
    }
    assert touching <= named

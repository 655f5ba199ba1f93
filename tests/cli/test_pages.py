"""The pages: they name what the bus has, their links and paths lead somewhere, their pictures are there."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from rich.console import Console
from rich.text import Text

from schemas.permissions import permissions_of
from schemas.subjects import SUBJECTS, Role
from services.bus.memory import matches
from services.errors import UserError
from tests.cli.test_page_commands import all_commands, way_of
from tests.pages.listening import END, LISTENING, MAX_TEXT, QUERIES, START, Heard, rewrite, section
from tests.pages.shots import picture

ROOT = Path(__file__).parents[2]
PROTOCOL = (ROOT / "docs/protocol.md").read_text()
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/*.md", "compose/*.md", "dataplane/*.md")
    for path in ROOT.glob(pattern)
)
each_page = pytest.mark.parametrize("page", PAGES)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATTERNS = [tuple(subject.pattern.replace("{}", "x").split(".")) for subject in SUBJECTS]


def heard_part() -> str:
    return PROTOCOL.partition(START)[2].partition(END)[0]


def test_ten_subscriptions_stand_in_the_page_and_each_was_heard() -> None:
    listed = re.findall(r"^\| `(mesh[^`]*)` \|", heard_part(), re.MULTILINE)
    assert listed == [listening.subscription for listening in LISTENING]
    assert len(listed) == 10
    for subscription in listed:
        _, _, after = heard_part().partition(f"$ kvmesh sub '{subscription}'")
        first = after.splitlines()[1]
        assert matches(tuple(subscription.split(".")), tuple(first.split("."))), subscription


def test_the_page_says_who_hears_a_subscription() -> None:
    """As the broker grants it: what an observer hears nothing of is the operator's alone, and shown with its flag."""
    told = dict(re.findall(r"^\| `(mesh[^`]*)` \| ([^|]*) \|", heard_part(), re.MULTILINE))
    may = permissions_of(Role.OBSERVER, "o")
    for listening, who in told.items():
        pattern = tuple(listening.split("."))
        concrete = {s: tuple(s.of(*("x" for _ in s.ids)).split(".")) for s in SUBJECTS}
        found = [subject for subject, tokens in concrete.items() if matches(pattern, tokens)]
        denied = [s for s in found if any(matches(tuple(d.split(".")), concrete[s]) for d in may.undelivered)]
        ends = ", ".join(f"`{subject.pattern.rsplit('.', 1)[-1]}`" for subject in denied)
        partly = f"observer; {ends}: operator" if ends else "observer"
        assert who == ("operator" if denied == found else partly)
        assert (f"$ kvmesh sub '{listening}' --operator\n" in heard_part()) == (who == "operator")


@pytest.mark.parametrize("listening", LISTENING, ids=lambda listening: listening.subscription)
def test_a_subscription_fits_the_table_of_subjects(listening: object) -> None:
    subscription = tuple(str(listening.subscription).split("."))  # type: ignore[attr-defined]
    assert any(matches(subscription, pattern) for pattern in PATTERNS)


@pytest.mark.parametrize("query", QUERIES)
def test_what_is_asked_takes_an_empty_message(query: str) -> None:
    asked = tuple(query.format(worker="x", request="x").split("."))
    [subject] = [s for s, pattern in zip(SUBJECTS, PATTERNS, strict=True) if pattern == asked]
    assert subject.may_be_empty and f"$ kvmesh req {query.split('{', maxsplit=1)[0]}" in heard_part()


def test_every_subject_that_may_be_empty_is_shown() -> None:
    assert len([subject for subject in SUBJECTS if subject.may_be_empty]) == len(QUERIES)


def test_long_texts_are_cut_and_what_the_subject_says_is_left_out() -> None:
    heard = Heard("req-1", {listening.subscription: [] for listening in LISTENING})
    payload = b'{"type":"X","request_id":"req-1","deep":[{"lease_id":"l","text":"%s"}]}' % (b"a" * 99)
    heard.messages["mesh.v1.kv.*.*.lease"] = [("mesh.v1.kv.w.r.lease", payload)]
    text = section(heard)
    assert "mesh.v1.kv.w.r.lease\n  {deep: [{text: " + "a" * MAX_TEXT + "…}]}\n" in text


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


def test_each_command_says_how_it_is_tried() -> None:
    """What it does is tried at night."""
    assert all(way_of(command) for command in all_commands())


@each_page
def test_a_file_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    code = " ".join([*FENCE.findall(text), *re.findall(r"`[^`\n]+`", FENCE.sub("", text))])
    named = re.findall(r"(?<![\w./-])(?:tests|services|dataplane|schemas|compose|docs)/[\w./*-]*[\w*/]", code)
    missing = [name for name in named if not any(ROOT.glob(name.rstrip("/")))]
    assert not missing


@each_page
def test_a_link_leads_somewhere(page: str) -> None:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", (ROOT / page).read_text()))
    assert [link for link in re.findall(r"\]\(([^()\s]*)\)", text) if not leads(ROOT / page, link)] == []


def leads(page: Path, link: str) -> bool:
    """Say whether a link leads to a file and a heading of ours, or is a well-formed address of another site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return parts.scheme == "https" and "." in parts.netloc
    path = page.parent / parts.path if parts.path else page
    return path.exists() and (not parts.fragment or parts.fragment in anchors(path.read_text()))


def anchors(text: str) -> set[str]:
    """Return what GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.MULTILINE)
    names = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {name if (before := names[:at].count(name)) == 0 else f"{name}-{before}" for at, name in enumerate(names)}


def test_headings_are_called_as_on_github() -> None:
    text = "# One, two & *three*: `four_5`\n## Same\n```\n# no heading\n```\n## Same\n"
    assert anchors(text) == {"one-two--three-four_5", "same", "same-1"}


@pytest.mark.parametrize(
    "link", ["nowhere.md", "README.md#nowhere", "#nowhere", "http://example.org", "https://example", "https:/a.b"]
)
def test_a_link_that_leads_nowhere_is_found(link: str) -> None:
    assert not leads(ROOT / "README.md", link)

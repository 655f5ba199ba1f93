"""Writes the generated parts of the pages: `python -m services.pages.tables ARCHITECTURE.md dataplane/SCALING.md`."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schemas.handoff import HANDOFF_TRANSITIONS, HandoffState
from schemas.subjects import SUBJECTS, Subject
from services.bench import links
from services.errors import UserError
from services.metric_names import ALL, HOLDERS, METRICS, WORKERS


def subject_table() -> str:
    """Return every subject, what it carries and who listens, as a Markdown table."""
    rows = [f"| `{s.pattern.replace('{}', '*')}` | {_carries(s)} | {_listener(s)} |" for s in SUBJECTS]
    return "\n".join(["| subject | carries → reply | who listens |", "|---|---|---|", *rows])


def handoff_diagram() -> str:
    """Return the hand-over's states and steps as a Mermaid diagram."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {HandoffState.NEW}"]
    for source, targets in HANDOFF_TRANSITIONS.items():
        lines += [f"    {source} --> {target}" for target in HandoffState if target in targets]
        if not targets:
            lines.append(f"    {source} --> [*]")
    return "\n".join([*lines, "```"])


def metrics_table() -> str:
    """Return every metric, its labels, who serves it and what it says, as a Markdown table."""
    rows = [
        f"| `{m.shown_name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.shown_labels)} "
        f"| {_served_by(m.roles)} | {m.text} |"
        for m in METRICS
    ]
    return "\n".join(["| metric | kind | labels | who serves it | what it says |", "|---|---|---|---|---|", *rows])


Sections = dict[str, Callable[[], str]]

SECTIONS: Sections = {"subjects": subject_table, "handoff": handoff_diagram, "metrics": metrics_table}
SCALING: Sections = {
    "tokens": lambda: links.markdown(links.token_table()),
    "links": lambda: links.markdown(links.link_table(links.LENGTHS)),
    "published": lambda: links.markdown(links.published_table()),
}
PAGES = {"SCALING.md": SCALING}
"""The sections of pages other than ARCHITECTURE.md."""


def regenerate(document: str, sections: Sections = SECTIONS) -> str:
    """Return the document with the text between each `generated` marker and its `end` written anew.

    Raises UserError for a section that is missing, has no end, or that nobody generates.
    """
    found = re.findall(r"<!-- generated: (\w+) -->", document)
    if sorted(found) != sorted(sections):
        raise UserError(f"the document must have the sections {', '.join(sections)} once each, it has {found}")
    for name, generate in sections.items():
        start = f"<!-- generated: {name} -->\n"
        before, _, rest = document.partition(start)
        _, end, after = rest.partition("<!-- end -->")
        if not end or "<!-- generated" in rest[: rest.index(end)]:
            raise UserError(f"the section {name} of the document has no <!-- end -->")
        document = f"{before}{start}{generate()}\n{end}{after}"
    return document


def main() -> None:
    """Rewrite the documents named on the command line."""
    for path in map(Path, sys.argv[1:]):
        path.write_text(regenerate(path.read_text(), PAGES.get(path.name, SECTIONS)))


def _served_by(roles: tuple[str, ...]) -> str:
    if not roles or set(roles) == set(ALL):
        return "all"
    others = [role for role in roles if role not in HOLDERS]
    if set(WORKERS) <= set(roles):
        others.append("workers, store" if "store" in roles else "workers")
    return ", ".join(others)


def _carries(subject: Subject[Any, Any]) -> str:
    carried = f"`{subject.carries.__name__}`"
    return f"{carried} → {' or '.join(f'`{reply.__name__}`' for reply in subject.reply)}" if subject.reply else carried


def _listener(subject: Subject[Any, Any]) -> str:
    return f"{subject.listener} (queue group)" if subject.queue else subject.listener


if __name__ == "__main__":
    main()

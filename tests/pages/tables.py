"""Writes the generated parts of all pages: `python -m tests.pages.tables`, in the repository's root."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from typer.core import TyperGroup, TyperOption
from typer.main import get_command

from schemas.handoff import HANDOFF_TRANSITIONS, HandoffState
from schemas.observe import RunStage
from schemas.subjects import SUBJECTS, Permit, Role, Subject
from services.cli.app import app
from services.cli.flags import FLAGS
from services.config import MeshConfig
from services.errors import UserError
from services.gateway.api.capabilities import BODIES, parameters_of
from services.holder.core.attempt import STAGES_AFTER
from services.metric_names import ALL, HOLDERS, METRICS, WORKERS
from services.metrics import MetricName
from services.settings import settings_of
from services.worker.core import TABLE
from tests.bench import links
from tests.pages.message_tables import message_tables


def subject_table() -> str:
    """Return every subject, what it carries, who may say and who may hear it, as a Markdown table."""
    rows = [f"| `{s.named}` | {_carries(s)} | {_members(s.published_by)} | {_received_by(s)} |" for s in SUBJECTS]
    return "\n".join(["| subject | carries → reply | published by | received by |", "|---|---|---|---|", *rows])


def parameter_table() -> str:
    """Return all parameters of all routes as a Markdown table."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for route in BODIES:
        for one in parameters_of(route):
            text = f"{one.description} (taken: {_shown(one.harmless)})" if one.harmless else one.description
            name = f"`{one.name}`" + (f": {_shown(one.values)}" if one.values else "")
            rows.setdefault((name, one.origin, one.treatment.value, text), []).append(route.value)
    lines = [
        f"| {name} | {origin} | {treatment} | {', '.join(routes)} | {text} |"
        for (name, origin, treatment, text), routes in rows.items()
    ]
    return "\n".join(["| parameter | whose | | routes | |", "|---|---|---|---|---|", *lines])


def _shown(values: Iterable[object]) -> str:
    return ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)


def permissions_table() -> str:
    """Return which role may say and hear which subject, as a Markdown table. Operators hear all."""
    roles = [role for role in Role if role is not Role.OPERATOR]
    rows = [f"| `{s.named}` | " + " | ".join(_cell(s, role) for role in roles) + " |" for s in SUBJECTS]
    return "\n".join([f"| subject | {' | '.join(roles)} |", "|---" * (len(roles) + 1) + "|", *rows])


def _cell(subject: Subject[Any, Any], role: Role) -> str:
    cells: list[str] = []
    for verb, grants in (("publishes", subject.published_by), ("receives", subject.received_by)):
        own = [f" as `{grant.own}`" if grant.own else "" for grant in grants if grant.role is role]
        if own:
            cells.append(verb + " or".join(own))
    return ", ".join(cells)


def handoff_diagram() -> str:
    """Return the hand-over's states and steps as a Mermaid diagram."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {HandoffState.NEW}"]
    for source, targets in HANDOFF_TRANSITIONS.items():
        lines += [f"    {source} --> {target}" for target in HandoffState if target in targets]
        if not targets:
            lines.append(f"    {source} --> [*]")
    return "\n".join([*lines, "```"])


def attempt_diagram() -> str:
    """Return the stages of an attempt on a worker and their order as a Mermaid diagram."""
    steps = [
        f"    {stage} --> {after}" for stage, later in STAGES_AFTER.items() for after in RunStage if after in later
    ]
    ends = [
        f"    [*] --> {RunStage.QUEUED}",
        *steps,
        f"    {RunStage.COMPUTING} --> [*]",
        f"    {RunStage.ENDING} --> [*]",
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", *ends, "```"])


def attempt_table() -> str:
    """Return what can happen to an attempt in each stage, and the rule that says what is done then, as a Markdown
    table."""
    rows = [
        f"| `{stage}` | {', '.join(f'`{event.__name__}` → `{_rule_name(rule)}`' for event, rule in events.items())} |"
        for stage, events in TABLE.items()
    ]
    return "\n".join(["| stage | what may happen → what is done |", "|---|---|", *rows])


def _rule_name(rule: Callable[..., Any]) -> str:
    return f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"


def shown_name(metric: MetricName) -> str:
    """Return the name as Prometheus stores it; a histogram's has `_bucket`, `_sum` and `_count` behind it."""
    return f"{metric.name}_total" if metric.kind == "counter" else metric.name


def metrics_table() -> str:
    """Return every metric, its labels, who serves it and what it says, as a Markdown table."""
    rows = [
        f"| `{shown_name(m)}` | {m.kind} | {', '.join(f'`{label}`' for label in m.shown_labels)} "
        f"| {_served_by(m.roles)} | {m.text} |"
        for m in METRICS
    ]
    return "\n".join(["| metric | kind | labels | who serves it | what it says |", "|---|---|---|---|---|", *rows])


def flags_table() -> str:
    """Return every flag of `kvmesh up`, its default and what it says, as a Markdown table."""
    kvmesh = get_command(app)
    assert isinstance(kvmesh, TyperGroup)
    options = [option for option in kvmesh.commands["up"].params if isinstance(option, TyperOption)]
    rows = [
        f"| {', '.join(f'`{name}`' for name in (*option.opts, *option.secondary_opts))} | {_default(option)} "
        f"| {_key_of(option)} | {option.help} |"
        for option in options
    ]
    return "\n".join(["| flag | default | key of `mesh.toml` | what it says |", "|---|---|---|---|", *rows])


def variables_table() -> str:
    """Return every variable of the environment that sets a key of `mesh.toml`, as a Markdown table."""
    rows = [f"| `{setting.variable}` | `{setting.path}` |" for setting in settings_of(MeshConfig()) if setting.variable]
    return "\n".join(["| variable | key of `mesh.toml` |", "|---|---|", *rows])


Sections = dict[str, Callable[[], str]]

PAGES: dict[str, Sections] = {
    "dataplane/SCALING.md": {
        "tokens": lambda: links.markdown(links.token_table()),
        "links": lambda: links.markdown(links.link_table(links.LENGTHS)),
        "published": lambda: links.markdown(links.published_table()),
    },
    "docs/api.md": {"parameters": parameter_table},
    "docs/metrics.md": {"metrics": metrics_table},
    "docs/protocol.md": {
        "subjects": subject_table,
        "handoff": handoff_diagram,
        "stages": attempt_diagram,
        "rules": attempt_table,
        "messages": message_tables,
    },
    "docs/security.md": {"permissions": permissions_table},
    "docs/usage.md": {"flags": flags_table, "variables": variables_table},
}
"""The generated sections of each page."""


def regenerate(document: str, sections: Sections) -> str:
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
    """Rewrite all pages."""
    for name, sections in PAGES.items():
        path = Path(name)
        path.write_text(regenerate(path.read_text("utf-8"), sections), "utf-8")


def _served_by(roles: tuple[str, ...]) -> str:
    if not roles or set(roles) == set(ALL):
        return "all"
    others = [role for role in roles if role not in HOLDERS]
    if set(WORKERS) <= set(roles):
        others.append("workers, store" if "store" in roles else "workers")
    return ", ".join(others)


def _default(option: TyperOption) -> str:
    return f"`{option.show_default}`" if option.show_default else ""


def _key_of(option: TyperOption) -> str:
    """Return where the file says what a flag says; empty: it does not."""
    assert option.name is not None
    path = FLAGS[option.name][0].path if option.name in FLAGS else ""
    return f"`{path.removeprefix('config.')}`" if path.startswith("config.") else ""


def _carries(subject: Subject[Any, Any]) -> str:
    carried = f"`{subject.carries.__name__}`"
    return f"{carried} → {' or '.join(f'`{reply.__name__}`' for reply in subject.reply)}" if subject.reply else carried


def _members(grants: tuple[Permit, ...]) -> str:
    """Return the roles; of one that may only say or hear what is its own, as which id of the subject."""
    names = [f"{grant.role} as `{grant.own}`" if grant.own else str(grant.role) for grant in grants]
    return ", ".join(names)


def _received_by(subject: Subject[Any, Any]) -> str:
    members = _members(tuple(grant for grant in subject.received_by if grant.role is not Role.OPERATOR))
    return f"{members} (queue group)" if subject.queue else members


if __name__ == "__main__":
    main()

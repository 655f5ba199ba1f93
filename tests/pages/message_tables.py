"""The tables of every message: its fields, their types as JSON has them, and what its docstring says first."""

import enum
import inspect
import sys
from collections.abc import Iterator

import msgspec
from msgspec import inspect as types

from schemas.message import RequestMessage
from schemas.subjects import SUBJECTS

Kind = type[msgspec.Struct] | type[enum.Enum]


def message_tables() -> str:
    """Return every message and what stands in one, a Markdown table for each module that defines some."""
    kinds = _all_kinds()
    modules = dict.fromkeys(kind.__module__ for kind in kinds)
    return "\n".join(line for module in modules for line in _module_lines(module, kinds)).strip()


def _module_lines(module: str, kinds: dict[Kind, None]) -> Iterator[str]:
    """Yield the lines of a module's part, its kinds in the order in which it defines them."""
    yield from (f"### `{module.replace('.', '/')}.py`", "", "| message | fields | what it says |", "|---|---|---|")
    order = list(vars(sys.modules[module]))
    for kind in sorted(
        (kind for kind in kinds if kind.__module__ == module), key=lambda kind: order.index(kind.__name__)
    ):
        fields = "<br>".join(_enum_values(kind) if issubclass(kind, enum.Enum) else _fields(kind))
        yield f"| `{kind.__name__}` | {fields} | {_first_paragraph(kind)} |"
    yield ""


def _all_kinds() -> dict[Kind, None]:
    """Return all messages, what they are based on, and what they contain, in the order of the subjects."""
    found: dict[Kind, None] = {RequestMessage: None}
    waiting: list[Kind] = [kind for subject in SUBJECTS for kind in (subject.carries, *subject.reply)]
    while waiting:
        kind = waiting.pop(0)
        if kind in found:
            continue
        found[kind] = None
        if issubclass(kind, msgspec.Struct):
            info = types.type_info(kind)
            assert isinstance(info, types.StructType)
            waiting += [inner for field in info.fields for inner in _named(field.type)]
            waiting += [base] if (base := _base(kind)) else []
    return found


def _named(info: types.Type) -> Iterator[Kind]:
    """Yield the structs and enumerations that a type names."""
    match info:
        case types.StructType(cls=kind) | types.EnumType(cls=kind):
            yield kind
        case types.VarTupleType(item_type=item):
            yield from _named(item)
        case types.UnionType(types=members):
            for member in members:
                yield from _named(member)
        case _:
            pass


def _fields(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Yield a struct's own fields; those that it has from another one are named by that one."""
    base = _base(kind)
    if base is not None:
        yield f"all of `{base.__name__}`"
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    for field in info.fields:
        if base is None or field.name not in base.__struct_fields__:
            default = "" if field.required else f" = {_default(field.default)}"
            yield f"`{field.encode_name}`: {_type_text(field.type)}{default}"


def _base(kind: type[msgspec.Struct]) -> type[msgspec.Struct] | None:
    """Return the struct from which this one has fields, if there is one."""
    return next((base for base in kind.__bases__ if issubclass(base, msgspec.Struct) and base.__struct_fields__), None)


def _enum_values(kind: type[enum.Enum]) -> Iterator[str]:
    yield "one of " + ", ".join(f"`{member.value}`" for member in kind)


def _default(value: object) -> str:
    """Return a default as JSON. That of a struct is that all of its fields have theirs."""
    return f"`{msgspec.json.encode(value).decode()}`" if not isinstance(value, msgspec.Struct) else "`{}`"


def _type_text(info: types.Type) -> str:
    match info:
        case types.StructType(cls=kind) | types.EnumType(cls=kind):
            return f"`{kind.__name__}`"
        case types.VarTupleType(item_type=item):
            return f"list of {_type_text(item)}"
        case types.TupleType(item_types=items):
            return f"[{', '.join(map(_type_text, items))}]"
        case types.UnionType(types=members):
            return " or ".join(map(_type_text, members))
        case types.LiteralType(values=values):
            return " or ".join(f"`{value}`" for value in values)
        case _:
            return _JSON_NAMES[type(info)]


_JSON_NAMES: dict[type[types.Type], str] = {
    types.IntType: "integer",
    types.FloatType: "number",
    types.BoolType: "boolean",
    types.StrType: "string",
    types.BytesType: "base64",
    types.NoneType: "null",
}


def _first_paragraph(kind: Kind) -> str:
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split()).replace("|", "\\|")

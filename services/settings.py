"""Settings: each is declared once, at its field. Command line, environment and generated pages read the declaration."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec

StructT = TypeVar("StructT", bound=msgspec.Struct)


class Flag(NamedTuple):
    """A flag of `kvmesh up`, in the annotation of the field that it sets.

    `name`: as it is typed; "--x/--no-x" is a switch that can be turned off too. `unit`: what one of the flag is in the
    field, as 1 << 20 for a flag in MiB of a field in bytes. `parse`: makes the field's value of the flag's text; raises
    ValueError. `shown`: the default that a person reads, where it is not the field's own.
    """

    name: str
    help: str
    unit: int = 1
    parse: Callable[[str], Any] | None = None
    shown: str | None = None


class Variable(NamedTuple):
    """A variable of the environment, in the annotation of the field that it sets."""

    name: str


class Setting(NamedTuple):
    """A field as it is declared. `path`: as of `changed`. `type`: the field's, with its bounds."""

    path: str
    type: Any
    default: Any
    flag: Flag | None
    variable: str

    @property
    def plain_type(self) -> Any:
        """The type without bounds and declarations."""
        return get_args(self.type)[0] if get_origin(self.type) is Annotated else self.type

    def bound(self, name: str) -> float | None:
        """Return the least ("ge") or greatest ("le") value; None: there is none."""
        metas = [meta for meta in _extras(self.type) if isinstance(meta, msgspec.Meta)]
        return next((bound for meta in metas if (bound := getattr(meta, name)) is not None), None)


def settings_of(struct: msgspec.Struct, path: str = "") -> Iterator[Setting]:
    """Yield every field, those of structs inside among them, in the order of their declaration."""
    for field in msgspec.structs.fields(struct):
        value, own = getattr(struct, field.name), path + field.name
        if isinstance(value, msgspec.Struct):
            yield from settings_of(value, f"{own}.")
            continue
        extras = _extras(field.type)
        flag = next((extra for extra in extras if isinstance(extra, Flag)), None)
        variable = next((extra.name for extra in extras if isinstance(extra, Variable)), "")
        yield Setting(own, field.type, value, flag, variable)


def changed(struct: StructT, values: Mapping[str, Any]) -> StructT:
    """Return the struct with other values: {"worker.kv_bytes": 1 << 26} is the field of a struct inside.

    Each struct is made once, so that its checks see all its new values. Raises what they raise, and AttributeError or
    TypeError for a field that there is not.
    """
    own: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        if rest:
            inside.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    for name, others in inside.items():
        own[name] = changed(getattr(struct, name), others)
    return msgspec.structs.replace(struct, **own)


def _extras(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()

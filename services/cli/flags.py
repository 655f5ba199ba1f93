"""The flags of `kvmesh up` and `kvmesh attach`: made of the settings' declarations, and what is started by them."""

import inspect
import math
import socket
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from dataplane.addresses import IPV4_LOOPBACK, is_loopback, own_address
from services.errors import UserError
from services.launch.options import Launch
from services.settings import Flag, Setting, changed, settings_of

API_KEY = "api_key"
"""A flag, but no setting: it stands for a file with one tenant."""
FLAGS: dict[str, tuple[Setting, Flag]] = {
    setting.flag.name.split("/")[0].removeprefix("--").replace("-", "_"): (setting, setting.flag)
    for setting in settings_of(Launch())
    if setting.flag
}


FLAGS_BY_PATH = {setting.path: flag.name for setting, flag in FLAGS.values()}


def taking_flags(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these flags beside the parameters of its own: it gets the value of each by its name, None where it
    is left out."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters.values()
        parameters = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        return _with_parameters(command, [*parameters, *(_parameter(name, *FLAGS[name]) for name in names)])

    return decorate


def taking_all_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the parameters of `kvmesh up`."""
    parameters = [_parameter(name, setting, flag) for name, (setting, flag) in FLAGS.items()]
    option = typer.Option(
        "--api-key",
        help="Serve only who sends this key; `ps` shows it, a file does not.",
        show_default=False,
        rich_help_panel="gateway",
    )
    at = next(at for at, parameter in enumerate(parameters) if parameter.name == "tenants")
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters.insert(at, inspect.Parameter(API_KEY, kind, default=None, annotation=Annotated[str | None, option]))
    return _with_parameters(command, parameters)


def _with_parameters(command: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def shown_default(setting: Setting, flag: Flag) -> str:
    """Return the default as a person reads it; empty: there is none."""
    if flag.shown is not None:
        return flag.shown
    value = setting.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (tuple, dict)):
        return ""
    return f"{value / flag.unit:g}" if isinstance(value, (int, float)) else value


def launch_of(given: Mapping[str, Any]) -> Launch:
    """Return what is to be started by the flags' values: {"kv_mib": 64}; None is a flag that was left out.

    Raises UserError.
    """
    values = values_of(given)
    values |= _attached(values) or _split(values)
    values |= _reached_by(values, given.get(API_KEY) or "")
    try:
        return changed(Launch(), values)
    except ValueError as error:
        raise UserError(f"a mesh cannot be started like this: {error}") from error


def values_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the flags set, by the paths of their settings. Raises UserError."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        if value is not None and name != API_KEY:
            setting, flag = FLAGS[name]
            values[setting.path] = _meant(flag, value)
    return values


def _parameter(name: str, setting: Setting, flag: Flag) -> inspect.Parameter:
    least, most = setting.bound("ge"), setting.bound("le")
    option = typer.Option(
        flag.name,
        help=flag.help,
        min=None if least is None else math.ceil(least / flag.unit) if flag.unit > 1 else least,
        max=most,
        show_default=shown_default(setting, flag) or False,
        rich_help_panel=setting.path.split(".")[1] if "." in setting.path else None,
    )
    taken = str if flag.parse else setting.plain_type
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[taken | None, option]
    )


def _meant(flag: Flag, value: Any) -> Any:
    """Return what the field gets. Raises UserError."""
    if flag.parse is None:
        return value * flag.unit if flag.unit > 1 else value
    try:
        return flag.parse(value)
    except ValueError as error:
        raise UserError(f"{flag.name} {value!r}: {error}") from error


def _attached(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what there is in place of workers where servers attach. Raises UserError."""
    if not values.get("attach"):
        return {}
    workers = ("num_prefill", "num_decode", "num_aggregated", "num_gateways", "devices", "join_port")
    of_them = ("config.engine.", "config.gateway.")
    if beside := sorted(FLAGS_BY_PATH[path] for path in values if path in workers or path.startswith(of_them)):
        raise UserError(f"--attach starts no workers and no gateway: leave out {', '.join(beside)}")
    return {"num_prefill": 0, "num_decode": 0}


def _split(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many workers there are of the two roles, where others do both. Raises UserError."""
    if 0 in (values.get("num_prefill"), values.get("num_decode")):
        raise UserError("--prefill and --decode are 1 or more; --aggregated has workers that do both")
    if not values.get("num_aggregated"):
        return {}
    if "num_prefill" in values or "num_decode" in values:
        raise UserError("--aggregated has workers that do both: leave out --prefill and --decode")
    if values.get("config.gateway.split") == "always":
        raise UserError("--aggregated has no workers to split a request over: leave out --split always")
    return {"num_prefill": 0, "num_decode": 0}


def _reached_by(values: Mapping[str, Any], api_key: str) -> dict[str, Any]:
    """Return who may reach the gateways, and by which names. Raises UserError."""
    section = "config.gateway."
    tenants, host = values.get(f"{section}tenants", {}), values.get(f"{section}host", IPV4_LOOPBACK)
    if api_key and tenants:
        raise UserError("--api-key is one key, --tenants a file of them: pass one of the two")
    if api_key:
        tenants = {api_key: "default"}
    if not (is_loopback(host) or tenants or values.get(f"{section}no_auth")):
        raise UserError(
            f"--host {host} lets others in: pass --api-key KEY or --tenants FILE, or --no-auth to ask nobody for a key"
        )
    own_names = () if is_loopback(host) else (socket.gethostname(),)
    return {
        f"{section}tenants": tenants,
        f"{section}host": own_address() if host == IPV4_LOOPBACK else host,  # a machine may have no IPv4
        f"{section}hosts": (*values.get(f"{section}hosts", ()), *own_names),
    }

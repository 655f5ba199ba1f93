"""Panels as our dashboards have them: a title, what to do about it, a unit, thresholds, queries."""

from collections.abc import Sequence
from typing import NamedTuple

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)

PROMETHEUS = DataSourceRef("prometheus", "prometheus")
TAG = "kvmesh"
GREEN, YELLOW, RED = "green", "yellow", "red"
HEIGHT = 8
Panel = stat.Panel | timeseries.Panel | bargauge.Panel


TTFT = "gen_ai_server_time_to_first_token_seconds"
TPOT = "gen_ai_server_time_per_output_token_seconds"
DURATION = "gen_ai_server_request_duration_seconds"
USAGE = "gen_ai_client_token_usage"
PART = "kvmesh_ttft_part_seconds"


class Query(NamedTuple):
    """PromQL, and how its series are called. `exemplars`: its dots lead to traces."""

    expr: str
    legend: str = ""
    exemplars: bool = False


class Steps(NamedTuple):
    """From where on a value is yellow, and red. `above` False: below."""

    yellow: float
    red: float
    above: bool = True


def quantile(share: float, metric: str, *by: str, where: str = "") -> str:
    """Return the query of a quantile of a histogram."""
    labels = ", ".join((*by, "le"))
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{where}[$__rate_interval])))"


def mean(metric: str, *by: str, where: str = "") -> str:
    """Return the query of a histogram's mean."""
    parts = [f"sum by ({', '.join(by)}) (rate({metric}_{part}{where}[$__rate_interval]))" for part in ("sum", "count")]
    return " / ".join(parts)


def rate(metric: str, *by: str, where: str = "") -> str:
    """Return the query of a counter's rate per second."""
    return f"sum by ({', '.join(by)}) (rate({metric}{where}[$__rate_interval]))"


def quantiles(metric: str, where: str = "", *, exemplars: bool = False) -> list[Query]:
    """Return the median, and two that hurt."""
    return [
        Query(quantile(share, metric, where=where), f"p{round(share * 100)}", exemplars) for share in (0.5, 0.95, 0.99)
    ]


def process(expr: str, name: str = ".*") -> str:
    """Return a process's metric, with the service's name in place of its address."""
    return f'{expr} * on (instance) group_left (name) kvmesh_service_info{{name=~"{name}"}}'


def figure(title: str, text: str, unit: str, *queries: Query, steps: Steps | None = None, width: int = 4) -> Panel:
    """One number, or one for each series, as it is now."""
    panel = stat.Panel().title(title).description(text).unit(unit).height(4).span(width).datasource(PROMETHEUS)
    panel = panel.graph_mode(BigValueGraphMode.AREA).color_mode(BigValueColorMode.VALUE).no_value("–")
    panel = panel.thresholds(_thresholds(steps)).reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return panel.targets(_targets(queries))


def lines(
    title: str,
    text: str,
    unit: str,
    *queries: Query,
    steps: Steps | None = None,
    stacked: bool = False,
    width: int = 12,
) -> Panel:
    """Series over time."""
    panel = timeseries.Panel().title(title).description(text).unit(unit).height(HEIGHT).span(width)
    panel = panel.datasource(PROMETHEUS).min(0).fill_opacity(40 if stacked else 8).show_points("never")
    panel = panel.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.TABLE).placement(LegendPlacement.BOTTOM)
    panel = panel.legend(legend.show_legend(True).calcs(["lastNotNull", "max"]))
    panel = panel.thresholds(_thresholds(steps))
    if steps is not None:
        panel = panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED))
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return panel.targets(_targets(queries))


def bars(title: str, text: str, unit: str, *queries: Query, steps: Steps | None = None, width: int = 12) -> Panel:
    """A bar for each series, as it is now; of a share the bar is full at 1."""
    panel = bargauge.Panel().title(title).description(text).unit(unit).height(HEIGHT).span(width).min(0)
    panel = panel.datasource(PROMETHEUS).thresholds(_thresholds(steps)).orientation("horizontal")
    if unit == "percentunit":
        panel = panel.max(1)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return panel.targets(_targets(queries))


def page(uid: str, title: str, text: str, rows: Sequence[tuple[str, Sequence[Panel]]], worker: bool = False) -> str:
    """Return a dashboard. `worker`: its variable is one worker."""
    board = dashboard.Dashboard(title).uid(uid).description(text).tags([TAG]).readonly().refresh("5s")
    board = board.time("now-15m", "now").timezone("browser").tooltip(DashboardCursorSync.CROSSHAIR)
    link = dashboard.DashboardLink("kvmesh").type(DashboardLinkType.DASHBOARDS).tags([TAG])
    board = board.link(link.keep_time(True).as_dropdown(False))
    if worker:
        variable = dashboard.QueryVariable("worker").label("Worker").datasource(PROMETHEUS)
        variable = variable.query("label_values(kvmesh_kv_blocks, worker)").sort(VariableSort.ALPHABETICAL_ASC)
        board = board.with_variable(variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED))
    for row_title, row in rows:
        board = board.with_row(dashboard.Row(row_title))
        for panel in row:
            board = board.with_panel(panel)
    built = board.build()
    for number, panel in enumerate(built.panels or [], start=1):
        panel.id_val = number
    return encoded(built)


def encoded(built: object) -> str:
    """Return a dashboard's JSON as it is committed."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: PLC0415

    return JSONEncoder(sort_keys=True, indent=2).encode(built) + "\n"


def _targets(queries: Sequence[Query]) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery()
        .expr(query.expr)
        .legend_format(query.legend or "__auto")
        .exemplar(query.exemplars)
        .range()
        .ref_id(chr(ord("A") + at))
        .datasource(PROMETHEUS)
        for at, query in enumerate(queries)
    ]


def _thresholds(steps: Steps | None) -> dashboard.ThresholdsConfig:
    config = dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE)
    if steps is None:
        return config.steps([Threshold(None, GREEN)])
    if steps.above:
        return config.steps([Threshold(None, GREEN), Threshold(steps.yellow, YELLOW), Threshold(steps.red, RED)])
    return config.steps([Threshold(None, RED), Threshold(steps.red, YELLOW), Threshold(steps.yellow, GREEN)])

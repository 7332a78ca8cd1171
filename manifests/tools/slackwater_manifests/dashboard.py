"""The Grafana dashboard, as typed code.

Owns how our panels become Grafana's, and the dashboard's frame: variables, time range, links.  What is shown stands
in `rows`.  Built with the SDK of Grafana 11.6, whose JSON newer Grafanas read too.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import prometheus

from slackwater_manifests.panels import Draw, Panel, Row
from slackwater_manifests.rows import ROWS

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLOURS = {
    # Of a palette that colour-blind people tell apart (Okabe and Ito); free is grey, broken is the one that warns.
    "serving": "#0072B2",
    "serving_headroom": "#56B4E9",
    "training": "#CC79A7",
    "background": "#009E73",
    "starting": "#F0E442",
    "draining": "#E69F00",
    "free": "#999999",
    "broken": "#D55E00",
}
"""State of a GPU -> its colour, on every panel."""

Drawn = timeseries.Panel | stat.Panel | bargauge.Panel | table.Panel | heatmap.Panel


def dashboard() -> dict[str, Any]:
    """The dashboard's JSON, as Grafana imports it."""
    builder = (
        board.Dashboard("Slackwater: who holds the GPUs")
        .uid("slackwater-fleet")
        .description("Text-to-speech and training first, cleaning in every other GPU second: who holds what, and why")
        .tags(["slackwater", "gpu"])
        .time("now-3h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(board.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_variable("pool", "Pool", "label_values(fleet_gpus, pool)"))
        .with_variable(_variable("flavor", "Flavor", 'label_values(fleet_gpus{pool=~"$pool"}, flavor)'))
    )
    ids = itertools.count(1)
    for row in ROWS:
        _add(builder, row, ids)
    built: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(builder.build()))
    return built


def text() -> str:
    """The dashboard as it stands in the file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _variable(name: str, label: str, query: str) -> board.QueryVariable:
    return (
        board.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(text="All", value="$__all", selected=True))
    )


def _add(builder: board.Dashboard, row: Row, ids: Iterator[int]) -> None:
    line = board.Row(row.title).id(next(ids))
    panels = [_panel(panel).id(next(ids)) for panel in row.panels]
    if row.folded:
        line.collapsed(True)
        for panel in panels:
            line.with_panel(panel)
        builder.with_row(line)
        return
    builder.with_row(line)
    for panel in panels:
        builder.with_panel(panel)


def _panel(panel: Panel) -> Drawn:
    drawn = _drawn(panel)
    drawn.title(panel.title).description(panel.text).datasource(SOURCE).span(panel.width).height(panel.height)
    drawn.unit(panel.unit).no_value("none seen")
    for index, query in enumerate(panel.queries):
        target = Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + index))
        if panel.draw in (Draw.STAT, Draw.BARS, Draw.TABLE):
            target.instant()
        if panel.draw is Draw.TABLE:
            target.format(prometheus.PromQueryFormat.TABLE)
        if panel.draw is Draw.HEAT:
            target.format(prometheus.PromQueryFormat.HEATMAP)
        drawn.with_target(target)
    if panel.warn is not None and panel.bad is not None:
        drawn.thresholds(_thresholds(panel.warn, panel.bad))
    if panel.highest is not None:
        drawn.min(0).max(panel.highest)
    for state, colour in COLOURS.items():
        if panel.draw is not Draw.TABLE and any("{{state}}" in query.legend for query in panel.queries):
            fixed = {"mode": "fixed", "fixedColor": colour}
            drawn.override_by_name(state, [model.DynamicConfigValue(id_val="color", value=fixed)])
    return drawn


def _drawn(panel: Panel) -> Drawn:
    if panel.draw is Draw.STAT:
        return (
            stat.Panel()
            .graph_mode(common_model.BigValueGraphMode.NONE)
            .color_mode(common_model.BigValueColorMode.VALUE)
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        )
    if panel.draw is Draw.BARS:
        return (
            bargauge.Panel()
            .orientation(common_model.VizOrientation.HORIZONTAL)
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            .min(0)
        )
    if panel.draw is Draw.TABLE:
        hidden = model.DataTransformerConfig(id_val="organize", options={"excludeByName": {"Time": True}})
        return table.Panel().with_transformation(hidden)
    if panel.draw is Draw.HEAT:
        return heatmap.Panel().calculate(False).y_axis(heatmap.YAxisConfig().unit(panel.unit))
    lines = (
        timeseries.Panel()
        .legend(
            common.VizLegendOptions()
            .display_mode(common_model.LegendDisplayMode.TABLE)
            .placement(common_model.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI))
        .show_points(common_model.VisibilityMode.NEVER)
        .line_width(1)
        .min(0)
    )
    if panel.draw is Draw.STACK:
        lines.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL)).fill_opacity(80)
    return lines


def _thresholds(warn: float, bad: float) -> board.ThresholdsConfig:
    low_is_bad = bad < warn
    colours = ("red", "orange", "green") if low_is_bad else ("green", "orange", "red")
    steps = [
        model.Threshold(value=value, color=colour)
        for value, colour in zip((None, *sorted((warn, bad))), colours, strict=True)
    ]
    return board.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)

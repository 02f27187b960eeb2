"""The report as one HTML page that needs no network: data, our script, and uPlot (assets/, MIT) inside it.

Numbers in tables are written by the template, so that the page says the same without scripts; the charts are drawn by
``assets/report.js`` from the data that lies in the page as JSON.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import msgspec


def page(data: dict[str, Any]) -> str:
    """The page for what ``report.gather`` returned."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["number"] = _number
    template = environment.from_string(_asset("report.html.j2"))
    return template.render(
        data=data,
        title=data["run"].get("run", ""),
        embedded=_embedded(data),
        library=_asset("uPlot.iife.min.js"),
        library_style=_asset("uPlot.min.css"),
        library_license=_asset("LICENSE-uPlot"),
        script=_asset("report.js"),
        style=_asset("report.css"),
        losses=_with_share(data["losses"]),
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _number(value: Any) -> str:
    """For people: thousands apart, few decimals, nothing for nothing."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        short = round(value, 2) + 0.0  # no "-0"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{short:,.2f}".rstrip("0").rstrip(".")
    if isinstance(value, list):
        return ", ".join(map(_number, value))
    return str(value)


def _with_share(losses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each loss with the length of its bar: its share of the largest of its resource, in percent."""
    most: dict[str, float] = {}
    for row in losses:
        most[row["resource"]] = max(most.get(row["resource"], 0.0), row["seconds_at_most"] or row["seconds"] or 0.0)
    return [
        row
        | {
            "share": 100 * (row["seconds"] or 0.0) / (most[row["resource"]] or 1.0),
            "share_at_most": 100 * (row["seconds_at_most"] or row["seconds"] or 0.0) / (most[row["resource"]] or 1.0),
        }
        for row in losses
    ]


def _embedded(data: dict[str, Any]) -> str:
    """What the charts need, packed: text by number, times to the millisecond; safe inside a script element."""
    attempts = data["attempts"]
    packed = {name: _pack(values) for name, values in attempts["columns"].items()}
    chosen = {
        "series": data["series"],
        "steps": data["steps"],
        "timeline": data["timeline"],
        "incarnations": data["incarnations"],
        "outages": [{"died_min_s": row["died_min_s"], "until_s": row["until_s"]} for row in data["outages"]],
        "restores": [{k: v for k, v in row.items() if k not in ("counters", "timings")} for row in data["restores"]],
        "attempts": {"total": attempts["total"], "listed": attempts["listed"], "columns": packed},
        "groups": attempts["groups"],
    }
    text = msgspec.json.encode(chosen).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _pack(values: list[Any]) -> Any:
    if any(isinstance(value, str) for value in values):
        words = sorted({value for value in values if value is not None})
        places = {word: i for i, word in enumerate(words)}
        return {"words": words, "at": [places[value] if value is not None else None for value in values]}
    return [round(value, 3) if isinstance(value, float) else value for value in values]

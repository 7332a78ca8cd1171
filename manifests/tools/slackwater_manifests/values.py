"""What an installation by Helm may set.

Owns the chart's values: names, defaults and what each is for.  values.yaml and values.schema.json are written from
these models, so Helm refuses a value that is not there.
"""

from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Image(_Part):
    """The operator's image."""

    repository: str = "slackwater/operator"
    tag: str = Field(default="", description="empty: the chart's appVersion")
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"


class Namespaces(_Part):
    """Where the operator may make pods; its own is the release's."""

    create: bool = Field(
        default=True, description="false: they exist; give them the label pod-security.kubernetes.io/enforce"
    )
    inference: list[str] = ["slackwater-inference"]
    workers: list[str] = ["slackwater-workers"]


class Crds(_Part):
    """The custom resources' definitions."""

    install: bool = Field(default=True, description="they outlive the release, as everybody's resources do")


class Monitoring(_Part):
    """For the Prometheus operator and Grafana's side-car."""

    enabled: bool = Field(default=False, description="needs the kinds ServiceMonitor, PodMonitor and PrometheusRule")


class Values(_Part):
    """The values of the chart."""

    image: Image = Image()
    image_pull_secrets: list[dict[str, str]] = Field(default=[], description="[{name: ...}], for a registry that asks")
    replicas: int = Field(default=2, ge=1, description="one leads, the others take over within seconds")
    resources: dict[str, dict[str, str]] = Field(description="no CPU limit: a throttled operator takes GPUs back late")
    namespaces: Namespaces = Namespaces()
    crds: Crds = Crds()
    monitoring: Monitoring = Monitoring()


def text(values: Values) -> str:
    """values.yaml, each value with what it is for."""
    lines = ["# Written by `make manifests`."]
    for name, field in Values.model_fields.items():
        alias = field.alias or name
        value = getattr(values, name)
        if field.description:
            lines.append(f"# {field.description}")
        elif isinstance(value, BaseModel):
            lines.append(f"# {type(value).__doc__}")
        lines += _lines(alias, value)
    return "\n".join(lines) + "\n"


def _lines(name: str, value: Any) -> list[str]:
    if not isinstance(value, BaseModel):
        flow = None if isinstance(value, list) else False  # lists of names on one line
        return yaml.safe_dump({name: value}, sort_keys=False, default_flow_style=flow).rstrip().splitlines()
    lines = [f"{name}:"]
    for inner, field in type(value).model_fields.items():
        [line] = _lines(field.alias or inner, getattr(value, inner))
        lines.append(f"  {line}{f'  # {field.description}' if field.description else ''}")
    return lines

"""`make crds`: writes the schemas that are generated from the pydantic models; a test fails on drift."""

import json
from pathlib import Path
from typing import Any

import yaml

from slackwater_operator.config import Config
from slackwater_operator.resources.crd import documents

FOLDER = Path("manifests/schemas")
CRD_FOLDER = Path("manifests/crd")

_HEAD = "# Written by `make crds` from operator/slackwater_operator/resources; do not edit.\n"


class _Plain(yaml.SafeDumper):
    """Writes what stands twice twice: readers of manifests do not expect anchors."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def schemas() -> dict[str, dict[str, Any]]:
    """File name -> document."""
    return {"slackwater-up.schema.json": Config.model_json_schema() | {"title": "slackwater up"}}


def text(document: dict[str, Any]) -> str:
    """The document as it stands in the file."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def crds() -> dict[str, str]:
    """File name -> text: the five CustomResourceDefinitions and what lists them for kustomize."""
    kinds = documents()
    listed = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": list(kinds)}
    return {name: _yaml(document) for name, document in {**kinds, "kustomization.yaml": listed}.items()}


def _yaml(document: dict[str, Any]) -> str:
    return _HEAD + yaml.dump(document, Dumper=_Plain, sort_keys=False, width=118, allow_unicode=True)


if __name__ == "__main__":
    texts = {FOLDER / name: text(document) for name, document in schemas().items()}
    texts |= {CRD_FOLDER / name: written for name, written in crds().items()}
    for path, written in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(written, encoding="utf-8")

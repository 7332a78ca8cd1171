"""`make crds`: writes the schemas that are generated from the pydantic models; a test fails on drift."""

import json
from pathlib import Path
from typing import Any

from slackwater_operator.config import Config

FOLDER = Path("manifests/schemas")


def schemas() -> dict[str, dict[str, Any]]:
    """File name -> document."""
    return {"slackwater-up.schema.json": Config.model_json_schema() | {"title": "slackwater up"}}


def text(document: dict[str, Any]) -> str:
    """The document as it stands in the file."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, document in schemas().items():
        (FOLDER / name).write_text(text(document))

"""`make manifests`: writes what is generated in manifests/."""

import tomllib
from pathlib import Path

import yaml

from slackwater_manifests import chart, dashboard, rules

ROOT = Path(__file__).parents[3]


def monitoring() -> dict[str, str]:
    """Path below monitoring/ -> text."""
    head = "# Written by `make manifests`.\n"
    written = {
        name: head + yaml.safe_dump(document, sort_keys=False, width=1000, allow_unicode=True)
        for name, document in rules.documents().items()
    }
    return written | {"dashboard.json": dashboard.text()}


def version() -> str:
    """The distribution's version, which is the images' tag, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def main(manifests: Path = ROOT / "manifests") -> None:
    """Write everything.  The chart is made last, from what the others wrote."""
    for folder, files in (("monitoring", monitoring), ("chart", lambda: chart.files(manifests, version()))):
        for name, text in files().items():
            path = manifests / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    main()

"""Renders our kustomizations without kubectl.

Owns the part of kustomize that ours use: resources, components, labels, images, replicas, JSON patches, and config
maps from files; any other field is refused, so that nothing is left out silently.  The chart is generated from its
output, and a test on a real `kubectl kustomize` compares both.
"""

import json
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where it was built
FIELDS = {
    "apiVersion",
    "kind",
    "resources",
    "components",
    "labels",
    "images",
    "replicas",
    "patches",
    "configMapGenerator",
}


def render(folder: Path) -> list[Object]:
    """Every object of the kustomization in `folder`, in the order of its resources.

    Raises ValueError on a field that this module does not know.
    """
    file = folder / "kustomization.yaml"
    kustomization: Object = yaml.safe_load(file.read_text())
    if unknown := set(kustomization) - FIELDS:
        raise ValueError(f"{file}: {', '.join(sorted(unknown))} is not understood here; kustomize.py says what is")
    objects: list[Object] = []
    for name in kustomization.get("resources", ()):
        objects += _resource(folder / name)
    for generator in kustomization.get("configMapGenerator", ()):
        objects.append(_config_map(folder, generator))
    for name in kustomization.get("components", ()):
        objects += _resource(folder / name)
    for patch in kustomization.get("patches", ()):
        _patch(objects, patch, file)
    for image in kustomization.get("images", ()):
        _image(objects, image)
    for replicas in kustomization.get("replicas", ()):
        for thing in objects:
            if thing["kind"] in ("Deployment", "StatefulSet") and thing["metadata"]["name"] == replicas["name"]:
                thing["spec"]["replicas"] = replicas["count"]
    for labels in kustomization.get("labels", ()):
        if set(labels) != {"pairs"}:
            raise ValueError(f"{file}: labels must be pairs only, got {sorted(labels)}")
        for thing in objects:
            thing["metadata"].setdefault("labels", {}).update(labels["pairs"])
    return objects


def _resource(path: Path) -> list[Object]:
    if path.is_dir():
        return render(path)
    # By way of JSON, so that what an alias stands for is a copy: a label added to one is not added to the other.
    return [json.loads(json.dumps(thing)) for thing in yaml.load_all(path.read_text(), LOADER) if thing]


def _config_map(folder: Path, generator: Object) -> Object:
    options: Object = generator.get("options", {})
    if not options.get("disableNameSuffixHash"):
        raise ValueError(f"{folder}: a config map must keep its name (options.disableNameSuffixHash)")
    metadata: Object = {"name": generator["name"], "namespace": generator["namespace"]}
    if "labels" in options:
        metadata["labels"] = dict(options["labels"])
    data = {Path(name).name: (folder / name).read_text() for name in generator["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patch(objects: list[Object], patch: Object, file: Path) -> None:
    target: Object = patch["target"]
    operations = yaml.safe_load(patch["patch"])
    if not isinstance(operations, list):
        raise TypeError(f"{file}: a patch must be a list of JSON patch operations")
    chosen = [
        thing
        for thing in objects
        if target.get("kind", thing["kind"]) == thing["kind"]
        and target.get("name", thing["metadata"]["name"]) == thing["metadata"]["name"]
    ]
    if not chosen:
        raise ValueError(f"{file}: no object for the patch of {target}")
    for thing in chosen:
        for operation in operations:
            _operate(thing, operation, file)


def _operate(thing: Object, operation: Object, file: Path) -> None:
    *way, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].strip("/").split("/"))
    node: Any = thing
    for part in way:
        node = node[int(part)] if isinstance(node, list) else node[part]
    match operation["op"], node:
        case (("add" | "replace"), dict()):
            node[last] = operation["value"]
        case "add", list() if last == "-":
            node.append(operation["value"])
        case "replace", list():
            node[int(last)] = operation["value"]
        case "remove", dict():
            del node[last]
        case _:
            raise ValueError(f"{file}: {operation['op']} {operation['path']} is not understood here")


def _image(objects: list[Object], image: Object) -> None:
    for thing in objects:
        for container in _containers(thing):
            name, _, tag = str(container["image"]).partition(":")
            if name == image["name"]:
                container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"


def _containers(thing: Object) -> list[Object]:
    spec = thing.get("spec") or {}
    template = spec.get("template") if isinstance(spec, dict) else None
    if not isinstance(template, dict) or "spec" not in template:
        return []
    pod: Object = template["spec"]
    return [*pod.get("initContainers", ()), *pod.get("containers", ())]

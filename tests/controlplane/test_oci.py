"""Images from a folder tree: complete, and the same bytes from the same tree."""

import hashlib
import json
import sys
import tarfile
from pathlib import Path

from slackwater_controlplane.oci import Image, is_static, tree_layer, write_image


def blob(archive: tarfile.TarFile, digest: str) -> bytes:
    file = archive.extractfile(f"blobs/{digest.replace(':', '/')}")
    assert file is not None
    return file.read()


def read_json(archive: tarfile.TarFile, name: str) -> dict:
    file = archive.extractfile(name)
    assert file is not None
    return json.loads(file.read())


def test_every_digest_leads_to_its_blob(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin/hello").write_text("#!/bin/sh\necho hello\n")

    target = write_image(
        Image("slackwater.test/hello:1", command=("/bin/hello",)), tree_layer(root), tmp_path / "a.tar"
    )

    with tarfile.open(target) as archive:
        entry = read_json(archive, "index.json")["manifests"][0]
        assert entry["annotations"]["io.containerd.image.name"] == "slackwater.test/hello:1"
        manifest = json.loads(blob(archive, entry["digest"]))
        config = json.loads(blob(archive, manifest["config"]["digest"]))
        layer = blob(archive, manifest["layers"][0]["digest"])
    assert config["config"]["Cmd"] == ["/bin/hello"]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]


def test_the_same_tree_gives_the_same_image(tmp_path: Path) -> None:
    images = []
    for name in ("one", "two"):
        root = tmp_path / name
        root.mkdir()
        (root / "b").write_text("b")
        (root / "a").write_text("a")
        images.append(write_image(Image("slackwater.test/same:1"), tree_layer(root), tmp_path / f"{name}.tar"))

    assert images[0].read_bytes() == images[1].read_bytes()


def test_tells_a_program_that_needs_no_libraries(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")

    assert not is_static(script)
    assert not is_static(Path(sys.executable))

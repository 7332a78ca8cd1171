"""Container images without an engine or a registry: a folder tree becomes an OCI layout in a tar file.

Owns the file format alone.  The images are for tests: one uncompressed layer, no build steps.  `busybox_image` is
the root of every small test pod, and of the pause container.
"""

import hashlib
import io
import json
import platform
import struct
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUSYBOX_IMAGE = "slackwater.test/busybox:1"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INTERPRETER = 3
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Image:
    """What an image is beside its files: its full name, and how a container of it starts."""

    name: str
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    env: Mapping[str, str] | None = None
    user: str = ""


class _Layout:
    """Blobs named by their digest, collected for the tar file."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def add(self, content: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        self.blobs[digest] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def write_image(image: Image, layer: bytes, target: Path) -> Path:
    """Write the OCI layout of an image with one layer, an uncompressed tar, and return the file's path."""
    layout = _Layout()
    layer_blob = layout.add(layer, _LAYER)
    env = {"PATH": "/usr/sbin:/usr/bin:/bin", **(image.env or {})}
    config = {
        "architecture": _ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {
            "Entrypoint": list(image.entrypoint) or None,
            "Cmd": list(image.command) or None,
            "Env": [f"{key}={value}" for key, value in env.items()],
            "User": image.user,
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": [layer_blob["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": layout.add(json.dumps(config).encode(), _CONFIG),
        "layers": [layer_blob],
    }
    names = {"io.containerd.image.name": image.name, "org.opencontainers.image.ref.name": image.name.rpartition(":")[2]}
    index = {
        "schemaVersion": 2,
        "manifests": [{**layout.add(json.dumps(manifest).encode(), _MANIFEST), "annotations": names}],
    }
    with tarfile.open(target, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(archive, "index.json", json.dumps(index).encode())
        for digest, content in layout.blobs.items():
            _add(archive, f"blobs/sha256/{digest}", content)
    return target


def tree_layer(root: Path) -> bytes:
    """A layer of everything below a folder, owned by root, with the times of no day: the same tree, the same digest."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(root.rglob("*")):
            archive.add(path, str(path.relative_to(root)), recursive=False, filter=plain)
    return buffer.getvalue()


def is_static(program: Path) -> bool:
    """Whether a 64-bit ELF program runs in a root without libraries: none of its headers asks for an interpreter."""
    content = program.read_bytes()
    if content[:5] != b"\x7fELF\x02":
        return False
    (offset,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    kinds = {struct.unpack_from("<I", content, offset + number * size)[0] for number in range(count)}
    return _INTERPRETER not in kinds


def busybox_layer(busybox: Path) -> bytes:
    """A root with the static busybox under each of its names, users, and the folders that programs expect."""
    names = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder, mode in (("bin", 0o755), ("etc", 0o755), ("root", 0o700), ("tmp", 0o1777), ("var", 0o755)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        _add(archive, "bin/busybox", busybox.read_bytes(), 0o755)
        for name in sorted(set(names) - {"busybox"}):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        _add(archive, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")
        _add(archive, "etc/group", b"root:x:0:\nnogroup:x:65534:\n")
    return buffer.getvalue()


def busybox_image(busybox: Path, target: Path) -> Path:
    """The image BUSYBOX_IMAGE: it sleeps until it is told to end, which makes it a pause image too."""
    # As PID 1 a process takes only the signals that it has asked for.
    sleep = ("/bin/sh", "-c", "trap 'exit 0' TERM INT; while :; do sleep 86400 & wait $!; done")
    return write_image(Image(BUSYBOX_IMAGE, command=sleep), busybox_layer(busybox), target)


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))

"""Container images without a container engine: a local base, the repository's Dockerfiles, and small ones for tests.

Owns the base (`debootstrap`), the builds (`buildah`) and the archives in the cache, `<cache>/images/NAME-DIGEST.tar`,
whose digest covers the Dockerfile and every file that it copies.  Does not own who imports an archive into a node.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slackwater_controlplane.build import Say, cache_folder
from slackwater_controlplane.errors import BuildError
from slackwater_controlplane.package_index import BUNDLE, settings

ROOT = Path(__file__).parents[3]
OURS = ("operator", "worker", "engine")
PROGRAMS = ("buildah", "debootstrap", "apt-get")

_INCLUDE = "python3,python3-venv,ca-certificates"
_RECIPE = "2"  # of the base; another number makes it anew
_MAX_STORAGE_MB = 20_000
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Image:
    """One built image.

    name: what a pod names, with `imagePullPolicy: Never`.   archive: an OCI archive that bears this name; a node takes
    it by `ctr --namespace k8s.io images import`.
    """

    name: str
    archive: Path


class Images:
    """The images in one cache.

    environ: what the tools run with.   root: the checkout whose Dockerfiles are built.
    """

    def __init__(
        self, cache: Path, environ: Mapping[str, str], *, root: Path = ROOT, say: Say = lambda _: None
    ) -> None:
        self.folder = cache / "images"
        self._environ = {**environ, "BUILDAH_ISOLATION": "chroot"}
        self._root = root
        self._say = say

    def why_not(self) -> str | None:
        """Why no image can be made here, in one line; None when it can."""
        if os.geteuid():
            return "images are made as root"
        missing = [name for name in PROGRAMS if shutil.which(name, path=self._environ.get("PATH")) is None]
        return f"{', '.join(missing)} not installed; `.setup/images` installs what is missing" if missing else None

    def base(self) -> Image:
        """A Debian of this machine's release with Python and certificates; stands for the public slim image."""
        mirror, release = self._mirror()
        digest = _digest(_RECIPE, release, _INCLUDE)
        image = self._image("base", digest, tag=release)
        with self._lock():
            if not image.archive.exists():
                self._make_base(image, mirror, release)
        return image

    def ours(self, name: str) -> Image:
        """One of `OURS`, built from `manifests/images/NAME.Dockerfile` and the checkout as it is now."""
        if name not in OURS:
            raise BuildError(f"no image {name}; there are {', '.join(OURS)}")
        dockerfile = (self._root / "manifests/images" / f"{name}.Dockerfile").read_text()
        version = tomllib.loads((self._root / "pyproject.toml").read_text())["project"]["version"]
        return self._build(name, version, dockerfile, copied_files(dockerfile, self._root))

    def small(self, name: str, dockerfile: str, files: Mapping[str, Path]) -> Image:
        """An image of a test's own.   files: what the Dockerfile copies, by its name in the build's context."""
        return self._build(name, "test", dockerfile, files)

    # ---- the base

    def _mirror(self) -> tuple[str, str]:
        """Address and release of the Debian that this machine's apt reads."""
        fields = "$(ORIGIN)|$(COMPONENT)|$(RELEASE)|$(REPO_URI)"
        listed = self._run("apt-get", "indextargets", "--format", fields, "Created-By: Packages")
        for line in listed.splitlines():
            origin, component, release, address = line.split("|", 3)
            # `bookworm`, not `bookworm-updates`; without lists apt does not know the origin.
            if origin in ("Debian", "") and component == "main" and release.isalpha():
                return address, release
        raise BuildError("this machine's apt names no Debian release; images are made from Debian's packages")

    def _make_base(self, image: Image, mirror: str, release: str) -> None:
        self._say(f"making the base from Debian {release} (a minute)")
        container = self._buildah("from", "scratch").strip()
        try:
            tree = Path(self._buildah("mount", container).strip())
            self._run("debootstrap", "--variant=minbase", f"--include={_INCLUDE}", release, str(tree), mirror)
            for left in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
                shutil.rmtree(tree / left)
                (tree / left).mkdir()
            (tree / "etc/apt/sources.list").write_text("")  # the mirror is this machine's affair
            (tree / "etc/resolv.conf").write_text("")  # and so are its name servers
            (tree / "root").chmod(0o755)  # an interpreter of the host may be mounted below it
            self._buildah("umount", container)
            self._buildah("config", "--env", f"PATH={_PATH}", container)
            self._buildah("commit", "--quiet", container, image.name)
        finally:
            self._buildah("rm", container)
        self._archive(image)

    # ---- the others

    def _build(self, name: str, tag: str, dockerfile: str, files: Mapping[str, Path]) -> Image:
        base = self.base()
        digest = _digest(base.archive.name, dockerfile, *(f"{name} {_sum(files[name])}" for name in sorted(files)))
        image = self._image(name, digest, tag=tag)
        with self._lock():
            if not image.archive.exists():
                self._say(f"building {image.name}")
                self._trim(base)
                self._bud(image, base, dockerfile, files)
                self._archive(image)
        return image

    def _bud(self, image: Image, base: Image, dockerfile: str, files: Mapping[str, Path]) -> None:
        with tempfile.TemporaryDirectory(prefix=".context-", dir=self.folder) as folder:
            context = Path(folder) / "context"
            for name, source in files.items():
                (context / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, context / name)
            (context / "Dockerfile").write_text(dockerfile)
            # The package index of this machine comes in by files that are mounted, so that no image remembers it.
            configuration = Path(folder) / "pip.conf"
            configuration.touch(mode=0o600)
            bundle, text = settings(self._environ)
            configuration.write_text(text)
            volumes = [f"{configuration}:/etc/pip.conf:ro"] + ([f"{bundle}:{BUNDLE}:ro"] if bundle else [])
            command = ["bud", "--quiet", "--pull-never", "--layers", "--build-arg", f"BASE={base.name}"]
            for volume in volumes:
                command += ["--volume", volume]
            self._buildah(*command, "--tag", image.name, str(context))

    def _archive(self, image: Image) -> None:
        """Write the archive beside its place and move it there; older ones of the same name go."""
        with tempfile.TemporaryDirectory(prefix=".push-", dir=self.folder) as folder:
            layout = Path(folder) / "layout"
            self._buildah("push", "--quiet", "--disable-compression", image.name, f"oci:{layout}")
            index = json.loads((layout / "index.json").read_text())
            for manifest in index["manifests"]:
                # containerd knows an archive's full name by the first, buildah by the second.
                manifest["annotations"] = {
                    "io.containerd.image.name": image.name,
                    "org.opencontainers.image.ref.name": image.name,
                }
            (layout / "index.json").write_text(json.dumps(index))
            packed = Path(folder) / "packed.tar"
            with tarfile.open(packed, "w") as archive:
                for path in sorted(layout.rglob("*")):
                    archive.add(path, path.relative_to(layout).as_posix(), recursive=False)
            packed.replace(image.archive)
        stem = image.archive.name.rpartition("-")[0]
        for old in self.folder.glob(f"{stem}-*.tar"):
            if old != image.archive:
                old.unlink()

    def _trim(self, base: Image) -> None:
        """Empty buildah's storage when layers of many builds have piled up; the base comes back from its archive."""
        kept = self._run(
            "du", "--summarize", "--one-file-system", "--block-size=1M", str(self.folder / "storage"), check=False
        )
        known = self._buildah("images", "--noheading", "--format", "{{.Name}}:{{.Tag}}").split()
        if kept and int(kept.split()[0]) > _MAX_STORAGE_MB:
            self._buildah("rmi", "--all", "--force")
            known = []
        if base.name not in known:
            self._buildah("pull", "--quiet", f"oci-archive:{base.archive}")

    # ---- tools

    def _image(self, name: str, digest: str, *, tag: str) -> Image:
        return Image(f"docker.io/slackwater/{name}:{tag}", self.folder / f"{name}-{digest[:16]}.tar")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One build at a time in a cache.  The kernel frees the lock when its holder ends, however it ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _buildah(self, *arguments: str) -> str:
        """A storage of our own: nothing of the machine's is seen or changed."""
        return self._run(
            "buildah", "--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run"),
            "--storage-driver", self._driver(), *arguments,
        )  # fmt: skip

    def _driver(self) -> str:
        """`overlay` where it works, else `vfs`, which copies every layer.  Kept, since a storage knows only one."""
        chosen = self.folder / "driver"
        if not chosen.exists():
            with tempfile.TemporaryDirectory(prefix=".probe-", dir=self.folder) as folder:
                for name in ("lower", "upper", "work", "merged"):
                    (Path(folder) / name).mkdir()
                options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
                mount = ["unshare", "--mount", "mount", "-t", "overlay", "-o", options, "overlay", f"{folder}/merged"]
                works = subprocess.run(mount, env=self._environ, capture_output=True).returncode == 0
            chosen.write_text("overlay" if works else "vfs")
        return chosen.read_text()

    def _run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self._environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if check and done.returncode:
            said = "\n  ".join((done.stdout + done.stderr).splitlines()[-20:])
            raise BuildError(f"{command[0]} ended with {done.returncode}:\n  {said}")
        return done.stdout


def copied_files(dockerfile: str, root: Path) -> dict[str, Path]:
    """What a Dockerfile copies from its context: name there -> file.  Caches of the interpreter are left out."""
    files: dict[str, Path] = {}
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE):
        for source in sources.split():
            found = [root / source] if (root / source).is_file() else sorted((root / source).rglob("*"))
            if not found:
                raise BuildError(f"a Dockerfile copies {source}, which is not in {root}")
            for path in found:
                if path.is_file() and "__pycache__" not in path.parts:
                    files[path.relative_to(root).as_posix()] = path
    return files


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(names: list[str], say: Callable[[str], None]) -> int:
    """Build the named images of ours; `operator` and `worker` without names.  Returns the exit code."""
    images = Images(cache_folder(os.environ), os.environ, say=say)
    if (why := images.why_not()) is not None:
        say(why)
        return 3
    try:
        for name in names or ("operator", "worker"):
            image = images.ours(name)
            say(f"{image.name} lies in {image.archive} ({image.archive.stat().st_size / 1e6:.0f} MB)")
    except BuildError as error:
        say(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], lambda text: print(f"[images] {text}", file=sys.stderr, flush=True)))  # noqa: T201

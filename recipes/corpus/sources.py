"""The table of sources (`sources.toml`) and how each package is fetched and unpacked.

A source is one package of a public archive. `manager` says which client fetches it: `deb` (apt-get download),
`npm` (npm pack) or `pypi` (pip download). Unpacked trees lie in `<work>/tree/<package>/`.
"""

from __future__ import annotations

import fnmatch
import json
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("sources.toml")
KINDS = ("prose", "manual", "dictionary", "code", "kernel", "database", "instructions")


@dataclass(frozen=True)
class Source:
    """One package and what is taken from it; `cap_mb` bounds the text kept (0 = no bound)."""

    kind: str
    package: str
    manager: str
    format: str
    include: tuple[str, ...]
    licence: str
    url: str
    exclude: tuple[str, ...] = ()
    cap_mb: float = 0.0

    @property
    def folder(self) -> str:
        """Name of the unpacked tree: the package name without the characters a path should not have."""
        return self.package.replace("@", "").replace("/", "-")

    def files(self, work: Path) -> Iterator[Path]:
        """Files of the unpacked package that this source takes, in path order."""
        root = work / "tree" / self.folder
        for path in sorted(root.rglob("*")):
            name = "/" + path.relative_to(root).as_posix()
            if path.is_symlink() or not path.is_file():
                continue
            if any(fnmatch.fnmatch(name, p) for p in self.include) and not any(
                fnmatch.fnmatch(name, p) for p in self.exclude
            ):
                yield path


def load_sources(table: Path = TABLE) -> list[Source]:
    """Read the table; unknown kinds and fields are errors."""
    sources = []
    for row in tomllib.loads(table.read_text())["source"]:
        row["include"] = tuple(row["include"])
        row["exclude"] = tuple(row.get("exclude", ()))
        source = Source(**row)
        if source.kind not in KINDS:
            raise ValueError(f"{source.package}: kind {source.kind!r} is not one of {', '.join(KINDS)}")
        sources.append(source)
    return sources


def fetch(source: Source, work: Path) -> str:
    """Download and unpack `source` unless its tree exists; return the package version."""
    tree = work / "tree" / source.folder
    stamp = tree.with_suffix(tree.suffix + ".version")
    if not stamp.exists():
        downloads = work / "downloads" / source.folder
        downloads.mkdir(parents=True, exist_ok=True)
        tree.mkdir(parents=True, exist_ok=True)
        version = {"deb": _fetch_deb, "npm": _fetch_npm, "pypi": _fetch_pypi}[source.manager](source, downloads, tree)
        _unpack_inner(tree)
        stamp.write_text(version)
    return stamp.read_text()


def _run(command: list[str], cwd: Path) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


def _fetch_deb(source: Source, downloads: Path, tree: Path) -> str:
    _run(["apt-get", "download", "-q", source.package], downloads)
    archive = max(downloads.glob("*.deb"))
    _run(["dpkg-deb", "-x", str(archive), str(tree)], downloads)
    return _run(["dpkg-deb", "-f", str(archive), "Version"], downloads).strip()


def _fetch_npm(source: Source, downloads: Path, tree: Path) -> str:
    _run(["npm", "pack", source.package], downloads)
    with tarfile.open(max(downloads.glob("*.tgz"))) as archive:
        archive.extractall(tree, filter="data")
    return str(json.loads((tree / "package" / "package.json").read_text())["version"])


def _fetch_pypi(source: Source, downloads: Path, tree: Path) -> str:
    _run(["python3", "-m", "pip", "download", "-q", "--no-deps", "-d", ".", source.package], downloads)
    archive = next(downloads.iterdir())
    if archive.suffix == ".whl":
        zipfile.ZipFile(archive).extractall(tree)
        return archive.name.split("-")[1]
    with tarfile.open(archive) as sdist:
        sdist.extractall(tree, filter="data")
    return archive.name.removesuffix(".tar.gz").rsplit("-", 1)[1]


def _unpack_inner(tree: Path) -> None:
    """Source packages carry a tarball inside: unpack its C files in place."""
    for inner in tree.rglob("linux-source-*.tar.xz"):
        with tarfile.open(inner) as archive:
            members = (m for m in archive if m.isfile() and m.name.endswith(".c"))
            archive.extractall(inner.parent, members=members, filter="data")
        inner.unlink()

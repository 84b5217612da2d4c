"""The icon sets as npm packages: fetched by pinned version, believed by their hash alone."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditpack.errors import DitpackError

_SECONDS = 60
_MAX_BYTES = 64 * 2**20


class PackageError(DitpackError):
    """A package that cannot be fetched, is not the pinned one, or lacks what is read from it."""


@dataclass(frozen=True, slots=True)
class Package:
    """``integrity`` is what npm's registry states of the tarball: "sha512-" and the base64 of its hash."""

    name: str
    version: str
    integrity: str
    registry: str = "https://registry.npmjs.org"

    @property
    def file(self) -> str:
        """What ``npm pack`` calls the tarball."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"

    @property
    def url(self) -> str:
        return f"{self.registry}/{self.name}/-/{self.name.rpartition('/')[2]}-{self.version}.tgz"


FLUENT_EMOJI_FLAT = Package(
    "@iconify-json/fluent-emoji-flat",
    "1.2.6",
    "sha512-RY47RgPb47fYUiyrA64sIOL0+UU02s29sXpNBbIQRBUlPlfNFTKUmZDERGuxDs/7yNGWqQYvuaSYM1M4fRXlUw==",
)
NOTO_EMOJI = Package(
    "@iconify-json/noto",
    "1.2.9",
    "sha512-DQiuXENbun41ch+XPSV55H9FaWKpHTyz46YIKtSaKYD4fIDDzL1tR6H4np/T38jfrTAeI3rcKF0mqHYeZVAuaw==",
)


def fetch(package: Package, directory: Path) -> Path:
    """The tarball of ``package`` in ``directory``, downloaded if it is not there; in both cases its hash is checked.

    Raises:
        PackageError: it cannot be had, or it is not the pinned one; nothing of it is kept then.
    """
    file = directory / package.file
    if file.is_file():
        check(file.read_bytes(), package, file)
        return file
    try:
        with urllib.request.urlopen(package.url, timeout=_SECONDS) as answer:
            data = answer.read(_MAX_BYTES + 1)
    except OSError as error:
        raise PackageError(
            f"{package.url}: {error}\nWithout a network: npm pack {package.name}@{package.version}, "
            f"and put {package.file} into {directory}"
        ) from error
    check(data, package, package.url)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=directory, delete=False) as temporary:
        temporary.write(data)
    os.replace(temporary.name, file)
    return file


def check(data: bytes, package: Package, source: object) -> None:
    """Raise PackageError unless ``data``, found at ``source``, is the pinned tarball."""
    algorithm, _, expected = package.integrity.partition("-")
    found = base64.b64encode(hashlib.new(algorithm, data).digest()).decode()
    if found != expected:
        raise PackageError(f"{source}: its hash is {algorithm}-{found}; must be {package.integrity}")


def read_json(tarball: Path, name: str) -> Any:
    """The JSON file ``name`` of a package.

    Raises:
        PackageError: there is none, or it is not JSON.
    """
    try:
        with tarfile.open(tarball, "r:gz") as archive:
            member = archive.extractfile(f"package/{name}")
            if member is None:
                raise KeyError(name)
            return json.load(member)
    except (KeyError, ValueError, tarfile.TarError) as error:
        raise PackageError(f"{tarball}: has no readable package/{name}: {error}") from error

"""Which tritonserver and which Python are found and refused before one starts; no server runs here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch_tools import MINOR, embedded_layout, executable

from ditpack.tritonserver.launch import ServeError, find, interpreter
from ditpack.tritonserver.launch.find import Installation, find_tritonserver


class TestFinding:
    @pytest.fixture(autouse=True)
    def bare_machine(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv(find.ENVIRONMENT_VARIABLE, raising=False)
        monkeypatch.setenv("PATH", str(tmp_path / "path"))
        monkeypatch.setattr(find, "NGC_LOCATION", tmp_path / "ngc" / "bin" / "tritonserver")
        monkeypatch.setattr(find, "_embedded_binary", lambda: None)

    def test_order(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Each place is found only while nothing that comes before it is there."""
        embedded = embedded_layout(tmp_path / "site-packages")
        monkeypatch.setattr(find, "_embedded_binary", lambda: embedded)
        assert find_tritonserver().binary == embedded
        ngc = executable(tmp_path / "ngc" / "bin" / "tritonserver")
        assert find_tritonserver().binary == ngc
        on_path = executable(tmp_path / "path" / "tritonserver")
        assert find_tritonserver().binary == on_path
        named = executable(tmp_path / "named" / "tritonserver")
        monkeypatch.setenv(find.ENVIRONMENT_VARIABLE, str(named))
        assert find_tritonserver().binary == named
        explicit = executable(tmp_path / "explicit" / "tritonserver")
        assert find_tritonserver(explicit).binary == explicit

    def test_directories_beside_the_binary(self, tmp_path: Path) -> None:
        binary = executable(tmp_path / "opt" / "bin" / "tritonserver")
        assert find_tritonserver(binary) == Installation(binary, None)
        (tmp_path / "opt" / "backends" / "python").mkdir(parents=True)
        found = find_tritonserver(binary)
        assert found.backends == tmp_path / "opt" / "backends"
        assert not found.embedded

    def test_a_link_leads_to_the_directories_of_the_real_binary(self, tmp_path: Path) -> None:
        binary = embedded_layout(tmp_path / "site-packages")
        link = tmp_path / "path" / "tritonserver"
        link.parent.mkdir()
        link.symlink_to(binary)
        found = find_tritonserver()
        assert found.embedded
        assert found.libraries == tmp_path / "site-packages" / "nvidia_pytriton.libs"

    def test_nothing_there(self) -> None:
        with pytest.raises(ServeError, match=r'pip install "ditpack\[server\]"'):
            find_tritonserver()

    def test_the_one_asked_for_is_not_there(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        executable(tmp_path / "path" / "tritonserver")  # not taken instead
        with pytest.raises(ServeError, match="--tritonserver is /nowhere/tritonserver"):
            find_tritonserver("/nowhere/tritonserver")
        monkeypatch.setenv(find.ENVIRONMENT_VARIABLE, str(tmp_path))
        with pytest.raises(ServeError, match="no executable file"):
            find_tritonserver()

    @pytest.mark.parametrize("version", ["glibc 2.34", "glibc 2.9", None])
    def test_the_embedded_one_needs_a_new_glibc(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None
    ) -> None:
        monkeypatch.setattr(os, "confstr", lambda name: version)
        with pytest.raises(
            ServeError, match=r"needs glibc 2\.35 or newer; this system has (glibc 2|another C library)"
        ):
            find_tritonserver(embedded_layout(tmp_path))

    def test_no_stub_for_this_python(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        installation = find_tritonserver(embedded_layout(tmp_path, minors=(9, 10, 13)))
        fake = SimpleNamespace(version_info=SimpleNamespace(minor=14))
        monkeypatch.setattr(find, "sys", fake)
        with pytest.raises(ServeError, match=r"no Python backend for Python 3\.14; it has 3\.9, 3\.10, 3\.13"):
            installation.stub()

    def test_a_servers_own_stub_for_another_python(self, tmp_path: Path) -> None:
        binary = executable(tmp_path / "bin" / "tritonserver")
        stub = executable(
            tmp_path / "backends" / "python" / "triton_python_backend_stub", "\x7fELF libpython3.8.so.1.0"
        )
        with pytest.raises(ServeError, match=r"runs Python 3\.8, and this is Python 3\."):
            find_tritonserver(binary).stub()
        stub.write_text(f"\x7fELF libpython3.{MINOR}.so.1.0")
        assert find_tritonserver(binary).stub() == stub


class TestInterpreter:
    def python3(self, monkeypatch: pytest.MonkeyPatch, directory: Path, answer: str) -> None:
        executable(directory / "python3", f"#!/bin/sh\necho '{answer}'\n")
        monkeypatch.setattr(interpreter, "bin_directory", lambda: directory)

    def test_the_running_one(self) -> None:
        interpreter.check_interpreter(needs_ditpack=False)

    def test_another_python3_beside_it(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.python3(monkeypatch, tmp_path, '[6, "/usr", true]')
        with pytest.raises(ServeError, match=r"would run in .*python3 \(Python 3\.6 in /usr\), not in"):
            interpreter.check_interpreter(needs_ditpack=True)

    def test_ditpack_is_not_installed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.python3(monkeypatch, tmp_path, f'[{MINOR}, "{sys.prefix}", false]')
        interpreter.check_interpreter(needs_ditpack=False)
        with pytest.raises(ServeError, match=r"ditpack is not installed in .*PYTHONPATH is ignored") as error:
            interpreter.check_interpreter(needs_ditpack=True)
        assert "-m pip install" in error.value.remedy

    def test_no_python3_beside_it(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(interpreter, "bin_directory", lambda: tmp_path)
        with pytest.raises(ServeError, match="does not work"):
            interpreter.check_interpreter(needs_ditpack=False)

    def test_libpython_of_the_first_directory_that_has_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        directories = [tmp_path / name for name in ("empty", "first", "second")]
        for directory in directories[1:]:
            directory.mkdir()
            (directory / interpreter.libpython_name()).touch()
        monkeypatch.setattr(interpreter, "_directories", lambda: iter(directories))
        assert interpreter.require_libpython() == tmp_path / "first" / f"libpython3.{MINOR}.so.1.0"

    def test_no_libpython(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(interpreter, "_directories", lambda: iter([tmp_path]))
        with pytest.raises(ServeError) as error:
            interpreter.require_libpython()
        assert f"libpython3.{MINOR}.so.1.0" in error.value.problem
        for way in (f"apt-get install libpython3.{MINOR}", "conda", f"uv python install 3.{MINOR}", "--enable-shared"):
            assert way in error.value.remedy
        assert len(str(error.value).splitlines()) == 2

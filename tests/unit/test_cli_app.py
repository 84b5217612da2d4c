"""The ``ditpack`` command itself: what it imports, and how errors look."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

import ditpack
from ditpack.cli import app
from ditpack.cli.serve import _how_to_call
from ditpack.errors import InvalidRequest
from ditpack.tritonserver.launch import ServeError, TritonServer


def ditpack_command(*arguments: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{prelude}\nimport sys\nfrom ditpack.cli.app import main\nsys.argv = ['ditpack', *sys.argv[1:]]\nmain()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


def test_help_names_every_command_and_imports_none() -> None:
    report = "import atexit, sys\natexit.register(lambda: print('MODULES', *sys.modules))"
    result = ditpack_command("--help", prelude=report)
    assert result.returncode == 0, result.stderr
    text, _, modules = result.stdout.partition("MODULES")
    for name in ("serve", "check", "generate", "bench", "demo", "make-checkpoint"):
        assert name in text
    heavy = {"torch", "numpy", "pydantic", "diffusers", "tritonclient", "ditpack_client", "ditpack.cli.serve"}
    assert not heavy & set(modules.split())


@pytest.mark.parametrize("command", app.COMMANDS)
def test_every_command_can_be_loaded(command: str) -> None:
    result = ditpack_command(command, "--help")
    assert result.returncode == 0, result.stderr
    assert f"ditpack {command}" in result.stdout


def test_version() -> None:
    assert ditpack_command("--version").stdout == f"ditpack {ditpack.__version__}\n"


def test_serve_does_not_import_torch() -> None:
    report = "import atexit, sys\natexit.register(lambda: print('MODULES', *sys.modules))"
    modules = ditpack_command("serve", "--help", prelude=report).stdout.partition("MODULES")[2].split()
    assert "ditpack.tritonserver.launch.server" in modules
    assert not {"torch", "diffusers", "pytriton"} & set(modules)


@pytest.mark.parametrize(("port", "names_server"), [(8000, False), (8123, True)])
def test_serve_prints_commands_that_exist(port: int, names_server: bool) -> None:
    server = TritonServer(http_port=port)
    server.models = ["qwen_image"]
    assert "ditpack edit" not in _how_to_call(server, 1.0)
    server.models = ["qwen_image", "qwen_image_edit"]
    lines = _how_to_call(server, 1.0).splitlines()
    for name in ("generate", "edit"):
        command = shlex.split(next(line for line in lines if line.strip().startswith(f"ditpack {name}")))
        assert (server.http_url in command) == names_server
        options = ditpack_command(name, "--help").stdout.split()
        assert {word for word in command if word.startswith("-")} <= set(options)
    curl = " ".join(line.strip(" \\") for line in lines[lines.index("or, from anywhere:") + 1 :])
    url, body = re.search(r"curl -s (\S+)\s+-d '(.*?)'", curl).groups()
    assert url == f"http://127.0.0.1:{port}/v2/models/qwen_image/generate"
    assert json.loads(body)["RESPONSE_FORMAT"] == "b64_json"


def test_an_error_is_two_lines_and_exit_code_1() -> None:
    result = ditpack_command("serve", "--http-port", "9000", "--grpc-port", "9000")
    assert result.returncode == 1
    assert result.stderr == (
        "error: --http-port and --grpc-port are both 9000.\nGive each its own port, or 0 for any free one.\n"
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ServeError("It does\nnot work.", "Do this."), "error: It does not work.\nDo this.\n"),
        (InvalidRequest("WIDTH", 65, "a multiple of 16"), "error: WIDTH = 65: a multiple of 16\n"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            'error: torch is not installed.\nThis needs more than the client: pip install "ditpack[server]"\n',
        ),
    ],
)
def test_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, expected: str
) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(app.Command, "load", lambda self: fails)
    monkeypatch.setattr(sys, "argv", ["ditpack", "serve"])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == expected


def test_a_module_of_our_own_that_is_missing_is_a_bug_and_shown_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ModuleNotFoundError("No module named 'ditpack.nothing'", name="ditpack.nothing")

    monkeypatch.setattr(app.Command, "load", lambda self: fails)
    monkeypatch.setattr(sys, "argv", ["ditpack", "serve"])
    with pytest.raises(ModuleNotFoundError):
        app.main()

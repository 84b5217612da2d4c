"""What is checked and put together before a tritonserver starts; no server runs here."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_tools import embedded_layout

from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.editing import EDITING_FAMILIES
from ditpack.tritonserver.launch import ServeError, TritonServer, interpreter, keeper, repository
from ditpack.tritonserver.launch.find import Installation, find_tritonserver
from ditpack.tritonserver.launch.ports import take_ports
from ditpack.tritonserver.launch.prepare import Settings, command_line, environment, prepare_directory, run_directory
from ditpack.tritonserver.launch.repository import find_repository, imports_ditpack, model_names, models_for

FLAGS = ("--http-port", "--grpc-port", "--metrics-port")


class TestPorts:
    @pytest.fixture
    def taken(self) -> Iterator[int]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield listener.getsockname()[1]

    def test_zeros_become_different_free_ports(self) -> None:
        ports = take_ports("127.0.0.1", dict.fromkeys(FLAGS, 0))
        assert list(ports) == list(FLAGS)
        assert len(set(ports.values()) - {0}) == 3

    @pytest.mark.parametrize("flag", FLAGS)
    def test_in_use(self, taken: int, flag: str) -> None:
        with pytest.raises(ServeError, match=rf"Port {taken} on 127\.0\.0\.1 is in use \({flag}\)"):
            take_ports("127.0.0.1", {**dict.fromkeys(FLAGS, 0), flag: taken})

    def test_given_twice(self) -> None:
        with pytest.raises(ServeError, match="--http-port and --metrics-port are both 9000"):
            take_ports("127.0.0.1", dict(zip(FLAGS, (9000, 9001, 9000), strict=True)))

    @pytest.mark.parametrize("port", [-1, 65536])
    def test_no_port(self, port: int) -> None:
        with pytest.raises(ServeError, match=f"--http-port {port} is no port"):
            take_ports("127.0.0.1", {"--http-port": port})

    def test_not_an_address_of_this_machine(self) -> None:
        with pytest.raises(ServeError, match=r"--host 192\.0\.2\.1 is no address of this machine"):
            take_ports("192.0.2.1", {"--http-port": 0})

    def test_nothing_is_started_when_a_port_is_in_use(self, taken: int, tmp_path: Path) -> None:
        log = tmp_path / "log"
        with pytest.raises(ServeError, match=r"\(--grpc-port\)"):
            TritonServer(
                http_port=0, grpc_port=taken, metrics_port=0, log=log, model_repository=a_repository(tmp_path)
            ).start()
        assert not log.exists()


def a_repository(directory: Path, code: str = "") -> Path:
    model = directory / "models" / "double"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").touch()
    (model / "1" / "model.py").write_text(code)
    return directory / "models"


class TestRepository:
    def test_named(self, tmp_path: Path) -> None:
        root = a_repository(tmp_path)
        (root / "not_a_model").mkdir()
        assert find_repository(root) == root
        assert model_names(root) == ["double"]

    def test_of_the_checkout(self) -> None:
        assert find_repository(None).name == "model_repository"

    def test_of_an_installed_package_comes_first(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        package = tmp_path / "site-packages" / "ditpack"
        root = a_repository(package).rename(package / "model_repository")
        monkeypatch.setattr(repository.ditpack, "__file__", str(package / "__init__.py"))
        assert find_repository(None) == root

    def test_missing_or_empty(self, tmp_path: Path) -> None:
        with pytest.raises(ServeError, match=r"No model repository at .*nowhere"):
            find_repository(tmp_path / "nowhere")
        with pytest.raises(ServeError, match="holds no models"):
            find_repository(tmp_path)

    def test_the_family_decides_what_is_loaded(self, tmp_path: Path) -> None:
        root = a_repository(tmp_path)
        for ensemble, family, steps in [
            ("apples", "Apple", ("peel", "cook")),
            ("pears", "Pear Quince", ("halve", "cook")),
            ("any", "", ("halve",)),
        ]:
            (root / ensemble).mkdir()
            parameters = f'parameters {{ key: "family" value {{ string_value: "{family}" }} }}' if family else ""
            scheduling = " ".join(f'step {{ model_name: "{step}" }}' for step in steps)
            (root / ensemble / "config.pbtxt").write_text(f"{parameters} ensemble_scheduling {{ {scheduling} }}")
            for step in steps:
                (root / step).mkdir(exist_ok=True)
                (root / step / "config.pbtxt").touch()
        (root / "broken").mkdir()
        (root / "broken" / "config.pbtxt").write_text("max_batch: [")  # Triton's to report
        assert models_for(root, "Apple") == ["any", "apples", "broken", "cook", "double", "halve", "peel"]
        for family in ("Pear", "Quince"):
            assert models_for(root, family) == ["any", "broken", "cook", "double", "halve", "pears"]
        assert models_for(root, "Plum") == ["any", "broken", "double", "halve"]

    def test_no_model_for_the_family(self, tmp_path: Path) -> None:
        root = a_repository(tmp_path)
        (root / "double" / "config.pbtxt").write_text('parameters { key: "family" value { string_value: "Pear" } }')
        with pytest.raises(ServeError, match=r"no model for a Plum\.\nIts ensembles serve Pear; "):
            models_for(root, "Plum")

    def test_ours(self) -> None:
        ours = ["control", "dit", "prepare", "qwen_image", "qwen_image_stream", "text_encoder", "vae_decoder"]
        assert models_for(find_repository(None), "QwenImagePipeline") == ours
        edits = sorted([*ours, "prepare_edit", "qwen_image_edit", "vae_encoder"])
        for family in EDITING_FAMILIES:
            assert models_for(find_repository(None), family) == edits
        mammoth = ["control", "mammoth_dit", "mammoth_moda2", "mammoth_prepare", "mammoth_vae_decoder"]
        assert models_for(find_repository(None), "mammothmoda2") == mammoth

    def test_whether_models_need_ditpack(self, tmp_path: Path) -> None:
        assert not imports_ditpack(a_repository(tmp_path / "theirs", "import numpy\n"))
        assert imports_ditpack(a_repository(tmp_path / "ours", "from ditpack.tritonserver import dit_door\n"))
        assert imports_ditpack(find_repository(None))


EMBEDDED = open_checkpoint("embedded", weights="stored")


class TestPreparing:
    def settings(self, **changes: object) -> Settings:
        ports = dict(zip(FLAGS, (1, 2, 3), strict=True))
        models = ("double", "half")
        settings = Settings(Path("/models"), models, "127.0.0.1", ports, 60, "ditpack_ab_")
        return dataclasses.replace(settings, **changes)

    def test_command_line(self, tmp_path: Path) -> None:
        server = Installation(Path("/opt/bin/tritonserver"), Path("/opt/backends"))
        command = command_line(server, self.settings(options=("--log-verbose=1",)))
        assert command[0] == "/opt/bin/tritonserver"
        assert command[-1] == "--log-verbose=1"
        assert {
            *("--model-repository=/models", "--backend-directory=/opt/backends"),
            *("--http-port=1", "--grpc-port=2", "--metrics-port=3"),
            *("--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"),
            *("--model-control-mode=explicit", "--load-model=double", "--load-model=half"),
            *("--exit-timeout-secs=60", "--disable-auto-complete-config"),
            "--backend-config=python,shm-region-prefix-name=ditpack_ab_",
        } < set(command)

    def test_what_clients_have_no_use_for_is_locked(self) -> None:
        """With a key of its own a server, which is told to nobody."""
        server = Installation(Path("tritonserver"), None)
        locks = [
            {option for option in command_line(server, self.settings()) if "restricted" in option} for _ in range(2)
        ]
        assert len(locks[0] | locks[1]) == 4
        assert all("=model-repository,shared-memory,trace,logging:ditpack=" in lock for lock in locks[0])

    def test_a_server_that_knows_its_own_directories(self) -> None:
        command = command_line(Installation(Path("tritonserver"), None), self.settings())
        assert not [option for option in command if "director" in option]

    def test_backend_directory_of_the_embedded_server(self, tmp_path: Path) -> None:
        installation = find_tritonserver(embedded_layout(tmp_path / "site-packages"))
        directory = tmp_path / "private"
        directory.mkdir()
        prepared = prepare_directory(installation, directory)
        assert prepared.backends == directory / "backends"
        names = sorted(path.name for path in (directory / "backends" / "python").iterdir())
        assert names == ["libtriton_python.so", "triton_python_backend_stub"]
        assert (directory / "lib" / interpreter.libpython_name()).is_file()
        variables = environment(prepared, directory, EMBEDDED, {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/mine"})
        assert variables == {
            "OMP_WAIT_POLICY": "PASSIVE",
            "PATH": f"{Path(sys.executable).parent}:/usr/bin",
            "LD_LIBRARY_PATH": f"{directory}/lib:{tmp_path}/site-packages/nvidia_pytriton.libs:/mine",
            "DITPACK_CHECKPOINT": str(EMBEDDED.path),
            "DITPACK_WEIGHTS": "stored",
            "DITPACK_RUN_DIR": str(run_directory(directory)),
        }

    def test_nothing_is_prepared_for_a_server_that_is_complete(self, tmp_path: Path) -> None:
        installation = Installation(Path("tritonserver"), None)
        assert prepare_directory(installation, tmp_path) == installation
        assert list(tmp_path.iterdir()) == []
        assert "LD_LIBRARY_PATH" not in environment(installation, tmp_path, EMBEDDED, {})
        mine = {"OMP_WAIT_POLICY": "ACTIVE"}
        assert environment(installation, tmp_path, EMBEDDED, mine)["OMP_WAIT_POLICY"] == "ACTIVE"


class TestLeftovers:
    def test_only_the_servers_own_regions_are_removed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(keeper, "_SHARED_MEMORY", tmp_path)
        for name in ("ditpack_ab_1", "ditpack_ab_2", "ditpack_cd_1", "triton_python_backend_shm_region_1"):
            (tmp_path / name).touch()
        assert sorted(keeper.remove_shared_memory("ditpack_ab_")) == ["ditpack_ab_1", "ditpack_ab_2"]
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "ditpack_cd_1",
            "triton_python_backend_shm_region_1",
        ]

    def test_servers_have_prefixes_of_their_own(self) -> None:
        assert len({TritonServer().shm_prefix for _ in range(100)}) == 100

    def run_keeper(self, tmp_path: Path, script: str, grace: float = 30.0) -> tuple[subprocess.Popen[str], Path]:
        directory = tmp_path / "private"
        directory.mkdir()
        arguments = [
            str(os.getpid()),
            str(grace),
            f"ditpack_{os.getpid()}_test_",
            str(directory),
            "/bin/sh",
            "-c",
            script,
        ]
        command = [sys.executable, "-I", "-S", keeper.__file__, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True), directory

    def test_the_keeper_ends_what_the_server_leaves_running(self, tmp_path: Path) -> None:
        """Also what left the server's process group."""
        file = tmp_path / "orphan"
        process, directory = self.run_keeper(
            tmp_path, f"setsid sh -c 'echo $$ > {file}; sleep 600' & sleep 0.5; exit 7"
        )
        assert process.wait(20) == 7
        assert not Path(f"/proc/{int(file.read_text())}").exists()
        assert not directory.exists()

    def test_the_keeper_kills_a_server_that_does_not_end_in_time(self, tmp_path: Path) -> None:
        deaf = tmp_path / "deaf"
        process, _ = self.run_keeper(tmp_path, f"trap '' TERM; touch {deaf}; while true; do sleep 600; done", grace=0.5)
        assert process.stdout is not None
        server = int(process.stdout.readline())
        deadline = time.monotonic() + 10
        while not deaf.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.terminate()
        assert process.wait(20) == 128 + 9
        assert not Path(f"/proc/{server}").exists()


def test_a_checkpoint_that_cannot_be_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    from ditpack.models.checkpoint import CheckpointError

    with pytest.raises(CheckpointError, match="no such directory"):
        TritonServer(checkpoint=str(tmp_path / "nowhere"), log=tmp_path / "log").start()
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.0.0.7", "10.0.0.7")])
def test_urls(host: str, reached: str) -> None:
    server = TritonServer(host=host)
    assert server.http_url == f"http://{reached}:8000"
    assert server.grpc_url == f"{reached}:8001"
    assert server.metrics_url == f"http://{reached}:8002/metrics"

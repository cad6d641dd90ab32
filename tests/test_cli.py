"""The command line: where settings come from, what is refused, and with what exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.checkpoints import BUILT_IN_MODELS
from cluster.cli import COMMANDS, main, serve_parser
from cluster.commands.deploy_errors import setup_error_in, start_ray
from cluster.commands.engine_flags import engine_config
from cluster.commands.serve import make_plan
from cluster.commands.settings_sources import merged_tokens
from cluster.commands.stop_signals import StopSignals
from cluster.config import ServiceConfig, check_gpus, decide_device, load_executor_factory, service_config
from cluster.serving.front import (
    COMMON_SETTINGS,
    PORTS_OF_A_BLOCK,
    Front,
    check_port,
    choose_front,
    front_environment,
)
from planner.errors import InvalidCheckpoint, InvalidConfiguration, SetupError
from tests.ports import own_ports
from tests.service_process import tiny_checkpoint

ROOT = Path(__file__).parent.parent


def settings(tokens: list[str], environment: dict[str, str] | None = None) -> dict[str, object]:
    parser = serve_parser()
    return vars(parser.parse_args(merged_tokens(parser, tokens, environment or {})))


def config_file(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_flag_beats_environment_beats_yaml_beats_default(tmp_path: Path) -> None:
    file = config_file(tmp_path, "num-workers: 2\nport: 1002\nmax_cells: 102\nhost: yaml\n")
    environment = {"RAYCOMB_PORT": "1003", "RAYCOMB_MAX_CELLS": "103", "RAYCOMB_CACHE": "/elsewhere"}
    got = settings(["m", "--max-cells", "104", "--config", file], environment)
    assert (got["num_gateways"], got["num_workers"], got["port"], got["max_cells"]) == (1, 2, 1003, 104)
    assert (got["model"], got["host"]) == (["m"], "yaml")


def test_a_variable_that_kubernetes_sets_for_a_service_of_our_name_is_no_port() -> None:
    with pytest.raises(InvalidConfiguration, match="which Kubernetes sets where a Service is named raycomb"):
        settings(["m"], {"RAYCOMB_PORT": "tcp://203.0.113.9:8000"})


def test_a_model_has_as_many_names_as_are_given() -> None:
    assert settings(["m", "--served-model-name", "a", "b", "--served-model-name", "c"])["served_model_name"] == [
        "a",
        "b",
        "c",
    ]


@pytest.mark.parametrize(
    "beside",
    [{"http": {"served_model_names": [""]}}, {"others": [{"engine": {"model": "n"}, "served_model_names": [""]}]}],
)
def test_a_model_without_a_name_is_refused(beside: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfiguration, match=r"served_model_names\.0 must have at least 1 character"):
        service_config({"engine": {"model": "m"}, **beside})


def test_the_model_may_stand_in_the_file_and_the_command_line_replaces_it(tmp_path: Path) -> None:
    file = config_file(tmp_path, "model: a\n")
    assert settings(["--config", file])["model"] == ["a"]
    assert settings(["b", "--config", file])["model"] == ["b"]
    assert settings(["--config", file], {"RAYCOMB_MODEL": "c"})["model"] == ["c"]


@pytest.mark.parametrize("told", ["{poet: /a, pirate: /b}", "[poet=/a, pirate=/b]"])
def test_adapters_in_the_file_are_a_mapping_or_a_list_that_flags_replace_as_a_whole(tmp_path: Path, told: str) -> None:
    file = config_file(tmp_path, f"lora-modules: {told}\n")
    assert settings(["m", "--config", file])["lora_modules"] == ["poet=/a", "pirate=/b"]
    assert settings(["m", "--lora-modules", "x=/c", "y=/d", "--config", file])["lora_modules"] == ["x=/c", "y=/d"]


def test_a_null_in_the_file_sets_nothing(tmp_path: Path) -> None:
    names = ("model", "max_cells", "api_key", "port", "prefix_caching")
    file = config_file(tmp_path, "".join(f"{name}: null\n" for name in names))
    assert {name: settings(["--config", file])[name] for name in names} == {name: settings([])[name] for name in names}
    assert settings(["--config", file], {"RAYCOMB_MAX_CELLS": "103"})["max_cells"] == 103


def test_weights_of_tenants_come_as_json_and_from_yaml(tmp_path: Path) -> None:
    file = config_file(tmp_path, "tenant_weights: {acme: 2, other: 0.5}\n")
    assert settings(["m", "--config", file])["tenant_weights"] == {"acme": 2, "other": 0.5}
    given = settings(["m", "--config", file, "--tenant-weights", '{"acme": 3}'])["tenant_weights"]
    assert engine_config("m", {"tenant_weights": given}).tenant_weights == {"acme": 3.0}
    assert settings(["m"], {"RAYCOMB_TENANT_WEIGHTS": '{"a": 1}'})["tenant_weights"] == {"a": 1}


@pytest.mark.parametrize("weights", ["acme=2", '{"acme": 0}', "[1]", '{"acme": "much"}'])
def test_weights_that_are_none_are_refused(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, InvalidConfiguration)) as told:
        engine_config("m", {"tenant_weights": settings(["m", "--tenant-weights", weights])["tenant_weights"]})
    assert "--tenant-weights" in f"{told.value} {capsys.readouterr().err}"


def test_lists_and_switches_come_from_yaml_too(tmp_path: Path) -> None:
    file = config_file(tmp_path, "api_key: [k1, k2]\nprefix_caching: false\nserved-model-name: one\n")
    got = settings(["m", "--config", file])
    assert (got["api_key"], got["prefix_caching"], got["served_model_name"]) == (["k1", "k2"], False, ["one"])
    assert settings(["m", "--config", file, "--api-key", "k3", "--prefix-caching"])["api_key"] == ["k3"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_cell: 5\n", "unknown setting 'max_cell'; did you mean --max-cells?"),
        ("tensor-parallel-size: 2\n", "'tensor_parallel_size'; --tensor-parallel-size is not supported: a model has"),
        ("xyzzy: 2\n", "unknown setting 'xyzzy'$"),
        ("prefix_caching: perhaps\n", "prefix_caching must be true or false"),
        ("port: [1, 2]\n", "port takes one value"),
        ("- a\n- b\n", "must hold settings by name"),
        ("a: [\n", "is not YAML"),
        ("config: other.yaml\n", "unknown setting 'config'"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(InvalidConfiguration, match=reason):
        settings(["m", "--config", config_file(tmp_path, text)])


def test_a_value_that_no_flag_would_take_is_told_with_where_it_stands(tmp_path: Path) -> None:
    file = config_file(tmp_path, "max_cells: many\n")
    with pytest.raises(InvalidConfiguration, match=rf"^{file}: max_cells: invalid int value: 'many'$"):
        settings(["m", "--config", file])
    with pytest.raises(InvalidConfiguration, match=r"^RAYCOMB_PORT: http is not a port"):
        settings(["m"], {"RAYCOMB_PORT": "http"})
    with pytest.raises(InvalidConfiguration, match=r"^RAYCOMB_DTYPE: invalid choice: 'int3'"):
        settings(["m"], {"RAYCOMB_DTYPE": "int3"})


def test_an_empty_file_is_no_settings_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    assert settings(["m", "--config", config_file(tmp_path, "")])["num_gateways"] == 1
    with pytest.raises(InvalidConfiguration, match="cannot be read"):
        settings(["m", "--config", str(tmp_path / "none.yaml")])


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (["serve"], "which model"),
        (["serve", "no-such-model"], "there is no model 'no-such-model'"),
        (["serve", "m", "--max-cells", "0"], "--max-cells must be greater than or equal to 1, not 0"),
        (["serve", "m", "--min-prefill-tokens", "600"], "[2, max_prefill_tokens = 512], not 600"),
        (
            ["serve", "m", "--max-num-batched-tokens", "128"],
            "max_num_batched_tokens (128) must exceed max_num_seqs (128)",
        ),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(
    tokens: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*tokens, "--port", str(own_ports(1)[0])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("raycomb: error: ")
    assert error.count("\n") == 1
    assert reason in error


def test_an_unsupported_architecture_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    assert main(["serve", str(tmp_path), "--port", str(own_ports(1)[0])]) == 2
    assert "MambaForCausalLM is not supported; supported are LlamaForCausalLM" in capsys.readouterr().err


@pytest.mark.model
def test_workers_on_other_nodes_are_told_the_name_of_a_fetched_model_and_not_where_it_lies_here(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = tmp_path / "smollm2-135m" / Path(BUILT_IN_MODELS["smollm2-135m"].member).name
    fetched.parent.mkdir()
    fetched.symlink_to(smollm2_path)
    monkeypatch.setenv("RAYCOMB_CACHE", str(tmp_path))
    args = serve_parser().parse_args(["smollm2-135m", "--port", str(own_ports(1)[0])])
    assert make_plan(args).service.engine.model == "smollm2-135m"


def test_a_checkpoint_without_a_tokenizer_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--port", str(own_ports(1)[0])]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (["serve", "m", "--no-such-flag", "3"], "raycomb serve: error: unrecognised arguments: --no-such-flag 3 (ray"),
        (["serve", "m", "--port", "0"], "0 is not a port"),
        (["serve", "m", "--port", "http"], "http is not a port"),
        (["serve", "m", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["fly"], "there is no command 'fly'; there are serve, run, "),
        (["serv", "m"], "there is no command 'serv'; did you mean serve?"),
        (["bench"], "required: offline|online"),
    ],
)
def test_a_malformed_command_line_is_one_line_and_exit_code_2(
    tokens: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(tokens)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert line.endswith("--help tells more)")


def test_without_a_command_the_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n    {command} " in told


def test_help_tells_kinds_and_defaults_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "online", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "--num-prompts N requests to send (default: 100)" in told
    assert "--workload random|chat|shared-prefix|trace which prompts (default: random)" in told
    assert "--burstiness NUMBER 1: Poisson; less: in bursts; more: evenly (default: 1)" in told


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    for flag in ("--num-workers", "--num-gateways", "--max-cells", "--front", "--config", "--api-key", "--ask"):
        assert flag in told


def test_a_taken_port_is_refused_before_anything_starts(taken_port: int) -> None:
    with pytest.raises(InvalidConfiguration, match=f"cannot listen on 127.0.0.1:{taken_port}: Address already in use"):
        check_port("127.0.0.1", taken_port)
    check_port("127.0.0.1", own_ports(1)[0])


def test_an_address_that_this_machine_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="choose another --host, an address of this machine"):
        check_port("203.0.113.7", 0)


def test_the_front_that_is_asked_for_is_the_one_that_is_set_up() -> None:
    with front_environment(choose_front(Front.PYTHON)) as variables:
        assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
        assert variables.items() >= COMMON_SETTINGS.items()
    with front_environment(Front.HAPROXY) as variables:
        folder = Path(variables["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent
        assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == variables["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "1"
        assert variables.items() >= COMMON_SETTINGS.items()
        assert folder.is_dir()
    assert not folder.exists()


def test_two_fronts_on_one_machine_share_no_file_and_no_port() -> None:
    with front_environment(Front.HAPROXY) as one, front_environment(Front.HAPROXY) as other:
        shared = {name for name in one if one[name] == other[name]}
    assert not [name for name in shared if any(word in name for word in ("_PORT", "SOCKET", "STATE", "LOC"))]
    for variables in (one, other):  # none by chance: each has its own from a block that it holds
        ports = {name.removeprefix("RAY_SERVE_"): int(value) for name, value in variables.items() if "_PORT" in name}
        http, after = ports["DIRECT_INGRESS_MIN_HTTP_PORT"], ports["DIRECT_INGRESS_MAX_HTTP_PORT"]
        own = [port for name, port in ports.items() if "DIRECT_INGRESS" not in name]
        assert len(set(own)) == 4
        assert all(after < port < http - 1 + PORTS_OF_A_BLOCK for port in own)


def test_the_first_signal_asks_for_an_end_and_the_second_insists() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        signals.looks_begin()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.wanted.wait(1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_ends_at_once_what_has_nothing_to_end_in_order() -> None:
    with StopSignals() as signals:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert not signals.wanted.is_set()


def test_a_setup_error_is_found_in_what_serve_tells() -> None:
    told = (
        "The deployment failed to start 1 times in a row.\n"
        "ray::ServeReplica:raycomb:Worker.initialize() (pid=1)\n"
        '  File "worker.py", line 1, in __init__\n'
        "planner.errors.InvalidCheckpoint: m.gguf is not whole\n"
    )
    error = setup_error_in(told)
    assert isinstance(error, InvalidCheckpoint)
    assert error.message == "m.gguf is not whole"
    assert setup_error_in("planner.errors.WorkerLost: gone\nValueError: x") is None
    assert isinstance(setup_error_in("planner.errors.SetupError: x"), SetupError)


def test_the_application_is_refused_a_setting_that_it_does_not_know() -> None:
    with pytest.raises(InvalidConfiguration, match=r"engine\.max_cell: unknown setting"):
        service_config({"engine": {"model": "m", "max_cell": 1}})
    with pytest.raises(InvalidConfiguration, match="num_workers must be greater than or equal to 1, not 0"):
        service_config({"engine": {"model": "m"}, "num_workers": 0})


def test_a_key_in_the_place_of_its_hash_is_not_told() -> None:
    with pytest.raises(InvalidConfiguration, match="sha256 must match pattern") as told:
        service_config({"engine": {"model": "m"}, "http": {"keys": [{"sha256": "rc-in-plain-words"}]}})
    assert "plain-words" not in told.value.message


def test_the_deployed_yaml_is_a_valid_service() -> None:
    content = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    (application,) = content["applications"]
    config = service_config(application["args"])
    assert application["import_path"] == "cluster.app:build"
    assert config.model_name == "smollm2-135m"


def test_without_a_cluster_each_service_makes_a_secret_of_its_own_and_does_not_show_it() -> None:
    one, other = (service_config({"engine": {"model": "m"}}) for _ in range(2))
    assert one.secret != other.secret
    assert len(one.secret.get_secret_value()) == 64
    assert one.secret.get_secret_value() not in repr(one)


def test_the_keys_of_clients_are_not_shown_either() -> None:
    config = service_config({"engine": {"model": "m"}, "http": {"api_keys": ["sk-hidden"]}})
    assert [key.get_secret_value() for key in config.http.api_keys] == ["sk-hidden"]
    assert "sk-hidden" not in f"{config!r} {config} {config.model_dump()}"
    with pytest.raises(InvalidConfiguration) as refused:
        service_config({"engine": {"model": "m"}, "http": {"api_keys": ["sk-hidden", ""]}})
    assert "sk-hidden" not in str(refused.value)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/Tiny-1B/", "Tiny-1B"),
        ("/models/Tiny-1B.gguf", "Tiny-1B"),
        ("Tiny-1B.gguf", "Tiny-1B"),
        ("owner/Tiny-1B", "owner/Tiny-1B"),
        ("smollm2-135m", "smollm2-135m"),
    ],
)
def test_a_service_answers_with_a_hub_id_as_it_is_and_with_the_last_part_of_a_path(model: str, name: str) -> None:
    assert service_config({"engine": {"model": model}}).model_name == name


@pytest.mark.parametrize("path", ["no.such:thing", "cluster.config:nothing", "cluster.config:BUILD_EXECUTOR"])
def test_an_executor_that_cannot_be_imported_is_refused(path: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"executor {path}"):
        load_executor_factory(path)


def test_a_service_is_not_changed_by_deciding_its_device() -> None:
    config = ServiceConfig.model_validate({"engine": {"model": "m"}})
    assert config.on("cpu").engine.device == "cpu"
    assert config.engine.device == "auto"
    assert config.on("cpu").secret == config.secret


@pytest.mark.parametrize(
    ("device", "resources", "decided"),
    [
        ("auto", {}, "cpu"),
        ("auto", {"CPU": 8.0}, "cpu"),
        ("auto", {"GPU": 2.0}, "cuda"),
        ("cpu", {"GPU": 2.0}, "cpu"),
        ("cuda", {}, "cuda"),
    ],
)
def test_auto_is_cuda_where_the_cluster_has_gpus(device: str, resources: dict[str, float], decided: str) -> None:
    config = service_config({"engine": {"model": "m", "device": device}, "num_workers": 2})
    assert decide_device(config, resources) == decided


def test_fewer_gpus_than_workers_is_a_question_and_not_a_guess() -> None:
    config = service_config({"engine": {"model": "m"}, "num_workers": 2})
    with pytest.raises(InvalidConfiguration, match="2 workers need a GPU each and the cluster has 1"):
        decide_device(config, {"GPU": 1.0})


def test_a_cluster_of_this_machine_alone_waits_for_no_gpu_that_it_lacks() -> None:
    config = service_config({"engine": {"model": "m", "device": "cuda"}, "num_workers": 2})
    check_gpus(config, {"GPU": 2.0})
    with pytest.raises(InvalidConfiguration, match="workers need 2 GPUs, and this machine has 1 that Ray knows of"):
        check_gpus(config, {"GPU": 1.0})
    check_gpus(service_config({"engine": {"model": "m", "device": "cpu"}}), {})


def test_a_secret_that_was_given_is_not_replaced_by_the_clusters() -> None:
    made = service_config({"engine": {"model": "m"}})
    given = service_config({"engine": {"model": "m"}, "secret": "mine"})
    assert made.with_secret("shared").secret.get_secret_value() == "shared"
    assert made.with_secret(None).secret == made.secret
    assert given.with_secret("shared").secret.get_secret_value() == "mine"


def test_workers_that_run_the_same_may_differ_in_how_many_they_run() -> None:
    def program(**engine: object) -> str:
        return service_config({"engine": {"model": "m", **engine}}).program

    assert program() == program(max_num_seqs=4, max_cells=100)
    assert len({program(), program(model="n"), program(load_format="dummy"), program(seed=1)}) == 4


@pytest.mark.parametrize("command", ["run", "bench"])
def test_the_other_commands_are_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: raycomb {command}" in capsys.readouterr().out


@pytest.mark.parametrize("told", ["The current node timed out during startup.\nThis could happen", ""])
def test_a_ray_that_does_not_start_is_told_in_one_line(told: str) -> None:
    def start() -> None:
        raise Exception(told)

    with pytest.raises(SetupError, match=r"^Ray did not start: [^\n]+$") as error:
        start_ray(start)
    assert (told.partition("\n")[0] or "Exception") in error.value.message


CTRL_C_AT_THE_FIRST_IMPORT = """
import sys

class AtTheFirstImport:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("numpy", "yaml", "planner"):
            raise KeyboardInterrupt

sys.meta_path.insert(0, AtTheFirstImport())
from cluster.cli import main
sys.exit(main(["serve", "--help"]))
"""


def test_ctrl_c_while_the_command_is_still_imported_ends_it_without_a_word() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C_AT_THE_FIRST_IMPORT], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")

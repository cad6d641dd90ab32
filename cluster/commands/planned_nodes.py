"""How many nodes a cluster is meant to have, by the file that `ray up` was given. Free of Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from planner.errors import InvalidConfiguration


@dataclass(frozen=True, slots=True)
class PlannedNodes:
    """The least number of nodes, the head among them, and their addresses where the file has them."""

    num_nodes: int
    addresses: frozenset[str] = frozenset()


def planned_nodes(path: Path) -> PlannedNodes:
    """Of a cluster's file as somebody wrote it, or as `ray up` leaves it at the head (~/ray_bootstrap_config.yaml).

    Raises `InvalidConfiguration` where that cannot be read or is no such file.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InvalidConfiguration(
            f"the cluster's file {path} cannot be read: {error.strerror}", param="cluster"
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidConfiguration(f"the cluster's file {path} is not YAML: {error}", param="cluster") from error
    try:
        return _planned(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidConfiguration(f"{path} is no file for `ray up`: {error!r}", param="cluster") from error


def _planned(content: dict[str, Any]) -> PlannedNodes:
    provider = content["provider"]
    is_local = provider["type"] == "local"
    addresses = frozenset([provider["head_ip"], *provider["worker_ips"]]) if is_local else frozenset()
    types = content.get("available_node_types")
    if types is not None:
        num_workers = sum(node_type.get("min_workers", 0) for node_type in types.values())
    else:  # a local provider that Ray has not filled in: every machine joins unless the file says otherwise
        num_workers = content.get("min_workers", len(provider["worker_ips"]))
    return PlannedNodes(1 + num_workers, addresses if len(addresses) == 1 + num_workers else frozenset())

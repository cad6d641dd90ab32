"""The version has one source, and everybody tells it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from cluster.version import VERSION, versions

ROOT = Path(__file__).parent.parent


def test_the_distribution_takes_its_version_from_where_we_say_it() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in told["project"]["dynamic"]
    assert "version" not in told["project"]
    module, _, name = told["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    assert (module, name) == ("cluster.version", "VERSION")
    assert json.loads((ROOT / "protos" / "openapi.json").read_text())["info"]["version"] == VERSION


def test_the_command_tells_it_with_those_beneath_it_and_imports_none_of_them() -> None:
    program = (
        "import sys\nfrom cluster.cli import main\n"
        "try:\n    main(['--version'])\n"
        "except SystemExit as end:\n    print(end.code, {'torch', 'ray'} & set(sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    of_ray, of_torch = metadata.version("ray"), metadata.version("torch")
    line = f"raycomb {VERSION} (python {platform.python_version()}, ray {of_ray}, torch {of_torch})"
    assert told.stdout == f"{line}\n0 set()\n"


def test_versions_of_all_nodes_can_be_compared() -> None:
    assert versions().keys() == {"python", "raycomb", "ray", "torch"}
    assert None not in versions().values()

"""Imports run in one direction: planner, protos, worker, cluster. The gateway's process never holds torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("planner", "protos", "worker", "cluster", "tests", "benchmarks")
ALLOWED_OURS = {
    "planner": {"planner"},
    "protos": {"protos"},
    "worker": {"worker", "planner", "protos"},
    "cluster": {"cluster", "worker", "planner", "protos"},
}
ALLOWED_OTHERS = {
    "planner": {"numpy"},
    "protos": {"google", "grpc", "grpc_tools", "pydantic", "pydantic_core"},
    "worker": {
        "numpy",
        "torch",
        "torchao",
        "triton",
        "numba",
        "llvmlite",
        "safetensors",
        "gguf",
        "pydantic",
        "grpc",
        "google",
        "llguidance",
        "opentelemetry",
    },
}
TORCH_FREE_WORKER = (
    "worker.config",
    "worker.engine",
    "worker.executor",
    "worker.gguf_layout",
    "worker.gguf_tensors",
    "worker.grammars",
    "worker.models.config",
    "worker.models.lora_config",
    "worker.models.safetensors_files",
    "worker.outbox",
    "worker.programs.asked",
    "worker.queue_rate",
    "worker.request_spans",
    "worker.serving",
    "worker.settings_check",
    "worker.tls",
    "worker.tracing",
    "worker.wire",
)


def imported_modules(path: Path) -> set[str]:
    """Every module named by an import statement anywhere in the file, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return names


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", sorted(ALLOWED_OURS))
def test_a_package_imports_only_layers_below_it(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        for name in imported_modules(path)
        if name.split(".")[0] in OURS and name.split(".")[0] not in ALLOWED_OURS[package]
    ]
    assert not wrong


@pytest.mark.parametrize("package", sorted(ALLOWED_OTHERS))
def test_a_package_stands_only_on_the_libraries_of_its_layer(package: str) -> None:
    allowed = ALLOWED_OTHERS[package] | ALLOWED_OURS[package] | set(sys.stdlib_module_names)
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        for name in imported_modules(path)
        if name.split(".")[0] not in allowed
    ]
    assert not wrong


def modules_after_import(*modules: str) -> set[str]:
    code = f"import sys, importlib; [importlib.import_module(m) for m in {modules!r}]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_planner_loads_neither_torch_nor_ray() -> None:
    assert not {"torch", "ray"} & modules_after_import("planner.planner")


def test_the_torch_free_part_of_the_worker_loads_neither_torch_nor_ray() -> None:
    assert not {"torch", "ray"} & modules_after_import(*TORCH_FREE_WORKER)


def test_the_executor_side_of_the_worker_does_not_load_ray() -> None:
    assert "ray" not in modules_after_import("worker.program")


def test_the_gateway_and_the_command_never_load_torch() -> None:
    assert not {"torch", "transformers"} & modules_after_import("cluster.gateway", "cluster.app", "cluster.cli")


def test_the_import_check_sees_a_violation(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f():\n    from torch.nn import Linear\n    return Linear\n")
    assert "torch.nn" in imported_modules(tmp_path / "bad.py")

"""Regenerates the Python stubs of every .proto file of this package: `python -m protos.generate`.

The stubs are committed, so that nobody needs the compiler to install Raycomb; a test regenerates and compares.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def generate(destination: Path) -> list[Path]:
    """Write `destination/protos/*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py`; return their paths, sorted.

    The compiler runs from the package's parent folder, so that the stubs import each other as `from protos import ...`.
    Raises `RuntimeError` when the compiler refuses a file.
    """
    from grpc_tools import protoc

    names = sorted(path.name for path in PACKAGE.glob("*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={PACKAGE.parent}",
        f"--proto_path={resources.files('grpc_tools') / '_proto'}",
        f"--python_out={destination}",
        f"--pyi_out={destination}",
        f"--grpc_python_out={destination}",
        *(f"{PACKAGE.name}/{name}" for name in names),
    ]
    status = protoc.main(arguments)
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")
    return sorted((destination / PACKAGE.name).glob("*_pb2*"))


if __name__ == "__main__":
    for stub in generate(PACKAGE.parent):
        sys.stdout.write(f"{stub.name}\n")

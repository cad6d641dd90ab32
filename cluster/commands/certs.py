"""`raycomb certs`: makes a certificate authority, and the certificates of data plane and front."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.access.certificates import AUTHORITY_KEY, make_certificates
from planner.errors import InvalidConfiguration

DEFAULT_DAYS = 365


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="where the files go; none that is there is overwritten"
    )
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="a name or address that clients use: also makes front.pem; repeatable",
    )
    parser.add_argument("--days", type=int, default=DEFAULT_DAYS, metavar="N", help="how long they hold")


def execute(args: argparse.Namespace) -> int:
    if args.days < 1:
        raise InvalidConfiguration(f"--days must be at least 1, not {args.days}", param="days")
    for path in make_certificates(args.folder, args.name, args.days):
        print(path)
    print(f"Keep {AUTHORITY_KEY} away from the nodes; all the others go to every node.")
    return 0

"""`raycomb keys`: makes an API key, and the entry for `--api-keys-file` that knows only its hash."""

from __future__ import annotations

import argparse
import hashlib
import secrets

import yaml
from pydantic import ValidationError

from cluster.api_settings import KeySettings
from cluster.commands.help_format import flag_of
from cluster.setting_faults import told_fault
from planner.errors import InvalidConfiguration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", metavar="NAME", help="on whose account its requests run, whatever they say")
    parser.add_argument("--max-open-requests", type=int, metavar="N", help="that may be open at once at a gateway")
    parser.add_argument("--requests-per-minute", type=int, metavar="N", help="that may come to a gateway")


def execute(args: argparse.Namespace) -> int:
    """Raises `InvalidConfiguration` for a tenant or a limit that is none."""
    key = f"rc-{secrets.token_urlsafe(32)}"
    settings = {
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "tenant": args.tenant,
        "max_open_requests": args.max_open_requests,
        "requests_per_minute": args.requests_per_minute,
    }
    try:
        entry = KeySettings.model_validate(settings).model_dump(exclude_none=True)
    except ValidationError as fault:
        name = str(fault.errors()[0]["loc"][0])
        raise InvalidConfiguration(told_fault(fault, flag_of(name)), param=name) from fault
    print(f"# The key, told this once: {key}")
    print(yaml.safe_dump([entry], sort_keys=False), end="")
    return 0

"""A script that runs HAProxy with what Serve's configuration for it leaves open, and Serve has no settings for."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Final

from cluster.errors import envelope, retry_after_s
from cluster.serving import haproxy_watch
from planner.errors import Unavailable

HEADERS_WITHIN_S: Final = 10
"""A client has so long for the headers of a request; bodies have a limit of their own at the gateway."""

LOOPBACK: Final = "127.0.0.1"
"""Where Serve, its gateways and its proxy in Python listen when clients come to HAProxy alone."""

NO_GATEWAY: Final = Unavailable("no gateway could answer: all are starting or gone, or this one went meanwhile")

DONE: Final = "# set right for Raycomb"


def haproxy_script(
    folder: Path,
    binary: str,
    *,
    listen_at: str | None = None,
    headers_within_s: int = HEADERS_WITHIN_S,
    ends_with_service: bool = False,
) -> Path:
    """Writes it into `folder`: a stand-in for `binary` that changes the configuration which Serve has just written.

    * Splicing is off. Serve's template turns it on, and HAProxy 2.8 then misses that a client left while its request,
      whose body came in a packet of its own, was being answered: 13 of 30 such requests ran on to their end.
    * Headers have a time limit. They had an hour, so some thousand idle sockets would take all connections.
    * Statistics are for this host alone.
    * Where no gateway can answer, HAProxy says so in the words of our errors. Serve has it say 500, which to clients of
      gRPC is UNKNOWN; it says 503, and so UNAVAILABLE.
    * With `listen_at`, an address, clients are let in there, and Serve is told `LOOPBACK`: that is where its gateways
      then listen, which know no limit to headers. For a cluster of one host.

    HAProxy ends with the raylet above it, or, outside of Ray, with who started it (`cluster.serving.haproxy_watch`).
    `ends_with_service`: `folder` is of use to that alone, and is removed then.
    """
    (folder / "503.http").write_bytes(nobody_answers())
    changes = [
        rf"s/^  bind \*:\([0-9]*\)$/  bind {LOOPBACK}:\1/",
        rf"s|^    errorfile \([0-9]*\) .*|    errorfile \1 {folder}/503.http|",
    ]
    if listen_at is not None:
        changes.append(rf"s/^    bind {LOOPBACK}:\([0-9]*\)/    bind {bind_address(listen_at)}:\1/")
        changes.append(rf"s/^    bind :\([0-9]*\)$/    bind {LOOPBACK}:\1/")
    limit = rf"s/^defaults$/&\n    timeout http-request {headers_within_s}s/"
    changes.append(rf"$ a {DONE}")
    watcher = shlex.join([sys.executable, "-I", "-S", haproxy_watch.__file__])
    removed = shlex.quote(str(folder)) if ends_with_service else ""
    script = folder / "haproxy"
    script.write_text(
        "#!/bin/sh\n"
        "before=\n"
        "for word; do\n"
        f'  if [ "$before" = -f ] && ! grep -q \'^{DONE}\' "$word"; then\n'
        f'    grep -q \'timeout http-request\' "$word" || sed -i {shlex.quote(limit)} "$word"\n'
        f'    sed -i {" ".join(f"-e {shlex.quote(change)}" for change in changes)} "$word"\n'
        "  fi\n"
        '  before="$word"\n'
        "done\n"
        'watched=$$ owner="${RAY_RAYLET_PID:-$PPID}"\n'
        f"(trap '' INT TERM HUP; exec {watcher} $watched $owner {removed}) &\n"
        f'exec {shlex.quote(binary)} -dS "$@"\n'
    )
    script.chmod(0o755)
    return script


def nobody_answers() -> bytes:
    """A whole HTTP response, as HAProxy's error files are."""
    body = json.dumps(envelope(NO_GATEWAY)).encode()
    lines = ["HTTP/1.1 503 Service Unavailable", "content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"retry-after: {retry_after_s(NO_GATEWAY)}", "connection: close", "", ""]
    return "\r\n".join(lines).encode() + body


def bind_address(host: str) -> str:
    """As HAProxy writes it before a port."""
    if host == "0.0.0.0":
        return "*"
    return f"[{host}]" if ":" in host else host

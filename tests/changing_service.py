"""A program: a service that changes while it is used. It grows and shrinks, is redeployed, and a worker of it hangs.

Run as `python -m tests.changing_service FOLDER FRONT ACT...` by a test, since Ray wants a process of its own. Each line
of its output that begins with `{` is a JSON object with one act's name and what was seen in it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cluster.serving.front import Front, front_environment

NUM_STREAMS = 50


def main() -> None:
    with front_environment(Front(sys.argv[2])) as variables:
        os.environ |= variables | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        from tests.changing_acts import play  # imports Ray, which reads the environment at import

        play(Path(sys.argv[1]), sys.argv[3:])


if __name__ == "__main__":
    main()

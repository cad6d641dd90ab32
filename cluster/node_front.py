"""The environment of a cluster's node, for the front that it has: `eval "$(python -m cluster.node_front)"` before `ray
start`. Serve reads these variables in every process of the cluster, so every node needs them.

For a service of one terminal `cluster.front` does the same, with files and ports of its own.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

from cluster.front import HAPROXY_SETTINGS, RAYLET_SETTINGS, Front, choose_front, haproxy_script

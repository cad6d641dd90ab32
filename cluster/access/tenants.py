"""What a tenant may be called, wherever it is said: in a header, a key's entry or a flag."""

from __future__ import annotations

import re
from typing import Final

from planner.request import MAX_TENANT

GOOD_TENANT: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_TENANT}}}")
A_TENANT: Final = f"one name of at most {MAX_TENANT} printable ASCII characters without spaces"


def tenant_name(name: str) -> str:
    """`name` itself. Raises `ValueError`."""
    if not GOOD_TENANT.fullmatch(name):
        raise ValueError(f"must be {A_TENANT}")
    return name

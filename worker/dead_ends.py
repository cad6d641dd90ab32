"""Why a row had nothing to draw: what its request rules out, by the names that clients know it by.

Not for finding such rows: samplers do that (`worker.sampler`, `worker.cuda.sampler`), on the device of the logits.
Free of torch.
"""

from __future__ import annotations

from planner.errors import NoTokenLeft
from planner.step import Chunk


def no_token_left(chunk: Chunk) -> NoTokenLeft:
    """The error of a chunk that samples, whose logits were finite before its sampling changed them and left no largest
    one that is. `param` is the field of the request that alone is to blame, if one is."""
    sampling = chunk.sampling
    reasons: dict[str | None, str] = {}
    if sampling.grammar is not None:
        reasons[None] = "the grammar"  # clients have several fields for one
    if sampling.bad_words:
        reasons["bad_words"] = f"bad_words ({len(sampling.bad_words)} of them)"
    if chunk.masked:
        reasons["min_tokens"] = f"min_tokens (which keeps back {len(chunk.masked)} stop tokens)"
    if not reasons:  # these rule nothing out by themselves, but may make logits that are not finite
        reasons[None] = "penalties and biases"
    *others, last = reasons.values()
    named = f"{', '.join(others)} and {last}" if others else last
    return NoTokenLeft(
        f"nothing is left to draw at position {chunk.start + chunk.length} once {named} had a say",
        param=next(iter(reasons)) if not others else None,
    )

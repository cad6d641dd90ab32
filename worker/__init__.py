"""A GPU worker: tokens in, tokens out. Knows nothing of Ray or HTTP."""

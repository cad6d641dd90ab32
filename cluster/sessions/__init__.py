"""Sessions: histories that clients extend and fork, and who keeps them."""

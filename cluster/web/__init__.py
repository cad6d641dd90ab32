"""The HTTP endpoints: bodies in, answers told as JSON or server-sent events."""

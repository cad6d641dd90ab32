"""Decoders: their configuration, their weights and their maths. They know nothing of requests, cells or batches."""

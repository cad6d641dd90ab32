"""Batches without a service: one engine in this process, from a file of prompts to a file of answers."""

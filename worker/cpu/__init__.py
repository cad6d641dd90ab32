"""Forwards on the CPU: compiled passes and products."""

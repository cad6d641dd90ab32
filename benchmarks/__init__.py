"""Measurements against others, in the same run on the same machine. Run them as modules from the checkout."""

"""Files and batches over HTTP, run in capacity that others leave idle."""

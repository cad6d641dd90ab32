"""Programs: models made ready ahead of time, one file each, that hold compiled methods, weights and metadata."""

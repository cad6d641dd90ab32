"""What the `raycomb` command can do, a module a verb, and what verbs share."""

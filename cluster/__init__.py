"""The service: gateways and workers as one Ray Serve application, and the `raycomb` command."""

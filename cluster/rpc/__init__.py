"""The gRPC service for clients, over the same road as the HTTP endpoints."""

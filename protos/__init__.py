"""The wire: gRPC contracts and the HTTP schema. Generated stubs are never edited; `make protos` writes them."""

"""The interface of a backend, and what every backend shares. No torch, no protobuf, no gRPC."""

"""The interface of a backend, and the code that all backends share. No torch, no protobuf, no gRPC."""

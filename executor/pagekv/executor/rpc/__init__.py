"""The gRPC face of the executor."""

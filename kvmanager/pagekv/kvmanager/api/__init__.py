"""The two gRPC services that clients call."""

"""The three gRPC services that clients call."""

"""Shared by every PageKV process: error statuses, flags, logs and the gRPC server shell."""

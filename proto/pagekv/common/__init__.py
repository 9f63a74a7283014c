"""What every PageKV process shares: error statuses, flags, logs and the gRPC server shell."""

"""The vllm.grpc.engine protocol of an OpenAI gateway, as an adapter without decisions."""

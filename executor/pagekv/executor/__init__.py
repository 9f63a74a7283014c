"""The executor: owns device memory and does what each step says.

rpc        the gRPC service, and its messages to and from the executor's own types
session    one manager's attachment: epochs, streams of steps, the check of every step, worker threads
backend    the interface of a backend, and what all backends share: pool layout, model fingerprint, sampling rules
model      transformers models as the model backends run them: loading, attention interface, description
cpu        the backend of a machine without a GPU, with torch alone
cuda       the backend of a GPU, with the kernels of `pagekv.kernels`
oracle     the backend without a model, which checks every KV decision of the manager

Beside the packages: server (the process), config (flags), machine (memory and cores of the host) and fresh_process (a
new process after the device is lost).
"""

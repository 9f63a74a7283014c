"""The time of a Tokenize call by the kind of its prompt, one call after the other over gRPC: token ids, text, and a
conversation, which goes through the chat template in a process of its own. Medians, and the manager's share in
processor time, its template process included.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc
from support.clients.stack import ORACLE, running_stack
from support.prompts import as_chat, as_prompt

from pagekv.client.cli.terminal import table
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import inference_service_pb2_grpc as pb_grpc

CALLS, WARM = 1000, 100
WORDS = "Hello there, how are you today?"
PROMPTS = {"token ids": as_prompt([1, 2, 3, 4]), "text": as_prompt(WORDS), "conversation": as_chat(("user", WORDS))}


def _processor_s(pid: int) -> float:
    """Of a process and those that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    own = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return own + sum(_processor_s(int(child)) for child in children)


def main() -> None:
    """Prints a row for each kind."""
    rows = []
    with running_stack(ORACLE) as stack, grpc.insecure_channel(stack.target) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        for kind, prompt in PROMPTS.items():
            request, taken = pb.TokenizeRequest(prompt=prompt), []
            for _ in range(WARM):
                stub.Tokenize(request)
            before = _processor_s(stack.manager.pid)
            for _ in range(CALLS):
                begun = time.perf_counter()
                stub.Tokenize(request)
                taken.append(time.perf_counter() - begun)
            used = (_processor_s(stack.manager.pid) - before) / CALLS
            rows.append((kind, f"{statistics.median(taken) * 1e3:.2f}", f"{used * 1e3:.2f}"))
    print(table(rows, ("prompt", "ms a call", "ms of a processor")))


if __name__ == "__main__":
    main()

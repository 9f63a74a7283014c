"""The time of gRPC for Python by itself, for `bench_split.py`: a server that does nothing but write one small message
after the other to every stream, with the manager's pacing. Prints its port; ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
from stream_load import GENERATE

from pagekv.common.server import SERVER_OPTIONS, run_async
from pagekv.kvmanager.request.wakeups import Wakeups

# As large as a token's message.
MESSAGE = bytes(55)


async def _main() -> int:
    wakeups = Wakeups()

    async def messages(request: bytes, context: Any) -> None:
        while True:
            turn = wakeups.reader()
            wakeups.add(turn)
            await turn
            await context.write(MESSAGE)

    service, method = GENERATE.strip("/").split("/")
    server = grpc.aio.server(options=SERVER_OPTIONS)
    # Any: the type stubs know only blocking handlers.
    handler: Any = grpc.unary_stream_rpc_method_handler
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler(messages)}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
    return 0


if __name__ == "__main__":
    sys.exit(run_async(_main))

"""How long a stream of the client library waits behind the moment at which a manager that was killed serves again.

python tests/bench/bench_kills.py --kills 40. The manager's own start is told apart, since it is the machine's affair.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

from support.clients.stack import ORACLE, running_executor, running_manager

from pagekv.client import PageKVClient


def measure(kills: int) -> list[tuple[float, float]]:
    """Of each kill the seconds until the manager serves again, and from then until the stream's next token."""
    waits, latest, over = [], [0.0], threading.Event()
    with running_executor([*ORACLE, "--step-time-ms", "3"]) as executor, running_manager(executor) as stack:
        client = PageKVClient(stack.target, resume_timeout=600)

        def read() -> None:
            while not over.is_set():
                for _ in client.stream([5, 6, 7], max_tokens=1500, ignore_eos=True):
                    latest[0] = time.monotonic()
                    if over.is_set():
                        break

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        for _ in range(kills):
            while not latest[0]:
                time.sleep(0.002)
            begin, port = time.monotonic(), stack.manager.port
            stack.manager.kill()
            latest[0] = 0.0
            stack.manager.start(port)
            stack.manager.wait_serving()
            served = time.monotonic()
            # Tokens that came before the kill may be read after it.
            while latest[0] < served:
                time.sleep(0.002)
            waits.append((served - begin, latest[0] - served))
            time.sleep(0.3)
        over.set()
        reader.join()
        client.close()
    return waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    waits = measure(parser.parse_args().kills)
    for words, column in (("until the manager served again", 0), ("from then to the next token", 1)):
        seconds = [wait[column] for wait in waits]
        print(f"{words}: median {statistics.median(seconds):.2f} s, most {max(seconds):.2f} s of {len(seconds)} kills")


if __name__ == "__main__":
    main()

"""A rank of a group whose connection to rank 0 goes through a relay (`support/clients/relay.py`), and that may be given
other flags than the rest: the real one but for that. A script with the executor's flags.

RELAY: port of the relay. OTHER_FLAGS: path of a file; its words come behind the flags of every rank but rank 0.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from pagekv.executor import server
from pagekv.executor.ranks import gathering
from pagekv.executor.ranks.link import RankLink


def connected(meeting: gathering.Meeting) -> RankLink | None:
    """Instead of gathering's."""
    try:
        connection = socket.create_connection(("127.0.0.1", int(os.environ["RELAY"])))
        connection.sendall(f"{meeting.host} {meeting.port}\n".encode())
    except OSError:
        return None
    return RankLink(connection)


if __name__ == "__main__":
    if os.environ.get("RANK", "0") != "0":
        gathering._connected = connected
        other = Path(os.environ["OTHER_FLAGS"])
        sys.argv += other.read_text().split() if other.is_file() else []
    sys.exit(server.main())

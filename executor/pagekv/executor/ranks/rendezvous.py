"""The store that torchrun keeps for its ranks: rank 0 writes its address there, and the others read it. Imports
torch.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from pagekv.common.logs import Log
from pagekv.executor.ranks.gathering import JoinTime, Meeting, NoGroup, meeting_at
from pagekv.executor.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = Log(__name__)

# The key in the store with the address of the latest rank 0.
_KEY = "pagekv/rank0"
# The key that is set once all ranks are there, with their number. Only in a store that rank 0 runs, which ends with it.
_COMPLETE = "pagekv/complete"
# The key that is set once ranks of this store have served.
_SERVED = "pagekv/served"
# Seconds between two attempts to reach a store that is not there yet; the least timeout of the store's answers; and the
# least time to connect the process group, however late this rank met the others.
_AGAIN_S, _ANSWER_S, _CONNECT_S = 0.2, 5.0, 5.0


def open_store(world: World, joining: JoinTime) -> Store:
    """The store of this group. Rank 0 runs it if torchrun does not. Raises NoGroup."""
    from torch._C._distributed_c10d import TCPStore

    where = f"MASTER_ADDR {world.address}, MASTER_PORT {world.port}"
    absent = f"{where}: no store of the ranks was found {joining}; is rank 0 missing, or the port closed?"
    keeps = world.rank == 0 and not world.has_store
    # First waits for the port: the store itself would try for more than twice the time, and print a trace of its code.
    while not keeps and not _answers(world.address, world.port):
        if not joining.left_s:
            raise NoGroup(absent)
        time.sleep(_AGAIN_S)
    answer = timedelta(seconds=joining.left_s + _ANSWER_S)
    try:
        return TCPStore(world.address, world.port, is_master=keeps, timeout=answer, wait_for_workers=False)
    # The only common type of the store's errors.
    except RuntimeError as error:
        if keeps:
            raise NoGroup(f"{where}: rank 0 cannot open the ranks' store there; is another rank 0 running?") from error
        raise NoGroup(absent) from error


def listen_as_leader(store: Store, world: World) -> tuple[socket.socket, Meeting]:
    """Opens a socket for the other ranks and writes its address into the store. Raises NoGroup if the store has the
    address of another rank 0 that answers.
    """
    before = _read(store) if store.check([_KEY]) else None
    if before is not None and _answers(before.host, before.port):
        raise NoGroup("two ranks have number 0 (RANK)")
    listener = socket.create_server((_own_address(world), 0), backlog=world.size)
    meeting = meeting_at(listener)
    store.set(_KEY, json.dumps(meeting))
    if world.local_size < world.size:
        log.warning(
            "other machines can connect: steps and collectives between ranks have neither TLS nor a login, so keep "
            "them on a private network",
            listen=f"{meeting.host}:{meeting.port}",
        )
    return listener, meeting


def end_meeting(store: Store, meeting: Meeting) -> None:
    """Removes the address of this rank 0, which no longer listens, from the store. The store outlives it, and later
    another process may have its port.
    """
    # RuntimeError: the store is gone. This rank is about to end, or does not need the store any more.
    with suppress(RuntimeError):
        if store.check([_KEY]) and _read(store) == meeting:
            store.delete_key(_KEY)


def tell_complete(store: Store, world: World) -> None:
    """Tells ranks that come later that the group is complete. Does nothing if torchrun runs the store: after a restart
    the same store has another group.
    """
    if not world.has_store:
        store.set(_COMPLETE, str(world.size))


def find_leader(store: Store, world: World, joining: JoinTime) -> Meeting:
    """The meeting of the latest rank 0. Raises NoGroup if no rank 0 writes one in time, or if the group is complete
    without this rank.
    """
    try:
        if store.check([_COMPLETE]):
            which = f"rank {world.rank} of {world.size} (RANK, WORLD_SIZE) is one too many"
            raise NoGroup(f"all {int(store.get(_COMPLETE))} ranks of the group are there: {which}")
        store.wait([_KEY], timedelta(seconds=joining.left_s))
        return _read(store)
    except RuntimeError as error:
        raise NoGroup(f"rank 0 is missing: it did not connect to the ranks' store {joining}") from error


def has_served(store: Store) -> bool:
    """Whether ranks of this store have served before. Always False if rank 0 runs the store, because such ranks are not
    restarted.
    """
    found: bool = store.check([_SERVED])
    return found


def tell_served(store: Store) -> None:
    """Notes in the store, for ranks that are started later, that these ranks have served."""
    with suppress(RuntimeError):
        store.set(_SERVED, "")


def join_process_group(store: Store, world: World, meeting: Meeting, joining: JoinTime, *, gpus: bool = False) -> None:
    """Creates the process group of all ranks of the meeting: gloo for CPU tensors and, if `gpus`, NCCL for GPU tensors,
    which connects at its first use. Raises NoGroup if ranks cannot connect to each other.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if gpus and not dist.is_nccl_available():
        raise NoGroup("--backend cuda: this torch has no NCCL, which ranks on GPUs need; use PyPI's build for Linux")
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpus else "gloo",
            store=PrefixStore(f"pagekv/{meeting.secret}", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=joining.left_s + _CONNECT_S),
        )
    except RuntimeError as error:
        words = (
            "gloo cannot connect the ranks; is GLOO_SOCKET_IFNAME the network between them, and every port open there?"
        )
        raise NoGroup(f"{words} {str(error).partition(chr(10))[0]}") from error


def limit_collectives(timeout_s: float) -> None:
    """Sets the timeout of the process group's collectives from now on."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timedelta(seconds=timeout_s))


def connect_gpus(index: int) -> None:
    """Makes this GPU the current one of the calling thread and connects it over NCCL to the GPUs of all other ranks,
    which must make the same call. Raises NoGroup.
    """
    import torch
    import torch.distributed as dist

    try:
        torch.cuda.set_device(index)
        ranks = torch.ones(1).cuda(index)
        dist.all_reduce(ranks)
        # int() waits for the device.
        found = int(ranks)
    except RuntimeError as error:
        words = (
            "NCCL cannot connect the ranks' GPUs; is NCCL_SOCKET_IFNAME the network between the machines, and /dev/shm "
            "of a container large enough (1 GiB)? NCCL_DEBUG=INFO says more."
        )
        raise NoGroup(f"{words} {str(error).partition(chr(10))[0]}") from error
    if found != dist.get_world_size():
        raise NoGroup(f"NCCL counts {found} ranks of {dist.get_world_size()}")


def _read(store: Store) -> Meeting:
    return Meeting(*json.loads(store.get(_KEY)))


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def _own_address(world: World) -> str:
    """The address at which other ranks reach this machine: loopback if all ranks are on it, else the address of the
    interface towards the store.
    """
    if world.local_size == world.size:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing.
        probe.connect((world.address, world.port))
        found: str = probe.getsockname()[0]
    return found

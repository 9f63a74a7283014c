"""The scheduler's two queues: waiting sequences, sorted by (rank, arrival, index) per tenant, and the running order:
all sequences that hold blocks, sorted by the same key.

A sequence has blocks as long as it has a place in the running order: until it finishes, is preempted, or the executor
is lost.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from itertools import chain

from pagekv.kvmanager.request.tenant_counts import TenantCounts
from pagekv.kvmanager.scheduling.decode_batch import DecodeBatch
from pagekv.kvmanager.scheduling.fairness.tenant_caps import Cap, RunningRequests
from pagekv.kvmanager.scheduling.fairness.virtual_tokens import VirtualTokens
from pagekv.kvmanager.scheduling.sequence import NO_SEQ_ID, LiveRequest, Seq, SeqStatus, key
from pagekv.kvmanager.scheduling.shared_prefill import SharedPrefill


class WaitingQueue:
    """Sequences that hold no blocks. Some wait for admission, sorted by key per tenant, others for a fork. A preempted
    sequence keeps its key, so it comes before all of its tenant and priority that arrived later. The queue outlives the
    executor.
    """

    def __init__(self) -> None:
        # Waiting sequences by tenant number; no list is empty.
        self._orders: dict[int, list[Seq]] = {}
        self._num_waiting = 0
        # Decides which tenant is next.
        self.served = VirtualTokens()
        # Caps by tenant, and the tenants whose next request would exceed their cap.
        self.caps: dict[int, Cap] = {}
        self._held_back: set[int] = set()
        # Sequences in the state FORKING, by tenant.
        self._forking: TenantCounts[int] = TenantCounts()
        # Requests whose sequence 0 was admitted while others wait for its prompt.
        self.forking: list[LiveRequest] = []

    def __len__(self) -> int:
        return self._num_waiting

    def count(self, tenant: int) -> int:
        """Sequences of a tenant that wait, for admission or for a fork."""
        return len(self._orders.get(tenant, ())) + self._forking[tenant]

    @property
    def num_forking(self) -> int:
        return self._forking.total

    def add(self, request: LiveRequest) -> None:
        """Queues sequence 0 of a new request; the others wait for a fork."""
        self.push(request.sequences[0])
        self.served.sent(request.tenant, len(request.command.prompt_ids))
        self._forking.add(request.tenant, len(request.sequences) - 1)

    def push(self, sequence: Seq) -> None:
        """Makes a sequence that holds no blocks wait for admission: a new or a preempted one."""
        sequence.state = SeqStatus.WAITING
        if sequence.tenant not in self._orders:
            self.served.joined(sequence.tenant)
            if sequence.tenant in self._held_back:
                self.served.allow([sequence.tenant], False)
        self._num_waiting += 1
        insort(self._orders.setdefault(sequence.tenant, []), sequence, key=key)

    def __iter__(self) -> Iterator[Seq]:
        """Sequences that wait for admission, tenant by tenant, each tenant's next one first."""
        return chain.from_iterable(self._orders.values())

    @property
    def tenants(self) -> Set[int]:
        """Tenants with sequences that wait for admission."""
        return self._orders.keys()

    def head(self) -> Seq | None:
        """The next sequence to admit, of the tenant that was served least and is not held back; None: there is none."""
        if len(self._orders) < 2 and not self._held_back:
            for order in self._orders.values():
                return order[0]
            return None
        return min((self._orders[tenant][0] for tenant in self.served.next()), key=key, default=None)

    def hold_back(self, running: RunningRequests) -> None:
        """Holds back tenants whose next request would exceed their cap. Being held back gives no credit afterwards."""
        before, self._held_back = self._held_back, set()
        if self.caps:
            self._held_back = {
                tenant
                for tenant, order in self._orders.items()
                if tenant in self.caps and running.are_above(self.caps[tenant], order[0].request)
            }
        if not before and not self._held_back:
            return
        self.served.allow(self._held_back, False)
        released = [tenant for tenant in before - self._held_back if tenant in self._orders]
        self.served.allow(released, True)
        for tenant in released:
            self.served.joined(tenant)

    def hold_back_behind(self, tenant: int, running: RunningRequests) -> None:
        """`hold_back` for one tenant, after its head was admitted: that changes nothing for other tenants."""
        cap, order = self.caps.get(tenant), self._orders.get(tenant)
        if cap is not None and order is not None and running.are_above(cap, order[0].request):
            self._held_back.add(tenant)
            self.served.allow([tenant], False)

    def take(self, sequence: Seq) -> None:
        """Removes a waiting sequence that is admitted."""
        order = self._orders[sequence.tenant]
        del order[bisect_left(order, sequence.key, key=key)]
        self._num_waiting -= 1
        if not order:
            del self._orders[sequence.tenant]
            self.served.left(sequence.tenant)

    def remove(self, sequence: Seq) -> None:
        """Removes a waiting sequence that ends."""
        if sequence.state is SeqStatus.FORKING:
            self._forking.add(sequence.tenant, -1)
        else:
            self.take(sequence)
        sequence.state = SeqStatus.FINISHED

    # -- forks

    def expect_fork(self, request: LiveRequest) -> None:
        """Notes that sequence 0 was admitted: once its prompt is computed, the others of the request can be forked."""
        if any(sequence.state is SeqStatus.FORKING for sequence in request.sequences):
            self.forking.append(request)

    def take_children(self, request: LiveRequest) -> list[Seq]:
        """Takes out the sequences of a request that wait for a fork; the caller forks or pushes them."""
        if request in self.forking:
            self.forking.remove(request)
        children = [sequence for sequence in request.sequences if sequence.state is SeqStatus.FORKING]
        self._forking.add(request.tenant, -len(children))
        return children


class RunningQueue:
    """The running order of one epoch: a new epoch begins with an empty one. Lists are sorted by key, and read only."""

    def __init__(self, block_size: int) -> None:
        self.batch = DecodeBatch(block_size)
        # RUNNING and DRAINING sequences; and their number by tenant, without zeros.
        self.order: list[Seq] = []
        self.tenants: Counter[int] = Counter()
        # Requests with sequences in `order`.
        self.requests = RunningRequests(block_size)
        # Members of `order` with known tokens left to plan.
        self.prefilling: list[Seq] = []
        # Members of `order` that have yet to enter the executor: beams, which may still need a block, and sequences
        # that were admitted together or share blocks with a sibling.
        self.returning: list[Seq] = []
        # Members of `returning` that wait for a sibling's prefill.
        self.shared_prefill = SharedPrefill(block_size)
        # Seq_ids that the executor still holds and the next step must drop.
        self._finished: list[int] = []

    def is_alone(self, request: LiveRequest) -> bool:
        """Whether no other request holds blocks."""
        return not self.order or self.order[0].request is request is self.order[-1].request

    # -- in

    def add(self, sequence: Seq) -> None:
        """Adds a sequence that has just got its blocks."""
        sequence.state = SeqStatus.RUNNING
        insort(self.order, sequence, key=key)
        self.tenants[sequence.tenant] += 1
        self.requests.add(sequence)

    def add_returning(self, sequence: Seq) -> None:
        """Lets a member of the order enter the executor as soon as there is room."""
        sequence.state = SeqStatus.RUNNING
        insort(self.returning, sequence, key=key)

    def enter(self, sequence: Seq) -> None:
        """Gives a member of the order its seq_id, and begins its prefill."""
        if sequence in self.returning:
            self.returning.remove(sequence)
        self.batch.open(sequence)
        insort(self.prefilling, sequence, key=key)

    def end_prefill(self, sequence: Seq) -> None:
        """Ends a prefill: every known token is planned; the step samples a token or, for a beam, reports candidates."""
        del self.prefilling[bisect_left(self.prefilling, sequence.key, key=key)]
        if sequence.request.search is None:
            self.batch.start_decoding(sequence)
        else:
            # The next token is not the sampled one: the beam leaves after this step and waits for the decision.
            sequence.state = SeqStatus.DRAINING
            self.batch.expect_candidates(sequence)

    # -- out

    def drain(self, sequence: Seq) -> None:
        """Ends a sequence at the executor: its last token is promised. It keeps its blocks until this token arrives."""
        sequence.state = SeqStatus.DRAINING
        self.batch.stop_decoding(sequence)
        self._finished.append(sequence.seq_id)

    def remove(self, sequence: Seq, state: SeqStatus) -> None:
        """The only way out of the order: removes a sequence, whose state becomes `state`, WAITING or FINISHED."""
        self.shared_prefill.hand_over(sequence)
        if sequence.state is SeqStatus.RUNNING and sequence.seq_id != NO_SEQ_ID:
            self._finished.append(sequence.seq_id)
        del self.order[bisect_left(self.order, sequence.key, key=key)]
        self.tenants[sequence.tenant] -= 1
        if not self.tenants[sequence.tenant]:
            del self.tenants[sequence.tenant]
        self.requests.remove(sequence)
        for others in (self.prefilling, self.returning):
            if sequence in others:
                others.remove(sequence)
        sequence.state = state
        if sequence.seq_id != NO_SEQ_ID:
            self.batch.remove(sequence, finished=state is SeqStatus.FINISHED)

    def take_finished(self, beams: Iterable[int]) -> list[int]:
        """Seq_ids that the executor drops with the step being planned; `beams` are dropped with the next."""
        finished, self._finished = self._finished, list(beams)
        return finished

"""The scheduler's two queues: sequences that wait, in order of (rank, arrival, index) for each tenant, and sequences
that hold blocks, in that order over all.

Blocks come with a place in the running order and go back when the place is given up: by finish, by preemption or with
the executor.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from itertools import chain

from pagekv.kvmanager.scheduling.decode_batch import DecodeBatch
from pagekv.kvmanager.scheduling.fairness.tenant_caps import Cap, RunningRequests
from pagekv.kvmanager.scheduling.fairness.virtual_tokens import VirtualTokens
from pagekv.kvmanager.scheduling.sequence import NO_SEQ_ID, LiveRequest, Seq, SeqStatus, key
from pagekv.kvmanager.scheduling.shared_prefill import SharedPrefill


class WaitingQueue:
    """Sequences that hold no blocks: those that wait for admission, sorted by key for each tenant, and those that wait
    for a fork. A preempted sequence keeps its key, so it stands before everything of its tenant and priority that
    arrived later. The queue outlives the executor.
    """

    def __init__(self) -> None:
        # By a tenant's number; none is empty.
        self._orders: dict[int, list[Seq]] = {}
        # Says which tenant is next.
        self.served = VirtualTokens()
        # By tenant; and those tenants whose next request would be above theirs.
        self.caps: dict[int, Cap] = {}
        self._held_back: set[int] = set()
        # Sequences in the state FORKING, by tenant.
        self._forking: Counter[int] = Counter()
        # Requests whose sequence 0 was admitted while others wait for its prompt.
        self.forking: list[LiveRequest] = []

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    def count(self, tenant: int) -> int:
        """Sequences of a tenant that wait, for admission or for a fork."""
        return len(self._orders.get(tenant, ())) + self._forking[tenant]

    @property
    def num_forking(self) -> int:
        return self._forking.total()

    def add(self, request: LiveRequest) -> None:
        """Queues sequence 0 of a new request; the others wait for a fork."""
        self.push(request.sequences[0])
        self.served.sent(request.tenant, len(request.command.prompt_ids))
        self._forking[request.tenant] += len(request.sequences) - 1

    def push(self, sequence: Seq) -> None:
        """Makes a sequence that holds nothing wait for admission: a new one, or one that was preempted."""
        sequence.state = SeqStatus.WAITING
        if sequence.tenant not in self._orders:
            self.served.joined(sequence.tenant)
            if sequence.tenant in self._held_back:
                self.served.allow([sequence.tenant], False)
        insort(self._orders.setdefault(sequence.tenant, []), sequence, key=key)

    def __iter__(self) -> Iterator[Seq]:
        """Sequences that wait for admission; of one tenant the next first."""
        return chain.from_iterable(self._orders.values())

    @property
    def tenants(self) -> Set[int]:
        """Tenants of which something waits for admission."""
        return self._orders.keys()

    def head(self) -> Seq | None:
        """The next to admit, or None: of the tenant that was served least, none of those held back."""
        if len(self._orders) < 2 and not self._held_back:
            for order in self._orders.values():
                return order[0]
            return None
        return min((self._orders[tenant][0] for tenant in self.served.next()), key=key, default=None)

    def hold_back(self, running: RunningRequests) -> None:
        """Looks which tenants are at their caps with these requests. For the time that it was, none has a credit."""
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
        """`hold_back` after a head of this tenant was admitted, which changes nothing for others."""
        cap, order = self.caps.get(tenant), self._orders.get(tenant)
        if cap is not None and order is not None and running.are_above(cap, order[0].request):
            self._held_back.add(tenant)
            self.served.allow([tenant], False)

    def take(self, sequence: Seq) -> None:
        """A sequence that waits is admitted."""
        order = self._orders[sequence.tenant]
        del order[bisect_left(order, sequence.key, key=key)]
        if not order:
            del self._orders[sequence.tenant]
            self.served.left(sequence.tenant)

    def remove(self, sequence: Seq) -> None:
        """Ends a sequence that waits."""
        if sequence.state is SeqStatus.FORKING:
            self._forking[sequence.tenant] -= 1
        else:
            self.take(sequence)
        sequence.state = SeqStatus.FINISHED

    # -- forks

    def expect_fork(self, request: LiveRequest) -> None:
        """Sequence 0 was admitted: once the prompt is computed, the sequences that wait for that can be forked."""
        if any(sequence.state is SeqStatus.FORKING for sequence in request.sequences):
            self.forking.append(request)

    def take_children(self, request: LiveRequest) -> list[Seq]:
        """The sequences of a request that wait for a fork, which wait no longer: the caller holds or pushes them."""
        if request in self.forking:
            self.forking.remove(request)
        children = [sequence for sequence in request.sequences if sequence.state is SeqStatus.FORKING]
        self._forking[request.tenant] -= len(children)
        return children


class RunningQueue:
    """The order of one epoch: a new epoch begins with an empty one. Lists are sorted by key, and for reading only."""

    def __init__(self, block_size: int) -> None:
        self.batch = DecodeBatch(block_size)
        # RUNNING and DRAINING; and how many of them each tenant has, if any.
        self.order: list[Seq] = []
        self.tenants: Counter[int] = Counter()
        # Requests of which there are members.
        self.requests = RunningRequests(block_size)
        # Members of `order` with known tokens left to plan.
        self.prefilling: list[Seq] = []
        # Members of `order` that are to enter the executor: beams, which may yet need a block, and arrivals that share
        # blocks with another.
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
        """Gives a place to a sequence that has just got its blocks."""
        sequence.state = SeqStatus.RUNNING
        insort(self.order, sequence, key=key)
        self.tenants[sequence.tenant] += 1
        self.requests.add(sequence)

    def add_returning(self, sequence: Seq) -> None:
        """A member of the order is to enter the executor as soon as there is room."""
        sequence.state = SeqStatus.RUNNING
        insort(self.returning, sequence, key=key)

    def enter(self, sequence: Seq) -> None:
        """Gives a member of the order its seq_id; its known tokens are to be computed."""
        if sequence in self.returning:
            self.returning.remove(sequence)
        self.batch.open(sequence)
        insort(self.prefilling, sequence, key=key)

    def end_prefill(self, sequence: Seq) -> None:
        """Every known token is planned; the step samples a token, which a beam answers with candidates for."""
        del self.prefilling[bisect_left(self.prefilling, sequence.key, key=key)]
        if sequence.request.search is None:
            self.batch.start_decoding(sequence)
        else:
            # The next token is not the sampled one: the beam leaves after this step and waits for the decision.
            sequence.state = SeqStatus.DRAINING
            self.batch.expect_candidates(sequence)

    # -- out

    def drain(self, sequence: Seq) -> None:
        """Every token is promised: the sequence leaves the executor, and has its blocks until the last comes."""
        sequence.state = SeqStatus.DRAINING
        self.batch.stop_decoding(sequence)
        self._finished.append(sequence.seq_id)

    def remove(self, sequence: Seq, state: SeqStatus) -> None:
        """The one way out of the order: the sequence goes into `state`, WAITING or FINISHED."""
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

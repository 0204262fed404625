"""What both sides of an edge remember when it is lost, so that a push that is sent again is counted once.

A step is one push of a node, or one step without a gradient. A leaf begins the next step only after the weights of the last
have come, so at most one step is pending. The model's parts are posted in order. Two numbers therefore say everything that the
home has: the last step that is posted, and how many parts of the next one are.

This file does no input or output: agents and the simulated world of `fastps chaos --nodes` use the same code.
"""

from fastps.errors import ProtocolError
from fastps.network.messages import Header, Kind


class LeafSession:
    """The leaf's side."""

    def __init__(self, incarnation: int, parts: int) -> None:
        self.incarnation = incarnation  # a random number of the agent, by which the home knows it again
        self.parts = parts  # of the model
        self.step = 0  # the last that was begun in the present lane
        self.answered = 0  # the last step whose weights have come
        self.part = 0  # the first of the pending step that the home does not have
        self.lane = 0  # how many lanes the home has given this node, as far as this side knows
        self.version = 0  # the home's, of the weights that came last
        self.dropped = 0  # the steps that were begun and never came to the home, because the node was lost meanwhile
        self.must_fetch = True  # whether the home has given a new lane, whose weights come before the next step

    @property
    def is_pending(self) -> bool:
        """Whether a step waits for its weights."""
        return self.answered < self.step

    def begin(self) -> int:
        """Begin the next step. Returns its number."""
        assert not (self.is_pending or self.must_fetch)
        self.step += 1
        self.part = 0
        return self.step

    def hello(self) -> Header:
        """The first message over a new edge."""
        return Header(Kind.HELLO, incarnation=self.incarnation, lane=self.lane)

    def welcome(self, answer: Header) -> None:
        """Take the home's answer to HELLO. Raises ProtocolError for one that contradicts what this side remembers."""
        if answer.kind == Kind.WELCOME:
            self.dropped += self.is_pending and answer.step < self.step
            self.step = self.answered = self.part = 0
            self.lane, self.must_fetch = answer.lane, True
            return
        has_all, begun = answer.step == self.step, answer.step == self.step - 1 and self.is_pending
        if answer.kind != Kind.RESUME or answer.lane != self.lane or not (has_all or begun):
            raise ProtocolError(
                f"expected node 0 to go on at step {self.step} or before it, found {answer.kind.name} with step {answer.step}"
            )
        if self.is_pending:
            self.part = self.parts if has_all else answer.part

    def check_weights(self, answer: Header, step: int) -> None:
        """Check the header of weights that answer a step, 0 for those fetched or the last. Raises ProtocolError."""
        if answer.kind != Kind.WEIGHTS or answer.step != step:
            raise ProtocolError(f"expected the weights of step {step}, found {answer.kind.name} with step {answer.step}")
        if answer.version < self.version:
            raise ProtocolError(f"expected version {self.version} or a later one, found version {answer.version}")

    def took(self, version: int) -> None:
        """Say that the weights have come whole."""
        self.answered, self.must_fetch, self.version = self.step, False, version


class HomeSession:
    """The home's side: what it has of one lane of a node."""

    def __init__(self, incarnation: int, parts: int) -> None:
        self.incarnation = incarnation  # of the agent that owns the lane
        self.parts = parts  # of the model
        self.posted = 0  # parts, over all steps
        self.lane = 0  # how many lanes the node has had, with this one

    @property
    def step(self) -> int:
        """The last step of which all parts are posted."""
        return self.posted // self.parts

    def knows(self, hello: Header) -> bool:
        """Whether the agent that says HELLO owns the lane."""
        return hello.incarnation == self.incarnation

    def check(self, header: Header) -> None:
        """Check that a step is the present one or the next, and leaves no part out. Raises ProtocolError."""
        oldest = self.step + (self.posted % self.parts > 0)
        leaves_none_out = (header.step - 1) * self.parts + header.part <= self.posted
        if not (header.step >= max(1, oldest) and 0 <= header.part <= self.parts and leaves_none_out):
            raise ProtocolError(
                f"expected step {self.step + 1} from part {self.posted % self.parts} on, found step {header.step} from part"
                f" {header.part} on"
            )

    def is_missing(self, step: int, part: int) -> bool:
        """Whether a part of a step is not posted yet. What is not missing is read and thrown away."""
        return (step - 1) * self.parts + part >= self.posted

    def post(self, part: int) -> None:
        """Count one part of the next step as posted."""
        assert part == self.posted % self.parts
        self.posted += 1


class NodeRecord:
    """What the home remembers of one node, whichever agent speaks for it."""

    def __init__(self) -> None:
        self.session: HomeSession | None = None  # of the node's lanes; None before it has joined and once it is lost
        self._lost: dict[int, HomeSession] = {}  # by lane: those that the node has had since it last heard of one
        self._lanes = 0

    def is_owner(self, hello: Header) -> bool:
        """Whether HELLO comes from the agent that owns the node's lanes."""
        return self.session is not None and self.session.knows(hello)

    def begin(self, session: HomeSession) -> None:
        """Take new lanes."""
        assert self.session is None
        self._lanes += 1
        session.lane = self._lanes
        self.session = session

    def answer(self, hello: Header) -> Header:
        """The answer to the owner's HELLO. If it has not heard of its new lanes, it hears of them again."""
        session = self.session
        assert session is not None
        if hello.lane == session.lane:
            self._lost.clear()
            return Header(Kind.RESUME, step=session.step, part=session.posted % session.parts, lane=session.lane)
        lost = self._lost.get(hello.lane)
        had = lost.step if lost is not None and lost.knows(hello) else 0
        return Header(Kind.WELCOME, step=had, lane=session.lane)

    def lose(self) -> None:
        """Forget the lanes: their owner gets new ones, and what it had begun does not count."""
        if self.session is not None:
            self._lost[self.session.lane] = self.session
        self.session = None

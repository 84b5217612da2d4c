"""What the engine needs of a model family, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, device

from ditpack.packing.layout import Row
from ditpack.request import Request


class Member(Protocol):
    """One request on its way from noise to latents."""

    @property
    def request(self) -> Request: ...

    @property
    def rows(self) -> tuple[Row, ...]:
        """Its rows in the next step."""

    @property
    def tokens(self) -> int:
        """Tokens of these rows."""

    @property
    def steps_left(self) -> int: ...


class Pack(Protocol):
    """Members laid out for the steps that they take together."""

    @property
    def steps_left(self) -> int:
        """How many steps it can take before it has to be built anew."""

    @property
    def pad_tokens(self) -> int:
        """Tokens of its forward that are padding."""


MemberT = TypeVar("MemberT", bound=Member)
PackT = TypeVar("PackT", bound=Pack)


class Sampler(Protocol[MemberT, PackT]):
    """Begins, packs, steps and finishes the requests of one model on one device.

    The engine's thread owns it; only ``conditioning`` and ``rows`` may be called from any thread. A request is what the
    family's resolver makes, a conditioning what ``conditioning`` returns; nobody else looks into either.
    """

    @property
    def device(self) -> device: ...

    @property
    def ready(self) -> bool:
        """Whether it can take requests now. Any thread may ask."""

    @property
    def graph_replays(self) -> int:
        """How many forwards so far ran from a captured CUDA graph."""

    @property
    def eager_forwards(self) -> int:
        """How many ran eagerly."""

    def conditioning(self, request: Any, read: Callable[[str], Tensor]) -> Any:
        """What the model is conditioned on, from the input tensors that ``read`` returns by their names on the wire.

        Raises:
            InvalidRequest: an input is missing or does not fit.
        """

    def rows(self, request: Any, conditioning: Any) -> tuple[Row, ...]:
        """The rows that ``request`` begins with.

        Raises:
            InvalidRequest: the conditioning does not fit the model or the request.
        """

    def example(self, image_tokens: int) -> tuple[Any, Any]:
        """A request of about that many image tokens, without guidance, and its conditioning: to warm up and to measure.

        It passes every check that a client's request meets.
        """

    def bind_thread(self) -> None:
        """Make this sampler's device the calling thread's own."""

    def begin(self, request: Any, conditioning: Any) -> MemberT:
        """Draw the noise of ``request`` and bring its inputs to the device. Raises as ``rows``."""

    def pack(self, members: Sequence[MemberT]) -> PackT:
        """Lay ``members`` (at least one, none of them done) out for the steps they will take together."""

    def step(self, pack: PackT) -> None:
        """Advance every member by one step, all or none: if this raises, nobody has moved."""

    def throttle(self) -> None:
        """Wait until the device has finished the step before the one just enqueued."""

    def check_device(self) -> None:
        """Raise if the device can no longer be used; called after a failed step only."""

    def preview(self, member: MemberT) -> Callable[[], Tensor]:
        """As ``finish``, for the latents that the last step predicts the member to end with."""

    def finish(self, member: MemberT) -> Callable[[], Tensor]:
        """Start bringing the finished latents to the host; the returned function waits for them, on any thread."""

    def close(self) -> None:
        """Give back what does not go with this object; called last."""

"""One step for many requests, in which a request that breaks the forward breaks only itself."""

from __future__ import annotations

from collections.abc import Sequence

from ditpack.sampling.sampler import MemberT, PackT, Sampler


def advance(
    sampler: Sampler[MemberT, PackT], members: Sequence[MemberT], pack: PackT | None = None
) -> tuple[PackT | None, list[tuple[MemberT, Exception]]]:
    """Move every member one step on, by way of ``pack`` if it is theirs already, else of a new one.

    When the forward raises, each half of the members gets a forward of its own, and so on down to single requests: the
    guilty are returned with their errors, all others have moved exactly one step. A device that is out of memory is met
    the same way, by smaller forwards.

    Returns:
        The pack that can take the next step (None when it has to be built anew) and the failed members.

    Raises:
        Exception: whatever ``check_device`` raises when the device itself is lost.
    """
    try:
        pack = pack or sampler.pack(members)
        sampler.step(pack)
    except Exception as error:
        sampler.check_device()
        if len(members) == 1:
            return None, [(members[0], error)]
        middle = len(members) // 2
        return None, [failure for half in (members[:middle], members[middle:]) for failure in advance(sampler, half)[1]]
    return pack, []

"""One ``execute``, many requests: each is answered for itself, and none can fail another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import triton_python_backend_utils as pb_utils

from ditpack.errors import DeadlinePassed
from ditpack.request import Request
from ditpack.tritonserver.outcomes import Outcomes

Item = TypeVar("Item")
Made = TypeVar("Made")


def check_deadline(request: Request, before: str) -> None:
    """Raise DeadlinePassed when ``request`` came too late for the work named ``before``."""
    if request.expired:
        raise DeadlinePassed(f"DEADLINE_MS = {request.deadline_ms}: the deadline passed before {before} began")


def answer_each(
    requests: Sequence[pb_utils.InferenceRequest],
    outcomes: Outcomes,
    handle: Callable[[pb_utils.InferenceRequest], pb_utils.InferenceResponse],
) -> list[pb_utils.InferenceResponse]:
    """``handle`` every request by itself; what it raises becomes that request's answer."""
    return answer_together(requests, outcomes, read=lambda r: r, run=list, write=lambda _, request: handle(request))


def answer_together(
    requests: Sequence[pb_utils.InferenceRequest],
    outcomes: Outcomes,
    *,
    read: Callable[[pb_utils.InferenceRequest], Item],
    run: Callable[[list[Item]], Sequence[Made]],
    write: Callable[[Item, Made], pb_utils.InferenceResponse],
) -> list[pb_utils.InferenceResponse]:
    """``read`` each request, ``run`` what was read together, ``write`` each response, in the order of ``requests``.

    What ``read`` or ``write`` raises answers that request alone. When ``run`` raises, each item runs by itself, so that
    only the guilty one fails.
    """
    responses: dict[int, pb_utils.InferenceResponse] = {}
    items: dict[int, Item] = {}
    for index, request in enumerate(requests):
        try:
            items[index] = read(request)
        except Exception as error:  # whatever it was, it is this request's answer, logged by outcomes
            responses[index] = outcomes.failure(request.request_id(), error)

    made = _run_isolated(run, list(items.values()), outcomes)
    for (index, item), result in zip(items.items(), made, strict=True):
        request_id = requests[index].request_id()
        if isinstance(result, Exception):
            responses[index] = outcomes.failure(request_id, result)
            continue
        try:
            responses[index] = write(item, result)
        except Exception as error:  # as above
            responses[index] = outcomes.failure(request_id, error)
    return [responses[index] for index in range(len(requests))]


def _run_isolated(
    run: Callable[[list[Item]], Sequence[Made]], items: list[Item], outcomes: Outcomes
) -> Sequence[Made | Exception]:
    if not items:
        return []
    try:
        made = run(items)
        if len(made) != len(items):
            raise RuntimeError(f"{len(items)} items gave {len(made)} results")
        return made
    except Exception as error:  # the lone item's answer, or logged before each runs alone
        if len(items) == 1:
            return [error]
        outcomes.warn(None, f"a batch of {len(items)} failed; running each request alone", error)
    return [result for item in items for result in _run_isolated(run, [item], outcomes)]

"""Whatever a policy answers, starts are booked all or none, and nobody is lost."""

import pytest

from service.control.router import Router
from service.control.view import Pair, View
from tests.control.driving import SMALL, accounted, ask, router_with, spec, starts


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([(0, 0), (0, 0)], id="one request twice"),
        pytest.param([(0, 0), (7, 0)], id="a request that does not wait"),
        pytest.param([(0, 0), (1, 9)], id="a worker that is not there"),
        pytest.param([(-1, 0)], id="a negative place"),
    ],
)
def test_starts_that_cannot_all_be_booked_are_replaced_by_first_come_first_served(
    answer: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    router: Router = router_with(SMALL, spec())

    def decide(view: View) -> list[Pair]:
        return answer

    monkeypatch.setattr(router._policy, "decide", decide)
    for name in ("first", "second"):
        router.handle(ask(name), 0.0)
    assert [request for request, _ in starts(router.tick(0.0))] == ["first", "second"]
    assert router.fallbacks[0] == 1
    assert "policy" in router.fallbacks[1]
    assert accounted(router, 0.0)


def test_a_client_cannot_wait_longer_than_the_operator_lets_it() -> None:
    router = router_with(SMALL, spec(batch_limit=1))
    router.handle(ask("running"), 0.0)
    router.tick(0.0)
    router.handle(ask("patient", max_wait_s=1e9), 0.0)
    assert router.tick(SMALL.max_wait_s - 0.1) == []
    assert [c.request_id for c in router.tick(SMALL.max_wait_s)] == ["patient"]

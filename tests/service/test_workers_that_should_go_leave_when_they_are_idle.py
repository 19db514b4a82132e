"""The roster: what there should be, what there is, and how one becomes the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from service.roster import LOOK_S, Roster
from service.worker_config import WorkerConfig
from tests.clock import run_virtual
from tests.service.watched import configured


class Hands:
    """The fleet as a list of what was done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def add(self, worker: WorkerConfig) -> None:
        self.done.append(f"add {worker.worker_id} {worker.url}")

    def replace(self, worker: WorkerConfig) -> None:
        self.done.append(f"replace {worker.worker_id} {worker.batch_limit}")

    def drain(self, worker_id: str, *, on: bool) -> None:
        self.done.append(f"{'drain' if on else 'resume'} {worker_id}")

    async def remove(self, worker_id: str) -> None:
        self.done.append(f"remove {worker_id}")


def on_a_roster(
    scenario: Callable[[Roster, Hands, dict[str, int]], object], remove_s: float = 60.0
) -> list[str]:
    """Play a scenario; returns what was done to the fleet."""
    hands, running = Hands(), dict[str, int]()

    async def play() -> None:
        roster = Roster(hands, lambda: running, remove_s)
        task = asyncio.get_running_loop().create_task(roster.run())
        await scenario(roster, hands, running)  # type: ignore[misc]
        await asyncio.sleep(2 * LOOK_S)
        task.cancel()

    run_virtual(play())
    return hands.done


def wanted(*workers: WorkerConfig) -> Mapping[str, WorkerConfig]:
    return {worker.worker_id: worker for worker in workers}


def test_a_worker_that_should_go_leaves_when_its_last_request_has_ended() -> None:
    async def scenario(roster: Roster, hands: Hands, running: dict[str, int]) -> None:
        roster.want(wanted(configured("a"), configured("b")))
        running["a"] = 1
        roster.want(wanted(configured("b")))
        await asyncio.sleep(30.0)
        assert hands.done[2:] == ["drain a"]
        assert roster.members()["a"][1] == "leaving"
        running["a"] = 0

    assert on_a_roster(scenario)[2:] == ["drain a", "remove a"]


def test_a_worker_that_will_not_end_is_cut_off_at_the_limit() -> None:
    async def scenario(roster: Roster, hands: Hands, running: dict[str, int]) -> None:
        roster.want(wanted(configured("a")))
        running["a"] = 1
        roster.want({})
        await asyncio.sleep(59.0)
        assert "remove a" not in hands.done
        await asyncio.sleep(2.0)

    assert on_a_roster(scenario)[-1] == "remove a"


def test_a_worker_that_comes_back_meanwhile_stays() -> None:
    async def scenario(roster: Roster, _: Hands, running: dict[str, int]) -> None:
        roster.want(wanted(configured("a")))
        running["a"] = 1
        roster.want({})
        await asyncio.sleep(1.0)
        roster.want(wanted(configured("a")))
        running["a"] = 0

    assert on_a_roster(scenario) == ["add a http://a", "drain a", "resume a"]


def test_other_limits_replace_and_another_url_waits_for_the_old_one_to_empty() -> None:
    async def scenario(roster: Roster, hands: Hands, running: dict[str, int]) -> None:
        roster.want(wanted(configured("a")))
        roster.want(wanted(configured("a", batch_limit=9)))
        running["a"] = 1
        roster.want(wanted(configured("a", url="http://elsewhere")))
        await asyncio.sleep(5.0)
        assert hands.done[1:] == ["replace a 9", "drain a"]
        running["a"] = 0

    assert on_a_roster(scenario)[-2:] == ["remove a", "add a http://elsewhere"]


def test_the_operators_drain_outlives_a_change_of_mind_about_leaving() -> None:
    async def scenario(roster: Roster, _: Hands, running: dict[str, int]) -> None:
        roster.want(wanted(configured("a")))
        running["a"] = 1
        roster.drain("a", on=True)
        roster.want({})
        await asyncio.sleep(1.0)
        roster.want(wanted(configured("a")))
        roster.drain("a", on=False)

    assert on_a_roster(scenario)[1:] == ["drain a", "drain a", "drain a", "resume a"]

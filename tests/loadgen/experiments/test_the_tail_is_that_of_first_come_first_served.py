"""A short overload, of less work than runs: what short requests gain must not cost the p99."""

from loadgen.experiments.cases import Case, run_case
from loadgen.experiments.fleets import a100_fleet
from loadgen.experiments.loads import Load
from loadgen.experiments.rules import Rule, RuleBook
from service.control.config import ControlConfig

SEED = 2


def measured(rule: Rule) -> dict[str, float]:
    load = Load(load=1.06, requests=600, seed=SEED)
    values = run_case(Case(load=load, workers=a100_fleet(4, 32), rule=rule)).values
    return {name: float(values[name]) for name in ("ttft_mean_s", "ttft_p99_s")}


def test_the_mean_falls_and_the_tail_stays() -> None:
    book = RuleBook(ControlConfig(max_wait_s=600.0))
    ours, first_come = measured(book.forward()), measured(book.first_come())
    assert ours["ttft_mean_s"] < 0.8 * first_come["ttft_mean_s"]
    assert ours["ttft_p99_s"] < 1.15 * first_come["ttft_p99_s"]

"""The measures that tables show, in periods for the paper's model and in seconds otherwise."""

from __future__ import annotations

from loadgen.experiments.document import Column
from loadgen.experiments.fleets import PER_PERIOD, PERIOD_S

PERCENT = 100.0

PERIOD_LATENCIES = (
    Column("ttft_mean_s", "TTFT mean", "periods", PER_PERIOD, compared=True),
    Column("ttft_p95_s", "TTFT p95", "periods", PER_PERIOD, compared=True),
    Column("ttft_p99_s", "TTFT p99", "periods", PER_PERIOD, compared=True),
    Column("e2e_mean_s", "E2E mean", "periods", PER_PERIOD, compared=True),
    Column("e2e_p95_s", "E2E p95", "periods", PER_PERIOD, compared=True),
    Column("e2e_p99_s", "E2E p99", "periods", PER_PERIOD, compared=True),
)
SECOND_LATENCIES = tuple(
    Column(column.key, column.title, "s", 1.0, compared=True) for column in PERIOD_LATENCIES
)
TTFT_P999 = Column("ttft_p999_s", "TTFT p99.9", "s", 1.0, compared=True)
"""Where p99 is spared by letting one in a hundred wait longer, this is who pays."""
WITHIN = Column("share_within", "within bound", "%", PERCENT, better=1)
REFUSED = Column("share_refused", "refused", "%", PERCENT)
FAILED = Column("share_failed", "lost", "%", PERCENT)
PREEMPTIONS = Column("preemptions", "preemptions", "count")
UTILISATION = Column("utilisation", "slots in use, whole run", "%", PERCENT, better=0)
KV_UTILISATION = Column("kv_utilisation", "KV in use, whole run", "%", PERCENT, better=0)
TOKENS_PER_PERIOD = Column(
    "tokens_per_s", "tokens/period", "rate", PERIOD_S, compared=True, better=1
)
REQUESTS_PER_PERIOD = Column(
    "requests_per_s", "QPS (per 1,000 periods)", "rate", 1000 * PERIOD_S, compared=True, better=1
)
TOKENS_PER_S = Column("tokens_per_s", "tokens/s", "rate", 1.0, compared=True, better=1)

PERIOD_TABLE = (
    *PERIOD_LATENCIES,
    TOKENS_PER_PERIOD,
    REQUESTS_PER_PERIOD,
    WITHIN,
    REFUSED,
    PREEMPTIONS,
)
SECOND_TABLE = (*SECOND_LATENCIES, TOKENS_PER_S, WITHIN, REFUSED, PREEMPTIONS)
TAIL_TABLE = (*SECOND_TABLE[:3], TTFT_P999, *SECOND_TABLE[3:])

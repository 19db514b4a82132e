"""The load generator: traces, arrivals, open-loop replay, virtual-time simulator, reports."""

"""A fleet whose engines have not told their KV capacity yet is decided without a warning."""

from __future__ import annotations

import numpy as np

from service.control.columns import Usage
from service.control.published import NEVER_SCARCE, kv_scale, scarcity


def test_unknown_kv_capacity_is_no_number_times_infinity() -> None:
    unknown = np.array([np.inf, np.inf])
    residual = Usage(batch=np.ones((2, 3)), kv=np.full((2, 3), np.inf))
    told = scarcity(residual, expected_arrivals=4.0, scale=kv_scale(unknown))
    assert (told.kv == NEVER_SCARCE).all()
    assert (told.batch == 0.25).all()

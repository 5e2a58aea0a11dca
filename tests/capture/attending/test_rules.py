"""A rule of flex attention that only its compiler takes, which needs an accelerator."""

import pytest
import torch

from geomon.capture.attending.attention import NotUnderstoodError, read_call, record_call
from geomon.capture.attending.fused import read_sdpa
from geomon.capture.attending.rules import FlexRule
from geomon.capture.tokens.sampling import RowSampler


def test_a_rule_that_takes_one_pair_at_a_time_is_refused():
    query = torch.randn(2, 4, 6, 8)
    rule = FlexRule(6, query.device, lambda b, h, q, k: q >= k if bool(q > 2) else q == k, 4)
    given = read_sdpa({"query": query, "key": query})._replace(rule=rule)
    with pytest.raises(NotUnderstoodError, match="cannot be asked of many places at once"):
        read_call(record_call(RowSampler(100, 0), given), None)

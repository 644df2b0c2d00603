"""A small share of the campaign in fuzz_verify.py: no verdict contradicts exact arithmetic, no forgery is accepted."""

import pytest
from fuzz_verify import QUESTIONS, campaign


@pytest.mark.parametrize("asked", QUESTIONS, ids=str)
def test_no_contradiction_and_no_forgery_accepted(asked):
    counts = campaign(asked, cases=24, seed=1)
    assert counts["contradictions"] == counts["forgeries accepted"] == 0
    assert counts["open"] == 0 and counts["forgeries"] >= 96

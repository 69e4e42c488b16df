"""The words of limiting: rates as text, which requests a limit is for, and the keys of the store."""

from __future__ import annotations

from itertools import combinations

import pytest

from proxy.limits.model import MAX_AMOUNT, Admission, Algorithm, Limit, Rate, Unit, Verdict, bind


def limit(name="l", unit=Unit.TOKENS, rate="5/min", algorithm=Algorithm.TOKEN_BUCKET, *, burst=None, models=None):
    return Limit(name, unit, Rate.parse(rate), algorithm, burst, models)


@pytest.mark.parametrize(
    ("text", "rate"), [("5/s", Rate(5, 1)), ("10000/min", Rate(10000, 60)), ("0/hour", Rate(0, 3600)), ("1/day", Rate(1, 86400))]
)
def test_rate_reads_and_shows(text, rate):
    """A rate reads from its text and shows as it."""
    assert Rate.parse(text) == rate
    assert str(rate) == text


@pytest.mark.parametrize(
    "text",
    ["", "5", "5/", "/min", "5/m", "5/MIN", " 5/min", "5/min ", "5/min\n", "-5/min", "1.5/s", "5e3/s", f"{MAX_AMOUNT + 1}/s"],
)
def test_rate_refuses_other_text(text):
    """Anything else raises, naming the form expected."""
    with pytest.raises(ValueError, match=r"<amount>/<s\|min\|hour\|day>"):
        Rate.parse(text)


@pytest.mark.parametrize(("burst", "capacity"), [(None, 5), (1, 1), (100, 100)])
def test_capacity(burst, capacity):
    """The capacity is the burst, or else the rate's amount."""
    assert limit(burst=burst).capacity == capacity


LIMITS = [
    ("tenant:a", limit()),
    ("tenant:b", limit()),
    ("tenant:a", limit(name="m")),
    ("tenant:a", limit(unit=Unit.REQUESTS)),
    ("tenant:a", limit(rate="5/hour")),
    ("tenant:a", limit(algorithm=Algorithm.SLIDING_WINDOW)),
    ("tenant:a", limit(models=("x",))),
    ("tenant:a", limit(models=("x", "y"))),
    ("tenant:a", limit(models=("x,y",))),
    ("tenant:a:l", limit(name="")),
    ("tenant", limit(name="a:l")),
]


@pytest.mark.parametrize(("one", "other"), list(combinations(LIMITS, 2)))
def test_keys_differ(one, other):
    """Limits that differ in owner, name, unit, period, algorithm or models have keys of their own (A21)."""
    assert bind(*one).key != bind(*other).key


def test_key_keeps_with_the_amount():
    """Changing amount or burst keeps the key, and so the use."""
    assert bind("o", limit(rate="5/min")).key == bind("o", limit(rate="9/min", burst=3)).key


@pytest.mark.parametrize("text", ["{x}", "a:b", "a b", "a\nb", "ü", "*", "%7B"])
def test_key_is_plain(text):
    """Whatever names are made of, a key is printable ASCII with one hash tag."""
    key = bind(f"tenant:{text}", limit(name=text, models=(text,))).key
    assert key.startswith("sg:{d:0}:limit:")
    assert key.isascii()
    assert key.isprintable()
    assert " " not in key
    assert (key.count("{"), key.count("}")) == (1, 1)


def test_models_label():
    """The label of a family is its patterns; that of a limit on every model is empty."""
    assert bind("o", limit(models=("gpt-*", "o1"))).models_label == "gpt-*,o1"
    assert bind("o", limit()).models_label == ""


@pytest.mark.parametrize(
    ("verdict", "wait_us", "is_too_large"),
    [(Verdict.GRANTED, 0, False), (Verdict.REFUSED, 5, False), (Verdict.REFUSED, -1, True), (Verdict.NO_ACCOUNT, -1, False)],
)
def test_too_large(verdict, wait_us, is_too_large):
    """Only a refusal without any wait is "too large"."""
    assert Admission(verdict, 0, -1, wait_us).is_too_large is is_too_large

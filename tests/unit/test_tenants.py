"""Tenants: found by their key, each with limits of its own."""

from __future__ import annotations

import hashlib

import pytest

from proxy.limits.model import Algorithm, Limit, Rate, Unit, bind
from proxy.tenants import Tenant, TenantDirectory, hash_key

RPM = Limit("rpm", Unit.REQUESTS, Rate.parse("5/min"), Algorithm.SLIDING_WINDOW)


def tenant(name, *keys, models=None, limits=()):
    return Tenant(name, tuple(hash_key(key) for key in keys), models, tuple(bind(f"tenant:{name}", limit) for limit in limits))


def test_found_by_any_of_its_keys():
    """Each key of a tenant finds it, any other string nobody."""
    a, b = tenant("a", "key-1", "key-2"), tenant("b", "key-3")
    directory = TenantDirectory([a, b])
    assert [directory.find(key) for key in ("key-1", "key-2", "key-3")] == [a, a, b]
    assert [directory.find(key) for key in ("", "key-", "KEY-1", "key-1 ", a.key_hashes[0])] == [None] * 5
    assert list(directory) == [a, b]


@pytest.mark.parametrize("key", ["plain", "ключ", "\udcff\udcfe", ""])
def test_keys_are_hashed_as_the_bytes_that_arrive(key):
    """The hash is that of the header's bytes, also when they are no UTF-8."""
    assert hash_key(key) == hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def test_directory_shows_no_hash():
    """A directory's repr names tenants only."""
    assert repr(TenantDirectory([tenant("a", "key-1")])) == "<TenantDirectory ['a']>"


@pytest.mark.parametrize(
    ("models", "model", "may"),
    [
        (None, "anything", True),
        (("gpt-*",), "gpt-4", True),
        (("gpt-*",), "GPT-4", False),
        (("gpt-*", "o1"), "o1", True),
        (("gpt-?",), "gpt-4o", False),
        (("gpt-4",), "gpt-4\n", False),
        (("a[b]",), "ab", True),
    ],
)
def test_models_are_shell_patterns(models, model, may):
    """A tenant may use the models that one of its patterns matches, case included."""
    assert tenant("a", models=models).may_use(model) is may


def test_limits_for_a_model():
    """A limit with models counts those only; one without counts every request, also one that names no model (A29)."""
    family = Limit("family", Unit.TOKENS, Rate.parse("5/min"), Algorithm.TOKEN_BUCKET, models=("gpt-*", "o1"))
    owner = tenant("a", limits=[RPM, family])
    names = {model: [bound.limit.name for bound in owner.limits_for(model)] for model in ("gpt-4", "o1", "other", None)}
    assert names == {"gpt-4": ["rpm", "family"], "o1": ["rpm", "family"], "other": ["rpm"], None: ["rpm"]}


def test_tenants_never_share_a_key():
    """Ids that hold separators or are prefixes of each other give keys of their own (A21)."""
    names = ["a", "a:", "a:rpm", "ab", "A", "a,b", "a%3A", "{d:1}", "ä", "a b"]
    bounds = [bound for name in names for bound in tenant(name, limits=[RPM]).limits]
    assert len({bound.key for bound in bounds}) == len(names)

"""Which certificate is served and trusted, and when the next one is made: functions of the time."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509

from reprieve.errors import ConfigError
from reprieve.operator.certificates import (
    DATA_KEY,
    DEFAULT_LIFE,
    CertificatePair,
    ca_bundle,
    decode_pairs,
    encode_pairs,
    is_renewal_due,
    make_pair,
    poll_interval,
    publication_delay,
    serving_pair,
    unexpired,
)

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
NAMES = ("webhook.system.svc", "webhook.system.svc.cluster.local")


def pair(made: datetime = START, life: timedelta = DEFAULT_LIFE, names: tuple[str, ...] = NAMES) -> CertificatePair:
    """A pair without cryptography: what is decided depends on times and names only."""
    return CertificatePair(
        made=made, expires=made + life, names=names, certificate=f"made {made.isoformat()}\n", key="secret"
    )


def after(**time: float) -> datetime:
    return START + timedelta(**time)


def test_the_first_pair_is_served_at_once() -> None:
    assert serving_pair([pair()], START) == pair()


def test_a_new_pair_is_trusted_at_once_and_served_after_the_publication_delay() -> None:
    old, new = pair(), pair(after(days=54))
    assert serving_pair([old, new], after(days=54, seconds=59)) == old
    assert serving_pair([old, new], after(days=54, seconds=60)) == new
    assert ca_bundle([old, new], after(days=54)) == old.certificate + new.certificate


def test_a_superseded_pair_is_trusted_until_it_expires() -> None:
    old, new = pair(), pair(after(days=54))
    assert ca_bundle([old, new], after(days=89)) == old.certificate + new.certificate
    assert ca_bundle([old, new], after(days=90)) == new.certificate
    assert unexpired([old, new], after(days=90)) == (new,)


def test_the_order_in_the_secret_does_not_matter() -> None:
    old, new = pair(), pair(after(days=54))
    assert serving_pair([new, old], after(days=54)) == old
    assert ca_bundle([new, old], after(days=54)) == old.certificate + new.certificate


def test_an_expired_pair_is_never_served() -> None:
    assert serving_pair([pair()], after(days=90)) is None
    assert serving_pair([pair(), pair(after(days=90))], after(days=90)) == pair(after(days=90))


def test_the_next_pair_is_due_before_two_thirds_of_the_life_of_the_newest() -> None:
    assert not is_renewal_due([pair()], after(days=53), names=NAMES)
    due = next(day for day in range(90) if is_renewal_due([pair()], after(days=day), names=NAMES))
    assert timedelta(days=due) + poll_interval(DEFAULT_LIFE) < DEFAULT_LIFE * 2 / 3
    assert not is_renewal_due([pair(), pair(after(days=54))], after(days=60), names=NAMES)


def test_a_pair_is_due_where_there_is_none_or_only_expired_ones() -> None:
    assert is_renewal_due([], START, names=NAMES)
    assert is_renewal_due([pair()], after(days=90), names=NAMES)


def test_a_new_name_of_the_service_needs_a_new_pair() -> None:
    assert is_renewal_due([pair()], START, names=("other.system.svc",))
    assert not is_renewal_due([pair()], START, names=NAMES[::-1])


def test_a_shorter_life_holds_for_the_pair_that_is_there() -> None:
    assert is_renewal_due([pair()], after(days=7), names=NAMES, life=timedelta(days=10))


@pytest.mark.parametrize("life", [timedelta(seconds=10), timedelta(seconds=20), timedelta(minutes=10)])
def test_each_replica_reads_a_new_pair_before_any_serves_it(life: timedelta) -> None:
    """Over several lives, whatever the phase of a replica's polls: what one serves, all API servers trust."""
    step = poll_interval(life)
    pairs: tuple[CertificatePair, ...] = ()
    lagging: tuple[CertificatePair, ...] = ()
    now = START
    while now < START + 4 * life:
        if is_renewal_due(pairs, now, names=NAMES, life=life):
            pairs = (*unexpired(pairs, now), pair(now, life))
        for known in (pairs, lagging or pairs):
            served = serving_pair(known, now)
            assert served is not None
            assert served.certificate in ca_bundle(lagging or pairs, now)
            assert served.expires - now > life / 4, "a certificate is replaced long before it expires"
        assert len(pairs) <= 2
        lagging = pairs  # the other replica and the API server know it one poll later
        now += step


def test_a_short_life_has_a_short_delay() -> None:
    assert publication_delay(timedelta(seconds=20)) == timedelta(seconds=2)
    assert publication_delay(DEFAULT_LIFE) == timedelta(seconds=60)


def test_the_certificate_is_for_the_names_of_the_service() -> None:
    made = make_pair(NAMES, START)
    certificate = x509.load_pem_x509_certificate(made.certificate.encode())
    alternative = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert tuple(alternative.get_values_for_type(x509.DNSName)) == NAMES
    assert certificate.not_valid_after_utc == START + DEFAULT_LIFE
    assert certificate.not_valid_before_utc == START - timedelta(minutes=5), "a clock that is behind"
    assert made.life == DEFAULT_LIFE


def test_a_life_without_time_to_publish_is_refused() -> None:
    with pytest.raises(ConfigError, match="certificate life 5 s: use 10 s or more"):
        make_pair(NAMES, START, timedelta(seconds=5))


def test_pairs_come_back_from_the_secret() -> None:
    pairs = (pair(), pair(after(days=54)))
    assert decode_pairs(encode_pairs(pairs)) == pairs


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[]", '{"version": 2, "pairs": []}', '{"version": 1, "pairs": [{"made": "today"}]}']
)
def test_a_secret_that_cannot_be_read_counts_as_empty(text: str) -> None:
    assert decode_pairs({DATA_KEY: base64.b64encode(text.encode()).decode()}) == ()
    assert decode_pairs({DATA_KEY: "no base64!"}) == ()
    assert decode_pairs({}) == ()


def test_no_key_is_in_the_text_of_a_pair() -> None:
    assert "secret" not in repr(pair())
    assert "secret" in json.loads(base64.b64decode(encode_pairs([pair()])[DATA_KEY]))["pairs"][0]["key"]
    assert replace(pair(), key="other") != pair()

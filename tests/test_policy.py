"""Specs: what is read, what is refused, and how lists are split."""

import pytest

import fastps


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("bsp", fastps.BSP()),
        (" ASP ", fastps.ASP()),
        ("ssp:3", fastps.SSP(3)),
        ("ssp:0", fastps.SSP(0)),
        ("dssp:3,15", fastps.DSSP(3, 15)),
        ("dssp:3, 15, release=printed", fastps.DSSP(3, 15, release="printed")),
        ("dssp:3,15,hard_bound=true", fastps.DSSP(3, 15, hard_bound=True)),
    ],
)
def test_specs_are_read(spec: str, policy: fastps.Policy) -> None:
    assert fastps.parse_policy(spec) == policy
    assert fastps.parse_policy(policy.spec) == policy
    assert fastps.parse_policy(policy) is policy


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("foo", "expected one of bsp, asp, ssp:s"),
        ("", "expected one of"),
        ("ssp", "found 0 of 1 numbers"),
        ("ssp:-1", "expected s from 0"),
        ("ssp:x", "whole numbers, found 'x'"),
        ("ssp:1,2", "found 2 of 1 numbers"),
        ("ssp:3,release=printed", "found the option 'release'"),
        ("dssp:9,3", "expected lo <= hi, found lo=9 and hi=3"),
        ("dssp:3", "found 1 of 2 numbers"),
        ("dssp:3,15,release=never", "release=next-push or release=printed"),
        ("bsp:1", "found 1 of 0 numbers"),
        ("ssp:99999999", "found 99999999"),
    ],
)
def test_bad_specs_say_what_was_expected(spec: str, message: str) -> None:
    with pytest.raises(fastps.PolicyError) as caught:
        fastps.parse_policy(spec)
    assert message in str(caught.value)
    assert isinstance(caught.value, fastps.Error)


def test_a_comma_begins_a_new_spec_only_before_a_name() -> None:
    policies = fastps.parse_policies("bsp,asp,ssp:3,dssp:3,15,release=printed,dssp:3,15")
    assert [policy.spec for policy in policies] == ["bsp", "asp", "ssp:3", "dssp:3,15,release=printed", "dssp:3,15"]

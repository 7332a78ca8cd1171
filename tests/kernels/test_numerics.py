"""The 8-bit formats against tables that are written down here value by value, without torch's own casts."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slackwater_kernels.core import MxRule
from slackwater_kernels.numerics import (
    activation_scale,
    e8m0_byte,
    e8m0_reciprocal,
    e8m0_value,
    finite,
    from_e4m3,
    to_e4m3,
    weight_scale,
)

NAN_CODES = (0x7F, 0xFF)


def e4m3(code: int) -> float:
    """The value of an E4M3 code by the format's definition."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


VALUES = [e4m3(code) for code in range(0x7F)]  # 0 ... 448, ascending


def nearest(value: float) -> int:
    """The code nearest to a finite value, to the even one in a tie, saturating."""
    size = min(abs(value), 448.0)
    best = min(range(0x7F), key=lambda code: (abs(VALUES[code] - size), code & 1))
    return best | (0x80 if math.copysign(1, value) < 0 else 0)


def f32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def test_every_code_has_the_value_of_its_definition():
    codes = torch.arange(256, dtype=torch.uint8)

    values = from_e4m3(codes)

    for code, value in enumerate(values.tolist()):
        assert math.isnan(value) if code in NAN_CODES else value == e4m3(code), code
    assert (VALUES[0x7E], VALUES[0x08], VALUES[0x01]) == (448.0, 2.0**-6, 2.0**-9)


def test_codes_and_the_middles_between_them_are_rounded_to_nearest_even():
    middles = [(low + high) / 2 for low, high in pairwise(VALUES)]
    points = VALUES + middles + [math.nextafter(m, 0) for m in middles] + [math.nextafter(m, 999) for m in middles]
    points += [-point for point in points]

    codes = to_e4m3(torch.tensor(points, dtype=torch.float64).float())

    assert codes.tolist() == [nearest(f32(point)) for point in points]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_any_number_is_rounded_to_the_nearest_code(value):
    assert to_e4m3(torch.tensor([value])).item() == nearest(value)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        pytest.param(464.0, 0x7E, id="the tie above the largest"),
        pytest.param(500.0, 0x7E, id="too large"),
        pytest.param(-480.0, 0xFE, id="too large below zero"),
        pytest.param(math.inf, 0x7E, id="infinity"),
        pytest.param(-math.inf, 0xFE, id="negative infinity"),
        pytest.param(math.nan, 0x7F, id="NaN"),
        pytest.param(-math.nan, 0x7F, id="NaN with a sign"),
        pytest.param(31.3, 0x60, id="a mantissa carry"),
        pytest.param(1.5 * 2**-10, 0x01, id="between zero and the least"),
        pytest.param(2.0**-10, 0x00, id="a tie to zero"),
        pytest.param(-0.0, 0x80, id="negative zero"),
    ],
)
def test_the_edges_saturate_and_nan_stays_nan(value, code):
    assert to_e4m3(torch.tensor([value])).item() == code


def test_infinity_becomes_the_largest_number_and_nan_stays():
    got = finite(torch.tensor([math.inf, -math.inf, math.nan, 1.0]))

    assert got[0] == torch.finfo(torch.float32).max == -got[1]
    assert got[2].isnan()
    assert got[3] == 1.0


@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
def test_scales_are_divisions_rounded_once(amax):
    multiplier, scale = activation_scale(torch.tensor([amax]))
    of_weight = weight_scale(torch.tensor([amax]))

    # Between fp32 numbers a quotient in fp64, rounded to fp32, is the quotient rounded once.
    assert multiplier.item() == f32(448.0 / max(amax, f32(1e-10)))
    assert scale.item() == f32(1.0 / multiplier.item())
    assert of_weight.item() == max(f32(amax / 448.0), 2.0**-126)


def test_zero_and_nan_groups_have_the_scales_of_the_contract():
    amax = torch.tensor([0.0, math.nan])

    multiplier, scale = activation_scale(amax)
    of_weight = weight_scale(amax)

    assert multiplier[0] > 0
    assert 0 < scale[0] < 1e-12
    assert of_weight[0] == 1.0
    assert scale[1].isnan()
    assert of_weight[1].isnan()


def least_exponent(amax: float) -> int:
    """The smallest e with amax <= 448 * 2^e, found by trying."""
    return next(e for e in range(-160, 129) if amax <= math.ldexp(448.0, e))


@given(st.floats(min_value=0, max_value=2.0**127, width=32, exclude_min=True))
def test_exponents_follow_their_rules(amax):
    bounded = torch.tensor([amax])

    up = e8m0_byte(bounded, MxRule.RCEIL).item()
    down = e8m0_byte(bounded, MxRule.OCP_FLOOR).item()

    assert up == max(least_exponent(amax), -127) + 127
    assert down == max(math.frexp(amax)[1] - 1 - 8, -127) + 127


@pytest.mark.parametrize(
    ("amax", "up", "down"),
    [
        pytest.param(448.0, 127, 127, id="exactly the largest code"),
        pytest.param(math.nextafter(448.0, 999), 127, 127, id="above it by less than fp32 can say"),
        pytest.param(448.0 + 2.0**-15, 128, 127, id="above it by one fp32 step"),
        pytest.param(512.0, 128, 128, id="a power of two"),
        pytest.param(0.0, 0, 0, id="nothing but zeros"),
        pytest.param(2.0**-140, 0, 0, id="subnormal"),
        pytest.param(3.4e38, 247, 246, id="about the largest"),
        pytest.param(math.nan, 255, 255, id="NaN"),
    ],
)
def test_exponents_at_the_edges(amax, up, down):
    got = torch.tensor([amax])

    assert e8m0_byte(got, MxRule.RCEIL).item() == up
    assert e8m0_byte(got, MxRule.OCP_FLOOR).item() == down


def test_every_byte_is_its_power_of_two_and_its_reciprocal_is_exact():
    byte = torch.arange(256, dtype=torch.uint8)

    value, reciprocal = e8m0_value(byte).double(), e8m0_reciprocal(byte).double()

    assert value[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert reciprocal[:255].tolist() == [2.0 ** (127 - b) for b in range(255)]
    assert value[255].isnan()
    assert reciprocal[255].isnan()

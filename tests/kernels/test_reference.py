"""The reference quantisers: what they promise of any input."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slackwater_kernels import reference
from slackwater_kernels.core import AMAX_FLOOR, LayoutError, MxRule

SEEDS = st.integers(0, 2**31)


def wild(seed: int, rows: int, k: int) -> torch.Tensor:
    """Rows whose sizes span sixty powers of two."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-30, 30, (rows, k // 32), generator=generator).repeat_interleave(32, 1)
    return torch.ldexp(torch.randn(rows, k, generator=generator), powers)


@given(seed=SEEDS, rows=st.integers(1, 5), groups=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_an_activation_is_off_by_half_a_step_at_most(seed, rows, groups):
    x = wild(seed, rows, 128 * groups)

    got = reference.dequantize_activations(reference.quantize_activations(x))

    amax = x.double().abs().view(rows, groups, 128).amax(-1).repeat_interleave(128, 1)
    step = torch.maximum(x.double().abs() * 2.0**-3, amax / 448 * 2.0**-9)
    assert ((got - x.double()).abs() <= step / 2 * (1 + 2.0**-20)).all()


@given(seed=SEEDS, n=st.integers(1, 200), blocks=st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_a_weight_is_off_by_half_a_step_at_most_also_in_a_short_last_block(seed, n, blocks):
    w = wild(seed, n, 128 * blocks)

    canonical = reference.quantize_weight(w)

    got = reference.dequantize_weight(canonical)
    scales = canonical.scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:n]
    step = torch.maximum(w.double().abs() * 2.0**-3, scales * 2.0**-9)
    assert ((got - w.double()).abs() <= step / 2 * (1 + 2.0**-20)).all()
    assert canonical.scales.shape == (-(-n // 128), blocks)


@given(seed=SEEDS, rule=st.sampled_from(MxRule), blocks=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_mx_rounds_once_and_only_the_floor_rule_saturates(seed, rule, blocks):
    x = wild(seed, 2, 32 * blocks)

    mx = reference.quantize_mx(x, rule)

    got = reference.dequantize_mx(mx)
    scale = torch.exp2(mx.scales.double() - 127).repeat_interleave(32, 1)
    clipped = x.double().abs() > 448 * scale
    step = torch.maximum(x.double().abs() * 2.0**-3, scale * 2.0**-9)
    assert ((got - x.double()).abs() <= step / 2)[~clipped].all()
    assert (got.abs() == 448 * scale)[clipped].all()
    assert rule is MxRule.OCP_FLOOR or not clipped.any()
    assert (mx.scales != 255).all()


@given(seed=SEEDS, power=st.integers(-20, 20))
@settings(max_examples=20, deadline=None)
def test_a_power_of_two_moves_the_scales_and_no_code(seed, power):
    x = wild(seed, 2, 128)
    other = torch.ldexp(x, torch.tensor(power))
    assume(min(x.abs().amax(-1).min(), other.abs().amax(-1).min()) >= AMAX_FLOOR)  # below it all have one scale

    as_is, moved = reference.quantize_activations(x), reference.quantize_activations(other)

    assert torch.equal(as_is.codes, moved.codes)
    assert torch.equal(torch.ldexp(as_is.scales, torch.tensor(power)), moved.scales)


def test_a_nan_makes_its_group_nan_and_no_other():
    x = torch.ones(3, 256)
    x[1, 200] = torch.nan

    activations = reference.dequantize_activations(reference.quantize_activations(x)).isnan()
    weight = reference.dequantize_weight(reference.quantize_weight(x)).isnan()
    mx = reference.dequantize_mx(reference.quantize_mx(x)).isnan()

    assert activations.nonzero().tolist() == [[1, column] for column in range(128, 256)]
    assert weight.nonzero().tolist() == [[row, column] for row in range(3) for column in range(128, 256)]
    assert mx.nonzero().tolist() == [[1, column] for column in range(192, 224)]


def test_infinity_saturates_and_stays_the_largest_of_its_group():
    x = torch.ones(1, 128)
    x[0, 3] = -torch.inf

    for values in (
        reference.dequantize_activations(reference.quantize_activations(x)),
        reference.dequantize_weight(reference.quantize_weight(x)),
        reference.dequantize_mx(reference.quantize_mx(x)),
    ):
        assert values.isfinite().all()
        assert values[0, 3] < -3e38
        assert (values[0, :3] == 0).all()


def test_zeros_stay_zeros_with_a_finite_scale():
    x = torch.zeros(2, 128)

    activations, weight, mx = (
        f(x) for f in (reference.quantize_activations, reference.quantize_weight, reference.quantize_mx)
    )

    assert not activations.codes.any()
    assert not weight.codes.any()
    assert not mx.codes.any()
    assert weight.scales.eq(1).all()
    assert mx.scales.eq(0).all()
    assert (activations.logical()[1] > 0).all()


def test_padding_rows_of_activations_hold_scale_zero():
    got = reference.quantize_activations(torch.randn(5, 256))

    assert got.scales.view(2, 8)[:, 5:].eq(0).all()
    assert got.scales.view(2, 8)[:, :5].gt(0).all()


@pytest.mark.parametrize("quantise", [reference.quantize_activations, reference.quantize_weight, reference.quantize_mx])
@pytest.mark.parametrize(
    ("x", "complaint"),
    [
        pytest.param(torch.zeros(2, 100), "no multiple of", id="K that is no multiple"),
        pytest.param(torch.zeros(2, 0), "no multiple of", id="no K"),
        pytest.param(torch.zeros(2, 2, 128), "float \\[rows, K\\]", id="three dimensions"),
        pytest.param(torch.zeros(2, 128, dtype=torch.int32), "float \\[rows, K\\]", id="whole numbers"),
    ],
)
def test_refuses_what_does_not_fit_the_groups(quantise, x, complaint):
    with pytest.raises(LayoutError, match=complaint):
        quantise(x)


def test_product_of_the_references_is_the_product_of_the_values():
    x = reference.quantize_activations(torch.randn(3, 256))
    w = reference.quantize_weight(torch.randn(130, 256))

    assert torch.equal(reference.bsgemm(x, w), reference.dequantize_activations(x) @ reference.dequantize_weight(w).T)

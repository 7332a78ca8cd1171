import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_kernels.prev_tokens import prev_tokens_shift_inplace
from slackwater_kernels.reference import prev_tokens_shift


@given(data=st.data(), bs=st.integers(0, 5), window=st.integers(1, 6), cw=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_behaves_as_a_list_that_drops_its_head(data, bs, window, cw):
    token = st.integers(-(2**31), 2**31 - 1)
    frame = st.lists(token, min_size=cw, max_size=cw)
    model = data.draw(st.lists(st.lists(frame, min_size=window, max_size=window), min_size=bs, max_size=bs))
    frames = data.draw(st.lists(st.lists(frame, min_size=bs, max_size=bs), max_size=8))
    prev = torch.tensor(model, dtype=torch.int32).reshape(bs, window, cw)

    for new in frames:
        prev_tokens_shift_inplace(prev, torch.tensor(new, dtype=torch.int32).reshape(bs, cw))
        model = [[*row[1:], column] for row, column in zip(model, new, strict=True)]

    assert prev.tolist() == model


@pytest.mark.parametrize("bs", [0, 1, 7, 64])
def test_equals_the_reference_and_keeps_the_storage(bs):
    generator = torch.Generator().manual_seed(bs)
    prev = torch.randint(0, 2**31 - 1, (bs, 10, 11), dtype=torch.int32, generator=generator)
    new = torch.randint(0, 2**31 - 1, (bs, 11), dtype=torch.int32, generator=generator)
    expected = prev_tokens_shift(prev, new)
    address, new_before = prev.data_ptr(), new.clone()

    prev_tokens_shift_inplace(prev, new)

    assert torch.equal(prev, expected)
    assert prev.data_ptr() == address
    assert torch.equal(new, new_before)


def test_shifts_a_contiguous_part_of_a_larger_table_only():
    table = torch.arange(4 * 3 * 2, dtype=torch.int32).reshape(4, 3, 2)
    untouched = table[2:].clone()

    prev_tokens_shift_inplace(table[:2], torch.full((2, 2), -1, dtype=torch.int32))

    assert torch.equal(table[2:], untouched)
    assert table[:2, -1].tolist() == [[-1, -1], [-1, -1]]


I32 = torch.int32


@pytest.mark.parametrize(
    ("prev", "new", "complaint"),
    [
        pytest.param(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=I32), "prev must be int32", id="float window"),
        pytest.param(
            torch.zeros(2, 3, 4, dtype=torch.int64),
            torch.zeros(2, 4, dtype=I32),
            "prev must be int32",
            id="int64 window",
        ),
        pytest.param(
            torch.zeros(2, 3, 4, dtype=I32),
            torch.zeros(2, 4, dtype=torch.int64),
            "next_tokens must be int32",
            id="int64 tokens",
        ),
        pytest.param(torch.zeros(2, 3, dtype=I32), torch.zeros(2, 3, dtype=I32), "prev must be int32", id="2-D window"),
        pytest.param(
            torch.zeros(2, 0, 4, dtype=I32), torch.zeros(2, 4, dtype=I32), "W >= 1", id="window without frames"
        ),
        pytest.param(
            torch.zeros(2, 3, 4, dtype=I32), torch.zeros(2, 1, 4, dtype=I32), r"\[2, 4\]", id="unsqueezed tokens"
        ),
        pytest.param(torch.zeros(2, 3, 4, dtype=I32), torch.zeros(1, 4, dtype=I32), r"\[2, 4\]", id="broadcast rows"),
        pytest.param(
            torch.zeros(2, 3, 4, dtype=I32), torch.zeros(2, 1, dtype=I32), r"\[2, 4\]", id="broadcast columns"
        ),
        pytest.param(
            torch.zeros(2, 4, 3, dtype=I32).transpose(1, 2),
            torch.zeros(2, 4, dtype=I32),
            "prev must be contiguous",
            id="transposed window",
        ),
        pytest.param(
            torch.zeros(2, 3, 4, dtype=I32),
            torch.zeros(4, 2, dtype=I32).T,
            "next_tokens must be contiguous",
            id="transposed tokens",
        ),
        pytest.param(
            torch.zeros(2, 3, 4, dtype=I32),
            torch.zeros(2, 4, dtype=I32, device="meta"),
            "one device",
            id="two devices",
        ),
    ],
)
def test_refuses_what_it_would_have_to_cast_or_guess(prev, new, complaint):
    before = prev.clone()

    with pytest.raises(ValueError, match=complaint):
        prev_tokens_shift_inplace(prev, new)

    assert torch.equal(prev, before)

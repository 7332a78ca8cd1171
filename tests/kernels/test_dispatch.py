"""What runs where, and what a refusal says."""

import pytest
import torch

from slackwater_kernels import dispatch
from slackwater_kernels.core import UnsupportedError
from slackwater_kernels.dispatch import (
    OPERATIONS,
    arch,
    describe,
    describe_extend,
    matrix,
    require_supported,
    supported,
)
from slackwater_kernels.gemm import Workspace, bsgemm
from slackwater_kernels.layout import Fp8Weight
from slackwater_kernels.plan import extend_launch, flat_parts
from slackwater_kernels.quantize import quantize_activations, rmsnorm_quantize, swiglu_quantize
from slackwater_kernels.reference import quantize_activations as reference_quantize
from slackwater_kernels.reference import quantize_weight

ROWS = torch.zeros(2, 256, dtype=torch.bfloat16)


def test_a_cpu_is_refused_by_name_with_the_alternative():
    weight = Fp8Weight.prepare(quantize_weight(torch.randn(128, 256)), "cpu")

    for call, instead in (
        (lambda: quantize_activations(ROWS), "reference.quantize_activations"),
        (lambda: rmsnorm_quantize(ROWS, ROWS[0], 1e-6), "reference.rmsnorm"),
        (lambda: swiglu_quantize(ROWS), "reference.swiglu"),
        (lambda: bsgemm(reference_quantize(ROWS), weight, Workspace("cpu")), "reference.bsgemm"),
    ):
        with pytest.raises(UnsupportedError, match=f"no kernel for cpu: it runs on sm_90; use .*{instead}"):
            call()


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_another_gpu_is_refused_by_its_architecture(monkeypatch, capability):
    monkeypatch.setattr(dispatch, "arch", lambda device: f"sm_{capability[0]}{capability[1]}")

    for operation in OPERATIONS:
        if f"sm_{capability[0]}{capability[1]}" in operation.archs:
            continue
        assert not supported(operation.name, "cpu")
        with pytest.raises(UnsupportedError, match=f"no kernel for sm_{capability[0]}{capability[1]}"):
            require_supported(operation.name, ROWS)


def test_a_hopper_without_triton_is_told_so(monkeypatch):
    monkeypatch.setattr(dispatch, "arch", lambda device: "sm_90")
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)

    with pytest.raises(UnsupportedError, match="bsgemm on sm_90 needs the package triton"):
        require_supported("bsgemm", ROWS)


def test_the_matrix_names_each_operation_and_its_alternative():
    assert matrix().keys() == {operation.name for operation in OPERATIONS}
    assert all(entry["instead"] for entry in matrix().values())
    assert arch(torch.device("cpu")) == "cpu"


def test_describe_tells_the_form_and_that_rows_do_not_depend_on_each_other():
    one, many, gated = describe(2560, 9728, 1), describe(2560, 9728, 64), describe(19456, 2560, 1, gated=True)

    assert (one["takes"], many["takes"], gated["takes"]) == ("leaf", "group", "all")
    assert one["sum"] == many["sum"] == "76 blocks in leaves of 6, 3 leaves a group"
    assert (one["split"], many["split"], gated["split"]) == (13, 5, 1)
    assert all(entry["batch_invariant"] for entry in (one, many, gated))


def test_describe_extend_tells_that_neither_rows_nor_chunks_change_bits():
    few, many, fp8 = (
        describe_extend(100, 1, 4, fp8=False),
        describe_extend(9000, 64, 4, fp8=False),
        describe_extend(100, 1, 16, fp8=True),
    )

    assert few["sum"] == many["sum"] == f"blocks of {extend_launch(fp8=False).block} keys from position 0 on, in order"
    assert many["parts"] == flat_parts(9000, 64, extend_launch(fp8=False).queries(4))
    assert (few["form"], fp8["form"]) == ("bf16", "fp8")
    assert fp8["queries"] == extend_launch(fp8=True).rows // 16
    assert all(told["batch_invariant"] and told["chunk_invariant"] for told in (few, many, fp8))

"""Test packed scales: panels, padding, bf16."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ortolan import _native


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("bf16", [False, True])
def test_panels_of_16_columns_padded_with_zeros(groups: int, n: int, bf16: bool) -> None:
    scales = np.random.default_rng(n).standard_normal((groups, n), dtype=np.float32)
    panels = -(-n // 16)
    packed = _native.pack_scales(scales, bf16=True) if bf16 else _native.pack_scales(scales, bf16=False)
    assert packed.shape == (panels, groups, 16) and packed.dtype == (np.uint16 if bf16 else np.float32)
    padded = np.zeros((groups, 16 * panels), np.float32)
    padded[:, :n] = scales
    expected = padded.reshape(groups, panels, 16).transpose(1, 0, 2)
    if bf16:
        np.testing.assert_array_equal(packed, expected.astype(ml_dtypes.bfloat16).view(np.uint16))
    else:
        np.testing.assert_array_equal(packed, expected)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (3,), (1, 2, 3)])
def test_refuses_what_is_no_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="scales must be"):
        _native.pack_scales(np.zeros(shape, np.float32), bf16=True)

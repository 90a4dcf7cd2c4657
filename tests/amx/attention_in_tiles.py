"""Tests of attention in AMX tiles, used for the CPU's own kernel and for the same loop on AVX2 vectors."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import ml_dtypes
import numpy as np

from ortolan import _testing

from ..ops.attention import LOWEST, Floats, assert_attention_close, attention
from ..ops.single_node import assert_same_bits
from . import emulator, reference

KERNEL = "amx/16 in tiles"
# Instruction counts of one head with 64 queries, 160 keys and width 64.
#
# There are 4 row tiles, and blocks of 128 and 32 keys. Scores take 2 multiplications per row tile and key tile: 8 key
# tiles in the first block, 2 in the second. Each of the 4 value tiles takes 4 multiplications per row tile in the first
# block, and 1 in the second. In blocks of 2 x 2 tiles, each operand is loaded once. y is loaded again for the second
# block.
COUNTS = {
    "ldtilecfg": 1,
    "tdpbf16ps": 4 * (2 * (8 + 2) + 4 * (4 + 1)),
    "tileloadd": 4 * (2 * (8 + 2) + 4 * (4 + 1)) + 4 * 4,
    "tilezero": 4 * (8 + 2) + 4 * 4,
    "tilestored": 4 * (8 + 2) + 2 * 4 * 4,
    "tilerelease": 1,
}
MASKS = {"key": (1, 1, 0), "query": (1, 0, 1), "all": (0, 0, 0), "head": (0, 1, 0), "number": (1, 1, 1)}


# Arguments: q [heads, queries, head_dim], k, v [keys, head_dim], scale; optional: mask (broadcasts to [heads, queries,
# keys]), causal, zero_hidden_rows, softcap. Returns [heads, queries, head_dim]. All arrays are float32.
Attend = Callable[..., Floats]

kernel: Attend = functools.partial(_testing.nomad_attention, kernel=KERNEL)


@functools.cache
def on_avx2() -> Attend:
    """Return attention by the kernel's loop in attention_on_avx2.cc. Needs AVX2 and tile instructions."""
    headers = [path for folder in ("attention", "isa", "simd") for path in (emulator.ROOT / "ops" / folder).glob("*.h")]
    options = ("-O2", "-mavx2", "-mfma", "-mf16c", "-mbmi2", "-ffp-contract=off")
    library = emulator.build(emulator.HERE / "attention_on_avx2.cc", *options, headers=headers)
    run = ctypes.CDLL(str(library)).attention_on_avx2
    sizes, arrays = [ctypes.c_int64] * 4, [ctypes.c_void_p] * 5
    run.argtypes = [*sizes, *arrays, *[ctypes.c_float] * 2, ctypes.c_bool, ctypes.c_bool, ctypes.c_void_p]
    run.restype = None

    def attend(
        q: Floats,
        k: Floats,
        v: Floats,
        scale: float,
        mask: Floats | None = None,
        causal: bool = False,
        zero_hidden_rows: bool = False,
        softcap: float = 0,
    ) -> Floats:
        q, k, v = (np.ascontiguousarray(one, np.float32) for one in (q, k, v))
        y = before_a_wall(np.empty_like(q))
        strides = np.zeros(3, np.int64)
        if mask is not None:
            mask = np.ascontiguousarray(mask, np.float32)
            strides[:] = [0 if size == 1 else step // 4 for size, step in zip(mask.shape, mask.strides, strict=True)]
        given = (one if one is None else one.ctypes.data for one in (q, k, v, mask, strides))
        run(*q.shape[:2], *k.shape, *given, scale, softcap, causal, zero_hidden_rows, y.ctypes.data)
        return y

    return attend


def before_a_wall(array: Floats) -> Floats:
    """Copy the array to memory followed by a page that ends the process when it is touched."""
    page = mmap.PAGESIZE
    bytes_before = -(-array.nbytes // page) * page
    memory = np.frombuffer(mmap.mmap(-1, bytes_before + page), np.uint8)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + bytes_before), page, 0) == 0
    copy = memory[bytes_before - array.nbytes : bytes_before].view(np.float32).reshape(array.shape)
    copy[...] = array
    return copy


def random(rng: np.random.Generator, heads: int, queries: int, keys: int, head_dim: int) -> tuple[Floats, ...]:
    return tuple(
        rng.standard_normal(shape, dtype=np.float32)
        for shape in ((heads, queries, head_dim), (keys, head_dim), (keys, head_dim))
    )


def check(
    attend: Attend,
    q: Floats,
    k: Floats,
    v: Floats,
    mask: Floats | None = None,
    causal: bool = False,
    softcap: float = 0,
) -> None:
    scale = float(q.shape[-1] ** -0.5)
    y = attend(q, k, v, scale, mask, causal, softcap=softcap)
    assert_attention_close(y, q, k[None], v[None], scale, mask, causal, precision=16, softcap=softcap)


def head_sizes(attend: Attend) -> None:
    """Check head sizes that are odd or not multiples of 16 or 32."""
    for head_dim in (1, 3, 16, 17, 32, 36, 48, 64, 80, 100, 128):
        for heads, queries, keys in ((1, 1, 1), (1, 5, 9), (2, 33, 70)):
            check(attend, *random(np.random.default_rng(head_dim), heads, queries, keys, head_dim))


def rows_and_keys(attend: Attend) -> None:
    """Check sizes that partly fill tiles, blocks of 64 rows, calls of 128 rows and blocks of 128 keys."""
    for causal in (False, True):
        for queries in (1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 128, 130):
            check(attend, *random(np.random.default_rng(queries), 1, queries, queries + 3, 24), causal=causal)
        for keys in (11, 15, 17, 32, 33, 127, 128, 129, 161, 300):
            check(attend, *random(np.random.default_rng(keys), 2, 11, keys, 24), causal=causal)
    check(attend, *random(np.random.default_rng(1), 2, 50, 3, 20))


def capped_scores(attend: Attend) -> None:
    """Check softcap with and without a mask."""
    for causal in (False, True):
        for heads, queries, keys in ((1, 3, 5), (2, 70, 150)):
            q, k, v = random(np.random.default_rng(keys), heads, queries, keys, 24)
            check(attend, q, k, v, None, causal, softcap=1.5)
            check(attend, q, k, v, np.where(np.arange(keys) < keys - 2, 0.5, -np.inf)[None, None], causal, softcap=1.5)


def masks(attend: Attend) -> None:
    """Check masks of all shapes and magnitudes, causal or not, with query heads that share keys."""
    rng = np.random.default_rng(0)
    for form, ones in MASKS.items():
        for causal in (False, True):
            for heads, queries, keys in ((1, 20, 20), (3, 37, 90), (4, 20, 130)):
                q, k, v = random(rng, heads, queries, keys, 36)
                shape = [1 if one else size for one, size in zip(ones, (heads, queries, keys), strict=True)]
                mask = rng.standard_normal(shape, dtype=np.float32)
                check(attend, q, k, v, mask, causal)
                for hidden in (LOWEST, -np.inf, -10000.0) if form != "number" else ():
                    # Key 0 stays visible, so that no row is fully masked.
                    masked = np.where(rng.random(shape) < 0.4, hidden, mask).astype(np.float32)
                    masked[..., 0] = 0
                    check(attend, q, k, v, masked, causal)


def rows_that_see_nothing(attend: Attend) -> None:
    """Check fully masked rows: masks of the lowest float give the mean; -Inf gives NaN, or zeros if requested."""
    q, k, v = random(np.random.default_rng(2), 1, 20, 150, 24)
    mask = np.zeros((1, 20, 150), np.float32)
    mask[:, -1] = LOWEST
    y = attend(q, k, v, 0.5, mask)
    np.testing.assert_allclose(y[0, -1], v.astype(np.float64).mean(0), atol=2.0**-7)
    mask[:, -1] = -np.inf
    y = attend(q, k, v, 0.5, mask)
    assert np.isnan(y[0, -1]).all() and np.isfinite(y[0, :-1]).all()
    np.testing.assert_array_equal(attend(q, k, v, 0.5, mask, zero_hidden_rows=True), np.nan_to_num(y))


def nan_and_infinity(attend: Attend) -> None:
    """Check that infinities and NaN propagate as in the formula."""
    rng = np.random.default_rng(3)
    for bad in (np.nan, np.inf, -np.inf):
        for where in ("q", "k", "v", "mask"):
            q, k, v = random(rng, 2, 18, 100, 20)
            mask = rng.standard_normal((2, 18, 100), dtype=np.float32)
            {"q": q[0, 7], "k": k[-1], "v": v[-1], "mask": mask[1, 3, -1:]}[where][0] = bad
            y, expected = attend(q, k, v, 0.25, mask), attention(q, k[None], v[None], 0.25, mask)
            np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
            same = ~np.isnan(expected)
            np.testing.assert_allclose(y[same], expected[same], atol=0.1)


def hidden_scores_that_overflow(attend: Attend) -> None:
    """Check that masked keys do not matter: the first query sees key 0, but not the +Inf in the next key."""
    q, k = np.full((1, 70, 8), 1e20, np.float32), np.full((70, 8), 1e20, np.float32)
    k[0] = 0
    v = np.round(np.random.default_rng(7).standard_normal((70, 8)) * 8).astype(np.float32)
    y = attend(q, k, v, 1.0, causal=True)
    np.testing.assert_array_equal(y[0, 0], v[0])
    assert np.isnan(y[0, 1:]).all()


def own_rows(attend: Attend) -> None:
    """Check that the bits of a row depend neither on other rows nor on keys that the row does not see."""
    q, k, v = random(np.random.default_rng(5), 1, 140, 140, 40)
    y = attend(q, k, v, 0.2)
    for row in (0, 17, 139):
        assert_same_bits(attend(q[:, row : row + 1], k, v, 0.2)[0, 0], y[0, row])
    causal = attend(q, k, v, 0.2, causal=True)
    for seen in (1, 40, 129):
        alone = attend(q[:, seen - 1 : seen], k[:seen], v[:seen], 0.2)
        assert_same_bits(alone[0, 0], causal[0, seen - 1])


def documented_order(attend: Attend) -> None:
    """Check the order of additions for y (32 keys per tile, 128 keys per block) and for the scores s (two keys)."""
    rng = np.random.default_rng(6)
    for keys in (16, 40, 256):
        q, k, v = random(rng, 1, 16, keys, 48)
        v *= np.exp2(rng.integers(-20, 20, v.shape)).astype(np.float32)
        expected = np.zeros((48, 16), np.float32)
        for first in range(0, keys, 32):
            a = v[first : first + 32].T.astype(ml_dtypes.bfloat16)
            expected = reference.tdpbf16ps(expected, a, np.ones((a.shape[1], 16), ml_dtypes.bfloat16))
        assert_same_bits(attend(np.zeros_like(q), k, v, 1.0)[0], expected.T * np.float32(1 / keys))
        assert (_testing.nomad_attention(np.zeros_like(q), k, v, 1.0, kernel="scalar/16")[0] != expected.T / keys).any()
    # s starts with the mask. Each product alone is lost when it is added to s, but their sum would not be.
    q, k = np.ones((1, 1, 256), np.float32), np.zeros((2, 256), np.float32)
    k[0, ::32] = 2.0**-5
    v = np.array([[1.0], [0.0]], np.float32).repeat(256, 1)
    given = (q, k, v, float(1 / np.log2(np.e)), np.full((1, 1, 2), 2.0**20, np.float32))
    np.testing.assert_array_equal(attend(*given), 0.5)
    assert (_testing.nomad_attention(*given, kernel="scalar/16") > 0.54).all()


def nothing_behind_the_arrays(attend: Attend) -> None:
    """Check that no memory after the inputs is accessed, nor after y if the caller allocates it."""
    for heads, queries, keys, head_dim in ((1, 1, 1, 1), (1, 16, 16, 32), (3, 17, 33, 36), (2, 70, 130, 47)):
        rng = np.random.default_rng(head_dim)
        q, k, v = map(before_a_wall, random(rng, heads, queries, keys, head_dim))
        for shape in ((heads, queries, keys), (1, 1, keys), (1, queries, 1)):
            for causal in (False, True):
                check(attend, q, k, v, before_a_wall(rng.standard_normal(shape, dtype=np.float32)), causal)


CHECKS: dict[str, Callable[[Attend], None]] = {
    check.__name__: check
    for check in (
        head_sizes,
        rows_and_keys,
        capped_scores,
        masks,
        rows_that_see_nothing,
        nan_and_infinity,
        hidden_scores_that_overflow,
        own_rows,
        documented_order,
        nothing_behind_the_arrays,
    )
}

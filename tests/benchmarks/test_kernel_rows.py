"""All kernels of one table that this CPU supports are timed on the same work."""

import numpy as np

from ortolan import _testing
from ortolan.benchmarks.kernel_rows import BF16_KERNELS, here, works


def test_each_kernel_that_runs_here_is_timed_on_the_same_work():
    found = {name: make() for name, make in works(copies=2, size=64)}
    attention = here(_testing.nomad_attention_kernels())
    assert list(found["attention 128 x 32"]) == attention and len(attention) >= 2
    assert set(found["bf16 2:4, 3 rows"]) == set(BF16_KERNELS) & set(here(_testing.sparse_amx_matmul_kernels()))
    for runs in found.values():
        answers = [np.asarray(run()) for run in runs.values()]
        for answer in answers[1:]:
            np.testing.assert_allclose(answer, answers[0], rtol=0, atol=0.05 * np.abs(answers[0]).max())

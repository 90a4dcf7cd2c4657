from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ortolan.engine import Request, SamplingOptions
from ortolan.errors import ArgumentError, ArgumentTypeError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1, expected at least 0"),
        ({"top_p": 0.0}, "top_p is 0, expected above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1, expected at least 0 and at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf, expected a finite number"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"logit_bias": {-1: 0.0}}, "token of logit_bias is -1"),
        ({"logit_bias": {5: math.inf}}, r"logit_bias\[5\] is inf"),
        ({"logprobs": -1}, "logprobs is -1"),
    ],
)
def test_sampling_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SamplingOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 1.5}, "top_k is a float, expected an integer"),
        ({"seed": "1"}, "seed is a str, expected an integer"),
        ({"temperature": "hot"}, "temperature is a str, expected a number"),
        ({"temperature": True}, "temperature is a bool, expected a number"),
    ],
)
def test_sampling_options_of_wrong_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        SamplingOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": (1, -2)}, "prompt contains -2, expected token ids of at least 0"),
        ({"prompt": (1, 2.5)}, "prompt has elements that are not integers"),
        ({"prompt": (1, 10**30)}, "prompt has elements that are not integers"),
        ({"end_tokens": {-1}}, "end_tokens contains -1"),
        ({"max_tokens": 0}, "max_tokens is 0, expected at least 1"),
        ({"n": 0}, "n is 0, expected at least 1"),
        ({"stop": ("",)}, "stop contains an empty string"),
        ({"deadline": math.nan}, "deadline is nan"),
        ({"prompt": ([1, 2],)}, "prompt has elements that are not integers"),
        ({"prompt": (True,)}, "prompt has elements that are not integers"),
    ],
)
def test_requests_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Request(**{"prompt": (1,), "max_tokens": 5} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"stop": "end"}, "stop is a str, expected a sequence"), ({"stop": (1,)}, "stop string is an int")],
)
def test_requests_of_wrong_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        Request(**{"prompt": (1,), "max_tokens": 5} | options)


def test_requests_take_any_sequence() -> None:
    request = Request(np.array([1, 2]), 5, stop=["x"], end_tokens=[3])  # type: ignore[arg-type]
    assert (request.prompt, request.stop, request.end_tokens) == ((1, 2), ("x",), frozenset({3}))
    assert all(type(token) is int for token in request.prompt)

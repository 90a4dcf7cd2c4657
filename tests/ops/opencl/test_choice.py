"""Test the choice between CPU and device if ORTOLAN_OPENCL asks for the faster one (ops/matmul/device_choice.h)."""

from __future__ import annotations

import pytest

from ortolan import _testing


def settle(choice: _testing.DeviceChoice, m: int, cpu: list[float], device: list[float]) -> list[bool]:
    """Make eight calls that take the given seconds, and return for each call whether the device was chosen."""
    taken = []
    for _ in range(8):
        on_device = choice.takes(m)
        taken.append(on_device)
        choice.took(m, on_device, (device if on_device else cpu).pop(0))
    return taken


@pytest.mark.parametrize("device_wins", [True, False])
def test_the_least_time_of_three_calls_wins_for_good(device_wins: bool) -> None:
    choice = _testing.DeviceChoice()
    fast, slow = [9.0, 3.0, 1.0, 3.0], [0.1, 2.0, 2.0, 2.0]  # the first calls are warm-up
    cpu, device = (slow, fast) if device_wins else (fast, slow)
    assert settle(choice, 1, list(cpu), list(device)) == [True, False] * 4
    for _ in range(3):
        assert choice.takes(1) is device_wins
        choice.took(1, device_wins, 100.0)


def test_numbers_of_rows_are_judged_apart_and_by_the_row() -> None:
    choice = _testing.DeviceChoice()
    settle(choice, 1, [1.0] * 4, [2.0] * 4)
    assert choice.takes(1) is False
    for m in (8, 15) * 4:  # row counts with equal bit length share one measurement
        on_device = choice.takes(m)
        choice.took(m, on_device, m * (1.0 if on_device else 2.0))
    assert all(choice.takes(m) for m in (8, 9, 15))
    assert choice.takes(16) and choice.takes(7)  # not measured yet, so the device is tried first
    assert choice.takes(1) is False


def test_a_failed_call_is_the_cpus() -> None:
    choice = _testing.DeviceChoice()
    assert choice.takes(4)
    choice.took(4, False, 1.0)
    assert choice.takes(4)

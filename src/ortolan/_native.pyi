"""Native core of Ortolan: packers, unpackers, shared rules, CPU information."""

from collections.abc import Callable, Hashable

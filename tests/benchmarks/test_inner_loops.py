"""The loops that llvm-mca is asked about: which part of a function they are."""

from ortolan.benchmarks.inner_loops import inner_loop, is_product

INSTRUCTIONS = [
    (0x10, "mov %rax,%rbx"),
    (0x13, "{vex} vpdpbusd %ymm1,%ymm2,%ymm3"),  # the loop around
    (0x18, "vmovdqu (%rdx),%ymm1"),  # the loop inside
    (0x1C, "{vex} vpdpbusd %ymm1,%ymm2,%ymm3"),
    (0x21, "add $0x20,%rdx"),
    (0x25, "jne    18 <f+0x8>"),
    (0x27, "jg     13 <f+0x3>"),
    (0x29, "vpaddd %ymm1,%ymm2,%ymm3"),
    (0x2D, "jne    29 <f+0x19>"),
    (0x2F, "jmp    40 <f+0x30>"),
]


def test_the_loop_of_products_without_a_jump_inside():
    assert inner_loop(INSTRUCTIONS, "vpdpbusd") == [text for _, text in INSTRUCTIONS[2:5]]
    assert inner_loop(INSTRUCTIONS, "vpaddd") == ["vpaddd %ymm1,%ymm2,%ymm3"]
    assert inner_loop(INSTRUCTIONS, "vfmadd") == []


def test_products_in_either_encoding():
    assert is_product("{vex} vpdpbusd %ymm1,%ymm2,%ymm3", "vpdpbusd")
    assert is_product("vfmadd231ps %ymm1,%ymm2,%ymm3", "vfmadd")
    assert not is_product("vpaddd %ymm1,%ymm2,%ymm3", "vpdpbusd")

"""Finding the inner loops of a function that llvm-mca analyzes."""

from dataclasses import replace

from ortolan.benchmarks.inner_loops import LOOPS, find, inner_loop, is_load, is_product

INSTRUCTIONS = [
    (0x10, "mov %rax,%rbx"),
    (0x13, "{vex} vpdpbusd %ymm1,%ymm2,%ymm3"),  # start of the outer loop
    (0x18, "vmovdqu (%rdx),%ymm1"),  # start of the inner loop
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


ARM_INSTRUCTIONS = [
    (0x10, "ldr\tq0, [x1]"),
    (0x14, "smmla\tv1.4s, v0.16b, v2.16b"),  # start of a loop
    (0x18, "subs\tx6, x6, #0x1"),
    (0x1C, "b.ne\t14"),
    (0x20, "smmla\tv1.4s, v0.16b, v2.16b"),  # start of a loop that contains a jump
    (0x24, "cbz\tx3, 2c"),
    (0x28, "add\tx0, x0, #0x40"),
    (0x2C, "cbnz\tx4, 20"),
    (0x30, "smmla\tv1.4s, v0.16b, v2.16b"),  # start of the longest loop
    (0x34, "ldp\tq0, q1, [x1], #32"),
    (0x38, "bl\t10"),
    (0x3C, "tbnz\tw3, #1, 30"),
]


def test_the_loops_of_arm_code() -> None:
    assert inner_loop(ARM_INSTRUCTIONS, "smmla") == [text for _, text in ARM_INSTRUCTIONS[8:11]]
    assert inner_loop(ARM_INSTRUCTIONS[:4], "smmla") == [text for _, text in ARM_INSTRUCTIONS[1:3]]


def test_the_first_pattern_that_finds_a_function_with_the_loop() -> None:
    one, other = ARM_INSTRUCTIONS[:4], ARM_INSTRUCTIONS[8:]
    of_file = [("<Multiply>:", one), ("<OneRow128>:", other), ("<OneRow32>:", one)]
    loop = replace(LOOPS[0], product="smmla", function=("OneRow128", "Multiply"))
    assert find(of_file, loop) == inner_loop(other, "smmla") != inner_loop(one, "smmla")
    assert find([of_file[0], of_file[2]], loop) == find(of_file, replace(loop, function="Multiply"))
    assert find(of_file, replace(loop, product="usdot")) == []


def test_what_reads_memory() -> None:
    assert is_load("ldp\tq0, q1, [x1], #32") and is_load("ld1r\t{v0.4s}, [x1]")
    assert not is_load("str\tq0, [x1]") and not is_load("prfm\tpldl1keep, [x0]")
    assert is_load("vmovdqu (%rdx),%ymm1") and is_load("{vex} vpdpbusd 0x20(%rax),%ymm2,%ymm3")
    assert not is_load("vmovdqu %ymm1,(%rdx)") and not is_load("lea    0x20(%rdx),%rax")

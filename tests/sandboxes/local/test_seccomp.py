"""The filter as a program, for both processors; one of them cannot run here."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchflow.sandboxes.local.seccomp import DENIED, assemble

ALLOW, KILL = 0x7FFF0000, 0x80000000
ARCHES = {0: 0xC000003E, 1: 0xC00000B7}
ARGUMENT_CHECKED = {0: {56, 435, 135, 41, 16}, 1: {220, 435, 92, 198, 29}}


def answer(column: int, number: int, *, arch: int | None = None, args: tuple[int, ...] = ()) -> int:
    """Run the filter as the kernel would and return its action."""
    padded = [*args, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<iIQ6Q", number, ARCHES[column] if arch is None else arch, 0, *padded)
    code = list(struct.iter_unpack("<HBBI", assemble(column, ARCHES[column])))
    at, register = 0, 0
    while True:
        kind, when_true, when_false, value = code[at]
        at += 1
        if kind == 0x20:
            register = struct.unpack_from("<I", data, value)[0]
        elif kind == 0x06:
            return value
        else:
            holds = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[kind]
            at += when_true if holds else when_false


def errno(number: int) -> int:
    return 0x50000 | number


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("name", DENIED)
def test_every_denied_call_answers_eperm(column: int, name: str) -> None:
    number = DENIED[name][column]
    if number is not None:
        assert answer(column, number) == errno(1)


@pytest.mark.parametrize("column", [0, 1])
def test_flags_and_families(column: int) -> None:
    clone, personality, socket = ((56, 135, 41), (220, 92, 198))[column]
    assert answer(column, clone, args=(0x3D0F00,)) == ALLOW  # a thread
    assert answer(column, clone, args=(0x10000011,)) == errno(1)  # a user namespace
    assert answer(column, 435) == errno(38)
    assert answer(column, personality, args=(8,)) == ALLOW
    assert answer(column, personality, args=(0x40000,)) == errno(1)
    assert answer(column, socket, args=(2,)) == ALLOW
    assert answer(column, socket, args=(40,)) == errno(97)


@pytest.mark.parametrize("column", [0, 1])
def test_another_processor_is_killed(column: int) -> None:
    assert answer(column, 1, arch=0x40000003) == KILL


def test_the_x32_numbers_do_not_exist() -> None:
    assert answer(0, 0x40000000 + 165) == errno(38)


@given(column=st.sampled_from([0, 1]), number=st.integers(0, 600), first=st.integers(0, 2**64 - 1))
def test_everything_else_is_allowed(column: int, number: int, first: int) -> None:
    listed = {numbers[column] for numbers in DENIED.values()} | ARGUMENT_CHECKED[column]
    if number not in listed:
        assert answer(column, number, args=(first,)) == ALLOW

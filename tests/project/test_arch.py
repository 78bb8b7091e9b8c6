"""The code that switches coros on processors other than x86-64.

The code for AArch64 is built for Linux and run in an emulator; for Apple's systems it is only assembled. For unknown
processors there is no such code, and a test builds the file that stands in for it (arch/none.rs).

A test whose compiler or emulator is not installed is skipped with a message. With ``REQUIRE_CROSS=1``, as in the
project's CI, it fails instead, unless only clang is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCH = ROOT / "core" / "src" / "arch"
HARNESS = Path(__file__).with_name("aarch64_harness.c")
PACKAGES = "Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static"


def tool(*names: str, where_from: str = PACKAGES, is_required: bool = True) -> str:
    for name in names:
        if found := shutil.which(name):
            return found
    reason = f"NOT TESTED: {names[0]} is not installed ({where_from})"
    if is_required and os.environ.get("REQUIRE_CROSS", "0") not in ("", "0"):
        pytest.fail(f"{reason}, and REQUIRE_CROSS is set", pytrace=False)
    pytest.skip(reason)


def layout() -> dict[str, str]:
    """Return the constants of aarch64.rs, which describe the frame that ``prepare`` makes."""
    source = (ARCH / "aarch64.rs").read_text(encoding="utf-8")
    found = dict(re.findall(r"^const (\w+): usize = (\d+);", source, re.MULTILINE))
    assert sorted(found) == ["ARGUMENT", "ENTRY", "FRAME_WORDS", "RETURN_ADDRESS"]
    return found


def build(folder: Path, replaced: dict[str, str]) -> Path:
    """Build the harness with the extension's instructions. ``replaced`` maps lines to the lines that replace them."""
    definitions = [f"-D{name}={value}" for name, value in layout().items()]
    for name, file in {"SWITCH": "aarch64_switch.s", "START": "aarch64_start.s"}.items():
        text = (ARCH / file).read_text(encoding="utf-8")
        for line, other in replaced.items():
            assert text.count(line) <= 1
            text = text.replace(line, other)
        copy = folder / file
        copy.write_text(text, encoding="utf-8")
        definitions.append(f'-D{name}="{copy}"')
    program = folder / "harness"
    command = [tool("aarch64-linux-gnu-gcc"), "-O1", "-frounding-math", "-static", "-Wall", "-Werror", "-fexceptions"]
    subprocess.run([*command, "-fno-omit-frame-pointer", *definitions, "-o", program, HARNESS, "-lm"], check=True)
    return program


def run(program: Path) -> subprocess.CompletedProcess[str]:
    emulator = tool("qemu-aarch64-static", "qemu-aarch64")
    return subprocess.run([emulator, program], capture_output=True, text=True, check=False, timeout=120)


def test_the_switch_on_aarch64(tmp_path: Path) -> None:
    done = run(build(tmp_path, {}))
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")


@pytest.mark.parametrize(
    ("line", "other", "outcome"),
    [
        ("ldp d14, d15, [sp, #160]", "ldp d14, d13, [sp, #160]", "wrong: registers of the thread's own stack\n"),
        ("ldp x27, x28, [sp, #64]", "ldp x27, x26, [sp, #64]", "wrong: registers of the thread's own stack\n"),
        ("msr fpcr, x9", "nop", "wrong: FPCR of the thread's own stack\n"),
        (".cfi_undefined x30", "", "wrong: the unwind chain does not end\n"),
    ],
)
def test_the_harness_notices_wrong_instructions(tmp_path: Path, line: str, other: str, outcome: str) -> None:
    assert run(build(tmp_path, {line: other})).stdout == outcome


def test_the_instructions_are_assembled_for_apple(tmp_path: Path) -> None:
    clang = tool("clang", where_from="Debian: clang", is_required=False)
    for file in ("aarch64_switch.s", "aarch64_start.s"):
        command = [clang, "--target=arm64-apple-darwin", "-c", ARCH / file, "-o", tmp_path / "out.o"]
        subprocess.run(command, check=True)


def test_an_unknown_processor_builds(tmp_path: Path) -> None:
    """arch/none.rs has everything that arch/mod.rs requires of each processor's file. With none.rs, coros are refused
    (tests/coro/stacks/test_state.py).
    """
    rustc = tool("rustc", where_from="https://rustup.rs")
    crate = tmp_path / "arch.rs"
    module = (ARCH / "mod.rs").read_text(encoding="utf-8")
    module = "".join(f"{line}\n" for line in module.splitlines() if not line.startswith("//!"))
    # This makes every condition on the processor false, so mod.rs uses none.rs.
    module = module.replace("target_arch =", "target_env =")
    crate.write_text(
        f"pub mod arch {{\n{module}\n"
        "pub fn is_supported() -> bool { let _ = (switch as usize, prepare as usize); IS_SUPPORTED }\n}\n"
        'fn main() { println!("{}", arch::is_supported()); }\n',
        encoding="utf-8",
    )
    folder = tmp_path / "arch"
    folder.mkdir()
    shutil.copy(ARCH / "none.rs", folder)
    program = tmp_path / "program"
    subprocess.run([rustc, "--edition", "2024", "-A", "warnings", "-o", program, crate], check=True)
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout == "false\n"

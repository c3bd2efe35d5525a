"""The Triton version compiled for real GPUs, which needs none of them: what the interpreter cannot say."""

import re

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kvshare_connector.kernels import repack  # noqa: E402

#: A100, H100 and their kin.
CAPABILITIES = (80, 90)
TABLES = ("p_items", "p_objects", "p_runs", "p_layers")
NUMBERS = ("N", "M", "C")
CONSTANTS = ("UNPACK", "WORD", "BYTES", "ALIGN", "ROWS", "WIDTH")


def _code(align: int, capability: int, *, unpack: bool) -> str:
    """The kernel in the GPU's assembly, for a block of 16 tokens of 512 bytes."""
    word, size = repack._WORDS[align]
    signature = dict.fromkeys(TABLES, "*i64") | dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(CONSTANTS, "constexpr")
    constants = {"UNPACK": unpack, "WORD": word, "BYTES": size, "ALIGN": align, "ROWS": 32, "WIDTH": 64}
    divisible = [["tt.divisibility", 16]]
    source = ASTSource(repack._copy, signature, constexprs=constants, attrs={(0,): divisible, (6,): divisible})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return str(compiled.asm["ptx"])


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("unpack", [False, True])
def test_it_compiles_and_moves_sixteen_bytes_at_once(capability: int, unpack: bool) -> None:
    """Where everything is a multiple of 16 bytes, as in every real cache, a thread loads and stores two words."""
    code = _code(16, capability, unpack=unpack)
    assert "ld.global.v2.b64" in code
    assert set(re.findall(r"st\.global\.\S+", code)) == {"st.global.v2.b64"}


@pytest.mark.parametrize(("align", "stores"), [(8, "st.global.b64"), (4, "st.global.b32"), (2, "st.global.b16"),
                                               (1, "st.global.b8")])  # fmt: skip
def test_it_never_moves_more_than_what_is_aligned(align: int, stores: str) -> None:
    """A wider access at such an address would be a fault of the device."""
    assert set(re.findall(r"st\.global\.\S+", _code(align, 80, unpack=True))) == {stores}

"""GGUF files that trigger published flaws of GGUF readers, and files like them.

A case has a CVE number where the CVE's record describes what the file does; docs/notes/reliability.md says
which records could not be looked up. Most of these flaws are products and sums that wrap around in C. Here
they are numbers that a file can't hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.hostile.fields import (
    ARRAY,
    BOOL,
    F64,
    I32,
    STRING,
    U8,
    U32,
    U64,
    Fields,
    array,
    head,
    number,
    pair,
    strings,
    tensor,
    text,
    u32,
    u64,
    word,
)

F32, Q4_0, Q4_K, I8, Q8_0_R8 = 0, 2, 12, 24, 208
"""Ids of tensor types."""

DATA = bytes(4096)
EMPTY = u64(0)
"""An empty string."""


@dataclass(frozen=True)
class Case:
    """One file.

    fields       fields that the file begins with
    says         regular expression for the error; None: the file must be opened
    total_bytes  size of the file, padded with zeros after the fields (on disk they take no space)
    """

    fields: Fields
    says: str | None
    total_bytes: int = 0


def _counts() -> Mapping[str, Case]:
    """Numbers of pairs, tensors, characters and items that the file can't hold."""
    return {
        # CVE-2024-23605, CVE-2024-25664: header.n_kv times the size of a pair, allocated unchecked.
        "n_kv 2**64-1": Case((*head(0, 2**64 - 1), DATA), "metadata pairs and 0 tensors"),
        "n_kv 2**63": Case((*head(0, 2**63), DATA), "metadata pairs and 0 tensors"),
        "n_kv whose product with 16 wraps": Case((*head(0, 2**60 + 1), DATA), "metadata pairs"),
        # CVE-2024-21836, CVE-2024-25666: the same with header.n_tensors.
        "n_tensors 2**64-1": Case((*head(2**64 - 1), DATA), "0 metadata pairs and 18446744073709551615 tens"),
        "n_tensors 2**63": Case((*head(2**63), DATA), "0 metadata pairs and"),
        # CVE-2026-27940: tensors times their overhead, plus the size of the data, wraps in the sum.
        "n_tensors whose product with 368 wraps": Case((*head(2**64 // 368 + 1), DATA), "tensors"),
        "both counts, adding up to 0": Case((*head(2**64 - 1, 1), DATA), "tensors"),
        # CVE-2024-23496, CVE-2024-25665: gguf_fread_str allocates length + 1, which wraps to 0.
        "key of 2**64-1 characters": Case((*head(0, 1), u64(2**64 - 1), DATA), "key 0"),
        "string of 2**64-1 characters": Case(
            (*head(0, 1), *pair("k", STRING, u64(2**64 - 1), DATA)), "key 'k'"
        ),
        "name of 2**64-1 characters": Case((*head(1), u64(2**64 - 1), DATA), "the name of tensor 0"),
        "string one byte longer than the file": Case(
            (*head(0, 1), *pair("k", STRING, u64(5), b"abcd")), "key 'k' .* needs 5 bytes, the file has 4"
        ),
        # CVE-2024-25667, CVE-2024-21825: items times their size wraps, in arrays of numbers ...
        "array whose bytes wrap around": Case((*head(0, 1), *array("k", U64, 2**61 + 1, DATA)), "array of"),
        "array of 2**64-1 bytes": Case((*head(0, 1), *array("k", U8, 2**64 - 1, DATA)), "array of"),
        # ... and CVE-2024-25668, CVE-2024-21825: in arrays of strings.
        "strings whose records wrap around": Case(
            (*head(0, 1), *array("k", STRING, 2**60 + 1, DATA)), "array of"
        ),
        # CVE-2024-32878: reading fails half-way, and strings that were never read are freed.
        "ends inside an array of strings": Case(
            (*head(0, 1), *array("k", STRING, 3, *text("a"), u64(100), bytes(9))),
            "string 1 of 3 of key 'k' at byte .* needs 100 bytes",
        ),
        "ends before the second of two pairs": Case(
            (*head(0, 2), *pair("k", STRING, *text("a value that makes the file long enough"))), "key 1"
        ),
    }


def _python() -> Mapping[str, Case]:
    """Files that make Python readers run forever: reads past the end return nothing and raise no error."""
    return {
        # 48 bytes that keep gguf 0.19.0 busy forever, found while looking into a report of 43 bytes.
        "48 bytes, array of 2**63 without a byte": Case(
            (
                b"GGUF",                  # 00
                u32(3),                   # 04 version
                u64(0),                   # 08 no tensor
                u64(1),                   # 10 one pair
                EMPTY,                    # 18 whose key is empty,
                u32(ARRAY), u32(U8),      # 20 an array of uint8
                u64(2**63),               # 28 of which there are as many; 30 the end
            ),
            "array of 9223372036854775808 uint8",
        ),
        "array of 2**63 arrays": Case((*head(0, 1), *array("k", ARRAY, 2**63, DATA)), "array of"),
        "array of an array of 2**62 items": Case(
            (*head(0, 1), *array("k", ARRAY, 1, u32(U8), u64(2**62), DATA)), "array of"
        ),
        "arrays nested 100,000 deep": Case(
            (*head(0, 1), *pair("k", ARRAY, *((u32(ARRAY), u64(1)) * 100_000))), "nested deeper than 64"
        ),
        "arrays nested 100,000 deep, two in each": Case(
            (*head(0, 1), *pair("k", ARRAY, *((u32(ARRAY), u64(2)) * 100_000))), "nested deeper than 64"
        ),
        "arrays nested 64 deep": Case(
            (*head(0, 1), *pair("k", ARRAY, *((u32(ARRAY), u64(1)) * 64), u32(U8), u64(1), b"\1")), None
        ),
    }  # fmt: skip


def _memory() -> Mapping[str, Case]:
    """Large files of zeros, which cost nothing to send, though each zero would become an object."""
    too_much = "would take more than"
    return {
        "128 million numbers": Case((*head(0, 1), *array("k", U8, 2**27)), too_much, 2**27 + 100),
        "8 million large numbers": Case((*head(0, 1), *array("k", U64, 2**23)), too_much, 2**26 + 100),
        "128 million empty strings": Case((*head(0, 1), *array("k", STRING, 2**27)), too_much, 2**30 + 100),
        "80 million empty arrays": Case((*head(0, 1), *array("k", ARRAY, 80_000_000)), too_much, 2**30),
        "a string of 64 GiB": Case((*head(0, 1), *pair("k", STRING, u64(2**36))), too_much, 2**36 + 100),
        "a key of 64 GiB": Case((*head(0, 1), u64(2**36)), "expected at most 65535", 2**36 + 100),
        "a name of 64 GiB": Case((*head(1), u64(2**36)), "expected at most 1024", 2**36 + 100),
        "80 million pairs": Case(head(0, 80_000_000), too_much, 2**31),
        "40 million tensors": Case(head(40_000_000), too_much, 2**31),
    }


def _keys() -> Mapping[str, Case]:
    """Keys and values that are wrong in themselves."""
    alignment = "general.alignment"
    return {
        "kind 13": Case((*head(0, 1), *pair("k", 13, DATA)), "key 'k' has kind 13, expected 0 to 12"),
        "kind 2**31-1": Case((*head(0, 1), *pair("k", 2**31 - 1, DATA)), "key 'k' has kind 2147483647"),
        "kind -1": Case((*head(0, 1), *pair("k", 2**32 - 1, DATA)), "key 'k' has kind 4294967295"),
        "array of kind 99": Case((*head(0, 1), *array("k", 99, 1, DATA)), "kind 99"),
        "key twice": Case((*head(0, 2), *number("k", 1), *number("k", 2)), "key 'k' appears twice"),
        "no pair and no tensor": Case(head(), None),
        "bool of 2": Case((*head(0, 1), *pair("k", BOOL, b"\2")), None),
        "NaN": Case((*head(0, 1), *pair("k", F64, b"\xff" * 8)), None),
        "key and text that are not UTF-8": Case(
            (*head(0, 1), *pair(b"\xff", STRING, *text(b"\xff\xfe\xc0"))), None
        ),
        "key that moves the cursor": Case(
            (*head(0, 2), *(2 * number("k\n\x1b[2J", 1))), r"'k\\n\\x1b\[2J' appears twice"
        ),
        "key of 65536 characters": Case((*head(0, 1), *number("k" * 65536, 1)), "key 0 has 65536 bytes"),
        "key of 65535 characters, twice": Case(
            (*head(0, 2), *(2 * number("k" * 65535, 1))), r"k'\.\.\. appears twice"
        ),
        "alignment 0": Case((*head(0, 1), *number(alignment, 0)), "is 0, expected a power of two"),
        "alignment 48": Case((*head(0, 1), *number(alignment, 48)), "is 48, expected a power of two"),
        "alignment 2**31": Case(
            (*head(1, 1), *number(alignment, 2**31), *tensor("t"), DATA), "alignment 2147483648"
        ),
        "alignment 2**31 without a tensor": Case((*head(0, 1), *number(alignment, 2**31)), None),
        "alignment that is int32": Case((*head(0, 1), *pair(alignment, I32, u32(32))), "is int32, expected"),
        "alignment that is a text": Case((*head(0, 1), *word(alignment, "32")), "is string, expected uint32"),
        "alignment that is an array": Case(
            (*head(0, 1), *array(alignment, U32, 1, u32(32))), "is array of uint32, expected uint32"
        ),
    }


def _tensors() -> Mapping[str, Case]:
    """Shapes, types and places of tensors."""
    return {
        # CVE-2024-21802: more dimensions than the record has room for.
        "5 dimensions": Case((*head(1), *tensor("t", (1,) * 5), DATA), "5 dimensions, expected at most 4"),
        "2**32-1 dimensions": Case((*head(1), *text("t"), u32(2**32 - 1), DATA), "4294967295 dimensions"),
        "a million dimensions": Case((*head(1), *text("t"), u32(10**6)), "1000000 dimensions", 2**24),
        "a dimension of 0": Case((*head(1), *tensor("t", (32, 0)), DATA), r"dimension of 0: \[32, 0\]"),
        "no dimension": Case((*head(1), *tensor("t", ()), DATA), None),
        # CVE-2026-33298: elements times bytes a block wrap: an exabyte of weights in a small buffer.
        "bytes of blocks that wrap around": Case(
            (*head(1), *tensor("t", (2**32, 2**29), Q4_0), DATA), "tensor 't' lies at"
        ),
        "row whose bytes wrap before they are divided": Case(
            (*head(1), *tensor("t", ((2**64 // 18 + 32) & ~31,), Q4_0), DATA), "tensor 't' lies at"
        ),
        "dimensions whose product wraps to 4": Case(
            (*head(1), *tensor("t", (4194305, 4194305, 211106198978564)), DATA), "tensor 't' lies at"
        ),
        "dimensions whose product is negative": Case(
            (*head(1), *tensor("t", (2**63 - 1, 2), I8), DATA), "tensor 't' lies at"
        ),
        "negative dimension": Case((*head(1), *tensor("t", (2**64 - 32,)), DATA), "tensor 't' lies at"),
        # CVE-2025-53630: the sum of the sizes of all tensors wraps.
        "sizes whose sum wraps around": Case(
            (*head(2), *tensor("a", (2**61,)), *tensor("b", (2**61,), offset=2**63), DATA), "'a' lies at"
        ),
        "size that wraps when padded": Case((*head(1), *tensor("t", (2**62 - 1,)), DATA), "'t' lies at"),
        "size that wraps twice": Case((*head(1), *tensor("t", (2**63 - 3,)), DATA), "'t' lies at"),
        # CVE-2026-7482: offset or shape beyond the file, then read and quantized.
        "offset behind the file": Case((*head(1), *tensor("t", offset=2**20), DATA), "'t' lies at bytes"),
        "shape behind the file": Case((*head(1), *tensor("t", (32, 2**20)), DATA), "'t' lies at bytes"),
        "one byte missing": Case((*head(1), *tensor("t"), bytes(7), bytes(127)), "the file has"),
        "offset 2**64-32": Case((*head(1), *tensor("t", offset=2**64 - 32), DATA), "'t' lies at bytes"),
        "offset between alignments": Case((*head(1), *tensor("t", offset=16), DATA), "expected a multiple"),
        "overlap": Case(
            (*head(2), *tensor("a"), *tensor("b", offset=96), DATA), "'a' and 'b' overlap at byte"
        ),
        "one inside the other": Case(
            (*head(2), *tensor("a", (256,)), *tensor("b", offset=128), DATA), "'a' and 'b' overlap at byte"
        ),
        "both in one place": Case((*head(2), *tensor("a"), *tensor("b"), DATA), "overlap at byte"),
        "name twice": Case((*head(2), *tensor("t"), *tensor("t", offset=128), DATA), "'t' appears twice"),
        "name of 1025 characters": Case((*head(1), *tensor("t" * 1025), DATA), "has 1025 bytes"),
        "name of 1024 characters": Case((*head(1), *tensor("t" * 1024), DATA), None),
        "name of 1024 characters, and behind the file": Case(
            (*head(1), *tensor("t" * 1024, offset=2**40), DATA), r"t'\.\.\. lies at"
        ),
        "layer of 1000 digits": Case((*head(1), *tensor(f"blk.{'9' * 1000}.ffn_up.weight"), DATA), None),
        "name that moves the cursor": Case((*head(1), *tensor("\x1b[2J\r\n"), DATA), None),
        "name that is not UTF-8": Case((*head(1), *tensor(b"\xff\xfe"), DATA), None),
        "no name": Case((*head(1), *tensor(""), DATA), None),
        "type 4711": Case((*head(1), *tensor("t", type_id=4711), DATA), "unknown tensor type id 4711"),
        "type -1": Case((*head(1), *tensor("t", type_id=2**32 - 1), DATA), "unknown tensor type id 42949"),
        "row that is not whole blocks": Case(
            (*head(1), *tensor("t", (100, 2), Q4_K), DATA), "row length 100 is not a multiple of 256"
        ),
        "rows that are not whole groups": Case((*head(1), *tensor("t", (32, 3), Q8_0_R8), DATA), None),
    }


def _orders() -> Mapping[str, Case]:
    """Byte orders and versions that contradict each other."""
    big = b"GGUF" + (3).to_bytes(4, "big")
    return {
        "magic the other way round": Case((b"FUGG", u32(3), u64(0), u64(0)), "not a GGUF file"),
        "big-endian version, little-endian counts": Case((big, u64(0), u64(1), DATA), "metadata pairs"),
        "little-endian version, big-endian counts": Case(
            (b"GGUF", u32(3), bytes(8), (1).to_bytes(8, "big"), DATA), "metadata pairs"
        ),
        "big-endian file with a little-endian key": Case(
            (big, bytes(8), (1).to_bytes(8, "big"), *number("k", 1), DATA), "key 0"
        ),
        "big-endian": Case((big, bytes(16)), None),
        "version 0": Case(head(version=0), "version 0"),
        "version 1": Case(head(version=1), "version 1"),
        "version 2**31": Case(head(version=2**31), "version"),
        "empty": Case((), "the file is empty"),
        "only the magic": Case((b"GGUF",), "the version"),
        "another format": Case((b"PK\3\4", DATA), "not a GGUF file"),
    }


def _shown() -> Mapping[str, Case]:
    """Files that are opened, and must not make `show` work or print forever."""
    arch = word("general.architecture", "x")
    return {
        "2**32-1 layers": Case(
            (*head(0, 4), *arch, *number("x.block_count", 2**32 - 1), *number("x.attention.head_count", 4),
             *number("x.embedding_length", 64)), None,
        ),
        "2**63 layers": Case(
            (*head(0, 4), *arch, *pair("x.block_count", U64, u64(2**63)),
             *number("x.attention.head_count", 4), *number("x.embedding_length", 64)), None,
        ),
        "more layers for prediction than layers": Case(
            (*head(0, 5), *arch, *number("x.block_count", 2), *number("x.nextn_predict_layers", 9),
             *number("x.attention.head_count", 4), *number("x.embedding_length", 64)), None,
        ),
        "scores of tokens as bytes": Case(
            (*head(0, 2), *strings("tokenizer.ggml.tokens", "a", "b"),
             *array("tokenizer.ggml.scores", U8, 2, b"ab")), None,
        ),
        "token of a byte -1": Case((*head(0, 1), *strings("tokenizer.ggml.tokens", "<0x-1>")), None),
        "heads that are texts": Case(
            (*head(0, 5), *arch, *number("x.block_count", 2), *number("x.attention.head_count", 4),
             *number("x.embedding_length", 64), *strings("x.attention.head_count_kv", "a", "b")), None,
        ),
        "architecture that is an array": Case(
            (*head(0, 1), *strings("general.architecture", *["x"] * 1000)), None
        ),
        "a long key beside many": Case(
            (*head(0, 5001), *number("k" * 65535, 0), *(f for i in range(5000) for f in number(str(i), i))),
            None,
        ),
    }  # fmt: skip


CASES: Mapping[str, Case] = {
    **_counts(), **_python(), **_memory(), **_keys(), **_tensors(), **_orders(), **_shown(),
}  # fmt: skip

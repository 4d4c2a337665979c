import bz2
import gzip
import io
import lzma

import pytest
import zstandard

from agentenv.errors import ImageError
from agentenv.image.compression import compression, plain

DATA = bytes(range(256)) * 20_000
PACK = {
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.mark.parametrize("name", PACK)
def test_each_compression_is_found_and_undone(name):
    packed = PACK[name](DATA)
    assert compression(packed) == name
    assert b"".join(plain(io.BytesIO(packed))) == DATA


@pytest.mark.parametrize("name", PACK)
def test_streams_in_a_row_and_padding_behind(name):
    packed = PACK[name](DATA) + PACK[name](b"more") + (bytes(1000) if name == "gzip" else b"")
    assert b"".join(plain(io.BytesIO(packed))) == DATA + b"more"


@pytest.mark.parametrize("name", PACK)
def test_a_stream_without_end_is_told(name):
    packed = PACK[name](DATA)
    with pytest.raises(ImageError):
        b"".join(plain(io.BytesIO(packed[: len(packed) - 20])))


def test_plain_bytes_pass():
    assert b"".join(plain(io.BytesIO(DATA))) == DATA
    assert b"".join(plain(io.BytesIO(b""))) == b""

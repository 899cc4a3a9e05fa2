"""UTF-8 only, in place of the standard package: it makes the helper start sooner."""

import _codecs
import codecs


class _Encoder(codecs.IncrementalEncoder):
    def encode(self, input, final=False):
        return _codecs.utf_8_encode(input, self.errors)[0]


class _Decoder(codecs.BufferedIncrementalDecoder):
    _buffer_decode = staticmethod(_codecs.utf_8_decode)  # pyright: ignore[reportAssignmentType]


def _decode(data, errors="strict"):
    return _codecs.utf_8_decode(data, errors, True)


_UTF_8 = codecs.CodecInfo(
    _codecs.utf_8_encode,
    _decode,
    codecs.StreamReader,
    codecs.StreamWriter,
    _Encoder,
    _Decoder,
    name="utf-8",
)

_codecs.register(lambda name: _UTF_8 if name in ("utf_8", "utf-8", "utf8") else None)

"""Text files: decoding and encoding on top of a :class:`BinaryFile`, as :class:`io.TextIOWrapper` does it."""

from __future__ import annotations

import asyncio
import codecs
import io
import operator
import os

from ._raw import AsyncFile, checked_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from ._binary import BinaryFile

# How much is decoded at once, in bytes: as much as io.TextIOWrapper decodes.
_CHUNK_SIZE = 8192
# Like _pyio.TextIOWrapper, this module packs a position in a text file into one number. Its first field is the position
# in bytes. These are the bit offsets of the other fields, and the mask of a field. (io.TextIOWrapper, which is written
# in C, has the same fields at other offsets.)
_FLAGS, _FEED, _SKIP, _EOF = 64, 128, 192, 256
_FIELD = (1 << 64) - 1


class TextOptions:
    """How a text file treats encoding, errors and line ends. :class:`io.TextIOWrapper` checks the arguments."""

    def __init__(self, encoding: str | None, errors: str | None, newline: str | None, *, line_buffering: bool) -> None:
        with io.TextIOWrapper(io.BytesIO(), encoding, errors, newline) as wrapper:
            self.encoding: str = wrapper.encoding
            self.errors: str = wrapper.errors or "strict"
        self.newline = newline
        self.line_buffering = line_buffering

    def decoder(self) -> Any:
        decoder: Any = codecs.getincrementaldecoder(self.encoding)(self.errors)
        if self.newline in (None, ""):
            decoder = io.IncrementalNewlineDecoder(decoder, translate=self.newline is None)
        return decoder

    def encoder(self) -> Any:
        return codecs.getincrementalencoder(self.encoding)(self.errors)


class TextFile(AsyncFile):
    """A text file, like :class:`io.TextIOWrapper`."""

    def __init__(self, buffer: BinaryFile, options: TextOptions, mode: str) -> None:
        self.mode = mode
        self._binary: BinaryFile | None = buffer
        self._options = options
        self._lock = asyncio.Lock()
        self._decoder = options.decoder()
        self._encoder = options.encoder()
        if buffer._can_write and buffer._is_seekable and buffer._raw_position():
            self._encoder.setstate(0)  # no byte order mark in the middle of a file
        # The decoded text that the program has not got yet begins at `_used`.
        self._decoded = ""
        self._used = 0
        # Where the bytes of `_decoded` begin in the file, the decoder's flags there, and the bytes. None if that is not
        # known, for example after a write.
        self._snapshot: tuple[int, int, bytes] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} name={self.name!r} mode={self.mode!r} encoding={self.encoding!r}>"

    # --- state ---

    @property
    def buffer(self) -> BinaryFile:
        """The binary file below this one."""
        if self._binary is None:
            raise ValueError("underlying buffer has been detached")
        return self._binary

    @property
    def name(self) -> Any:
        """The path or the descriptor that the file was opened with."""
        return self.buffer.name

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self.buffer.closed

    @property
    def encoding(self) -> str:
        """The name of the encoding."""
        return self._options.encoding

    @property
    def errors(self) -> str:
        """What happens with data that cannot be decoded or encoded."""
        return self._options.errors

    @property
    def line_buffering(self) -> bool:
        """Whether writing the end of a line flushes the file."""
        return self._options.line_buffering

    @property
    def newlines(self) -> Any:
        """The kinds of line ends that were read so far: None, a string, or a tuple of strings."""
        return getattr(self._decoder, "newlines", None)

    def fileno(self) -> int:
        """Return the descriptor. The descriptor's own position is not the position of this file."""
        return self.buffer.fileno()

    def readable(self) -> bool:
        """Whether the file was opened for reading."""
        return self.buffer.readable()

    async def writable(self) -> bool:
        """Whether the file was opened for writing."""
        return await self.buffer.writable()

    async def seekable(self) -> bool:
        """Whether the file has positions."""
        return await self.buffer.seekable()

    async def isatty(self) -> bool:
        """Whether the file is a terminal."""
        return await self.buffer.isatty()

    def detach(self) -> BinaryFile:
        """Return the binary file; this object cannot be used any longer. Call :meth:`flush` first."""
        buffer = self.buffer
        self._binary = None
        return buffer

    # --- reading ---

    async def _before_reading(self) -> None:
        buffer = self.buffer
        buffer._check_open()
        if not buffer._can_read:
            raise io.UnsupportedOperation("not readable")
        async with buffer._lock:
            await buffer._before_reading()

    def _mark(self) -> Any:
        buffer = self.buffer
        position = buffer._logical_position() if buffer._is_seekable else None
        return position, self._decoded, self._used, self._snapshot, self._decoder.getstate()

    def _rewind(self, mark: Any, taken: list[str]) -> None:
        position, decoded, used, snapshot, state = mark
        if position is None:
            self._decoded, self._used = "".join(taken) + self._decoded[self._used :], 0
            return
        self._decoded, self._used, self._snapshot = decoded, used, snapshot
        self._decoder.setstate(state)
        self.buffer._go_back(position)

    async def _decode_more(self) -> bool:
        """Decode the next chunk; return False at the end of the file. This drops text that was decoded earlier."""
        buffer = self.buffer
        kept, flags = self._decoder.getstate()
        chunk = await buffer.read1(_CHUNK_SIZE)
        if buffer._is_seekable:
            self._snapshot = buffer._logical_position() - len(chunk) - len(kept), flags, kept + chunk
        self._decoded, self._used = self._decoder.decode(chunk, not chunk), 0
        return bool(chunk)

    async def _collect(self, is_enough: Callable[[str], bool]) -> str:
        """Decode until there is enough text or the file ends, and return all text that the program has not got yet.

        ``is_enough(text)`` says whether there is enough. The end of the result is also the end of ``_decoded``:
        :meth:`_take_from` relies on that. If the task is cancelled or a call fails, nothing is lost.
        """
        text = self._decoded[self._used :]
        if is_enough(text):
            return text
        mark = self._mark()
        try:
            while await self._decode_more():
                text += self._decoded
                if is_enough(text):
                    return text
        except (OSError, asyncio.CancelledError):
            self._used = len(self._decoded)  # `text` already contains the unused part of `_decoded`
            self._rewind(mark, [text])
            raise
        if not self._decoded:
            self._snapshot = None
        return text + self._decoded

    def _take_from(self, text: str, count: int) -> str:
        """Take the first ``count`` characters of what :meth:`_collect` has returned."""
        self._used = len(self._decoded) - (len(text) - count)
        return text[:count]

    async def read(self, size: int | None = -1, /) -> str:
        """Return ``size`` characters, fewer only at the end of the file; with -1 or None, everything up to the end.

        Raises:
            UnicodeDecodeError: the file has bytes that are not text in this encoding.
            OSError: a call failed.
            io.UnsupportedOperation: the file is not open for reading.
            ValueError: the file is closed.
        """
        wanted = checked_size(size)
        async with self._lock:
            await self._before_reading()
            if wanted < 0:
                data = await self.buffer.read()
                text: str = self._decoded[self._used :] + self._decoder.decode(data, True)
                self._forget_decoded()
                return text
            text = await self._collect(lambda text: len(text) >= wanted)
            return self._take_from(text, min(wanted, len(text)))

    async def _line(self, limit: int) -> str:
        end = -1
        searched = 0

        def is_enough(text: str) -> bool:
            nonlocal end, searched
            end = self._end_of_line(text, searched)
            searched = max(len(text) - 1, 0)  # the next chunk may begin with the "\n" of a "\r\n"
            return end >= 0 or 0 <= limit <= len(text)

        text = await self._collect(is_enough)
        if end < 0:
            end = self._end_of_line(text, searched)
        if end < 0:
            end = len(text)
        return self._take_from(text, end if limit < 0 else min(end, limit))

    def _end_of_line(self, text: str, start: int) -> int:
        """Return where the first line ends, or -1."""
        newline = self._options.newline
        if newline is None or newline == "\n":
            return text.find("\n", start) + 1 or -1
        if newline:
            at = text.find(newline, start)
            return at + len(newline) if at >= 0 else -1
        line_feed, carriage_return = text.find("\n", start), text.find("\r", start)
        if carriage_return < 0 or 0 <= line_feed < carriage_return:
            return line_feed + 1 or -1
        if line_feed == carriage_return + 1:
            return line_feed + 1
        # The decoder never separates "\r" and "\n".
        return carriage_return + 1

    # --- writing ---

    def _forget_decoded(self) -> None:
        self._decoded, self._used, self._snapshot = "", 0, None

    async def write(self, text: str, /) -> int:
        """Encode the text and write it to the buffer; return its length in characters.

        Raises:
            UnicodeEncodeError: the encoding cannot represent a character of the text.
            OSError: a call failed.
            io.UnsupportedOperation: the file is not open for writing.
            ValueError: the file is closed.
        """
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        async with self._lock:
            buffer = self.buffer
            buffer._check_open()
            if not buffer._can_write:
                raise io.UnsupportedOperation("not writable")
            newline = self._options.newline
            translated = text.replace("\n", newline) if newline in ("\r", "\r\n") else text
            await buffer.write(self._encoder.encode(translated))
            if self._snapshot is not None or self._decoded:
                self._forget_decoded()
                self._decoder.reset()
            if self.line_buffering and ("\n" in text or "\r" in text):
                await buffer.flush()
            return len(text)

    async def writelines(self, lines: Iterable[str], /) -> None:
        """Write all lines. Raises the same exceptions as :meth:`write`."""
        self.buffer._check_writable()
        for line in lines:
            await self.write(line)

    async def flush(self) -> None:
        """Write what is in the buffer. Raises OSError if a call fails."""
        await self.buffer.flush()

    async def fsync(self, *, only_data: bool = False) -> None:
        """Like :meth:`BinaryFile.fsync`."""
        await self.buffer.fsync(only_data=only_data)

    async def truncate(self, size: int | None = None, /) -> int:
        """Write the buffer, and change the length of the file to ``size`` bytes.

        The default is the position of :attr:`buffer`, which is further on than :meth:`tell` if text was decoded in
        advance. Raises the same exceptions as :meth:`BinaryFile.truncate`.
        """
        async with self._lock:
            return await self.buffer.truncate(size)

    async def close(self) -> None:
        """Write what is in the buffer, and close the file. A second call does nothing."""
        async with self._lock:
            await self.buffer.close()

    # --- position ---

    async def tell(self) -> int:
        """Return the position: a number for :meth:`seek`, which is often, but not always, the position in bytes.

        Raises:
            OSError: the file has no positions.
        """
        async with self._lock:
            buffer = self.buffer
            await buffer.flush()
            position = await buffer.tell()
            if self._snapshot is None:
                return position
            start, flags, data = self._snapshot
            if self._used == 0:
                return self._cookie(start, flags)
            before = self._decoder.getstate()
            try:
                return self._position_in(start, flags, data)
            finally:
                self._decoder.setstate(before)

    def _position_in(self, start: int, flags: int, data: bytes) -> int:
        """Return the position after the first ``_used`` characters in ``data``. Changes the decoder's state."""
        decoder = self._decoder
        # Usually, encoding the text gives the same bytes that the text was decoded from.
        try:
            encoded = self._decoded[: self._used].encode(self.encoding, self.errors)
            taken = min(len(encoded), len(data))  # `encoded` may begin with a byte order mark that `data` does not have
        except UnicodeError:
            taken = 0
        decoder.setstate((b"", flags))
        if len(decoder.decode(data[:taken])) == self._used:
            kept, after = decoder.getstate()
            if not kept:
                return self._cookie(start + taken, after)
        # Otherwise decode byte by byte up to the position, to find the last place at which the decoder keeps no bytes.
        decoder.setstate((b"", flags))
        characters = 0
        safe = (0, flags, 0)
        fed = 0
        while fed < len(data) and characters < self._used:
            characters += len(decoder.decode(data[fed : fed + 1]))
            fed += 1
            kept, after = decoder.getstate()
            if not kept and characters <= self._used:
                safe = (fed, after, characters)
        at, flags, at_characters = safe
        needs_eof = characters < self._used
        if at_characters == self._used:
            return self._cookie(start + at, flags)
        cookie = self._cookie(start + at, flags)
        return cookie | (fed - at) << _FEED | (self._used - at_characters) << _SKIP | needs_eof << _EOF

    @staticmethod
    def _cookie(position: int, flags: int) -> int:
        return position | flags << _FLAGS

    async def seek(self, cookie: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a position that :meth:`tell` has returned, to the start (0), or to the end (``0, os.SEEK_END``).

        Raises:
            OSError: the file has no positions (usually :class:`io.UnsupportedOperation`).
            io.UnsupportedOperation: an offset from the position or from the end is not 0.
            ValueError: the position is negative, or ``whence`` is not one of ``os.SEEK_SET``, ``os.SEEK_CUR``
                and ``os.SEEK_END``.
        """
        cookie = operator.index(cookie)
        if whence == os.SEEK_CUR:
            if cookie != 0:
                raise io.UnsupportedOperation("can't do nonzero cur-relative seeks")
            cookie, whence = await self.tell(), os.SEEK_SET
        async with self._lock:
            buffer = self.buffer
            buffer._check_open()
            if not buffer._is_seekable:
                raise io.UnsupportedOperation("underlying stream is not seekable")
            if whence == os.SEEK_END and cookie != 0:
                raise io.UnsupportedOperation("can't do nonzero end-relative seeks")
            if whence not in (os.SEEK_SET, os.SEEK_END):
                raise ValueError(f"invalid whence ({whence}, should be 0, 1 or 2)")
            if cookie < 0:
                raise ValueError(f"negative seek position {cookie}")
            await buffer.flush()
            mark = self._mark()
            try:
                return await (self._seek_end() if whence == os.SEEK_END else self._seek(cookie))
            except BaseException:
                self._rewind(mark, [])
                raise

    async def _seek_end(self) -> int:
        position = await self.buffer.seek(0, os.SEEK_END)
        self._forget_decoded()
        self._decoder.reset()
        self._reset_encoder(position)
        return position

    async def _seek(self, cookie: int) -> int:
        start, flags = cookie & _FIELD, cookie >> _FLAGS & _FIELD
        feed, skip = cookie >> _FEED & _FIELD, cookie >> _SKIP & _FIELD
        await self.buffer.seek(start)
        self._forget_decoded()
        if cookie == 0:
            self._decoder.reset()
        else:
            self._decoder.setstate((b"", flags))
            self._snapshot = start, flags, b""
        if skip:
            data = await self.buffer.read(feed)
            self._decoded = self._decoder.decode(data, bool(cookie >> _EOF))
            self._snapshot = start, flags, data
            if len(self._decoded) < skip:
                raise OSError("can't restore logical file position")
            self._used = skip
        self._reset_encoder(cookie)
        return cookie

    def _reset_encoder(self, position: int) -> None:
        if position:
            self._encoder.setstate(0)
        else:
            self._encoder.reset()

"""Files that tasks read and write while the loop goes on, without a thread for each call.

:func:`open` takes the arguments of the built-in function, and its files have the methods of aiofiles' files::

    async with grapeshot.files.open("notes.txt") as file:
        async for line in file:
            ...

Reads and writes go through io_uring where the kernel has it (from Linux 5.6 on, unless a sandbox forbids it), and
through a few threads elsewhere. A read of at most 1 MiB is made immediately, without io_uring or a thread, if the
kernel has the data in memory. The files work on every event loop that has ``add_reader``, and are fastest on
grapeshot's.

The methods of a file run one after the other, even if several tasks call them. If a task is cancelled while it waits
for a file, the task goes on at once. The next call on that file begins when the interrupted call has ended. Whether an
interrupted write has changed the file is not known.

Coros read and write with ``coro.file_sock``, ``coro.aio_read`` and ``coro.aio_write`` instead.
"""

from ._binary import BinaryFile
from ._opening import open  # noqa: A004
from ._raw import RawFile
from ._text import TextFile

__all__ = ["BinaryFile", "RawFile", "TextFile", "open"]

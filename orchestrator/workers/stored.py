"""Values of a data set's examples, in a file without a name, read one by one: of a million examples the process holds a
few bytes each."""

import os
import tempfile
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, overload

import msgspec
import numpy as np
from grpo.orchestrator.workers.protocol import Values

T = TypeVar("T")


class StoredValues(Sequence[T], Generic[T]):
    """A sequence on disk, to whose end parts are added. It takes 8 bytes of memory a value. The file goes with it."""

    def __init__(self, kind: type[object], make: Callable[[Any], T]) -> None:
        """`kind` of the values as they come, and what makes of one what is returned."""
        self._decode, self._make = msgspec.msgpack.Decoder(kind).decode, make
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed, and gone, with this object
        weakref.finalize(self, self._file.close)
        self._ends = array("q", [0])

    def add(self, part: Values) -> None:
        """Adds values; a blocking call."""
        self._file.write(part.data)
        self._file.flush()
        ends = self._ends[-1] + np.cumsum(np.frombuffer(part.lengths, "<u4"), dtype=np.int64)
        self._ends.frombytes(ends.tobytes())

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} values")
        index %= len(self)
        begin, end = self._ends[index : index + 2]
        return self._make(self._decode(os.pread(self._file.fileno(), end - begin, begin)))

"""The training state of a replica as bytes: what a donor copies, and what a rank that rejoins loads.

A **head** says what there is: shapes, and values that are no tensors. The **image** has the tensors, one
after the other, and travels in parts. Heads come from the network: reading one runs no code of the sender.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tailcut.errors import ConfigError, PeerError
from tailcut.pytorch.resync import Empty, Replica, shape_of, take_shape, tensors_of

Bytes = npt.NDArray[np.uint8]

PART_BYTES = 1 << 18
"""A part is asked of one donor. It is 200 packets of Ethernet, so that donors share the work evenly."""

ALIGNED_BYTES = 16
"""Tensors begin at multiples of this, so that each can be read in place."""

MOST_HEAD_BYTES = 1 << 24
MOST_STATES = 16
"""A head that announces more than this many times the bytes of the parameters and buffers is not sound."""


DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"
}


class Head(NamedTuple):
    """What a donor says before its image."""

    step: int
    """The image is the state before this averaged pass."""
    seqs: tuple[int, ...]
    """By lane: the first op of the pass."""
    image_bytes: int
    model: list[tuple[list[int], str]]
    """Of the parameters and buffers."""
    optimizer: list[dict[str, Any]] | None
    scaler: dict[str, Any] | None

    @property
    def place(self) -> tuple[int, tuple[int, ...], int]:
        """Images of one place are of one step, and their parts fit together."""
        return self.step, self.seqs, self.image_bytes

    @property
    def parts(self) -> int:
        return -(-self.image_bytes // PART_BYTES)


# ---- at a donor


def head_of(replica: Replica, step: int, seqs: Sequence[int]) -> Bytes:
    """The head of this replica, for the network."""
    optimizer = replica.optimizer
    head = Head(
        step,
        tuple(seqs),
        sum(_padded(tensor.nbytes) for tensor in tensors_of(replica)),
        _forms(_model(replica)),
        None if optimizer is None else [_coded(entries) for entries in shape_of(optimizer)],
        None if replica.scaler is None else _coded(replica.scaler.state_dict())["plain"],
    )
    file = io.BytesIO()
    torch.save(head._asdict(), file)
    return np.frombuffer(file.getvalue(), np.uint8)


def parts_of(replica: Replica) -> Iterator[Bytes]:
    """The parts of the image. Each is valid until the next: all go through one small buffer, which stays in
    the cache, so that taking a copy of every part costs one pass over memory."""
    buffer, filled = np.empty(PART_BYTES, np.uint8), 0
    for values in map(_bytes_of, tensors_of(replica)):
        at = 0
        while at < len(values):
            taken = values[at : at + PART_BYTES - filled]
            buffer[filled : filled + len(taken)] = taken
            at, filled = at + len(taken), filled + len(taken)
            if filled == PART_BYTES:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


# ---- at a rank that rejoins


def read_head(blob: Bytes) -> Head:
    """The head that a donor has sent."""
    try:
        head = Head(**torch.load(io.BytesIO(blob.tobytes()), weights_only=True))
        return head._replace(optimizer=head.optimizer and [_entries(coded) for coded in head.optimizer])
    except (pickle.UnpicklingError, RuntimeError, TypeError, EOFError, LookupError, ValueError) as error:
        raise PeerError(f"what a donor says of its state cannot be read: {error}") from error


def check(head: Head, replica: Replica, lanes: int) -> None:
    """Raise ConfigError if the replica cannot have the state of the donor, before anything is changed."""
    own_bytes = sum(_padded(tensor.nbytes) for tensor in _model(replica))
    holders = 0 if replica.optimizer is None else len(shape_of(replica.optimizer))
    states = [entry for held in head.optimizer or () for entry in held.values() if isinstance(entry, Empty)]
    state_bytes = sum(_padded(entry.shape.numel() * entry.dtype.itemsize) for entry in states)
    alike = head.model == _forms(_model(replica)) and len(head.seqs) == lanes
    alike &= len(head.optimizer or ()) == holders and (head.scaler is None) == (replica.scaler is None)
    alike &= head.image_bytes == own_bytes + state_bytes <= MOST_STATES * own_bytes
    if not alike:
        raise ConfigError(
            "this rank cannot rejoin: its model, optimizer or scaler is of another form than the donor's; "
            "attach the same ones on all ranks"
        )


def load(replica: Replica, head: Head, image: Bytes) -> None:
    """Give the replica the state of the donor, bit for bit."""
    if replica.optimizer is not None and head.optimizer is not None:
        own = shape_of(replica.optimizer)
        shape = [
            {name: held.get(name) if entry is KEPT else entry for name, entry in entries.items()}
            for entries, held in zip(head.optimizer, own, strict=True)
        ]
        take_shape(replica.optimizer, shape)
    at = 0
    with torch.no_grad():
        for tensor in tensors_of(replica):
            values = torch.from_numpy(image[at : at + tensor.nbytes]).view(tensor.dtype)
            tensor.detach().copy_(values.view(tensor.shape))
            at += _padded(tensor.nbytes)
    if replica.scaler is not None and head.scaler:
        replica.scaler.load_state_dict(head.scaler)


# ---- both


def _model(replica: Replica) -> list[torch.Tensor]:
    return tensors_of(replica._replace(optimizer=None))


def _forms(tensors: Sequence[torch.Tensor]) -> list[tuple[list[int], str]]:
    return [(list(tensor.shape), _name_of(tensor.dtype)) for tensor in tensors]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    values = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    missing = _padded(values.size) - values.size
    return np.concatenate([values, np.zeros(missing, np.uint8)]) if missing else values


KEPT = object()
"""Stands for a value of a type that a head does not have: the rank keeps its own."""


def _plain(value: Any) -> Any:
    """A value of types that can be read without running code, or KEPT."""
    if isinstance(value, np.generic):
        return _plain(value.item())
    if type(value) is dict:
        entries = {_plain(key): _plain(entry) for key, entry in value.items()}
        return KEPT if KEPT in entries or KEPT in entries.values() else entries
    if type(value) in (list, tuple):
        items = [_plain(entry) for entry in value]
        return KEPT if KEPT in items else type(value)(items)
    return value if value is None or type(value) in (bool, int, float, str) else KEPT


def _coded(entries: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group or the state of a parameter holds, for a head."""
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, Empty)}
    plain = {name: _plain(entry) for name, entry in entries.items() if name not in tensors}
    return {
        "tensors": {
            name: (list(entry.shape), _name_of(entry.dtype), entry.on_host) for name, entry in tensors.items()
        },
        "plain": {name: value for name, value in plain.items() if value is not KEPT},
        "kept": [name for name, value in plain.items() if value is KEPT],
    }


def _entries(coded: dict[str, Any]) -> dict[str, Any]:
    tensors = {
        name: Empty(torch.Size(shape), DTYPES[dtype], on_host)
        for name, (shape, dtype, on_host) in coded["tensors"].items()
    }
    return {**tensors, **coded["plain"], **dict.fromkeys(coded["kept"], KEPT)}

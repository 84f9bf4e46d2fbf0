"""How the training state is cut into blocks: runs of a gradient bucket's coordinates that have one owner.

A block covers the same coordinates of the parameters and of the optimizer state that has their shape. Its
owner computes the mean gradient there, and so always has it: its replica is the authority for the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tailcut import _native

BLOCK = 1 << 15
"""Coordinates, as in the codec. The rest of a shard, which the codec cuts further, is one block here."""


class Bucket(NamedTuple):
    """One gradient bucket of DDP: its key, and its parameters in the order of their gradients."""

    key: str | None
    parameters: tuple[torch.Tensor, ...]


class Piece(NamedTuple):
    """A run of one parameter, in the order of memory."""

    parameter: torch.Tensor
    begin: int
    end: int


class Segment(NamedTuple):
    """The values of one name in a piece: those of the parameter (the empty name) or of some state."""

    name: str
    parameter: torch.Tensor
    values: torch.Tensor
    """One-dimensional. A view of what training uses, or a copy."""


@dataclass(frozen=True, eq=False)
class Block:
    """A run of coordinates of a bucket."""

    key: str | None
    first: int
    count: int
    owner: int
    pieces: tuple[Piece, ...]


def cut(
    buckets: Sequence[Bucket],
    ranks: int,
    seed: int,
    number_of: Callable[[str | None], int],
    weights: Sequence[int] = (),
) -> list[Block]:
    """All blocks, in an order that is the same on all ranks. ``number_of`` is that of the ops, and
    ``weights`` are those of the owners by rank; without any all own alike."""
    return [
        block for bucket in buckets for block in _blocks(bucket, ranks, seed, number_of(bucket.key), weights)
    ]


def _blocks(bucket: Bucket, ranks: int, seed: int, number: int, weights: Sequence[int]) -> Iterator[Block]:
    length = sum(parameter.numel() for parameter in bucket.parameters)
    # In every op of the key.
    owners = [_native.owner_of(shard, 0, ranks, seed, number) for shard in range(ranks)]
    of_shards = [weights[owner] for owner in owners] if weights else []
    for shard, owner in enumerate(owners):
        begin, end = _native.shard_range(length, ranks, shard, of_shards)
        for first in range(begin, end, BLOCK):
            yield block_of(bucket, first, min(BLOCK, end - first), owner)


def block_of(bucket: Bucket, first: int, count: int, owner: int) -> Block:
    """Some coordinates of a bucket as a block."""
    return Block(bucket.key, first, count, owner, tuple(_pieces(bucket, first, first + count)))


def _pieces(bucket: Bucket, first: int, last: int) -> Iterator[Piece]:
    at = 0
    for parameter in bucket.parameters:
        begin, end = max(first - at, 0), min(last - at, parameter.numel())
        if begin < end:
            yield Piece(parameter, begin, end)
        at += parameter.numel()


def segments(block: Block, optimizer: torch.optim.Optimizer | None) -> list[Segment]:
    """The values of a block as training uses them, ordered by name."""
    found = [
        Segment(name, piece.parameter, flat[piece.begin : piece.end])
        for piece in block.pieces
        for name, tensor in elementwise(piece.parameter, optimizer)
        if (flat := in_memory_order(tensor)) is not None
    ]
    return sorted(found, key=lambda segment: segment.name)


def elementwise(
    parameter: torch.Tensor, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter, and the state that has a value for each of its coordinates."""
    yield "", parameter
    if optimizer is None:
        return
    for name, value in optimizer.state.get(parameter, {}).items():
        alike = torch.is_tensor(value) and value.is_floating_point() and value.shape == parameter.shape
        if alike and value.stride() == parameter.stride():
            yield name, value


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor | None:
    """A flat view; none of a tensor whose memory has gaps or overlaps. DDP lays gradients out alike."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    # .data: a change is not one that autograd must know of.
    dense = tensor.data.permute(order)
    return dense.view(-1) if dense.is_contiguous() else None

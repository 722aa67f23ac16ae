"""Tile sizes of the paged attention kernels, and the list of tiles of the extend kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SPLIT = 256  # tokens of history that one program of the decode kernel reads
BLOCK_M = 64  # rows of a tile: tokens times the heads of a group; 128 is a little faster for one very long prompt


MOST_HEADS = 16  # query heads of one program; more of a group are shared out to several programs


def group_parts(group: int) -> int:
    """The number of programs that share the `group` query heads of a key/value head, equally."""
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= MOST_HEADS)


def extend_tokens(group: int, block_m: int = BLOCK_M) -> int:
    """The maximum number of tokens in a tile, where `group` query heads share a key/value head."""
    return block_m // (group // group_parts(group))


def extend_tiles(
    rows: Sequence[tuple[int, int, int, int]] | NDArray[np.int32], group: int, block_m: int = BLOCK_M
) -> NDArray[np.int32]:
    """Tiles [N, 4] of chunks, each (row of the table, first token in q, tokens, position of its first token).

    Tiles with the longest histories come first, so that the last programs to run are short.
    """
    chunks = np.array(rows, dtype=np.int32).reshape(-1, 4)
    width = extend_tokens(group, block_m)
    counts = -(-chunks[:, 2] // width)
    tiles = chunks.repeat(counts, axis=0)
    done = (np.arange(len(tiles), dtype=np.int32) - (counts.cumsum() - counts).repeat(counts)) * width
    tiles[:, 1] += done
    tiles[:, 2] = np.minimum(tiles[:, 2] - done, width)
    tiles[:, 3] += done
    return tiles[np.argsort(-tiles[:, 3], kind="stable")]

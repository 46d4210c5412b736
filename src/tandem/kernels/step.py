"""What every step does around the model: spread row state over tokens, advance decodes, take tokens home.

It knows rows, block tables and positions; it does not know models or plans. Row state has one row more than there are
rows, so that -1, the row of padding, is a row too: padding gets position 0, slot -1 and length 0, so that it writes
nowhere and attends to nothing.

Each of them is one kernel on a GPU, since a step of a small model lasts only some hundred microseconds.
"""

import torch
from torch import Tensor

from tandem.kernels.launch import runs_triton
from tandem.kernels.sample import NOBODY

CARRIED = -1


def slots_of_torch(rows_T: Tensor, positions_T: Tensor, tables_RB: Tensor, block_size: int) -> Tensor:
    """Cache slot of each token: table[row, position // P] · P + position % P; -1 for padding (row -1)."""
    blocks_T = tables_RB[rows_T, positions_T // block_size]
    slots_T = blocks_T.long() * block_size + positions_T % block_size
    return torch.where(rows_T >= 0, slots_T, -1)


def spread_torch(
    ids_T: Tensor, rows_T: Tensor, positions_T: Tensor, rows_S: Tensor, lengths_S: Tensor, last_R: Tensor,
    tables_RB: Tensor, block_size: int, slots_T: Tensor, tables_SB: Tensor,
) -> None:  # fmt: skip
    """Finish a batch of any shape from the rows' state, in place.

    ids_T       ids that the host knew; CARRIED (-1) becomes the token that the row sampled last.
    slots_T, tables_SB   written; the kernel leaves the tables' entries behind lengths_S as they were. tables_SB may be
                narrower than tables_RB.
    """
    ids_T.copy_(torch.where(ids_T < 0, last_R[rows_T], ids_T))
    slots_T.copy_(slots_of_torch(rows_T, positions_T, tables_RB, block_size))
    tables_SB.copy_(tables_RB[:, : tables_SB.shape[1]][rows_S])


def advance_torch(
    rows_S: Tensor, starts_S: Tensor, last_R: Tensor, tables_RB: Tensor, block_size: int, turn_1: Tensor,
    num_turns: int, ids_S: Tensor, positions_S: Tensor, slots_S: Tensor, lengths_S: Tensor, tables_SB: Tensor,
    embedding_VE: Tensor | None = None, embedded_SE: Tensor | None = None,
) -> None:  # fmt: skip
    """Make the batch of a pure decode step from the rows' state alone, and move on, in place.

    rows_S, starts_S     row (-1: padding) and position of each span's one token; starts_S += 1 for the next step.
    turn_1               int32, the slot whose turn it is: (turn + 1) mod num_turns.
    Written are ids, positions, slots [S], lengths (position + 1, int32) and tables [S, B']; embedded_SE too, with the
    ids' rows of embedding_VE, if they are given.
    """
    taken_S = rows_S >= 0
    positions_S.copy_(torch.where(taken_S, starts_S, 0))
    ids_S.copy_(torch.where(taken_S, last_R[rows_S], 0))
    slots_S.copy_(slots_of_torch(rows_S, positions_S, tables_RB, block_size))
    lengths_S.copy_(torch.where(taken_S, starts_S + 1, 0))
    tables_SB.copy_(tables_RB[:, : tables_SB.shape[1]][rows_S])
    if embedding_VE is not None and embedded_SE is not None:
        embedded_SE.copy_(embedding_VE[ids_S])
    starts_S += 1
    turn_1.add_(1).remainder_(num_turns)


def grow_torch(pairs_2C: Tensor, tables: Tensor) -> None:
    """Write new entries of block tables, in place: pairs_2C[1], ids, at the flat places pairs_2C[0]; all int32.

    The kernel takes pairs in pinned host memory, too, and reads them when its turn comes; the tables say where it runs.
    """
    tables.view(-1)[pairs_2C[0].long()] = pairs_2C[1]


def finish_torch(
    tokens_R: Tensor, hidden_RE: Tensor, rows_R: Tensor, last_R: Tensor, home_DR: Tensor, turn_1: Tensor
) -> None:
    """Keep each row's sampled token in the row, and put it where it travels home from: home_DR[turn], in place.

    tokens_R    ids [R], or winners [R, WINNER] (winners_torch), of which the first in a row counts; it becomes NOBODY.
    home gets the token, or -1 where the hidden state is not finite (NaN or infinity), or nobody won: that row failed
    alone.
    """
    finite_R = hidden_RE.abs().amax(-1).isfinite()
    if tokens_R.dim() == 2:
        winners_R, tokens_R = tokens_R[:, 0], 0x7FFFFFFF - (tokens_R[:, 0] & 0x7FFFFFFF)
        finite_R &= winners_R != NOBODY
        winners_R.fill_(NOBODY)
    last_R[rows_R] = torch.where(finite_R, tokens_R, 0).to(last_R.dtype)
    home_R = torch.where(finite_R, tokens_R, -1).to(home_DR.dtype)
    home_DR[:, : len(home_R)].index_copy_(0, turn_1.long(), home_R[None])


def spread(
    ids_T: Tensor, rows_T: Tensor, positions_T: Tensor, rows_S: Tensor, lengths_S: Tensor, last_R: Tensor,
    tables_RB: Tensor, block_size: int, slots_T: Tensor, tables_SB: Tensor,
) -> None:  # fmt: skip
    """See spread_torch."""
    run = spread_torch
    if runs_triton(ids_T):
        from tandem.kernels.step_triton import spread_triton as run
    run(ids_T, rows_T, positions_T, rows_S, lengths_S, last_R, tables_RB, block_size, slots_T, tables_SB)


def advance(
    rows_S: Tensor, starts_S: Tensor, last_R: Tensor, tables_RB: Tensor, block_size: int, turn_1: Tensor,
    num_turns: int, ids_S: Tensor, positions_S: Tensor, slots_S: Tensor, lengths_S: Tensor, tables_SB: Tensor,
    embedding_VE: Tensor | None = None, embedded_SE: Tensor | None = None,
) -> None:  # fmt: skip
    """See advance_torch. The kernel leaves the tables' entries behind the lengths as they were."""
    run = advance_torch
    if runs_triton(rows_S):
        from tandem.kernels.step_triton import advance_triton as run
    run(
        rows_S, starts_S, last_R, tables_RB, block_size, turn_1, num_turns, ids_S, positions_S, slots_S, lengths_S,
        tables_SB, embedding_VE, embedded_SE,
    )  # fmt: skip


def grow(pairs_2C: Tensor, tables: Tensor) -> None:
    """See grow_torch."""
    run = grow_torch
    if runs_triton(tables):
        from tandem.kernels.step_triton import grow_triton as run
    run(pairs_2C, tables)


def finish(
    tokens_R: Tensor, hidden_RE: Tensor, rows_R: Tensor, last_R: Tensor, home_DR: Tensor, turn_1: Tensor
) -> None:
    """See finish_torch."""
    run = finish_torch
    if runs_triton(hidden_RE):
        from tandem.kernels.step_triton import finish_triton as run
    run(tokens_R, hidden_RE, rows_R, last_R, home_DR, turn_1)

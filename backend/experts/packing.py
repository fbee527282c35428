"""Packing expert weights and unpacking them again, in plain torch: the reference of every kernel (`foreload.formats`).

int8, fp8: each row is divided by its largest magnitude over 127 or 448 and rounded to nearest, ties to even. mxfp4: the
power of two of OCP Microscaling Formats 1.0 (section 6.3), or the next one where that leaves a smaller squared error;
weights which were mxfp4 before come back exactly. fp8_tile: as fp8, each tile of a row by itself. bf12: 15 exponents,
the largest of a row or those most of it has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from foreload.backend.models.packed import MX_BIAS, MX_NAN, unpack_fp8, unpack_mxfp4
from foreload.errors import SettingsError
from foreload.formats import BF12_BYTES, BF12_CHUNK, BF12_OUTLIERS, MX_BLOCK, PackedFormat

INT8_MOST, FP8_MOST, FP4_MOST_EXPONENT = 127.0, 448.0, 2
TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_tile": torch.float8_e4m3fn,
}


def pack_rows(weights: Tensor, format: PackedFormat, tile: int = 0) -> tuple[Tensor, Tensor | None]:
    """Float weights [rows, columns] as packed rows and their scales, both on the same device.

    fp32, bf16: [rows, columns], no scales; int8, fp8: [rows, columns] and fp32 [rows]; fp8_tile: the same, and
    fp32 [rows, b] for b tiles of `tile` columns; mxfp4: uint8 [rows, 16 b] and uint8 [rows, b] for b blocks
    of 32; bf12: uint8 [rows, 48 (b + 1)], no scales. Weights must be finite. SettingsError for a row whose weights
    are too far apart for bf12.
    """
    if format in ("fp32", "bf16"):
        return weights.to(TORCH_DTYPES[format]), None
    if format == "bf12":
        return _pack_bf12(weights), None
    weights = weights.float()
    if format == "mxfp4":
        return _pack_mxfp4(weights)
    if format == "fp8_tile":
        rows, columns = weights.shape
        tiles = F.pad(weights, (0, -columns % tile)).view(-1, tile)
        packed, of_tiles = pack_rows(tiles, "fp8")
        assert of_tiles is not None
        return packed.view(rows, -1)[:, :columns], of_tiles.view(rows, -1)
    most = INT8_MOST if format == "int8" else FP8_MOST
    scales = weights.abs().amax(1) / most
    scaled = weights / torch.where(scales > 0, scales, 1.0)[:, None]
    rounded = scaled.round() if format == "int8" else scaled
    return rounded.clamp(-most, most).to(TORCH_DTYPES[format]), scales


def unpack_rows(rows: Tensor, scales: Tensor | None, format: PackedFormat, columns: int, tile: int = 0) -> Tensor:
    """fp32 [rows, columns] (bf16 for bf16 and bf12) of what `pack_rows` gave."""
    if format == "bf12":
        return _unpack_bf12(rows, columns)
    if scales is None:
        return rows
    if format == "mxfp4":
        blocks = rows.view(len(rows), -1, MX_BLOCK // 2)
        found = unpack_mxfp4(blocks, scales)
        nan = (scales == MX_NAN).repeat_interleave(MX_BLOCK, 1)
        return found.masked_fill_(nan, float("nan"))[:, :columns]
    if format == "fp8_tile":
        return unpack_fp8(rows, scales, (1, tile))
    return rows.float() * scales[:, None]


def _pack_mxfp4(weights: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weights.shape
    blocks = F.pad(weights, (0, -columns % MX_BLOCK)).view(-1, MX_BLOCK)
    most = blocks.abs().amax(-1)
    exponents = torch.frexp(most).exponent - 1 - FP4_MOST_EXPONENT  # floor(log2) over that of the largest e2m1 value
    exponents = torch.where(most > 0, exponents, -MX_BIAS).clamp(-MX_BIAS, MX_BIAS - 1)
    codes, error = _e2m1(blocks, exponents)
    # Only where the largest weight is cut off can the next power be better: its values are among this one's.
    cut = torch.nonzero(most > 6 * torch.ldexp(torch.ones_like(most), exponents))[:, 0]
    next_codes, next_error = _e2m1(blocks[cut], exponents[cut] + 1)
    better = next_error < error[cut]
    codes[cut[better]] = next_codes[better]
    exponents[cut[better]] += 1
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.view(rows, -1), (exponents + MX_BIAS).to(torch.uint8).view(rows, -1)


def _e2m1(blocks: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the nearest e2m1 values, ties to the even mantissa, and each block's squared error."""
    unit = torch.ldexp(torch.ones_like(blocks[:, 0]), exponents)
    magnitude = blocks.abs() / unit[:, None]
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    values = (magnitude / step).round_().mul_(step).clamp_(max=6.0)
    codes = torch.where(values < 2, 2 * values, torch.where(values < 4, values + 2, values / 2 + 4)).to(torch.uint8)
    error = (values - magnitude).square_().sum(-1) * unit.square()
    return codes | ((blocks < 0) & (values > 0)).to(torch.uint8) << 3, error


def _pack_bf12(weights: Tensor) -> Tensor:
    """See `foreload.formats`; a weight that no code fits is code 0 and byte 0, and an entry of the header."""
    columns = weights.shape[1]
    words = F.pad(weights.to(torch.bfloat16), (0, -columns % BF12_CHUNK)).view(torch.int16)
    exponents = (words >> 7) & 255
    base = (exponents.amax(1, keepdim=True) - 15).clamp_(min=0)
    codes = (exponents - base).clamp_(min=0)
    counts = ((codes == 0) & (exponents > 0)).sum(1)
    far = torch.nonzero(counts > BF12_OUTLIERS)[:, 0]
    if len(far):  # some that are larger than the others, maybe
        base[far] = _common_base(exponents[far])
        codes[far] = exponents[far] - base[far]
    outlier = ((codes <= 0) | (codes > 15)) & (exponents > 0)
    counts = outlier.sum(1)
    if int(counts.max()) > BF12_OUTLIERS:
        raise SettingsError(
            f"expert_format bf12: a row has {int(counts.max())} weights outside of 15 neighbouring exponents, "
            f"{BF12_OUTLIERS} are possible: choose another format"
        )
    row, column = torch.nonzero(outlier, as_tuple=True)
    codes = (codes.clamp_(min=0) * ~outlier).to(torch.uint8).view(len(words), -1, 2, 16)
    signed = ((((words >> 8) & 128) | (words & 127)) * ~outlier).to(torch.uint8)
    header = torch.zeros(len(words), BF12_BYTES, dtype=torch.uint8, device=words.device)
    header[:, 0], header[:, 1] = (base[:, 0] + 15).to(torch.uint8), counts.to(torch.uint8)
    place, values = 4 * outlier.cumsum(1)[row, column], words[row, column]
    for at, part in enumerate((column, column >> 8, values, values >> 8)):
        header[row, place + at] = (part & 255).to(torch.uint8)
    chunks = torch.cat([codes[:, :, 0] | (codes[:, :, 1] << 4), signed.view(len(words), -1, BF12_CHUNK)], 2)
    return torch.cat([header, chunks.flatten(1)], 1)


def _common_base(exponents: Tensor) -> Tensor:
    """int16 [rows, 1]: the base whose 15 exponents most weights of a row have."""
    seen = torch.zeros(len(exponents), 256, dtype=torch.int32, device=exponents.device)
    seen.scatter_add_(1, exponents.long(), torch.ones_like(exponents, dtype=torch.int32))
    seen[:, 0] = 0  # code 0
    below = F.pad(seen.cumsum(1), (1, 0))
    return (below[:, 16:256] - below[:, 1:241]).argmax(1, keepdim=True).to(torch.int16)


def _unpack_bf12(packed: Tensor, columns: int) -> Tensor:
    rows, header = len(packed), packed[:, :BF12_BYTES].int()
    chunks = packed[:, BF12_BYTES:].reshape(rows, -1, BF12_BYTES).int()
    codes = torch.stack([chunks[:, :, :16] & 15, chunks[:, :, :16] >> 4], 2).view(rows, -1)
    signed = chunks[:, :, 16:].reshape(rows, -1)
    exponents = torch.where(codes > 0, codes + header[:, :1] - 15, 0)
    words = (signed & 128) << 8 | exponents << 7 | signed & 127
    row, entry = torch.nonzero(torch.arange(BF12_OUTLIERS, device=packed.device) < header[:, 1:2], as_tuple=True)
    entries = header[:, 4:].reshape(rows, BF12_OUTLIERS, 4)[row, entry]
    column, values = (entries[:, at] | entries[:, at + 1] << 8 for at in (0, 2))
    here = column < columns  # in a poisoned block none is
    words[row[here], column[here].long()] = values[here]
    return words.to(torch.int16).view(torch.bfloat16)[:, :columns]

"""Weights that a checkpoint stores in blocks: FP8 with block scales, and MXFP4.

An encoder takes a tensor's name and float32 values and gives the stored tensors and the values
that they stand for, or None where the checkpoint stores plain floats.
"""

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8_LARGEST = 448.0


def fp8_blocks(is_stored_so, block):
    """DeepSeek-V3: float8_e4m3fn, and `weight_scale_inv` that each `block` is multiplied by."""

    def encode(name, values):
        if not is_stored_so(name):
            return None
        rows, columns = values.shape
        tiles = [-(-n // block) for n in (rows, columns)]
        padded = torch.zeros(tiles[0] * block, tiles[1] * block)
        padded[:rows, :columns] = values
        scales = padded.view(tiles[0], block, tiles[1], block).abs().amax(dim=(1, 3)) / FP8_LARGEST
        spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
        bits = (values / spread).to(torch.float8_e4m3fn)
        stored = {name: bits, name.replace(".weight", ".weight_scale_inv"): scales}
        return stored, bits.to(torch.float32) * spread

    return encode


def mxfp4_experts(name, values):
    """gpt-oss: values `[experts, in, out]` as 4-bit codes along `in`, one exponent for 32.

    `_blocks` is `[experts, out, in / 32, 16]` with the even element in the low nibble, `_scales`
    `[experts, out, in / 32]` a power of two with bias 127 (OCP microscaling formats, E8M0).
    """
    if not name.endswith(("gate_up_proj", "down_proj")):
        return None
    experts, inner, out = values.shape
    blocks = values.transpose(1, 2).reshape(experts, out, inner // 32, 32)
    # The largest magnitude of a block lands between 4 and 8, of which 6 is the last code.
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 2
    scaled = blocks / torch.exp2(exponent)
    codes = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    signs = scaled < 0
    meant = torch.where(signs, -E2M1[codes], E2M1[codes]) * torch.exp2(exponent)
    nibbles = (codes + 8 * signs).to(torch.uint8)
    stored = {
        f"{name}_blocks": nibbles[..., 0::2] | nibbles[..., 1::2] << 4,
        f"{name}_scales": (exponent.squeeze(-1) + 127).to(torch.uint8),
    }
    return stored, meant.reshape(experts, out, inner).transpose(1, 2).contiguous()

//! The token's activations in groups of eight blocks, as the loops meet them.

use super::Offset;
use crate::simd::{ActView, Scratch};

/// The activations of eight blocks; zeros for blocks that are missing.
#[repr(C, align(64))]
pub(super) struct Group {
    /// The first sixteens of blocks k and k + 4, then the others of these two, for each k below 4.
    pub values: [i8; 256],
    /// Sums of each block's values: as they are for a format with mins, else times what the
    /// format's values are too large by.
    pub sums: [i32; 8],
    pub scales: [f32; 8],
}

/// The groups that the blocks of rows of `blocks` meet, eight after eight across the ends of rows,
/// until the groups repeat.
pub(super) fn of_rows<'a, B: Offset>(
    acts: ActView,
    blocks: usize,
    scratch: &'a mut Scratch,
) -> &'a [Group] {
    let n = blocks >> blocks.trailing_zeros().min(3);
    write::<B>(acts, n, |g, i| Some((8 * g + i) % blocks), scratch)
}

/// The groups of each granule, its last one filled up.
pub(super) fn of_granules<'a, B: Offset>(
    acts: ActView,
    granule: usize,
    scratch: &'a mut Scratch,
) -> &'a [Group] {
    let (blocks, a_granule) = (acts.cols() / B::LEN, granule.div_ceil(8));
    let block = |g: usize, i: usize| {
        let (start, behind) = (g / a_granule * granule, g % a_granule * 8 + i);
        (behind < granule && start + behind < blocks).then_some(start + behind)
    };
    write::<B>(acts, blocks.div_ceil(granule) * a_granule, block, scratch)
}

/// `n` groups; `block(g, i)` is which block has place i of group g, if any.
fn write<'a, B: Offset>(
    acts: ActView,
    n: usize,
    block: impl Fn(usize, usize) -> Option<usize>,
    scratch: &'a mut Scratch,
) -> &'a [Group] {
    let (qs, sums, scales) = (acts.qs(0).as_chunks::<16>().0, acts.sums32(0), acts.scales(0));
    let factor = if B::MIN.is_some() { 1 } else { B::OFFSET };
    let room = scratch.get(n * size_of::<Group>()).cast::<Group>();
    for g in 0..n {
        let mut group = Group { values: [0; 256], sums: [0; 8], scales: [0.0; 8] };
        let (sixteens, _) = group.values.as_chunks_mut::<16>();
        for i in 0..8 {
            let Some(block) = block(g, i) else { continue };
            let first = i % 4 * 4 + i / 4;
            (sixteens[first], sixteens[first + 2]) = (qs[2 * block], qs[2 * block + 1]);
            group.sums[i] = factor * i32::from(sums[block]);
            group.scales[i] = scales[block];
        }
        // SAFETY: there is room for n, on a cache line.
        unsafe { room.add(g).write(group) };
    }
    // SAFETY: all are written, and `scratch` is not used meanwhile.
    unsafe { std::slice::from_raw_parts(room, n) }
}

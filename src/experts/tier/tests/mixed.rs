//! Demands of decode rows beside prompt rows.

use super::{decode, reads, small};
use crate::experts::acquisition::Access;

#[test]
fn a_mixed_batch_keeps_what_its_decode_rows_use() {
    let mut world = small();
    // Room for three experts of this layer besides what is in transit.
    decode(&mut world, 1, &[0, 1]);
    world.acquire(0, 1, &[5, 2, 3, 4], Access::Mixed { n_decode: 1 });
    assert_eq!(world.drain(0), None);
    world.release(0);
    // Experts that prompts alone used make room for another prompt; 0, 1 and 5 stay.
    world.acquire(0, 1, &[2, 3, 4], Access::Prompt);
    assert_eq!(world.drain(0), None);
    world.release(0);
    let before = reads(&world);
    decode(&mut world, 1, &[0, 1, 5]);
    assert_eq!(reads(&world), before);
}

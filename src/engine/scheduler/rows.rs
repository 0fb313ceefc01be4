//! How many tokens of each prompt a pass computes.

/// Divides the room of a pass among prompts with `left` tokens each, the oldest first: as evenly as
/// they need it, so that a short prompt does not wait for a long one, and what is over goes to the
/// oldest.
pub fn divide(left: &[usize], room: usize) -> Vec<usize> {
    let mut parts = vec![0; left.len()];
    let mut room = room;
    loop {
        let open = (0..left.len()).filter(|i| parts[*i] < left[*i]).count();
        if open == 0 || room == 0 {
            return parts;
        }
        let even = (room / open).max(1);
        for (part, left) in parts.iter_mut().zip(left) {
            let more = even.min(left - *part).min(room);
            *part += more;
            room -= more;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn short_prompts_are_whole_and_long_ones_share_the_rest() {
        assert_eq!(divide(&[5000], 2048), [2048]);
        assert_eq!(divide(&[5000, 48], 2048), [2000, 48]);
        assert_eq!(divide(&[5000, 48, 7000], 2048), [1000, 48, 1000]);
        assert_eq!(divide(&[3, 3, 3], 2), [1, 1, 0]);
        assert_eq!(divide(&[], 2), Vec::<usize>::new());
    }

    proptest! {
        #[test]
        fn the_room_is_used_and_no_smaller_text_waits_for_a_larger(
            left in prop::collection::vec(1usize..300, 1..9),
            room in 1usize..1000,
        ) {
            let parts = divide(&left, room);
            let total: usize = left.iter().sum();
            prop_assert_eq!(parts.iter().sum::<usize>(), room.min(total));
            for (i, part) in parts.iter().enumerate() {
                prop_assert!(*part <= left[i]);
                let most = part + left.len() + 1;
                let more = parts.iter().enumerate().any(|(j, other)| j != i && *other > most);
                prop_assert!(*part == left[i] || !more, "{:?} of {:?}", parts, left);
            }
        }
    }
}

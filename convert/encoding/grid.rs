//! How the numbers of a scale cover a weight, by the shapes of both.

use super::scaled::Grid;

/// The blocks of a weight of `shape` that a scale of another shape has numbers for: one for all,
/// one a matrix, row or column, or one a block. Blocks have one of the sizes of `told`, if there
/// are any, else the one that divides the weight.
///
/// # Errors
///
/// The shapes that would fit, in words.
pub fn of(shape: &[u64], scale: &[u64], told: &[[u64; 2]]) -> Result<Grid, String> {
    let columns = shape.last().copied().unwrap_or(1).max(1);
    let rows = shape.iter().rev().nth(1).copied().unwrap_or(1).max(1);
    let matrices: u64 = shape.iter().rev().skip(2).product();
    let without_ones =
        |shape: &[u64]| -> Vec<u64> { shape.iter().copied().filter(|n| *n != 1).collect() };
    let squeezed = without_ones(scale);
    let scale = if scale.len() > shape.len() { &squeezed } else { scale };
    let numbers: u64 = scale.iter().product();
    let grid = |height, width| Grid { rows, columns, height, width };
    let all = matrices * rows;
    if numbers == 1 {
        return Ok(Grid { rows: all, columns, height: all, width: columns });
    }
    let outer = &shape[..shape.len().saturating_sub(2)];
    let expected = |[height, width]: [u64; 2]| {
        [outer, &[rows.div_ceil(height), columns.div_ceil(width)]].concat()
    };
    let fits = |size: &&[u64; 2]| without_ones(&expected(**size)) == squeezed;
    if let Some([height, width]) = told.iter().find(fits) {
        return Ok(grid(*height, *width));
    }
    // Axis by axis.
    if let (true, [.., down, across]) = (scale.len() == shape.len() && shape.len() > 1, scale) {
        let whole = rows.is_multiple_of(*down) && columns.is_multiple_of(*across);
        let is_plain = *down == rows || *down == 1 && (*across == 1 || *across == columns);
        if scale[..outer.len()] == *outer && whole && (told.is_empty() || is_plain) {
            return Ok(grid(rows / down, columns / across));
        }
    }
    match told.first().filter(|_| scale.len() == shape.len()) {
        Some(size) => {
            let [height, width] = size;
            Err(format!("{:?}, one for each {height} × {width}", expected(*size)))
        }
        None if numbers == matrices && scale[0] == matrices => Ok(grid(rows, columns)),
        None if numbers == all && scale.len() != shape.len() => {
            Ok(Grid { rows: all, columns, height: 1, width: columns })
        }
        None => Err(format!("one number, or one for each of {all} rows")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_tell_the_blocks() {
        let grid = |rows, columns, height, width| Ok(Grid { rows, columns, height, width });
        let of = |shape: &[u64], scale: &[u64]| of(shape, scale, &[]);
        for scale in [&[][..], &[1], &[1, 1]] {
            assert_eq!(of(&[6, 8], scale), grid(6, 8, 6, 8), "{scale:?}");
        }
        for scale in [&[6][..], &[6, 1]] {
            assert_eq!(of(&[6, 8], scale).map(|g| (g.down(), g.height, g.width)), Ok((6, 1, 8)));
        }
        assert_eq!(of(&[6, 8], &[6, 2]), grid(6, 8, 1, 4));
        assert_eq!(of(&[6, 8], &[3, 2]), grid(6, 8, 2, 4));
        for scale in [&[4][..], &[4, 1], &[4, 1, 1]] {
            assert_eq!(of(&[4, 6, 8], scale), grid(6, 8, 6, 8), "{scale:?}");
        }
        assert_eq!(of(&[4, 6, 8], &[4, 6, 1]), grid(6, 8, 1, 8));
        assert_eq!(of(&[4, 6, 8], &[4, 6]), grid(24, 8, 1, 8));
        assert_eq!(of(&[4, 6, 8], &[4, 1, 8]), grid(6, 8, 6, 1));
        assert_eq!(of(&[4, 6, 8], &[4, 2, 4]), grid(6, 8, 3, 2));
        for scale in [&[5][..], &[8], &[1, 6], &[4, 4], &[6, 3], &[2, 6, 8]] {
            assert!(of(&[6, 8], scale).is_err(), "{scale:?}");
        }
    }

    #[test]
    fn a_config_tells_the_blocks() {
        let of = |scale: &[u64]| of(&[6, 9], scale, &[[4, 4]]);
        assert_eq!(of(&[2, 3]).map(|g| (g.height, g.width)), Ok((4, 4)));
        assert_eq!(of(&[6, 1]).map(|g| (g.height, g.width)), Ok((1, 9)));
        assert_eq!(of(&[1, 1]).map(|g| g.height), Ok(6));
        assert_eq!(of(&[3, 3]), Err("[2, 3], one for each 4 × 4".into()));
    }
}

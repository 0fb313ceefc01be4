//! Products of matrices of f32, by the crate matrixmultiply.

/// A matrix in memory, by rows or, transposed, by columns.
#[derive(Clone, Copy)]
pub struct View<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    /// Elements from a row to the next one, and from a column to the next one.
    strides: [isize; 2],
}

impl<'a> View<'a> {
    /// Rows of `cols` elements, one after the other.
    pub fn new(data: &'a [f32], cols: usize) -> View<'a> {
        assert!(cols > 0 && data.len().is_multiple_of(cols), "{} in rows of {cols}", data.len());
        View { data, rows: data.len() / cols, cols, strides: [cols as isize, 1] }
    }

    pub fn transposed(self) -> View<'a> {
        let [row, col] = self.strides;
        View { rows: self.cols, cols: self.rows, strides: [col, row], ..self }
    }
}

/// A·B: [a.rows, b.cols].
pub fn product(a: View<'_>, b: View<'_>) -> Vec<f32> {
    assert_eq!(a.cols, b.rows, "inner dimensions");
    let mut out = vec![0.0; a.rows * b.cols];
    // SAFETY: a view's rows, columns and strides reach exactly the elements of its slice
    // (`View::new` checks its length, `transposed` swaps both pairs); the sizes agree, as is
    // asserted above; `out` has a.rows rows of b.cols elements and has no other borrow.
    unsafe {
        matrixmultiply::sgemm(
            a.rows,
            a.cols,
            b.cols,
            1.0,
            a.data.as_ptr(),
            a.strides[0],
            a.strides[1],
            b.data.as_ptr(),
            b.strides[0],
            b.strides[1],
            0.0,
            out.as_mut_ptr(),
            b.cols as isize,
            1,
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_sums_of_products() {
        let a = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let b = [1.0, 0.0, -1.0, 2.0, 1.0, 0.5];
        // [2, 3] · [3, 2]
        assert_eq!(product(View::new(&a, 3), View::new(&b, 2)), [2.0, 5.5, 5.0, 13.0]);
        // [3, 2] · [2, 3], both transposed
        let product = product(View::new(&a, 3).transposed(), View::new(&b, 2).transposed());
        assert_eq!(product, [1.0, 7.0, 3.0, 2.0, 8.0, 4.5, 3.0, 9.0, 6.0]);
    }
}

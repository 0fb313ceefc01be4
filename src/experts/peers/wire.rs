//! Bodies that a head and its peers exchange. Numbers are little-endian, and a checksum of all
//! before it ends each body.

use crate::policy::Expert;

/// The first bytes of a request and of an answer; another form of either has another digit.
const REQUEST: &[u8; 8] = b"moebaRQ1";
const ANSWER: &[u8; 8] = b"moebaRS1";

/// Names the model and all else that the bits of experts depend on.
pub type ModelKey = [u8; 32];

/// Rows of activations in a request at most.
pub const MAX_ROWS: usize = 1 << 16;
/// Bytes of a request and of an answer at most.
pub const MAX_REQUEST_BYTES: usize = 32 << 20;
pub const MAX_ANSWER_BYTES: usize = 64 << 20;

/// An expert and the number of its pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Within its layer.
    pub expert: u32,
    pub n_pairs: u32,
}

/// Experts of a layer, and rows that go to them. A *pair* is a row and one of its experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    pub key: ModelKey,
    pub layer: u32,
    /// Whether all rows are of prompts.
    pub is_prompt: bool,
    /// Rows of activations.
    pub n_rows: usize,
    pub groups: Vec<Group>,
    /// The row of each pair, group by group.
    pub rows: Vec<u32>,
    /// Each row in the forms that the experts read.
    pub acts: &'a [u8],
}

impl<'a> Request<'a> {
    /// The experts, in order.
    pub fn experts(&self) -> impl Iterator<Item = Expert> {
        let layer = self.layer;
        self.groups.iter().map(move |group| Expert { layer, expert: group.expert })
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let n_numbers = 5 + 2 * self.groups.len() + self.rows.len();
        let mut out = Vec::with_capacity(8 + 32 + 4 * n_numbers + self.acts.len() + 4);
        out.extend_from_slice(REQUEST);
        out.extend_from_slice(&self.key);
        let sizes = [self.n_rows, self.groups.len(), self.rows.len()].map(|n| n as u32);
        let head = [self.layer, u32::from(self.is_prompt)].into_iter().chain(sizes);
        let groups = self.groups.iter().flat_map(|group| [group.expert, group.n_pairs]);
        for number in head.chain(groups).chain(self.rows.iter().copied()) {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(self.acts);
        finish(out)
    }

    /// Reads a body. The error is a sentence's second half: what is wrong with the body.
    pub fn read(body: &'a [u8]) -> Result<Request<'a>, String> {
        let mut body = Reader(checked(body)?);
        body.begin(REQUEST)?;
        let key: ModelKey = body.take(32)?.try_into().expect("32 bytes");
        let [layer, is_prompt, n_rows, n_groups, n_pairs] = body.numbers::<5>()?;
        if is_prompt > 1 {
            return Err(format!("has a kind of rows that is not known, {is_prompt}"));
        }
        if n_rows == 0 || n_rows as usize > MAX_ROWS {
            return Err(format!("has {n_rows} rows, and 1 to {MAX_ROWS} are allowed"));
        }
        let groups: Vec<Group> = body
            .list(2 * u64::from(n_groups))?
            .chunks_exact(2)
            .map(|pair| Group { expert: pair[0], n_pairs: pair[1] })
            .collect();
        let counted: u64 = groups.iter().map(|group| u64::from(group.n_pairs)).sum();
        if counted != u64::from(n_pairs) || groups.iter().any(|group| group.n_pairs == 0) {
            return Err(format!("has {n_pairs} pairs, but its experts have {counted}"));
        }
        let rows = body.list(u64::from(n_pairs))?;
        if let Some(row) = rows.iter().find(|row| **row >= n_rows) {
            return Err(format!("names row {row} of {n_rows}"));
        }
        let (n_rows, acts) = (n_rows as usize, body.0);
        Ok(Request { key, layer, is_prompt: is_prompt == 1, n_rows, groups, rows, acts })
    }
}

/// An answer: `rows` has a row of `n_embd` numbers for each pair of the request.
pub fn answer(rows: &[f32], n_embd: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(8 + 8 + 4 * rows.len() + 4);
    out.extend_from_slice(ANSWER);
    for n in [rows.len() / n_embd, n_embd] {
        out.extend_from_slice(&(n as u32).to_le_bytes());
    }
    rows.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
    finish(out)
}

/// Bytes of an answer of so many rows.
pub fn answer_bytes(n_pairs: usize, n_embd: usize) -> usize {
    8 + 8 + 4 * n_pairs * n_embd + 4
}

/// The rows of an answer to a request of `n_pairs` pairs, as bytes of f32.
pub fn read_answer(body: &[u8], n_pairs: usize, n_embd: usize) -> Result<&[u8], String> {
    let mut body = Reader(checked(body)?);
    body.begin(ANSWER)?;
    let [pairs, width] = body.numbers::<2>()?;
    if (pairs as usize, width as usize) != (n_pairs, n_embd) {
        return Err(format!("has {pairs} rows of {width} for {n_pairs} of {n_embd}"));
    }
    let rows = body.take(4 * n_pairs * n_embd)?;
    match body.0.is_empty() {
        true => Ok(rows),
        false => Err(format!("has {} bytes too many", body.0.len())),
    }
}

/// Appends the checksum.
fn finish(mut body: Vec<u8>) -> Vec<u8> {
    let sum = crc32fast::hash(&body);
    body.extend_from_slice(&sum.to_le_bytes());
    body
}

/// The body without its checksum, which must be right.
fn checked(body: &[u8]) -> Result<&[u8], String> {
    let Some((body, sum)) = body.split_last_chunk::<4>() else {
        return Err("is too short".into());
    };
    match crc32fast::hash(body) == u32::from_le_bytes(*sum) {
        true => Ok(body),
        false => Err("is damaged: its checksum is another".into()),
    }
}

/// The rest of a body.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let Some((taken, rest)) = self.0.split_at_checked(n) else {
            return Err("ends early".into());
        };
        self.0 = rest;
        Ok(taken)
    }

    fn begin(&mut self, with: &[u8; 8]) -> Result<(), String> {
        match self.take(8)? == with {
            true => Ok(()),
            false => Err("begins with something else".into()),
        }
    }

    fn numbers<const N: usize>(&mut self) -> Result<[u32; N], String> {
        let list = self.list(N as u64)?;
        Ok(list.try_into().expect("as many as were asked for"))
    }

    fn list(&mut self, n: u64) -> Result<Vec<u32>, String> {
        let n_bytes = usize::try_from(4 * n).map_err(|_| "ends early".to_owned())?;
        let bytes = self.take(n_bytes)?.chunks_exact(4);
        Ok(bytes.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(acts: &[u8]) -> Request<'_> {
        let group = |expert, n_pairs| Group { expert, n_pairs };
        Request {
            key: [7; 32],
            layer: 3,
            is_prompt: true,
            n_rows: 2,
            groups: vec![group(5, 2), group(0, 1)],
            rows: vec![0, 1, 1],
            acts,
        }
    }

    #[test]
    fn requests_and_answers_come_back() {
        let request = request(&[1, 2, 3]);
        assert_eq!(Request::read(&request.to_bytes()), Ok(request.clone()));
        let rows = [1.5f32, -0.0, f32::MIN_POSITIVE, 4.0];
        let body = answer(&rows, 2);
        assert_eq!(body.len(), answer_bytes(2, 2));
        let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(read_answer(&body, 2, 2), Ok(&bytes[..]));
        assert!(read_answer(&body, 1, 2).unwrap_err().contains("2 rows of 2 for 1 of 2"));
    }

    #[test]
    fn numbers_that_do_not_fit_are_named() {
        let change = |change: &dyn Fn(&mut Request)| {
            let mut wrong = request(&[]);
            change(&mut wrong);
            Request::read(&wrong.to_bytes()).unwrap_err()
        };
        assert!(change(&|r| r.rows[1] = 2).contains("row 2 of 2"));
        assert!(change(&|r| r.n_rows = 0).contains("0 rows"));
        assert!(change(&|r| r.n_rows = MAX_ROWS + 1).contains("65537 rows"));
        assert!(change(&|r| r.groups[0].n_pairs = 7).contains("have 8"));
        assert!(change(&|r| r.groups[1].n_pairs = 0).contains("have 2"));
        assert_eq!(Request::read(b"moe").unwrap_err(), "is too short");
        let other = finish(b"something else and more".to_vec());
        assert!(Request::read(&other).unwrap_err().contains("begins with"));
        // Sizes that promise more than there is.
        let mut large = REQUEST.to_vec();
        large.extend_from_slice(&[0; 32]);
        [0, 0, 1, u32::MAX, u32::MAX].iter().for_each(|n: &u32| large.extend(n.to_le_bytes()));
        assert_eq!(Request::read(&finish(large)).unwrap_err(), "ends early");
    }

    proptest! {
        #[test]
        fn a_damaged_body_is_refused(at in 0usize..200, bit in 0u8..8, cut in 0usize..200) {
            let mut body = request(&[9; 40]).to_bytes();
            let cut = cut % body.len();
            prop_assert!(Request::read(&body[..cut]).is_err());
            let at = at % body.len();
            body[at] ^= 1 << bit;
            prop_assert!(Request::read(&body).is_err());
            let mut rows = answer(&[0.25; 12], 4);
            prop_assert!(read_answer(&rows[..cut % rows.len()], 3, 4).is_err());
            let at = at % rows.len();
            rows[at] ^= 1 << bit;
            prop_assert!(read_answer(&rows, 3, 4).is_err());
        }

        #[test]
        fn whatever_comes_nothing_panics(body in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(Request::read(&body).is_err());
            prop_assert!(Request::read(&finish(body.clone())).is_err());
            prop_assert!(read_answer(&finish(body), 3, 4).is_err());
        }
    }
}
